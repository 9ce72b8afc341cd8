"""Compile what an install was asked for (DS_BUILD_*) into a folder with the cache's layout.

setup.py puts that folder into the package as `deepspeed4science/prebuilt`, where search.py looks
first.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import ALL_OPS, env
from .builder import OpBuilder
from .key import CompileJob
from .loaded import LoadedKernel
from .loader import Loader
from .search import Root


def requested() -> list[OpBuilder[Any]]:
    """The ops that DS_BUILD_* ask for. An op's own variable overrules DS_BUILD_OPS."""
    every = env.flag("DS_BUILD_OPS") or False
    asked = []
    for op in ALL_OPS.values():
        own = env.flag(op.BUILD_VAR)
        if every if own is None else own:
            asked.append(op)
    return asked


def build_requested(folder: Path, *, verbose: bool = True) -> list[LoadedKernel]:
    """Compile all that was asked for into `folder`, and remove whatever else an earlier install
    has left there; [] when nothing was asked for, and then `folder` is left as it is.

    Raises BuildError, with the reason, when something asked for cannot be compiled here.
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
    """Compile `jobs` into `folder` and load each once, which proves it; keep what fits already.

    Raises BuildError or one of its kinds.
    """
    target = folder.absolute()
    loader = Loader(lambda: (Root(target, "prebuilt", shared=False),))
    try:
        return loader.load(jobs, verbose=verbose)
    finally:
        for passing in ("locks", "aside"):  # of use to a cache only
            shutil.rmtree(target / passing, ignore_errors=True)
