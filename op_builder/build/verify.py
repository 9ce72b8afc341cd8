"""From a finished library to a loaded one: verify it, load it, publish it."""

from __future__ import annotations

import errno
from pathlib import Path

from ..cache import publish, search
from ..cache.loaded_kernel import EXPORTS, LoadedKernel
from ..cache.publish import Built
from ..cache.search import Root
from ..errors import BuildError
from ..system import log, shortages
from ..toolchain import elf


def verify_and_publish(built: Built, root: Root) -> LoadedKernel:
    """Verify, load, publish; from the private folder where publishing is not possible."""
    _verify(built)
    name = built.job.name
    try:
        if not built.changed_header:
            return _publish(built, root.path)
        private = (
            f"{built.changed_header} was changed while {name} was compiled; what came of it "
            "serves this process and is not kept"
        )
    except OSError as error:
        reason = error.strerror or str(error)
        if root.origin == "prebuilt":  # it was requested there: a copy elsewhere would not do
            raise BuildError(
                f"{name} was compiled but cannot be written to {root.path} ({reason}): free "
                "some space there, or name a folder that can be written"
            ) from error
        remedy = shortages.remedy(reason) or "set DS4S_CACHE_DIR to a folder that can be written"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):  # not the disk of TMPDIR
            remedy = "free some space there, or set DS4S_CACHE_DIR to a folder on another disk"
        elif error.errno == errno.EEXIST:
            remedy = f"remove them: python -m deepspeed4science cache clear {name}"
        private = (
            f"compiled kernels cannot be kept in {root.path} ({reason}); "
            f"this process uses a private copy and the next one compiles again: {remedy}"
        )
        if search.distrust(root):  # the search has logged why
            private = ""
    try:
        kernel = LoadedKernel(built.library, name, "built")
    except (OSError, ValueError) as error:
        raise BuildError(
            f"{name} was compiled but cannot be loaded: {error}; "
            f"{shortages.remedy(str(error)) or 'name another compiler in CXX, or report it'}"
        ) from error
    if private:
        log.warn_once(private)
    return kernel


def _publish(built: Built, root: Path) -> LoadedKernel:
    def load(library: Path) -> LoadedKernel:
        return LoadedKernel(library, built.job.name, "built")

    try:
        return load(publish.publish(root, built, load).library)
    except ValueError as error:
        raise BuildError(f"{error}; this is a fault of deepspeed4science") from error


def _verify(built: Built) -> None:
    """Check that the compiled library is the requested one, before other processes can see it."""
    try:
        library = built.contents
    except (OSError, ValueError) as error:
        raise BuildError(
            f"{built.job.name}: the compiler reported success, but its library is unusable "
            f"({error}); is the disk of {built.library.parent} full?"
        ) from error
    missing = sorted(EXPORTS - library.exports)
    if missing:
        raise BuildError(
            f"{built.job.name}: expected the exports {', '.join(sorted(EXPORTS))}, "
            f"got none named {', '.join(missing)}; this is a fault of the generated source"
        )
    if elf.own_machine() not in (0, library.machine):
        raise BuildError(
            f"{built.job.name}: expected machine code for ELF machine {elf.own_machine()}, got "
            f"{library.machine}; {built.job.compiler} is a cross compiler: name a native one in CXX"
        )
