"""A machine as the report's process gets to see it: packages, PATH, home, a make-believe torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests import fakes

ROOT = Path(__file__).resolve().parents[2]
MARK = "----- as json -----"

# Runs the report twice in one process, and insists on the same exit code.
PROGRAM = f"""\
import sys
{{prelude}}
from deepspeed4science.report import main
code = main([])
print({MARK!r})
assert main(["--json"]) == code
sys.exit(code)
"""

FAKE_TORCH = """\
from types import SimpleNamespace as _N
__version__ = {version!r}
version = _N(cuda={cuda!r})
_gpus = {gpus!r}
cuda = _N(
    is_available=lambda: bool(_gpus),
    device_count=lambda: len(_gpus),
    get_device_name=lambda index: _gpus[index][0],
    get_device_capability=lambda index: _gpus[index][1],
    get_arch_list=lambda: {archs!r},
)
"""

# A CUDA op as the report sees one, in the state that a test wants.
FAKE_CUDA_OP = """\
import op_builder
from op_builder.errors import ToolchainError
from op_builder.ops.instantiations import serving
from op_builder.ops.status import Obstacle
from op_builder.ops.status import OpStatus
class CudaOp:
    BUILD_VAR = "DS_BUILD_EVOFORMER_ATTN"
    DEVICE = "cuda"
    def status(self):
        return OpStatus({state!r}, 0, 8, {obstacles})
    def family(self, device):
        for family in serving(device):
            return family.name
        raise ToolchainError("too old")
    def compiled_for(self, family, device):
        return ""
    def family_note(self, device):
        return ""
op_builder.ALL_OPS["evoformer_attn"] = CudaOp()
"""
H200 = [("NVIDIA H200", (9, 0))]

# What machines have in common: programs, a folder for each, and the memos of what the report found
# out about them. Their keys name all that an answer depends on, so only the first machine asks.
_COMMON = tempfile.TemporaryDirectory(prefix="ds4s-machines-")
PROGRAMS, MEMOS = Path(_COMMON.name, "programs"), Path(_COMMON.name, "memo")


@dataclass
class Machine:
    """What the report's process gets to see. `folder` is this test's own."""

    folder: Path
    torch: str | None = FAKE_TORCH.format(version="2.13.0+cpu", cuda=None, gpus=[], archs=[])
    packages: tuple[str, ...] = ("ninja", "cutlass_library")
    programs: tuple[str, ...] = ("g++", "as", "ld")
    variables: dict[str, str] = field(default_factory=dict)
    prelude: str = ""

    def report(self) -> Outcome:
        environment = {
            "PATH": self._path(),
            "HOME": str(self.folder),
            "DS4S_CACHE_DIR": str(self.folder / "cache"),
            **self.variables,
        }
        cache = Path(environment["DS4S_CACHE_DIR"])
        remembers = self.folder in cache.parents and not cache.is_file()
        if remembers and MEMOS.exists():
            shutil.copytree(MEMOS, cache / "memo", dirs_exist_ok=True)
        ran = subprocess.run(
            # -S: no site-packages but the folder of this machine
            [sys.executable, "-S", "-c", self._program()],
            env={name: value for name, value in environment.items() if value},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if remembers and (cache / "memo").exists():
            shutil.copytree(cache / "memo", MEMOS, dirs_exist_ok=True)
        text, mark, as_json = ran.stdout.partition(MARK)
        assert mark, f"the report did not print:\n{ran.stdout}\n{ran.stderr}"
        assert not ran.stderr, ran.stderr
        return Outcome(ran.returncode, text, json.loads(as_json))

    def _program(self) -> str:
        places = f"sys.path[:0] = [{str(ROOT)!r}, {str(self._site())!r}]\n"
        no_toolkit = (
            "from pathlib import Path\nfrom op_builder.toolchain import cutlass, nvcc\n"
            f"nvcc.SYSTEM_PREFIX = Path({str(self.folder / 'usr-local')!r})\n"
            "cutlass.SYSTEM_INCLUDES = ()\n"
        )
        return PROGRAM.format(prelude=places + no_toolkit + self.prelude)

    def _path(self) -> str:
        """The programs that a test laid into the machine's own `bin`, and those that it names."""
        folders = [self.folder / "bin"]
        for name in self.programs:
            real = shutil.which(name)
            if real is None:
                pytest.skip(f"needs {name}")
            if not (PROGRAMS / name).exists():
                fakes.wrapper(PROGRAMS / name / name, Path(real))
            folders.append(PROGRAMS / name)
        return os.pathsep.join(map(str, folders))

    def _site(self) -> Path:
        site = self.folder / "site-packages"
        site.mkdir(exist_ok=True)
        if self.torch is not None:
            fakes.file(site / "torch" / "__init__.py", self.torch)
        if "ninja" in self.packages:
            fakes.file(site / "ninja" / "__init__.py")
            fakes.program(site / "ninja" / "data" / "bin" / "ninja", "#!/bin/sh\necho 1.13.2\n")
        if "cutlass_library" in self.packages:
            fakes.file(site / "cutlass_library" / "__init__.py")
            fakes.cutlass(site / "cutlass_library" / "source" / "include")
        return site


@dataclass(frozen=True)
class Outcome:
    code: int
    text: str
    json: dict[str, Any]

    def op(self, name: str = "evoformer_attn_cpu") -> dict[str, str]:
        """The op's row, its reasons and remedies each joined to one text."""
        row = next(row for row in self.json["ops"] if row["name"] == name)
        joined = {
            part: "; ".join(why[part] for why in row["whys"]) for part in ("reason", "remedy")
        }
        return {**row, **joined}

    def software(self, name: str) -> dict[str, Any]:
        return next(row for row in self.json["software"] if row["name"] == name)

    def line(self, start: str) -> str:
        return next(line for line in self.text.splitlines() if line.startswith(start))

    def check(self) -> None:
        """What holds in every situation."""
        assert self.code == (0 if self.json["usable"] else 1)
        text = self.text.replace("\n", " ")
        for leaf in _leaves(self.json):
            assert leaf in text, f"{leaf!r} is in the JSON but not in the table"
        for row in (*self.json["ops"], *self.json["software"]):
            refused = row["state"] == "not" if "state" in row else not row["ok"]
            mark = "[NO]" if refused else "[OKAY]"
            assert mark in self.line(f"{row['name']} "), row
            if refused:
                assert row.get("reason") or [why["reason"] for why in row["whys"]], row
        table, _, _ = self.text.partition("\nWarnings:\n")
        for warning in self.json["warnings"]:
            assert warning not in table


def _leaves(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [leaf for one in value.values() for leaf in _leaves(one)]
    if isinstance(value, list):
        return [leaf for one in value for leaf in _leaves(one)]
    return [str(value)] if isinstance(value, (str, int)) and not isinstance(value, bool) else []


def report(machine: Machine) -> Outcome:
    outcome = machine.report()
    outcome.check()
    return outcome


def cuda_op(state: str, reason: str = "", remedy: str = "") -> str:
    obstacles = f"(Obstacle({reason!r}, {remedy!r}),)" if reason else "()"
    return FAKE_CUDA_OP.format(state=state, obstacles=obstacles)


def cuda_torch(gpus: list[tuple[str, tuple[int, int]]], archs: Sequence[str] = ()) -> str:
    return FAKE_TORCH.format(version="2.11.0+cu130", cuda="13.0", gpus=gpus, archs=archs)
