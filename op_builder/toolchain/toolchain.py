"""nvcc, the host compiler and ninja: found where, which version, or why not.

Of several CUDA toolkits (nvcc.py says where they are looked for) one is chosen for each
architecture: what `CUDA_HOME` or `CUDA_PATH` names, since naming one is an instruction; else the
newest that compiles for it, of a CUDA that the driver serves. A toolkit that cannot make a small
kernel with the host compiler (smoke.py) is passed over and told. ninja: the PyPI package's program,
then `PATH`. The host compiler: see host_compiler.py.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from ..errors import UnfitToolkitError
from ..system import shortages
from . import nvcc, smoke
from .host_compiler import find_host_compiler
from .nvcc import cudart_folder
from .nvcc_targets import Targets, targets
from .tool import Candidate, Tool, first_fit, on_path, run

__all__ = [
    "Targets",
    "Tool",
    "command_exists",
    "cudart_folder",
    "find_host_compiler",
    "find_ninja",
    "find_nvcc",
    "installed_cuda_version",
    "nvccs",
    "prove",
    "targets",
]

_INSTALL_NINJA = "pip install ninja"


def find_nvcc(real: str = "", *, prove: bool = False) -> Tool:
    """The nvcc that compiles for `real` ("sm_90a"), or, without one that does, the best of all.

    prove: as for `nvccs`.
    """
    best = None
    for tool in nvccs(prove=prove):
        if not real or real in targets(tool).real:
            return tool
        best = best or tool
    return best or _no_nvcc(prove)


def nvccs(*, prove: bool = False) -> Iterator[Tool]:
    """Every nvcc that compiles here, best first.

    prove: try those that nobody has tried yet, each when it is its turn, which takes about a
    second. Without, they are believed: who compiles nothing need not wait.
    """
    return (tool for tool in _tried(prove) if tool.ok)


def prove(nvcc: Tool, host: Tool) -> None:
    """Raises UnfitToolkitError when it cannot make a small kernel; tried once for each."""
    if problem := smoke.problem(nvcc, host, prove=True):
        raise UnfitToolkitError(f"nvcc: {problem.reason}; {problem.remedy}")


def installed_cuda_version() -> tuple[int, int]:
    """(major, minor) of the toolkit that would compile; raises ToolchainError without one."""
    tool = find_nvcc()
    tool.require()  # raises
    return nvcc.two(tool.version)


def _tried(prove: bool) -> Iterator[Tool]:
    """What is there, then what is not whole; `passed_over` of each says what came before it."""
    found = nvcc.survey()
    host = find_host_compiler()
    passed_over = list(found.passed_over)
    for tool in found.fit:
        problem = smoke.problem(tool, host, prove=prove) if host.ok else None
        if problem is None:
            yield replace(tool, passed_over=tuple(passed_over))
        else:
            passed_over.append(f"{tool.where_found}: {problem.reason}")
            yield replace(tool, ok=False, reason=problem.reason, remedy=problem.remedy)
    for tool in found.unfit:
        yield replace(tool, passed_over=tuple(passed_over))


def _no_nvcc(prove: bool) -> Tool:
    tried = list(_tried(prove))
    if not tried:
        return Tool(
            "nvcc",
            reason="no CUDA compiler was found",
            remedy=nvcc.install(),
            passed_over=nvcc.survey().passed_over,
        )
    return replace(
        tried[0], passed_over=tuple(dict.fromkeys(p for t in tried for p in t.passed_over))
    )


def find_ninja() -> Tool:
    return first_fit(
        "ninja",
        [*_ninja_package(), *on_path("ninja", "ninja-build")],
        _examine_ninja,
        missing="ninja was not found",
        remedy=_INSTALL_NINJA,
    )


def command_exists(command: str) -> bool:
    """Whether a program is on PATH; alternatives are separated by `|`."""
    return any(any(on_path(name.strip())) for name in command.split("|"))


def _ninja_package() -> Iterable[Candidate]:
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
        *(
            parent / "bin" for parent in package.parents[1:4]
        ),  # <prefix>/lib/pythonX.Y/site-packages/ninja
        Path(sysconfig.get_path("scripts")),
        Path(sys.executable or ".").parent,
    )
    for folder in folders:
        yield Candidate("PyPI package", folder / "ninja")


def _examine_ninja(candidate: Candidate) -> Tool:
    path = candidate.path
    spoken = run([str(path), "--version"])
    match = re.match(r"\d+\.\d+(\.\d+)?", spoken.output) if not spoken.problem else None
    version = match[0] if match else ""
    return Tool(
        "ninja",
        path,
        version,
        candidate.where,
        ok=bool(version),
        reason=spoken.problem or ("" if version else f"{path} does not tell its version"),
        remedy="" if version else shortages.remedy(spoken.problem) or _INSTALL_NINJA,
        identity=spoken.output.strip() if version else "",
    )
