"""Compiles the kernels that an install requests (DS_BUILD_*) into a folder with the cache's layout.

setup.py puts that folder into the package as `deepspeed4science/prebuilt`, which search.py searches
first.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import env, paths
from ..build.loader import Loader
from ..cache import search, staging
from ..cache.key import CompileJob, Hashes
from ..cache.loaded_kernel import LoadedKernel
from ..cache.search import Root
from ..errors import BuildError
from ..system import files, ownership
from .all_ops import ALL_OPS
from .builder import OpBuilder


def requested() -> list[OpBuilder[Any]]:
    """The ops that DS_BUILD_* request. An op's own variable overrules DS_BUILD_OPS."""
    every = env.flag("DS_BUILD_OPS") or False
    asked = []
    for op in ALL_OPS.values():
        own = env.flag(op.BUILD_VAR)
        if every if own is None else own:
            asked.append(op)
    return asked


def build_requested(folder: Path, *, verbose: bool = True) -> list[LoadedKernel]:
    """Compile all requested ops into `folder`, and remove everything else that an earlier install
    left there. Without a request, return [] and leave `folder` as it is.

    Raises BuildError, with the reason, when a requested op cannot be compiled here.
    """
    jobs = [job for op in requested() for job in op.builder()]
    if not jobs:
        return []
    kernels = build_into(folder, jobs, verbose=verbose)
    wanted = {kernel.path.parent for kernel in kernels}
    for entry in (folder.absolute() / "units").iterdir():
        if entry not in wanted:
            shutil.rmtree(entry)
    return kernels


def build_into(
    folder: Path, jobs: Sequence[CompileJob], *, verbose: bool = True
) -> list[LoadedKernel]:
    """Compile `jobs` into `folder` and load each library once as a test; fitting ones are kept.

    Raises BuildError or a subclass, also when a kernel cannot be written there.
    """
    target = folder.absolute()
    if doubt := ownership.doubt_about(target):  # publishing would refuse it, after minutes
        raise BuildError(f"no kernel is put where others could change it: {doubt}")
    root = Root(target, "prebuilt", shared=False)
    _require_writable(root, jobs)
    loader = Loader(lambda: (root,))
    try:
        kernels = loader.load(jobs, verbose=verbose)
        require_kept(kernels, [target])
        return kernels
    finally:
        for passing in ("locks", "aside"):  # only a cache needs them
            shutil.rmtree(target / passing, ignore_errors=True)


def _require_writable(root: Root, jobs: Sequence[CompileJob]) -> None:
    """Raises BuildError, before anything is compiled, where a kernel is missing in a folder that
    cannot be written.
    """
    hashes = Hashes()
    if all(any(search.fitting(root, job, hashes)) for job in jobs):
        return
    try:
        paths.make_root(root.path)
        staging.new_folder(files.make_part(root.path, "units")).rmdir()
    except OSError as error:
        raise BuildError(
            f"kernels cannot be written to {root.path} ({error.strerror}); name a folder that can "
            "be written"
        ) from error


def require_kept(kernels: Sequence[LoadedKernel], folders: Sequence[Path]) -> None:
    """Raises BuildError for a kernel that could not be kept and serves this process alone."""
    passing = [
        kernel.name
        for kernel in kernels
        if not any(kernel.path.is_relative_to(folder / "units") for folder in folders)
    ]
    if passing:
        raise BuildError(
            f"{len(passing)} of {len(kernels)} kernels could not be kept in {folders[-1]}: "
            f"{', '.join(passing)}; name a folder that can be written and has room"
        )
