"""The CUTLASS headers: place and version, or why there are none.

Places, in this order: `CUTLASS_PATH` (a checkout or its include folder), the `nvidia-cutlass`
package (looked up, not imported), the conda environment, `/usr/local/include`, `/usr/include`.
Unfit headers are passed over, those of `CUTLASS_PATH`, too: it may have been set for DeepSpeed,
whose kernels are compiled with older ones.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from .. import env, paths
from ..errors import ToolchainError

# The oldest release the kernels have been compiled with. To lower it, compile with an older one.
OLDEST = (4, 2, 0)
SYSTEM_INCLUDES = (Path("/usr/local/include"), Path("/usr/include"))

_INSTALL = (
    "pip install --no-deps nvidia-cutlass==4.2.0.0, or set CUTLASS_PATH to a CUTLASS checkout"
)


@dataclass(frozen=True)
class Cutlass:
    include_dir: Path | None = None  # holds cutlass/ and cute/
    version: str = ""  # "4.2.0"
    where_found: str = ""
    ok: bool = False
    reason: str = ""  # when not ok: why
    remedy: str = ""  # when not ok
    passed_over: tuple[str, ...] = ()  # places with unfit headers, each with the reason

    def require(self) -> Path:
        """The include folder; raises ToolchainError with reason and remedy when there is none."""
        if not self.ok or self.include_dir is None:
            raise ToolchainError(f"CUTLASS: {self.reason}; {self.remedy}")
        return self.include_dir


def find_cutlass() -> Cutlass:
    passed_over: list[str] = []
    unfit: Cutlass | None = None
    for found in _candidates():
        if found.ok:
            return replace(found, passed_over=tuple(passed_over))
        unfit = unfit or found
        passed_over.append(f"{found.where_found}: {found.reason}")
    missing = Cutlass(reason="the CUTLASS headers were not found", remedy=_INSTALL)
    return replace(unfit or missing, passed_over=tuple(passed_over))


def _candidates() -> Iterable[Cutlass]:
    if named := env.text("CUTLASS_PATH"):
        yield _named(paths.absolute(named))
    for where, folder in _places():
        if _has_version(folder):
            yield _examine(where, folder)


def _named(path: Path) -> Cutlass:
    for folder in (path, path / "include"):
        if _has_version(folder):
            return _examine("CUTLASS_PATH", folder)
    return Cutlass(
        where_found="CUTLASS_PATH",
        reason=f"CUTLASS_PATH={path} holds neither cutlass/version.h nor include/cutlass/version.h",
        remedy=_INSTALL,
    )


def _has_version(folder: Path) -> bool:
    return os.path.isfile(folder / "cutlass" / "version.h")


def _places() -> Iterable[tuple[str, Path]]:
    for folder in _package():
        yield "nvidia-cutlass package", folder
    for prefix in filter(None, (env.text("CONDA_PREFIX"), sys.prefix)):
        yield prefix, Path(prefix) / "include"
    for folder in SYSTEM_INCLUDES:
        yield str(folder), folder


def _package() -> Iterable[Path]:
    """The package's include folder. It is not imported: its Python side needs further packages."""
    try:
        spec = importlib.util.find_spec("cutlass_library")
    except (ImportError, ValueError):
        return
    for place in (spec.submodule_search_locations or ()) if spec else ():
        yield Path(place) / "source" / "include"


def _examine(where: str, folder: Path) -> Cutlass:
    try:
        text = (folder / "cutlass" / "version.h").read_text(errors="replace")
    except OSError as error:
        return _unfit(where, folder, f"{folder}/cutlass/version.h: {error.strerror}")
    numbers = [_defined(text, name) for name in ("CUTLASS_MAJOR", "CUTLASS_MINOR", "CUTLASS_PATCH")]
    version = ".".join("?" if number is None else str(number) for number in numbers)
    if None in numbers:
        return _unfit(where, folder, f"{folder}/cutlass/version.h does not tell its version")
    if tuple(number or 0 for number in numbers) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        reason = f"CUTLASS in {folder} is {version}; {oldest} is the oldest that serves"
        return replace(_unfit(where, folder, reason), version=version)
    if not os.path.isfile(folder / "cute" / "tensor.hpp"):
        return _unfit(where, folder, f"{folder} holds cutlass/ but lacks CuTe (cute/tensor.hpp)")
    return Cutlass(folder, version, where, ok=True)


def _unfit(where: str, folder: Path, reason: str) -> Cutlass:
    return Cutlass(folder, where_found=where, reason=reason, remedy=_INSTALL)


def _defined(text: str, name: str) -> int | None:
    match = re.search(rf"#\s*define\s+{name}\s+(\d+)", text)
    return int(match[1]) if match else None
