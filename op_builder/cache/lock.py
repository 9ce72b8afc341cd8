"""One file lock per unit, so that many processes that want the same library compile it once.

Locks only save work: publishing is atomic without them, and where they do not work (some network
file systems, a read-only cache) every process compiles for itself. The system frees a flock when
its holder dies, so a killed builder never blocks others. The file's text tells waiting processes
who is compiling and, afterwards, why it failed: they then raise the same error instead of failing
one after another with the same source.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from .. import paths
from ..system import files, ownership

_held: set[int] = set()  # file descriptors, so that a forked child can close its copies


class NoLockError(Exception):
    """Locks do not work here: go on without one."""


@dataclass(frozen=True)
class Holder:
    """The process that is compiling the unit."""

    pid: int
    host: str
    since: float  # seconds since 1970

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


@dataclass(frozen=True)
class Failure:
    """Why the last attempt to compile it failed."""

    message: str
    files: tuple[str, ...]  # the compiler and the include folders that were used
    at: float  # seconds since 1970: distinguishes two failures of one kind


Note = Holder | Failure


class UnitLock:
    def __init__(self, root: Path, ident: str) -> None:
        self._root = root
        self.path = root / "locks" / f"{ident}.lock"
        self.previous: Note | None = None  # the previous holder's note
        self._handle: int | None = None

    def try_acquire(self) -> bool:
        """False when another process holds it; raises NoLockError where locks do not work."""
        try:
            handle = self._open()
        except OSError as error:
            raise NoLockError(str(error)) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return False
        except OSError as error:
            os.close(handle)
            raise NoLockError(str(error)) from error
        self._handle = handle
        _held.add(handle)
        self.previous = self.read()
        self.write(Holder(os.getpid(), socket.gethostname(), time.time()))
        return True

    def _open(self) -> int:
        """Open a regular file of this user, or of a trusted group (ownership.py), so that no others
        can hold the lock.

        Raises OSError.
        """
        paths.make_root(self._root)
        folder = files.make_part(self._root, "locks")
        if doubt := ownership.doubt_about(self._root) or ownership.doubt_about_parts(
            self._root, folder
        ):
            raise PermissionError(doubt)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        of_group = stat.S_ISGID | stat.S_IWGRP
        mode = 0o660 if os.stat(folder).st_mode & of_group == of_group else 0o600
        handle = os.open(self.path, flags, mode)
        status = os.fstat(handle)
        ours = status.st_uid == os.geteuid() or mode == 0o660
        if not (ours and stat.S_ISREG(status.st_mode) and status.st_nlink == 1):
            os.close(handle)
            raise OSError(errno.EINVAL, "is not a file of ours alone", str(self.path))
        with contextlib.suppress(OSError):
            os.fchmod(handle, mode)
        return handle

    def release(self) -> None:
        if self._handle is not None:
            _held.discard(self._handle)
            with contextlib.suppress(OSError):
                fcntl.flock(self._handle, fcntl.LOCK_UN)  # also for copies in forked children
            os.close(self._handle)
            self._handle = None

    def read(self) -> Note | None:
        """The last holder's note; None where there is none that can be parsed. Needs no lock."""
        try:
            return _parse(json.loads(files.read(self.path)))
        except (OSError, ValueError, RecursionError):
            return None

    def write(self, note: Note) -> None:
        """Leave a note for waiting processes; on a full disk it may be lost."""
        if self._handle is None:
            return
        with contextlib.suppress(OSError):
            data = json.dumps(_fields(note)).encode()
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, data, 0)


def _fields(note: Note) -> dict[str, object]:
    if isinstance(note, Holder):
        return {"pid": note.pid, "host": note.host, "since": note.since}
    return {"failed": note.message, "of": list(note.files), "at": note.at}


def _parse(content: object) -> Note | None:
    """The note; None where the content is not one that `_fields` writes: others may have written
    it.
    """
    match content:
        case {"pid": int(pid), "host": str(host), "since": int() | float() as since}:
            return Holder(pid, host, since)
        case {"failed": str(message), "of": [*named], "at": int() | float() as at}:
            return Failure(message, tuple(map(str, named)), at)
    return None


def forget_after_fork() -> None:
    """In a forked child: close its copies of held locks, which would stay locked when the parent
    dies.

    Closing a copy does not unlock the parent's lock: only closing the last copy does.
    """
    for handle in _held:
        with contextlib.suppress(OSError):
            os.close(handle)
    _held.clear()
