"""Searches for a library: compiled at install, in a shared cache, in the cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .. import paths
from ..system import log, ownership
from . import cache
from .cache import Entry
from .key import CompileJob, Hashes
from .loaded_kernel import LoadedKernel


@dataclass(frozen=True)
class Root:
    path: Path
    origin: str  # LoadedKernel.origin of what is found there
    shared: bool  # filled for other machines too; never written here


def roots() -> tuple[Root, ...]:
    """The folders in the order of the search; only the last one is written."""
    return (
        Root(paths.prebuilt_root(), "prebuilt", shared=True),
        *(Root(path, "cache", shared=True) for path in paths.readonly_roots()),
        Root(paths.cache_root(), "cache", shared=False),
    )


def holds(prefix: str) -> bool:
    """Whether a folder has a library whose name begins so, fitting or not."""
    return any(cache.holds(root.path, prefix) for root in roots())


def load_existing(job: CompileJob, where: tuple[Root, ...], hashes: Hashes) -> LoadedKernel | None:
    """The first sound library that fits. Damaged ones are skipped: publishing replaces them."""
    for root in where:
        if doubt := distrust(root):
            log.warn_once(f"compiled kernels in {root.path} are passed over: {doubt}")
            continue
        for entry in fitting(root, job, hashes):
            if doubt := distrust(root, entry):
                log.warn_once(f"{entry.folder} is passed over: {doubt}")
                continue
            damage = entry.damage()
            if damage is None:
                try:
                    kernel = LoadedKernel(entry.library, job.name, root.origin)
                except (OSError, ValueError) as error:
                    log.warn_once(f"{entry.folder} cannot be loaded ({error}); passed over")
                    continue
                if root.origin == "cache" and not root.shared:
                    cache.note_use(entry.folder)
                return kernel
            if root.shared:
                log.warn_once(f"{entry.folder} is damaged ({damage}); passed over")
    return None


def fitting(root: Root, job: CompileJob, hashes: Hashes) -> Iterator[Entry]:
    any_toolchain = root.shared or job.compiler is None
    return cache.find(root.path, job, hashes, any_toolchain=any_toolchain)


def distrust(root: Root, entry: Entry | None = None) -> str:
    """Why others could change a folder, or an entry in it; empty where they cannot.

    Kernels inside the package are not checked: a user who can change them can change the package.
    """
    if root.path == paths.prebuilt_root():
        return ""
    if entry is None:
        return ownership.doubt_about(root.path)
    return ownership.doubt_about_parts(root.path, entry.folder, entry.library)


def tell_uncovered(job: CompileJob, where: tuple[Root, ...]) -> None:
    """Log, once in a process, why the kernels that an install compiled do not serve `job`. Not of
    the last root: that is the folder being filled.
    """
    for root in where[:-1]:
        if root.origin != "prebuilt" or log.seen(root.path):
            continue
        entries = cache.entries(root.path)
        if entries and log.first_time(root.path):
            named = [entry for entry in entries if entry.meta["name"] == job.name]
            log.warn_once(
                f"{job.title} is not among the {len(entries)} kernels compiled while installing "
                f"({_why_not(job, named)}); it has to be compiled, and is then kept in "
                f"{where[-1].path}"
            )


def _why_not(job: CompileJob, entries: list[cache.Entry]) -> str:
    if not entries:
        return "none of them is for such inputs"
    if any(entry.key.startswith(job.accepted) for entry in entries):
        return "its sources have changed since, or it was made for another system"
    targets = {target for entry in entries for target in entry.targets}
    return f"it was compiled for {', '.join(sorted(targets)) or 'another processor'} there"
