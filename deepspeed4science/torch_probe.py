"""PyTorch's version, CUDA and GPUs, from a process of its own: it may raise, crash or hang."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO, Any

OLDEST = (2, 10)
TIMEOUT_S = 60.0  # a first import from a network file system may take most of it

_MARK = "deepspeed4science-torch-probe "
_INSTALL = "pip install 'torch>=2.10'"
_INSTALL_ANEW = 'python -c "import torch" shows all of it; pip install --force-reinstall torch'
_ASK_AGAIN = (
    "run ds_report again: a first import from a network file system may take minutes; "
    'if python -c "import torch" does not end either, press Ctrl-C there: it shows where it waits'
)

# Prints one marked line, whatever else the import prints. cuDriverGetVersion may be called before
# cuInit and creates no context.
_PROGRAM = """\
import ctypes, json, sys, warnings
sys.path[:] = json.loads(sys.argv[1])
said = {"gpus": [], "archs": [], "driver": "", "rocm": ""}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always", UserWarning)
    try:
        import torch
        said["version"] = str(torch.__version__)
        said["where"] = str(torch.__file__)
        said["cuda"] = str(torch.version.cuda or "")
        said["rocm"] = str(getattr(torch.version, "hip", None) or "")
        if torch.cuda.is_available():
            for index in range(torch.cuda.device_count()):
                said["gpus"].append({
                    "name": torch.cuda.get_device_name(index),
                    "capability": list(torch.cuda.get_device_capability(index)),
                })
            if said["cuda"]:
                said["archs"] = list(torch.cuda.get_arch_list())
    except BaseException as error:
        said["error"] = type(error).__name__ + ": " + str(error)
        said["missing"] = isinstance(error, ModuleNotFoundError) and error.name == "torch"
    if said.get("cuda"):
        try:
            number = ctypes.c_int()
            if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number)) == 0:
                said["driver"] = f"{number.value // 1000}.{number.value % 1000 // 10}"
        except OSError:
            pass
said["warnings"] = [str(one.message) for one in caught if "cuda" in str(one.message).lower()]
print("\\n" + sys.argv[2] + json.dumps(said), flush=True)
"""


@dataclass(frozen=True)
class TorchAnswer:
    ok: bool
    version: str = ""
    where: str = ""
    cuda: str = ""  # the CUDA version of this PyTorch; empty for a CPU build
    rocm: str = ""  # that of ROCm, where it is built for AMD's GPUs
    driver: str = ""  # the newest CUDA version that the driver serves
    gpus: tuple[dict[str, Any], ...] = ()  # {"name": str, "capability": [major, minor]}
    unserved: tuple[str, ...] = ()  # names of GPUs that it counts, and has no kernels for
    reason: str = ""
    remedy: str = ""
    warnings: tuple[str, ...] = field(default=())


class TorchProbe:
    """Starts the process when constructed; `answer` waits for it and never raises."""

    def __init__(self) -> None:
        self._problem = ""
        self._process: subprocess.Popen[bytes] | None = None
        try:
            # A file, not a pipe: writing to it never blocks.
            self._output = _unnamed_file()
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, json.dumps(sys.path), _MARK],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
            )
        except (OSError, ValueError, TypeError) as error:
            self._problem = f"it could not be asked: {error}"

    def answer(self) -> TorchAnswer:
        if self._process is None:
            return _broken(self._problem)
        try:
            self._process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return _broken(f"importing it did not end within {TIMEOUT_S:.0f} s", _ASK_AGAIN)
        self._output.seek(0)
        text = self._output.read().decode(errors="replace")
        self._output.close()
        for line in reversed(text.splitlines()):
            if line.startswith(_MARK):
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    return _understood(json.loads(line[len(_MARK) :]))
        return _broken(f"importing it ended the process{_how(self._process.returncode)}")


def _unnamed_file() -> IO[bytes]:
    """In memory where no temporary folder can be written, as in read-only containers."""
    try:
        return tempfile.TemporaryFile()
    except OSError:
        return open(os.memfd_create("torch"), "w+b")


def _understood(said: dict[str, Any]) -> TorchAnswer:
    warnings = tuple(said["warnings"])
    if said.get("missing"):
        return TorchAnswer(False, reason="it is not installed", remedy=_INSTALL)
    if "error" in said and "version" not in said:
        return _broken(f"importing it fails: {_first_line(said['error'])}")
    version, where, cuda = said["version"], said["where"], said["cuda"]
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    old = f"it is {version}; {'.'.join(map(str, OLDEST))} is the oldest that serves"
    if "error" in said:
        warnings = (*warnings, f"asking for GPUs failed: {_first_line(said['error'])}")
    served = [gpu for gpu in said["gpus"] if _serves(said["archs"], tuple(gpu["capability"]))]
    ok = numbers >= OLDEST
    return TorchAnswer(
        ok=ok,
        version=version,
        where=where,
        cuda=cuda,
        rocm=said["rocm"],
        driver=said["driver"],
        gpus=() if said["rocm"] else tuple(served),  # no kernels for AMD's
        unserved=tuple(gpu["name"] for gpu in said["gpus"] if gpu not in served),
        reason="" if ok else old,
        remedy="" if ok else _INSTALL,
        warnings=warnings,
    )


def _serves(archs: Sequence[str], capability: tuple[int, int]) -> bool:
    """Whether a PyTorch built for `archs`, such as sm_80 and compute_120, has machine code for the
    GPU, which is of its major version, or PTX.
    """
    for arch in archs:
        kind, _, number = arch.partition("_")
        major, minor = divmod(int("".join(filter(str.isdecimal, number))), 10)
        if (major, minor) <= capability and (kind == "compute" or major == capability[0]):
            return True
    return not archs


def _broken(reason: str, remedy: str = _INSTALL_ANEW) -> TorchAnswer:
    return TorchAnswer(False, reason=reason, remedy=remedy)


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[0][:300]


def _how(returncode: int) -> str:
    if returncode >= 0:
        return f" with exit code {returncode}"
    try:
        return f" by {signal.Signals(-returncode).name}"
    except ValueError:
        return f" by signal {-returncode}"
