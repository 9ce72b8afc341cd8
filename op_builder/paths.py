"""Folders: our C++ sources, the compiled kernels shipped with the package, the cache.

The sources are in `csrc/` beside `op_builder/` in a checkout (an editable install points there),
and in `deepspeed4science/csrc/` in an installed wheel, where they are package data. The only folder
that is created here is the cache of a user whose home cannot be written.
"""

from __future__ import annotations

import contextlib
import glob
import os
import stat
import tempfile
from pathlib import Path

from . import env
from .errors import BuildError
from .system import files, ownership

_HERE = Path(os.path.realpath(__file__)).parent
_OP = Path("deepspeed4science") / "evoformer_attn"
_NOWHERE = Path(os.devnull) / "no home folder"  # cannot be written: private copies, a warning


def absolute(text: str) -> Path:
    """`text` as an absolute path, `~` expanded; unchanged where the current folder was removed."""
    expanded = os.path.expanduser(text)
    try:
        return Path(os.path.abspath(expanded))
    except OSError:
        return Path(expanded)


def csrc_root() -> Path:
    """The include root of the op's own headers: the folder that holds `params.h`."""
    candidates = (
        _HERE.parent / "csrc" / _OP,
        _HERE.parent / "deepspeed4science" / "csrc" / _OP,
    )
    for candidate in candidates:
        if os.path.isfile(candidate / "params.h"):
            return candidate
    archive = next((one for one in _HERE.parents if os.path.isfile(one)), None)
    if archive is not None:  # a zipapp, or a wheel on PYTHONPATH
        raise BuildError(
            f"the C++ sources are in the archive {archive}, where no compiler can read them; "
            "unpack it, or install it with pip"
        )
    looked = " and ".join(str(candidate) for candidate in candidates)
    raise BuildError(
        f"the C++ sources are missing: expected params.h in {looked}, found it in neither; "
        "reinstall deepspeed4science"
    )


def prebuilt_root() -> Path:
    """Kernels compiled while installing; the folder need not exist."""
    return _HERE.parent / "deepspeed4science" / "prebuilt"


def readonly_roots() -> tuple[Path, ...]:
    """Folders searched before the cache, in this order, and never written."""
    named = [absolute(part) for part in env.folders("DS4S_CACHE_PATH")]
    home = _home_cache()
    if _named_cache() is None and home is not None and not _may_write(home) and os.path.isdir(home):
        named.append(home)  # filled earlier, when it could be written
    return tuple(named)


def cache_root() -> Path:
    """The folder in which compiled kernels are kept; it may not exist yet, nor be writable.

    A folder named by a variable is used as it is. Where the home cannot be written, it is a folder
    of this user's own among the temporary ones. Inside a folder that others can write, it is a
    subfolder of this user's own.
    """
    asked = _asked_cache()
    if asked is None:
        return _temporary_cache()
    return asked / _own_name() if ownership.doubt_about(asked) else asked


def make_root(root: Path) -> None:
    """Make a folder for compiled kernels, if it does not exist. A user's cache is private; root's,
    and a folder that was requested elsewhere, can be read by everybody.
    """
    files.make_root(root, private=root == cache_root() and os.geteuid() != 0)


def cache_note() -> str:
    """Why the cache is not in the requested folder, and what to do; empty when it is."""
    asked = _asked_cache()
    if asked is not None:
        doubt = ownership.doubt_about(asked)
        own = f"this user's are kept in {asked / _own_name()}"
        return f"compiled kernels in {asked} are passed over, {own}: {doubt}" if doubt else ""
    home = _home_cache()
    lacks = "there is no home folder" if home is None else f"{home} cannot be written"
    root, remedy = cache_root(), "set DS4S_CACHE_DIR to a folder that can be written and lasts"
    if root == _NOWHERE:
        return f"{lacks}; compiled kernels cannot be kept: {remedy}"
    return (
        f"{lacks}; compiled kernels are kept in {root} for as long as this machine keeps it: "
        f"{remedy}"
    )


def _asked_cache() -> Path | None:
    """The folder that a variable names, else that in the home, if it can be written."""
    named, home = _named_cache(), _home_cache()
    if named is not None:
        return named
    return home if home is not None and _may_write(home) else None


def _own_name() -> str:
    return f"deepspeed4science-{os.geteuid()}"


def _named_cache() -> Path | None:
    own = env.text("DS4S_CACHE_DIR")
    if own:
        return absolute(own)
    shared = env.text("TORCH_EXTENSIONS_DIR") or env.text("XDG_CACHE_HOME")
    if shared:
        return absolute(shared) / "deepspeed4science"
    return None


def _home_cache() -> Path | None:
    home = os.path.expanduser("~")
    if not os.path.isabs(home):  # no HOME and no entry in the user database, as in some containers
        return None
    return Path(home) / ".cache" / "deepspeed4science"


def _may_write(folder: Path) -> bool:
    """Whether permissions and mounts allow writing where the folder is or would be made."""
    for place in (folder, *folder.parents):
        if os.path.lexists(place):
            return os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK)
    return False


def _temporary_cache() -> Path:
    """This user's folder among the temporary ones; made here, so that nobody else can write it."""
    try:
        folder = build_root() / _own_name()
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        status = os.lstat(folder)
    except OSError:
        return _NOWHERE
    ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    return folder if ours and not status.st_mode & 0o022 else _NOWHERE


def build_root() -> Path:
    """A local folder in which compilations run: never the cache, which may be on a network.

    Raises OSError when no temporary folder can be written.
    """
    return Path(tempfile.gettempdir())


def matching(folder: Path, pattern: str) -> list[Path]:
    """The paths in `folder` that match `pattern`, sorted; [] where it may not be listed."""
    return [folder / name for name in sorted(glob.glob(pattern, root_dir=folder))]
