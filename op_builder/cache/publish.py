"""Publishes finished libraries under a root, whole or not at all, and moves damaged ones aside.

An entry appears by renaming a finished folder: readers never see half of one, and correctness needs
no lock.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .. import paths
from ..system import files, log, ownership
from ..toolchain import elf
from . import cache, staging
from .cache import Entry
from .key import LAYOUT, CompileJob, Header, content_key

_MOST_UNUSABLE = 8  # entries of one key, from other machines or damaged


@dataclass(frozen=True)
class Built:
    """One finished library in a private folder, not yet published."""

    job: CompileJob
    library: Path
    log: Path
    headers: tuple[Header, ...]
    seconds: float
    changed_header: str = ""  # a header that was written during the compilation, if there was one

    @functools.cached_property
    def contents(self) -> elf.Library:
        """The library's ELF contents; raises ValueError where the file is no library."""
        return elf.read(self.library)

    @property
    def key(self) -> str:
        found = self.contents
        return content_key(self.job, self.headers, found.machine, found.glibc)


def publish(root: Path, built: Built, load: Callable[[Path], object]) -> Entry:
    """Publish a finished library under `root`; an entry that was there first wins if it is sound.

    load   raises OSError or ValueError for a library that this process cannot use. Such a library
    is
           not published, and such an entry is replaced

    Raises OSError where `root` cannot be written (read-only, full, not allowed), and the exceptions
    of `load`.
    """
    paths.make_root(root)
    if doubt := ownership.doubt_about(root):
        raise PermissionError(doubt)
    units = files.make_part(root, "units")
    staging.sweep(units)
    temporary = staging.new_folder(units)
    try:
        with contextlib.suppress(OSError):
            os.chmod(temporary, files.bits(units))  # mkdtemp's 0700 is for nobody else to read
        entry = Entry(temporary, _write_entry(temporary, built))
        _synchronise(temporary)
        load(entry.library)  # the folder's new name is the same library to dlopen
        for folder in _names(units / f"{built.job.name}-{built.key}"):
            winner = _rename(root, temporary, folder, built.job, load)
            if winner is not None:
                return winner
        raise OSError(errno.EEXIST, "its entries can neither be used nor moved away", str(units))
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _names(folder: Path) -> Iterator[Path]:
    """The folders in which an entry may be. Earlier ones may hold a damaged entry that cannot be
    removed, or one whose system headers are in other folders, where this machine has none.
    """
    yield folder
    for number in range(2, 2 + _MOST_UNUSABLE):
        yield folder.with_name(f"{folder.name}.{number}")


def _rename(
    root: Path, temporary: Path, folder: Path, job: CompileJob, load: Callable[[Path], object]
) -> Entry | None:
    """The entry now in `folder`: ours, or a sound one that was there and that later processes here
    find. None where one is there that they do not find, or that is damaged and can be neither moved
    nor removed.
    """
    for _ in range(2):
        try:
            os.rename(temporary, folder)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
            winner = cache.read(folder)
            damage = _damage(root, winner, load) if winner else "its meta.json is damaged"
            if winner is not None and not damage:
                return winner if cache.headers_are_here(winner, job) else None
            if not set_aside(root, folder, damage):
                return None
        else:
            _synchronise(folder.parent)
            return cache.read(folder)
    return None


def _damage(root: Path, entry: Entry, load: Callable[[Path], object]) -> str:
    """Why an entry cannot be used here; empty where it can."""
    if damage := ownership.doubt_about_parts(root, entry.folder, entry.library) or entry.damage():
        return damage
    try:
        load(entry.library)
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def set_aside(root: Path, folder: Path, why: str) -> bool:
    """Move a damaged entry out of the way, replacing an earlier one; False when not allowed to."""
    try:
        aside = files.make_part(root, "aside") / folder.name
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(folder, aside)
    except FileNotFoundError:
        return True  # another process has just moved it
    except OSError as error:
        if staging.remove(folder):
            log.warn(f"{folder} cannot be used ({why}); removed, compiled again")
            return True
        log.warn(f"{folder} cannot be used ({why}) nor moved away ({error.strerror})")
        return False
    log.warn(f"{folder} cannot be used ({why}); moved to {aside}, compiled again")
    return True


def _write_entry(folder: Path, built: Built) -> dict[str, Any]:
    job = built.job
    data = built.library.read_bytes()
    system = os.uname()
    meta: dict[str, Any] = {
        "layout": LAYOUT,
        "name": job.name,
        "key": built.key,
        "source": hashlib.sha256(job.source.encode()).hexdigest(),
        "flags": list(job.flags),
        "link_flags": list(job.link_flags),
        "identity": cache.listed(job.identity),
        "headers": [list(asdict(header).values()) for header in built.headers],
        "machine": built.contents.machine,
        "glibc": list(built.contents.glibc),
        "size": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "seconds": built.seconds,
        "created": {
            "time": time.time(),
            "host": socket.gethostname(),
            "system": " ".join((system.sysname, system.release, system.machine)),
            "compiler": os.path.realpath(job.compiler or ""),
        },
    }
    files.write_new(folder / f"{job.name}.so", data, 0o755)
    files.write_new(folder / f"{job.name}{job.suffix}", job.source.encode(), 0o644)
    files.write_new(folder / "log", files.head_and_tail(built.log).encode(), 0o644)
    files.write_new(folder / "meta.json", json.dumps(meta, indent=1).encode(), 0o644)
    return meta


def _synchronise(folder: Path) -> None:
    """Write a folder's list of names to the disk, on file systems where that needs a request."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            files.synchronise(handle)
        finally:
            os.close(handle)
