"""Where a library may already be: compiled at install, in a shared cache, in the cache."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from . import cache, paths
from .key import CompileJob, Hashes
from .loaded import LoadedKernel

logger = logging.getLogger(__name__)

_warned: set[str] = set()


@dataclass(frozen=True)
class Root:
    path: Path
    origin: str  # LoadedKernel.origin of what is found there
    shared: bool  # made for other machines too, never written by us


def roots() -> tuple[Root, ...]:
    """In the order in which they are searched; the last one is written."""
    return (
        Root(paths.prebuilt_root(), "prebuilt", shared=True),
        *(Root(path, "cache", shared=True) for path in paths.readonly_roots()),
        Root(paths.cache_root(), "cache", shared=False),
    )


def load_existing(job: CompileJob, where: tuple[Root, ...], hashes: Hashes) -> LoadedKernel | None:
    """The first sound library that fits. Damaged ones are passed over: publishing replaces them."""
    for root in where:
        any_compiler = root.shared or job.compiler is None
        entry = cache.find(root.path, job, hashes, any_compiler=any_compiler)
        if entry is None:
            continue
        damage = entry.damage()
        if damage is None:
            try:
                return LoadedKernel(entry.library, job.name, root.origin)
            except (OSError, ValueError) as error:
                warn_once(f"{entry.folder} cannot be loaded ({error}); passed over")
        elif root.shared:
            warn_once(f"{entry.folder} is damaged ({damage}); passed over")
    return None


def warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        logger.warning("%s", message)
