"""Reads and writes files in folders that others may write: follows no links, waits for no FIFOs,
shares nothing by accident.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from pathlib import Path

# Errors of file systems that do not support a call; they do not prevent keeping kernels.
_UNKNOWN_CALL = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM, errno.EACCES, errno.EROFS)
_MOST_BYTES = 1 << 20  # read from each end of a log, which may have a hundred megabytes


def read(path: str | Path) -> bytes:
    """A regular file's bytes. Raises OSError for anything else: a FIFO would be waited for."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(handle, "rb") as stream:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", str(path))
        return stream.read()


def head_and_tail(path: Path) -> str:
    """The beginning and the end of a log; empty where it cannot be read."""
    try:
        with open(path, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            head = stream.read(_MOST_BYTES)
            left_out = size - 2 * _MOST_BYTES
            if left_out > 0:
                stream.seek(-_MOST_BYTES, os.SEEK_END)
            tail = stream.read()
    except OSError:
        return ""
    gap = f"\n... {left_out / 2**20:.0f} MiB left out ...\n".encode() if left_out > 0 else b""
    return (head + gap + tail).decode(errors="replace")


def replace(path: Path, data: bytes) -> None:
    """Write a file atomically, replacing one of that name; a link is replaced, not followed."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    try:
        with open(handle, "wb") as stream:
            stream.write(data)
        with contextlib.suppress(OSError):
            os.chmod(temporary, 0o666 & bits(path.parent))
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def write_new(path: Path, data: bytes, mode: int) -> None:
    """Write a file that must not exist yet, and wait until it is on the disk, where that can be
    known.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags, mode), "wb") as stream:
        stream.write(data)
        with contextlib.suppress(OSError):  # whatever the umask is: the folder says who reads it
            os.fchmod(stream.fileno(), mode & bits(path.parent) | mode & 0o600)
        stream.flush()
        synchronise(stream.fileno())


def synchronise(handle: int) -> None:
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _UNKNOWN_CALL:
            raise


def make_root(root: Path, *, private: bool) -> None:
    """Make a folder for compiled kernels: private, or readable by everybody.

    An existing one is not changed. A folder's group gets no rights from a setgid folder above it.
    """
    if os.path.isdir(root):
        return
    for folder in reversed(root.parents):
        if not os.path.isdir(folder):  # not writable by others, whatever the umask is
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o755)
    mode = 0o700 if private else 0o755
    with contextlib.suppress(FileExistsError):
        os.mkdir(root, mode)
        with contextlib.suppress(OSError):  # whatever the umask is
            os.chmod(root, mode)


def make_part(root: Path, part: str) -> Path:
    """Make a subfolder of `root` with the same permissions."""
    folder = root / part
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
        with contextlib.suppress(OSError):
            os.chmod(folder, bits(root))
    return folder


def bits(folder: Path) -> int:
    """Permissions for new files in `folder`: never writable by others."""
    mode = os.stat(folder).st_mode
    shared = stat.S_ISGID | 0o770 if mode & stat.S_ISGID else 0o700
    return mode & (shared | 0o055) | 0o700
