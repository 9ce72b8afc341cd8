"""From compile jobs to loaded kernels, once per process.

    loaded already -> compiled at install -> shared read-only caches -> cache -> compiled now

Safe to call from several threads, from forked children and from many processes on one cache.
key.py says when a library fits, cache.py how it is kept, loader.py who makes it and build.py how.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence

from ..cache import lock, search
from ..cache.key import CompileJob
from ..cache.loaded_kernel import LoadedKernel
from . import supervised_process, workdir
from .loader import Loader

__all__ = ["CompileJob", "LoadedKernel", "load", "loaded_kernels", "start"]

_LOADER = Loader(search.roots)


def load(
    jobs: Sequence[CompileJob], *, verbose: bool = True, skip_prebuilt: bool = False
) -> list[LoadedKernel]:
    """The kernels of `jobs`, in that order; what is missing is compiled together, in parallel.

    verbose         show progress on stderr while compiling (`DS4S_VERBOSE` overrules it)
    skip_prebuilt   do not consider what was compiled while installing

    Raises CompileError (the compiler refused a source), ToolchainError (compiler or ninja missing)
    or BuildError.
    """
    return _LOADER.load(jobs, verbose=verbose, skip_prebuilt=skip_prebuilt)


def loaded_kernels() -> tuple[LoadedKernel, ...]:
    """Every kernel this process has loaded so far, in the order it got them."""
    return _LOADER.loaded()


def start(jobs: Sequence[CompileJob]) -> None:
    """Make `jobs` ready in the background; returns at once, shows nothing and raises nothing.

    A later `load` of the same jobs waits for them and raises what went wrong.
    """
    _LOADER.start(jobs)


def _after_fork() -> None:
    _LOADER.forget_threads()
    lock.forget_after_fork()
    workdir.forget_after_fork()
    supervised_process.forget_after_fork()


atexit.register(_LOADER.stop)
os.register_at_fork(after_in_child=_after_fork)
