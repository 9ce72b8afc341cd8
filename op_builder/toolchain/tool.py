"""A program that is needed: its place and version, or why there is none and the remedy.

Searching never raises and never prints: an unfit or missing program is a `Tool` whose `ok` is
False.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from .. import env, paths
from ..errors import ToolchainError
from ..system import process_exit

TIMEOUT_S = 30.0  # a program on a hanging network file system must not hang the report
# Later tests of such a program fail at once, for so long: a load tests a compiler several times.
_SILENT_S = 60.0
_silent_since: dict[str, float] = {}


@dataclass(frozen=True)
class Tool:
    name: str  # "nvcc", "host compiler", "ninja"
    path: Path | None = None  # the program itself, behind known kinds of wrappers
    version: str = ""  # "13.0.88"
    where_found: str = ""  # "CUDA_HOME", "PATH", ...
    ok: bool = False
    reason: str = ""  # when not ok: why
    remedy: str = ""  # when not ok: a command or a setting
    identity: str = ""  # its version message, build number included: for the cache key
    root: Path | None = None  # nvcc only: the toolkit's folder
    passed_over: tuple[str, ...] = ()  # places tried before, each with the reason

    def require(self) -> Path:
        """The path; raises ToolchainError with reason and remedy when the tool is unfit."""
        if not self.ok or self.path is None:
            raise ToolchainError(f"{self.name}: {self.reason}; {self.remedy}")
        return self.path


class UnfitError(Exception):
    """Why a candidate is unfit. An exception, so that no memo keeps it: that may be mended."""


@dataclass(frozen=True)
class Candidate:
    where: str
    path: Path
    named: bool = False  # the user named this place, so it is reported when nothing is there


def first_fit(
    name: str,
    candidates: Iterable[Candidate],
    examine: Callable[[Candidate], Tool],
    *,
    missing: str,
    remedy: str,
) -> Tool:
    """The first fit candidate; else the first that exists; else `missing`."""
    passed_over: list[str] = []
    unfit: Tool | None = None
    for candidate in candidates:
        if not os.path.isfile(candidate.path):
            if candidate.named:
                passed_over.append(f"{candidate.where}: there is no {candidate.path}")
            continue
        tool = examine(candidate)
        if tool.ok:
            return replace(tool, passed_over=tuple(passed_over))
        passed_over.append(f"{candidate.where}: {tool.reason}")
        unfit = unfit or tool
    if unfit is not None:
        return replace(unfit, passed_over=tuple(passed_over))
    return Tool(name, reason=missing, remedy=remedy, passed_over=tuple(passed_over))


def on_path(*programs: str) -> Iterable[Candidate]:
    """Every executable of these names on PATH, all places of the first name first."""
    for program in programs:
        for folder in env.search_path().split(os.pathsep):
            path = paths.absolute(folder) / program
            if folder and os.path.isfile(path) and os.access(path, os.X_OK):
                yield Candidate("PATH", path)


def conda_prefixes() -> Iterable[Path]:
    """The activated conda environment, and the one this Python lives in."""
    for prefix in filter(None, (env.text("CONDA_PREFIX"), sys.prefix)):
        if os.path.isdir(Path(prefix) / "conda-meta"):
            yield Path(prefix)


def command_exists(command: str) -> bool:
    """Whether a program is on PATH; alternatives are separated by `|`."""
    return any(any(on_path(name.strip())) for name in command.split("|"))


def numbers(version: str) -> tuple[int, ...]:
    """(13, 0, 88) for "13.0.88"."""
    return tuple(int(part) for part in re.findall(r"\d+", version))


# A library in LD_PRELOAD that is not there, as in containers on clusters: every program says so.
_OF_THE_LINKER = "ERROR: ld.so: "
_TELLING_SHELL = ("/bin/sh", "-c", '"$@"; printf "\\n%d" "$?"', "sh")


@dataclass(frozen=True)
class Ran:
    output: str  # stdout, then stderr
    problem: str = ""  # empty: it ran and exited with 0
    answer: str = ""  # stdout alone: the dynamic linker and preloaded libraries warn on stderr


def run(command: list[str], *, stdin: str = "", cwd: str | None = None) -> Ran:
    """Run a program that should answer at once; any failure is described in `problem`."""
    silent = Ran("", f"{command[0]} did not answer within {TIMEOUT_S:.0f} s")
    if time.monotonic() < _silent_since.get(command[0], -math.inf) + _SILENT_S:
        return silent
    untold = signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN  # exit codes of children are lost
    try:
        with process_exit.slow_section():
            asked = [*_TELLING_SHELL, *command] if untold else command
            answer, warnings, code = _run(asked, stdin, cwd)
        if untold:
            answer, _, told = answer.rpartition("\n")
            code = int(told)
    except subprocess.TimeoutExpired:
        _silent_since[command[0]] = time.monotonic()
        return silent
    except (OSError, ValueError) as error:
        return Ran("", f"{command[0]} cannot be run: {getattr(error, 'strerror', None) or error}")
    output = answer + warnings
    if code != 0:
        words = [line.strip() for line in output.splitlines() if line.strip()]
        words = [line for line in words if not line.startswith(_OF_THE_LINKER)] or words
        telling = (line for line in words if re.search("error|cannot find", line, re.IGNORECASE))
        first = next(telling, words[0] if words else "")
        return Ran(output, f"{command[0]} ended with {code}: {first or 'no word'}")
    return Ran(output, answer=answer)


def _temporary_folder() -> str:
    try:
        return tempfile.gettempdir()
    except OSError:  # none can be written, which most questions to a program do not need
        return "."


def _run(command: list[str], stdin: str, cwd: str | None) -> tuple[str, str, int]:
    """Its stdout, stderr and exit code. If waiting for it ends early, all processes that it started
    are killed.
    """
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        # Where TMPDIR names no folder that can be written, Python and gcc take another, nvcc fails.
        env=env.for_compiler() | {"TMPDIR": "." if cwd else _temporary_folder()},
        cwd=cwd,
        start_new_session=True,
    ) as process:
        try:
            answer, warnings = process.communicate(stdin, timeout=TIMEOUT_S)
        except BaseException:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return answer, warnings, process.returncode
