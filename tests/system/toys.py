"""Toy kernels and the processes that load them, for the loader's tests.

A toy has the five exports, compiles quickly and returns `status + *(int*)params`, where status
comes from a header. It is C++, or CUDA compiled by the real nvcc with the real flags; then it has a
kernel, which is launched only where a stream is passed, and never without a GPU. Its compiler is a
shell script in front of the real one, which writes a line for each compilation, so that builds can
be counted, and can be made to stop or to fail.
"""

from __future__ import annotations

import functools
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]

SOURCE = """\
#include "toy.h"
#define EXPORT extern "C" __attribute__((visibility("default")))
EXPORT int ds4s_abi_version() {{ return {abi}; }}
EXPORT const char* ds4s_name() {{ return "{name}"; }}
EXPORT long long ds4s_workspace_bytes(const void*) {{ return 0; }}
EXPORT int ds4s_run(const void* params, void* {stream}) {{
  {launch}return TOY_STATUS + *static_cast<const int*>(params);
}}
EXPORT const char* ds4s_status_string(int) {{ return "toy"; }}
"""
CUDA_KERNEL = "__global__ void toy_kernel(int* answer) { *answer += TOY_STATUS; }\n"
CUDA_LAUNCH = """\
if (stream) {
    toy_kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(nullptr);
    return cudaGetLastError();
  }
  """
CUDA_ARCH = "9.0"  # every nvcc that serves can compile for it

# A child process: it can use `toy`, `jit`, `report`; its report is its only output on stdout.
PRELUDE = """\
import json, os, sys, threading
from tests.system.toys import Workshop
from op_builder.build import jit
from op_builder.errors import BuildError, CompileError, ToolchainError
workshop = Workshop.from_environment()
toy = workshop.job
def report(**answers): sys.stdout.write(json.dumps(answers) + "\\n"); sys.stdout.flush()
def load(*names, **how):
    kernels = jit.load([toy(name) for name in names or ("toy",)], **how)
    return {"origin": [k.origin for k in kernels], "path": [str(k.path) for k in kernels],
            "answer": [k.run((2).to_bytes(4, sys.byteorder), 0) for k in kernels]}
"""


@dataclass(frozen=True)
class Workshop:
    """A folder with the toys' header, their compiler, a cache and a folder to compile in."""

    root: Path
    language: str = "C++"  # or "CUDA"
    python: tuple[str, ...] = (sys.executable,)  # what runs the processes
    packages: str = str(REPOSITORY)  # their PYTHONPATH

    @classmethod
    def make(
        cls, root: Path, language: str = "C++", *, status: int = 40, **how: object
    ) -> Workshop:
        shop = cls(root, language, **how)
        for folder in (shop.include, shop.build_root):
            folder.mkdir(parents=True)
        shop.write_header(status)
        shop.set_compiler("")
        return shop

    @classmethod
    def from_environment(cls) -> Workshop:
        return cls(Path(os.environ["TOY_WORKSHOP"]), os.environ["TOY_LANGUAGE"])

    @property
    def cache(self) -> Path:
        return self.root / "cache"

    @property
    def include(self) -> Path:
        return self.root / "include"

    @property
    def build_root(self) -> Path:
        return self.root / "tmp"

    @property
    def compiler(self) -> Path:
        return self.root / "compiler"

    @property
    def entries(self) -> list[Path]:
        return sorted((self.cache / "units").glob("*"))

    def write_header(self, status: int) -> None:
        (self.include / "toy.h").write_text(f"#define TOY_STATUS {status}\n")

    def set_compiler(self, before: str) -> None:
        """`before`: shell commands to run before each compilation (not before linking)."""
        staged = self.root / "compiler.new"
        staged.write_text(
            "#!/bin/sh\n"
            'case " $* " in *" -c "*)\n'
            f"  echo $$ >> {shlex.quote(str(self.root / 'compilations'))}\n"
            f"  {before or ':'}\n"
            ";; esac\n"
            f'exec {shlex.quote(str(_real_compiler(self.language)))} "$@"\n',
            errors="surrogateescape",
        )
        staged.chmod(0o755)
        staged.replace(self.compiler)

    def num_compilations(self) -> int:
        path = self.root / "compilations"
        return len(path.read_text().split()) if path.exists() else 0

    def source(self, name: str = "toy") -> str:
        from op_builder.cache.loaded_kernel import ABI_VERSION

        fields = {"name": name, "abi": ABI_VERSION}
        if self.language == "C++":
            return SOURCE.format(**fields, stream="", launch="")
        source = SOURCE.format(**fields, stream="stream", launch=CUDA_LAUNCH)
        header, rest = source.split("\n", 1)
        return f"{header}\n{CUDA_KERNEL}{rest}"

    def job(self, name: str = "toy", **changes):
        from op_builder.cache.key import CompileJob

        fields = {
            "name": name,
            "source": self.source(name),
            "suffix": ".cpp",
            "compiler": self.compiler,
            "flags": ("-O1", "-fPIC"),
            "include_dirs": (self.include,),
            "link_flags": (),
            "identity": (("compiler", "toy 1.0"),),
        }
        if self.language == "CUDA":
            from op_builder import EvoformerAttnBuilder
            from op_builder.toolchain import arch

            builder = EvoformerAttnBuilder()
            target = arch.gencode(arch.parse(CUDA_ARCH))
            fields["suffix"] = ".cu"
            fields["flags"] = (*builder.nvcc_args(), *target)
            fields["link_flags"] = tuple(builder.extra_ldflags())
        return CompileJob(**(fields | changes))

    def environment(self, **changes: str) -> dict[str, str]:
        return (
            dict(os.environ)
            | {
                "TOY_WORKSHOP": str(self.root),
                "TOY_LANGUAGE": self.language,
                "DS4S_CACHE_DIR": str(self.cache),
                "TMPDIR": str(self.build_root),
                "PYTHONPATH": self.packages,
            }
            | changes
        )

    def spawn(self, script: str, *, stderr=subprocess.PIPE, **changes: str) -> subprocess.Popen:
        process = subprocess.Popen(
            [*self.python, "-c", PRELUDE + script],
            env=self.environment(**changes),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
        _SPAWNED.append(process)
        return process

    def run(self, script: str = "report(**load())", **changes: str) -> Outcome:
        return finish(self.spawn(script, **changes))


@functools.cache
def _real_compiler(language: str) -> str:
    if language == "C++":
        found = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
        assert found, "these tests need a C++ compiler"
        return found
    from op_builder.toolchain import toolkits

    nvcc = toolkits.find_nvcc()
    if not nvcc.ok:
        import pytest

        pytest.skip(f"nvcc: {nvcc.reason}; {nvcc.remedy}")
    return str(nvcc.path)


def kill_spawned() -> None:
    """Kills processes that a failed test left waiting; they would wait for minutes."""
    for process in _SPAWNED:
        if process.poll() is None:
            process.kill()
    _SPAWNED.clear()


_SPAWNED: list[subprocess.Popen] = []


@dataclass(frozen=True)
class Outcome:
    report: dict
    messages: str  # what the process wrote to stderr

    @property
    def origin(self) -> str:
        return self.report["origin"][0]


def time_told(outcome: Outcome) -> str:
    """What a build of the toy said that it took, such as "0.2 s"."""
    return outcome.messages.splitlines()[1].removeprefix("compiled toy in ")


def finish(process: subprocess.Popen, timeout: float = 60) -> Outcome:
    """The process's report; it must have exited with 0 and written nothing else to stdout."""
    stdout, stderr = process.communicate(timeout=timeout)
    assert process.returncode == 0, stderr
    lines = stdout.splitlines()
    assert len(lines) == 1, f"stdout must hold the report alone, got {stdout!r}"
    return Outcome(json.loads(lines[0]), stderr or "")


def gate(path: Path) -> str:
    """Shell commands that stand still until `open_gate`; `compilations` has their process."""
    os.mkfifo(path)
    return f"read line < {shlex.quote(str(path))}"


def open_gate(path: Path, times: int = 1) -> None:
    """Let that many processes pass, whether they wait already or come later."""
    handle = os.open(path, os.O_RDWR)  # does not wait for a reader
    os.write(handle, b"go\n" * times)
    _OPEN_GATES.append(handle)  # what is unread is lost when the last one closes the pipe


_OPEN_GATES: list[int] = []


def read_until(stream, words: str) -> str:
    """Lines up to the one with `words` in it; fails when the stream ends first."""
    seen = ""
    for line in stream:
        seen += line
        if words in line:
            return seen
    raise AssertionError(f"never said {words!r}, but: {seen}")


def until(condition):
    """Wait until another process has made a condition true; after a minute, fail."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "did not happen within a minute"
        time.sleep(0.005)
