"""Keeps a cache within DS4S_CACHE_MAX_MB: what was not used for longest goes first.

An entry's last use is its folder's modification time, which nothing else changes. It is written
once an hour at most, so that a warm load costs one question to the file system and a thousand ranks
do not write at once; an entry used within the last hour is therefore never removed. Removing is a
rename out of the way: a process that is about to load the entry finds all of it or nothing, and
then compiles it again.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .. import env
from . import cache, loaded_kernel, staging

DEFAULT_MAX_MB = 2048


@dataclass(frozen=True)
class Usage:
    """What one folder of `units/` or `aside/` takes."""

    folder: Path
    last_used: float  # seconds since 1970
    size_bytes: int


def limit_bytes() -> int | None:
    """None: no limit. Raises BuildError when the variable is not a number."""
    limit = env.whole_number("DS4S_CACHE_MAX_MB")
    limit = DEFAULT_MAX_MB if limit is None else limit
    return limit << 20 if limit else None


def make_room(root: Path) -> list[Path]:
    """Remove what is too much under the cache `root`; returns what was removed.

    Damaged entries go first, then those not used for longest; never what this process has loaded.
    Raises BuildError when the limit makes no sense.
    """
    limit = limit_bytes()
    if limit is None:
        return []
    damaged, entries = list(usages(root, "aside")), list(usages(root, "units"))
    excess = sum(one.size_bytes for one in (*damaged, *entries)) - limit
    in_use = {path.parent for path in loaded_kernel.in_use()}
    newest = time.time() - cache.USE_GRAIN_S
    candidates = [
        *damaged,
        *(one for one in sorted(entries, key=_age) if one.folder not in in_use),
    ]
    removed: list[Path] = []
    for one in candidates:
        if excess <= 0:
            break
        if one.folder.parent.name == "units" and cache.used(one.folder) > newest:
            continue
        if staging.remove(one.folder):
            removed.append(one.folder)
        excess -= one.size_bytes
    return removed


def usages(root: Path, part: str) -> Iterator[Usage]:
    """Every folder of `root`'s part "units" or "aside", but for those being published."""
    with contextlib.suppress(OSError):
        for folder in sorted((root / part).iterdir()):
            if not folder.name.startswith("."):
                yield usage(folder)


def usage(folder: Path) -> Usage:
    """Of no size when it has just gone."""
    size = 0
    with contextlib.suppress(OSError):
        size = sum(file.stat(follow_symlinks=False).st_size for file in os.scandir(folder))
    return Usage(folder, cache.used(folder), size)


def _age(one: Usage) -> float:
    return one.last_used
