"""A loaded library: five C functions, checked once, then called directly."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable
from pathlib import Path

from ..toolchain import openmp

# DS4S_ABI_VERSION of params.h: a library that returns another number is not called. A test compares
# the two.
ABI_VERSION = 5
EXPORTS = frozenset(
    {
        "ds4s_abi_version",
        "ds4s_name",
        "ds4s_workspace_bytes",
        "ds4s_run",
        "ds4s_status_string",
    }
)
PLAN = "ds4s_plan"  # optional


_in_use: list[Path] = []  # loaded libraries; they stay mapped until the process ends


def in_use() -> tuple[Path, ...]:
    """Every library that this process has loaded."""
    return tuple(_in_use)


class LoadedKernel:
    """One kernel, ready to be called; stays loaded until the process ends.

    name    the unit's name
    path    the library that was loaded
    origin  "prebuilt" (compiled while installing), "cache" (found in a cache folder) or "built"
    (compiled just now) run(params: bytes, stream: int) -> int
            Runs it; 0, or a status for `status_string`. Releases the GIL. `params` is FwdParams or
            BwdParams as bytes.
    workspace_bytes(params: bytes) -> int
            What `params.workspace` must hold; -1 where `params.dbias2_stride` is refused.
    """

    __slots__ = ("_plan", "_status_string", "name", "origin", "path", "run", "workspace_bytes")

    run: Callable[[bytes, int], int]
    workspace_bytes: Callable[[bytes], int]

    def __init__(self, path: Path, name: str, origin: str) -> None:
        """Raises OSError where it cannot be loaded, ValueError where its name or ABI is another."""
        openmp.provide()
        library = ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_LOCAL)
        try:
            functions = {export: library[export] for export in EXPORTS}
        except AttributeError as error:
            raise ValueError(f"{path} lacks a function: {error}") from None
        said = functions["ds4s_name"]
        said.restype = ctypes.c_char_p
        abi = functions["ds4s_abi_version"]()
        if said() != name.encode() or abi != ABI_VERSION:
            raise ValueError(
                f"{path}: expected {name} with ABI version {ABI_VERSION}, "
                f"got {(said() or b'').decode()} with {abi}"
            )
        run = functions["ds4s_run"]
        run.argtypes, run.restype = (ctypes.c_char_p, ctypes.c_void_p), ctypes.c_int
        workspace_bytes = functions["ds4s_workspace_bytes"]
        workspace_bytes.argtypes, workspace_bytes.restype = (ctypes.c_char_p,), ctypes.c_int64
        status_string = functions["ds4s_status_string"]
        status_string.argtypes, status_string.restype = (ctypes.c_int,), ctypes.c_char_p
        self.name, self.path, self.origin = name, path, origin
        _in_use.append(path)
        self.run, self.workspace_bytes = run, workspace_bytes
        self._status_string = status_string
        self._plan = None
        # UnicodeDecodeError: dlsym's message names the library, whose path may not be UTF-8.
        with contextlib.suppress(AttributeError, UnicodeDecodeError):
            self._plan = getattr(library, PLAN)
        if self._plan is not None:
            self._plan.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int64)
            self._plan.restype = ctypes.c_int64

    def plan(self, params: bytes) -> str:
        """The plan of `run` on the current device, as text; empty where the kernel has none."""
        if self._plan is None:
            return ""
        size = self._plan(params, None, 0) + 1
        text = ctypes.create_string_buffer(size)
        self._plan(params, text, size)
        return text.value.decode(errors="replace")

    def status_string(self, code: int) -> str:
        """The meaning of a status of `run`, as text."""
        return (self._status_string(code) or b"unknown status").decode(errors="replace")

    def __repr__(self) -> str:
        return f"LoadedKernel({self.name}, {self.origin}, {self.path})"
