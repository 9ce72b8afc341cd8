"""Private local folders for compiling, and for libraries that could not be published.

A folder is locked (flock) by its process as long as that lives. So folders of killed processes can
be recognised; they are removed when the next folder is made. The lock is taken before the folder
gets its final name. So a folder of that name without a lock is abandoned, and one that has not got
its name within an hour. The name ends with the host's: on a shared file system, such as Lustre or
BeeGFS, a lock may be known to its host alone.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import glob
import os
import shutil
import socket
import tempfile
import time
from pathlib import Path

from .. import paths
from ..errors import BuildError

_PREFIX, _NEW_PREFIX = "ds4s-build-", ".ds4s-new-"
_ALIVE = "alive"
_OLD = 3600.0  # seconds after which a folder without its final name has been abandoned

_mine: dict[Path, int] = {}  # folder -> the locked file's descriptor


def create() -> Path:
    """A new empty folder, removed by `remove` or when the process ends."""
    root: Path | str = "a temporary folder"
    try:
        root = paths.build_root()
        fresh = Path(tempfile.mkdtemp(dir=root, prefix=_NEW_PREFIX, suffix=_of_this_host()))
        handle = os.open(fresh / _ALIVE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        folder = root / fresh.name.replace(_NEW_PREFIX, _PREFIX)
        os.rename(fresh, folder)
    except OSError as error:
        raise BuildError(
            f"no folder to compile in: expected {root} to be writable, got {error.strerror}; "
            "free some space or set TMPDIR"
        ) from error
    _mine[folder] = handle
    _sweep(root)
    return folder


def remove(folder: Path) -> None:
    """Remove a folder of this process's; a library loaded from it stays usable."""
    handle = _mine.pop(folder, None)
    if handle is not None:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def forget_after_fork() -> None:
    """In a forked child: leave the folders to the parent, but keep their locks."""
    _mine.clear()


def _remove_mine() -> None:
    for folder in list(_mine):
        remove(folder)


def _sweep(root: Path) -> None:
    for folder in paths.matching(root, f"{_PREFIX}????????{glob.escape(_of_this_host())}"):
        if folder in _mine:
            continue
        with contextlib.suppress(OSError):
            if os.lstat(folder).st_uid != os.geteuid():
                continue
            handle = os.open(folder / _ALIVE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)
    for folder in paths.matching(root, f"{_NEW_PREFIX}*"):
        with contextlib.suppress(OSError):
            found = os.lstat(folder)
            if found.st_uid == os.geteuid() and found.st_mtime < time.time() - _OLD:
                shutil.rmtree(folder, ignore_errors=True)


def _of_this_host() -> str:
    return f"-{socket.gethostname()}"


atexit.register(_remove_mine)  # registered before jit.py's, which is called first and stops builds
