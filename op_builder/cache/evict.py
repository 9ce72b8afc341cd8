"""Keeps a cache within DS4S_CACHE_MAX_MB: the least recently used entries are removed first.

An entry's last use is its folder's modification time, which nothing else changes. It is written at
most once an hour: a warm load then costs one request to the file system, and a thousand ranks do
not write at once. An entry used within the last hour is therefore never removed. An entry is
removed by renaming it: a process that is about to load it finds all of it, or nothing and compiles
it again.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .. import env
from . import cache, loaded_kernel, staging

DEFAULT_MAX_MB = 2048
_OURS = re.compile(r"\w+-[0-9a-f]{32}(\.\d+)?")  # other folders there are somebody's own


@dataclass(frozen=True)
class Usage:
    """Size and last use of one folder of `units/` or `aside/`."""

    folder: Path
    last_used: float  # seconds since 1970
    size_bytes: int


def limit_bytes() -> int | None:
    """The limit; None: there is none. Raises BuildError when the variable is not a number."""
    limit = env.whole_number("DS4S_CACHE_MAX_MB")
    limit = DEFAULT_MAX_MB if limit is None else limit
    return limit << 20 if limit else None


def make_room(root: Path) -> list[Path]:
    """Remove entries of the cache `root` until it is within its limit; returns their folders.

    Damaged entries are removed first, then the least recently used; never those that this process
    has loaded. Raises BuildError when the limit is not a number.
    """
    limit = limit_bytes()
    if limit is None:
        return []
    damaged, entries = list(usages(root, "aside")), list(usages(root, "units"))
    excess = sum(one.size_bytes for one in (*damaged, *entries)) - limit
    in_use = {path.parent for path in loaded_kernel.in_use()}
    now = time.time()
    candidates = [
        *damaged,
        *(one for one in sorted(entries, key=_age) if one.folder not in in_use),
    ]
    removed: list[Path] = []
    for one in candidates:
        if excess <= 0:
            break
        is_recent = abs(now - cache.used(one.folder)) < cache.USE_GRAIN_S  # a wrong clock's is not
        if one.folder.parent.name == "units" and is_recent:
            continue
        if staging.remove(one.folder):
            removed.append(one.folder)
        excess -= one.size_bytes
    return removed


def usages(root: Path, part: str) -> Iterator[Usage]:
    """Every folder in `root`/units or `root`/aside, except those being published."""
    with contextlib.suppress(OSError):
        for folder in sorted((root / part).iterdir()):
            if _OURS.fullmatch(folder.name):
                yield usage(folder)


def usage(folder: Path) -> Usage:
    """Size and last use of a folder; size 0 where it has just been removed."""
    size = 0
    with contextlib.suppress(OSError):
        size = sum(file.stat(follow_symlinks=False).st_size for file in os.scandir(folder))
    return Usage(folder, cache.used(folder), size)


def _age(one: Usage) -> float:
    return one.last_used
