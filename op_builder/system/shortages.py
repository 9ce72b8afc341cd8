"""Temporary shortages of a machine (memory, disk, processes), its limits, and signals from outside,
as its programs report them, with remedies.

Such a failure says nothing about a compiler or a source: it is neither remembered nor shared with
waiting processes, and is no reason to choose another compiler.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

# nvcc does not report a full disk, and removes its temporary files before it ends. A unit needs
# less than this.
SMALL_DISK_BYTES = 64 << 20

_NOEXEC = (
    "the folder is on a file system that runs no programs (mounted noexec): set TMPDIR, and "
    "DS4S_CACHE_DIR if need be, to a folder on one that does"
)
# (message, remedy)
_SHORTAGES: tuple[tuple[str, str], ...] = (
    (
        r"\bKilled\b|exit status 137|died due to signal 9|ended with (-9|137)\b|out of memory"
        r"|cannot allocate memory|virtual memory exhausted|Memory allocation failure|bad_alloc",
        "the machine ran out of memory: close other programs or set MAX_JOBS=1",
    ),
    (
        r"No space left on device|Disk quota exceeded",
        "the disk is full: free some space, or set TMPDIR to a folder on another one",
    ),
    (
        r"Resource temporarily unavailable|[Cc]annot fork|can't start new thread",
        "no more processes or threads may be started: raise the limit (ulimit -u, or the "
        "container's pids limit), close other programs, or set MAX_JOBS=1",
    ),
    (
        r"Too many open files",
        "no more files may be opened: raise the limit (ulimit -n)",
    ),
    (
        r"File size limit exceeded|File too large|died due to signal 25|ended with (-25|153)\b",
        "no larger file may be written: raise the limit (ulimit -f)",
    ),
    (
        r"CPU time limit exceeded|died due to signal 24|ended with (-24|152)\b",
        "no program may run for longer: raise the limit (ulimit -t)",
    ),
    (  # SIGHUP, SIGINT, SIGUSR1, SIGUSR2, SIGTERM
        r"(Hangup|Interrupt|User defined signal [12]|Terminated) signal terminated"
        r"|unable to execute command: (Hangup|Interrupt|User defined signal [12]|Terminated)"
        r"|exit status (129|130|138|140|143)\b|died due to signal (1|2|10|12|15)\b"
        r"|ended with (-(1|2|10|12|15)|129|130|138|140|143)\b|build stopped: interrupted",
        "a signal ended it, as schedulers send them to all programs of a job: try again",
    ),
    (
        r"did not answer within \d+ s",
        "try again, or install it on a local disk",
    ),
    (
        r"failed to map segment from shared object",
        _NOEXEC,
    ),
)
_ANY = re.compile("|".join(pattern for pattern, _ in _SHORTAGES), re.IGNORECASE)


def remedy(words: str) -> str:
    """The remedy for the shortage that `words` report; empty where they report none."""
    if _ANY.search(words) is None:
        return ""
    return next(what for pattern, what in _SHORTAGES if re.search(pattern, words, re.IGNORECASE))


def disk_remedy(folder: Path, free_bytes: int | None = None) -> str:
    """The remedy where the disk of `folder` is nearly full; empty where it is not."""
    free = free_bytes if free_bytes is not None else free_space(folder)
    if free is None or free >= SMALL_DISK_BYTES:
        return ""
    return (
        f"the disk may be full, {free / 2**20:.1f} MiB are left in {folder}: free some space, or "
        "set TMPDIR to a folder on another one"
    )


def free_space(folder: Path) -> int | None:
    """Free bytes on the disk of `folder`; None where the system does not say."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def runs_programs(folder: Path) -> bool:
    """Whether libraries may be loaded from the file system of `folder`."""
    try:
        return not os.statvfs(folder).f_flag & os.ST_NOEXEC
    except OSError:
        return True
