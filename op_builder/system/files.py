"""Reading and writing where others may have been: nothing is followed, waited for or shared by
accident.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from pathlib import Path

# What a file system answers that does not know a call: no reason to keep nothing.
_UNKNOWN_CALL = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM, errno.EACCES, errno.EROFS)
_MOST_BYTES = 1 << 20  # of a log's beginning, and of its end: a hundred megabytes are no rarity


def read(path: str | Path) -> bytes:
    """A regular file's bytes. Raises OSError for anything else: a FIFO would be waited for."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(handle, "rb") as stream:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", str(path))
        return stream.read()


def head_and_tail(path: Path) -> str:
    """As much of a log as anybody reads; empty when it cannot be read."""
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
    """Write a file whole, in the place of whatever has its name; a link is not followed."""
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
    """A file that must not be there yet, on the disk when this returns if the disk can tell."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags, mode), "wb") as stream:
        stream.write(data)
        stream.flush()
        synchronise(stream.fileno())


def synchronise(handle: int) -> None:
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _UNKNOWN_CALL:
            raise


def make_root(root: Path, *, private: bool) -> None:
    """A folder for compiled kernels, for this user alone or for everybody to read.

    One that is there stays as it is. Below a setgid folder it is for that group as well.
    """
    if os.path.isdir(root):
        return
    for folder in reversed(root.parents):
        if not os.path.isdir(folder):  # whatever the umask is, not to be written by others
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o755)
    mode = 0o700 if private else 0o755
    if private and os.stat(root.parent).st_mode & stat.S_ISGID:
        mode = 0o770
    with contextlib.suppress(FileExistsError):
        os.mkdir(root, mode)
        if mode == 0o770:  # whatever the umask is
            with contextlib.suppress(OSError):
                os.chmod(root, mode | stat.S_ISGID)


def make_part(root: Path, part: str) -> Path:
    """A folder of `root`'s own, which those may read and write who may do so with `root`."""
    folder = root / part
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
        with contextlib.suppress(OSError):
            os.chmod(folder, bits(root))
    return folder


def bits(folder: Path) -> int:
    """Permissions for what is made in `folder`: never to be written by others."""
    mode = os.stat(folder).st_mode
    shared = stat.S_ISGID | 0o770 if mode & stat.S_ISGID else 0o700
    return mode & (shared | 0o055) | 0o700
