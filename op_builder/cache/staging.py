"""Staging folders beside a cache's entries: what is in one is no entry yet, or none any more."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import tempfile
from pathlib import Path


def new_folder(units: Path) -> Path:
    """A staging folder of this process's, which `sweep` removes if we are killed."""
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


def remove(folder: Path) -> bool:
    """Take an entry away at once and whole; False when it is gone already or not ours to remove.

    A container's lower layer lets folders be emptied but not renamed: what makes an entry one goes
    first there.
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
        with contextlib.suppress(OSError):  # what was no folder
            os.unlink(staging / folder.name)
            os.rmdir(staging)
    return not os.path.lexists(folder)
