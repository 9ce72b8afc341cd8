"""Puts finished libraries under a root: whole or not at all, and damaged ones out of the way.

An entry appears by renaming a finished folder: readers never see half of one, and no lock is
needed to be right.
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
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import cache, compiler_log, elf, tell
from .cache import Entry
from .key import LAYOUT, CompileJob, Header, content_key


@dataclass(frozen=True)
class Built:
    """One finished library in a private folder, not yet published."""

    job: CompileJob
    library: Path
    log: Path
    headers: tuple[Header, ...]
    seconds: float
    changed_header: str = ""  # one that was written while it was compiled, if there was one

    @functools.cached_property
    def contents(self) -> elf.Library:
        """Raises ValueError when the library is not one."""
        return elf.read(self.library)

    @property
    def key(self) -> str:
        found = self.contents
        return content_key(self.job, self.headers, found.machine, found.glibc)


def publish(root: Path, built: Built, load: Callable[[Path], object]) -> Entry:
    """Put a finished library under `root`; the entry that was there first wins if it is sound.

    load   raises OSError or ValueError for a library that this process cannot use: then it is not
           published, and an entry of its key that cannot be loaded either gives way

    Raises OSError when `root` cannot be written (read-only, full, not allowed), and what `load`
    raises.
    """
    units = root / "units"
    units.mkdir(parents=True, exist_ok=True)
    sweep(units)
    folder = units / f"{built.job.name}-{built.key}"
    temporary = new_folder(units)
    try:
        os.chmod(temporary, 0o755)  # mkdtemp's 0700 would keep a shared cache from being shared
        entry = Entry(folder, _write_entry(temporary, built))
        _fsync(temporary)
        load(temporary / entry.library.name)  # the folder's new name is the same library to dlopen
        for _ in range(2):
            try:
                os.rename(temporary, folder)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
                winner = cache.read(folder)
                damage = _damage(winner, load) if winner else "its meta.json is damaged"
                if winner is not None and not damage:
                    return winner
                set_aside(root, folder, damage)
                continue
            _fsync(units)
            return entry
        raise OSError(errno.EEXIST, "a damaged entry cannot be moved away", str(folder))
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _damage(entry: Entry, load: Callable[[Path], object]) -> str:
    """Why an entry is of no use here; empty when it is."""
    if damage := entry.damage():
        return damage
    try:
        load(entry.library)
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def set_aside(root: Path, folder: Path, why: str) -> bool:
    """Move a damaged entry out of the way, replacing an earlier one; False when not allowed to."""
    aside = root / "aside" / folder.name
    try:
        aside.parent.mkdir(exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(folder, aside)
    except FileNotFoundError:
        return True  # another process has just done it
    except OSError as error:
        tell.warn(f"{folder} cannot be used ({why}) nor moved away ({error.strerror})")
        return False
    tell.warn(f"{folder} cannot be used ({why}); moved to {aside}, compiled again")
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
        "seconds": round(built.seconds, 3),
        "created": {
            "time": time.time(),
            "host": socket.gethostname(),
            "system": " ".join((system.sysname, system.release, system.machine)),
            "compiler": str(job.compiler),
        },
    }
    _write(folder / f"{job.name}.so", data, mode=0o755)
    _write(folder / f"{job.name}{job.suffix}", job.source.encode())
    _write(folder / "log", compiler_log.read(built.log).encode())
    _write(folder / "meta.json", json.dumps(meta, indent=1).encode())
    return meta


def _write(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(handle, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def _fsync(folder: Path) -> None:
    """Make a folder's list of names survive a crash, on file systems where that is needed."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def new_folder(units: Path) -> Path:
    """A passing folder of this process's, which `sweep` removes if we are killed."""
    prefix = f".unfinished-{socket.gethostname()}-{os.getpid()}-"
    return Path(tempfile.mkdtemp(dir=units, prefix=prefix))


def sweep(units: Path) -> None:
    """Remove what processes of this host, killed while publishing, left behind.

    A wrong guess (another container of the same host name) makes that process keep its own copy,
    nothing worse.
    """
    here = f".unfinished-{socket.gethostname()}-"
    for name in os.listdir(units):
        pid = name.removeprefix(here).partition("-")[0]
        if name.startswith(here) and pid.isdecimal() and not _alive(int(pid)):
            shutil.rmtree(units / name, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
