"""ninja: the PyPI package's program, then `PATH`."""

from __future__ import annotations

import importlib.util
import re
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from ..system import shortages
from .tool import Candidate, Tool, first_fit, on_path, run

_INSTALL = "pip install ninja"


def find_ninja() -> Tool:
    return first_fit(
        "ninja",
        [*_package(), *on_path("ninja", "ninja-build")],
        _examine,
        missing="ninja was not found",
        remedy=_INSTALL,
    )


def _package() -> Iterable[Candidate]:
    """The program of the PyPI package, wherever its release puts it; nothing is imported."""
    try:
        spec = importlib.util.find_spec("ninja")
    except (ImportError, ValueError):
        return
    if spec is None or not spec.origin:
        return
    package = Path(spec.origin).parent
    folders = (
        package / "data" / "bin",
        # <target>/ninja of pip install --target, else <prefix>/lib/pythonX.Y/site-packages/ninja
        *(parent / "bin" for parent in package.parents[:4]),
        Path(sysconfig.get_path("scripts")),
        Path(sys.executable or ".").parent,
    )
    for folder in folders:
        yield Candidate("PyPI package", folder / "ninja")


def _examine(candidate: Candidate) -> Tool:
    path = candidate.path
    spoken = run([str(path), "--version"])
    match = re.match(r"\d+\.\d+(\.\d+)?", spoken.answer) if not spoken.problem else None
    version = match[0] if match else ""
    return Tool(
        "ninja",
        path,
        version,
        candidate.where,
        ok=bool(version),
        reason=spoken.problem or ("" if version else f"{path} does not tell its version"),
        remedy="" if version else shortages.remedy(spoken.problem) or _INSTALL,
        identity=spoken.answer.strip() if version else "",
    )
