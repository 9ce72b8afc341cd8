"""Whose libraries may be loaded: they run with our rights, so nobody else may be able to put one
there or to change it.

A folder or file is believed when it belongs to this user or to root and nobody else can write it. A
group is believed where it was meant to be: in a setgid folder that this user or root made, and as
the user's own group of one.
"""

from __future__ import annotations

import functools
import grp
import os
import pwd
import stat
from pathlib import Path


def doubt_about(root: Path) -> str:
    """Why nothing below a folder of kernels may be loaded; empty when it may, or is not there."""
    return _first(root, [root, root / "units"])


def doubt_about_parts(root: Path, *parts: Path) -> str:
    """The same of files and folders below `root`."""
    return _first(root, list(parts))


def _first(root: Path, places: list[Path]) -> str:
    group = _shared_group(root)
    return next(filter(None, (_doubt(place, group) for place in places)), "")


def _doubt(place: Path, group: int | None) -> str:
    try:
        status = os.stat(place)
    except OSError:
        return ""  # not there, or not to be read: nothing will be loaded either
    of_group = group is not None and status.st_gid == group
    if status.st_uid not in (os.geteuid(), 0) and not of_group:
        return (
            f"{place} belongs to {_name(status.st_uid)}, who could make it run anything here: "
            f"{_OTHER_FOLDER}"
        )
    if status.st_mode & stat.S_IWOTH or (
        status.st_mode & stat.S_IWGRP and not of_group and not _is_own_group(status.st_gid)
    ):
        return f"{place} can be written by others (chmod go-w {place}, or {_OTHER_FOLDER})"
    return ""


_OTHER_FOLDER = "name a folder of your own in DS4S_CACHE_DIR; one for several users is root's"


def _shared_group(root: Path) -> int | None:
    """The group that a setgid folder was made for, by this user or root."""
    try:
        status = os.stat(root)
    except OSError:
        return None
    meant = status.st_mode & stat.S_ISGID and status.st_uid in (os.geteuid(), 0)
    return status.st_gid if meant else None


@functools.lru_cache(maxsize=16)
def _is_own_group(gid: int) -> bool:
    """The group of one that many systems make with each user, with a umask that lets it write."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    own = user.pw_gid == gid and group.gr_name == user.pw_name
    return own and set(group.gr_mem) <= {user.pw_name}


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
