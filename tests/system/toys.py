"""Toy kernels and the processes that load them, for the loader's tests.

A toy has the five exports, compiles in a moment and answers `status + *(int*)params`, where status
comes from a header. Its compiler is a shell script in front of the real one: it writes a line for
each compilation, which is how builds are counted, and can be made to stand still or to fail.
"""

from __future__ import annotations

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
EXPORT int ds4s_abi_version() {{ return 1; }}
EXPORT const char* ds4s_name() {{ return "{name}"; }}
EXPORT long long ds4s_workspace_bytes(const void*) {{ return 0; }}
EXPORT int ds4s_run(const void* params, void*) {{
  return TOY_STATUS + *static_cast<const int*>(params);
}}
EXPORT const char* ds4s_status_string(int) {{ return "toy"; }}
"""

# A child process: `toy`, `jit`, `report` are at hand; what it reports is its only word on stdout.
PRELUDE = """\
import json, os, sys, threading
from tests.system.toys import Workshop
from op_builder import jit
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

    @classmethod
    def make(cls, root: Path, *, status: int = 40) -> Workshop:
        shop = cls(root)
        for folder in (shop.include, shop.build_root):
            folder.mkdir(parents=True)
        shop.write_header(status)
        shop.set_compiler("")
        return shop

    @classmethod
    def from_environment(cls) -> Workshop:
        return cls(Path(os.environ["TOY_WORKSHOP"]))

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
        real = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
        staged = self.root / "compiler.new"
        staged.write_text(
            "#!/bin/sh\n"
            'case " $* " in *" -c "*)\n'
            f"  echo $$ >> {shlex.quote(str(self.root / 'compilations'))}\n"
            f"  {before or ':'}\n"
            ";; esac\n"
            f'exec {real} "$@"\n'
        )
        staged.chmod(0o755)
        staged.replace(self.compiler)

    def num_compilations(self) -> int:
        path = self.root / "compilations"
        return len(path.read_text().split()) if path.exists() else 0

    def job(self, name: str = "toy", **changes):
        from op_builder.key import CompileJob

        fields = {
            "name": name,
            "source": SOURCE.format(name=name),
            "suffix": ".cpp",
            "compiler": self.compiler,
            "flags": ("-O1", "-fPIC"),
            "include_dirs": (self.include,),
            "link_flags": (),
            "identity": (("compiler", "toy 1.0"),),
        }
        return CompileJob(**(fields | changes))

    def environment(self, **changes: str) -> dict[str, str]:
        return (
            dict(os.environ)
            | {
                "TOY_WORKSHOP": str(self.root),
                "DS4S_CACHE_DIR": str(self.cache),
                "TMPDIR": str(self.build_root),
                "PYTHONPATH": str(REPOSITORY),
            }
            | changes
        )

    def spawn(self, script: str, *, stderr=subprocess.PIPE, **changes: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-c", PRELUDE + script],
            env=self.environment(**changes),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )

    def run(self, script: str = "report(**load())", **changes: str) -> Outcome:
        return finish(self.spawn(script, **changes))


@dataclass(frozen=True)
class Outcome:
    report: dict
    messages: str  # what the process wrote to stderr

    @property
    def origin(self) -> str:
        return self.report["origin"][0]


def finish(process: subprocess.Popen, timeout: float = 60) -> Outcome:
    """What the process reported; it must have ended well and said nothing else on stdout."""
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
    """Let so many pass, whether they wait already or come later."""
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
    """Turn until something another process does is done; a minute is a failure."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "did not happen within a minute"
        os.sched_yield()
