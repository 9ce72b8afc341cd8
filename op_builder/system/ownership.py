"""Decides whose libraries may be loaded: they run with this user's rights, so no other user may be
able to create or change them.

A folder or file is trusted when it belongs to this user or to root and nobody else can write it. A
group is trusted in a setgid folder that root made, and where it is the user's own group of one
member. Folders below a project's setgid folder have its bit and its group, whoever makes them.
"""

from __future__ import annotations

import functools
import grp
import os
import pwd
import stat
from pathlib import Path


def doubt_about(root: Path) -> str:
    """Why nothing below a folder of kernels may be loaded; empty where it may, or is missing."""
    return _first(root, [root, root / "units"])


def doubt_about_parts(root: Path, *parts: Path) -> str:
    """The same for files and folders below `root`."""
    return _first(root, list(parts))


def _first(root: Path, places: list[Path]) -> str:
    group = _shared_group(root)
    return next(filter(None, (_doubt(place, group) for place in places)), "")


def _doubt(place: Path, group: int | None) -> str:
    try:
        status = os.stat(place)
    except OSError:
        return ""  # it does not exist or cannot be read, so nothing will be loaded
    of_group = group is not None and status.st_gid == group
    if status.st_uid not in (os.geteuid(), 0) and not of_group:
        return (
            f"{place} belongs to {_name(status.st_uid)}, who could make it run anything here: "
            f"{_OTHER_FOLDER}"
        )
    if status.st_mode & stat.S_IWOTH or (
        status.st_mode & stat.S_IWGRP and not of_group and not _is_own_group(status.st_gid)
    ):
        meant = status.st_mode & stat.S_ISVTX  # for everybody, as /tmp, which needs these rights
        mend = _OTHER_FOLDER if meant else f"chmod go-w {place}, or {_OTHER_FOLDER}"
        return f"{place} can be written by others ({mend})"
    return ""


_OTHER_FOLDER = "name a folder of your own in DS4S_CACHE_DIR; one for several users is root's"


def _shared_group(root: Path) -> int | None:
    """The group of a setgid folder that root made."""
    try:
        status = os.stat(root)
    except OSError:
        return None
    return status.st_gid if status.st_mode & stat.S_ISGID and status.st_uid == 0 else None


@functools.lru_cache(maxsize=16)
def _is_own_group(gid: int) -> bool:
    """Whether the group is the user's own, which many systems create with each user, together with
    a umask that lets it write.
    """
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
