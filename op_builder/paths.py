"""Where things are: our C++ sources, the compiled kernels shipped with the package, the cache.

The sources have three homes: `csrc/` beside `op_builder/` in a checkout (an editable install
points there), and `deepspeed4science/csrc/` in an installed wheel, where they are package data.
Nothing is created here.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from . import env
from .errors import BuildError

_HERE = Path(__file__).resolve().parent
_OP = Path("deepspeed4science") / "evoformer_attn"


def csrc_root() -> Path:
    """The include root of the op's own headers: the folder that holds `params.h`."""
    candidates = (
        _HERE.parent / "csrc" / _OP,
        _HERE.parent / "deepspeed4science" / "csrc" / _OP,
    )
    for candidate in candidates:
        if (candidate / "params.h").is_file():
            return candidate
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
    return tuple(Path(os.path.abspath(part)) for part in env.folders("DS4S_CACHE_PATH"))


def cache_root() -> Path:
    """The folder that compiled kernels are kept in; it may not exist yet, nor be writable."""
    own = env.text("DS4S_CACHE_DIR")
    if own:
        return Path(os.path.abspath(os.path.expanduser(own)))
    shared = env.text("TORCH_EXTENSIONS_DIR") or env.text("XDG_CACHE_HOME")
    if shared:
        return Path(os.path.abspath(os.path.expanduser(shared))) / "deepspeed4science"
    home = os.path.expanduser("~")
    if not os.path.isabs(home):  # no HOME and no entry in the user database, as in some containers
        return Path(os.devnull) / "no home folder"  # cannot be written: private copies, a warning
    return Path(home) / ".cache" / "deepspeed4science"


def build_root() -> Path:
    """A local folder in which compilations run: never the cache, which may be on a network."""
    return Path(tempfile.gettempdir())
