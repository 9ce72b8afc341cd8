"""Makes the CPU libraries use the OpenMP runtime that the process already has.

Our CPU libraries call GOMP_* functions (cpu/parallel.h) and are linked to no runtime. torch brings
its own (libgomp, libiomp5 or libomp, often a private copy); a second runtime would start a second
pool of threads that competes with the first for the cores. All three have the GOMP_* functions.
Opening the present runtime again, globally, makes them visible to libraries that are loaded later.
Where there is none, the system's libgomp is opened.

libgomp's pool of threads does not survive a fork: a parallel region in the child would wait for
threads that are not there. `threads` therefore answers 1 in a child that was forked after a library
was loaded.
"""

from __future__ import annotations

import ctypes
import os
import re

from ..errors import BuildError

_RUNTIME = re.compile(r"/lib(gomp|iomp5|omp)[^/]*\.so[^/]*$")
_opened: list[ctypes.CDLL] = []
_forked = False


def provide() -> None:
    """Make the GOMP_* functions visible to libraries that are loaded later; once per process.

    Raises BuildError when the process has no runtime and the system has none either.
    """
    if _opened:
        return
    mode = os.RTLD_GLOBAL | os.RTLD_NOW
    for path in present():
        try:
            _opened.append(ctypes.CDLL(path, mode=mode | os.RTLD_NOLOAD))
            return
        except OSError:
            continue  # mapped, but its file has been replaced since
    try:
        _opened.append(ctypes.CDLL("libgomp.so.1", mode=mode))
    except OSError as error:
        raise BuildError(
            f"no OpenMP runtime: expected one that torch has loaded or libgomp.so.1, got {error}; "
            "import torch first, or install libgomp1 (libgomp on Fedora)"
        ) from error


def threads(wanted: int) -> int:
    """The number of threads that a kernel may use in this process, at most `wanted`."""
    return 1 if _forked else wanted


def present() -> list[str]:
    """The OpenMP runtimes mapped into this process, torch's own first."""
    found: dict[str, None] = {}
    try:
        with open("/proc/self/maps", "rb") as stream:
            for line in map(os.fsdecode, stream):  # names of all mapped files, in any encoding
                path = line.rstrip("\n").partition("/")
                if _RUNTIME.search("/" + path[2]):
                    found["/" + path[2]] = None
    except OSError:
        return []
    return sorted(found, key=lambda path: "/torch" not in path)


def _after_fork() -> None:
    global _forked
    _forked = bool(_opened)


os.register_at_fork(after_in_child=_after_fork)
