"""Staging folders beside a cache's entries, for folders that are not yet, or no longer, entries."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import tempfile
from pathlib import Path


def new_folder(units: Path) -> Path:
    """A staging folder of this process, which `sweep` removes if the process is killed."""
    prefix = f".unfinished-{socket.gethostname()}-{os.getpid()}-"
    return Path(tempfile.mkdtemp(dir=units, prefix=prefix))


def sweep(units: Path) -> None:
    """Remove the folders of processes of this host that were killed while publishing.

    A wrong guess (a process in another container with the same host name) only makes that process
    keep a copy of its own.
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


def remove(folder: Path) -> bool:
    """Remove an entry atomically; False where it is gone already or may not be removed.

    Folders of a container's lower layer can be emptied but not renamed: there, meta.json is removed
    first, without which a folder is no entry.
    """
    if not os.path.lexists(folder):
        return False
    try:
        staging = new_folder(folder.parent)
    except OSError:
        return False
    try:
        os.rename(folder, staging / folder.name)
    except OSError as error:
        if error.errno == errno.EXDEV:
            with contextlib.suppress(OSError):
                os.unlink(folder / "meta.json")
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        with contextlib.suppress(OSError):  # a file instead of a folder
            os.unlink(staging / folder.name)
            os.rmdir(staging)
    return not os.path.lexists(folder)
