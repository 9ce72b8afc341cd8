"""One run of ninja in a fresh private folder; compiles and links all units wanted, in parallel.

ninja only runs the commands: freshness was decided before, by content (key.py), and the folder is
empty at the start. Each unit has its own subfolder with its source, its log and, once linked, its
library and a file that marks it as complete, so that a unit can be used while others still compile.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .. import env
from ..cache.key import CompileJob, Header, headers_from_depfile
from ..cache.publish import Built
from ..system import files, shortages
from . import resources
from .supervised_process import SupervisedProcess

_RULES = """\
ninja_required_version = 1.5
rule run
  command = $command
  description = $what
"""

_AWKWARD = re.compile(r"[^\w./@%:=+-]")
_BEGUN = "begun"  # an empty file whose time says when a unit's first command began
# The output goes to the unit's own log, so that units compiled at once do not mix.
_LOGGED = (
    "{{ {command}; }} >> {log} 2>&1"
    " || {{ code=$?; echo 'exit status '$code >> {log}; exit $code; }}"
)

_LINKED = "linked"  # an empty file that marks a unit as complete
_MOST_SAID = 50  # lines of ninja's own output that are kept


@dataclass(frozen=True)
class Failed:
    """A unit that did not compile or link."""

    job: CompileJob
    log: str
    command: str
    free_bytes: int | None = None  # free space on the disk of `folder`; None: unknown
    folder: Path | None = None  # where it was compiled


class NinjaRun:
    """`run()` blocks; `cancel()` may be called from another thread and makes it return soon."""

    def __init__(self, folder: Path, jobs: Sequence[CompileJob], ninja: Path) -> None:
        self._folder, self._jobs, self._ninja = folder, tuple(jobs), ninja
        self._program: SupervisedProcess | None = None
        self._cancelled = False
        self._began_ns = 0
        self._said: deque[str] = deque(maxlen=_MOST_SAID)
        self._guard = threading.Lock()

    def run(self, on_built: Callable[[Built], None]) -> list[Failed]:
        """Calls `on_built` for each unit as soon as it is linked; returns those that failed."""
        self._began_ns = time.time_ns()
        self._write()
        waiting = {job.ident: job for job in self._jobs}
        program = self._start()
        try:
            for line in program.lines():  # some for each command that ended
                self._said.append(line)
                self._take_finished(waiting, on_built)
        except BaseException:
            program.end()
            raise
        self._take_finished(waiting, on_built)
        if program.code not in (0, 1):  # 1: a command failed, which its log tells
            self._said.append(f"{self._ninja} ended with {program.code}")
        return [self._failure(job) for job in waiting.values()]

    def cancel(self) -> None:
        with self._guard:
            self._cancelled = True
            if self._program is not None:
                self._program.cancel()

    def _start(self) -> SupervisedProcess:
        limit = resources.parallel_jobs(max(job.memory_bytes for job in self._jobs))
        command = [str(self._ninja), "-C", str(self._folder), "-j", str(limit), "-k", "0"]
        # Files left behind by a killed compiler are removed with the folder.
        # Commands run in their unit's folder, so "." names it where nvcc cannot pass on its name.
        folder = "." if _AWKWARD.search(str(self._folder)) else str(self._folder)
        environment = env.for_compiler() | {"TMPDIR": folder}
        with self._guard:
            self._program = SupervisedProcess(command, environment)
            if self._cancelled:
                self._program.cancel()
            return self._program

    def _write(self) -> None:
        text = _RULES
        for job in self._jobs:
            folder = self._folder / job.ident
            folder.mkdir()
            (folder / f"{job.name}{job.suffix}").write_text(job.source)
            (folder / "log").touch()
            for name, path in zip(_include_folders(job), job.include_dirs, strict=True):
                if name != str(path):
                    (folder / name).symlink_to(path)
            text += _edge(job)
        (self._folder / "build.ninja").write_bytes(os.fsencode(text))

    def _take_finished(
        self, waiting: dict[str, CompileJob], on_built: Callable[[Built], None]
    ) -> None:
        for ident, job in list(waiting.items()):
            folder = self._folder / ident
            if os.path.exists(folder / _LINKED):
                del waiting[ident]
                depfile = os.fsdecode((folder / f"{job.name}.d").read_bytes())
                headers = headers_from_depfile(depfile, folder, job)
                on_built(
                    Built(
                        job,
                        library=folder / _library(job),
                        log=folder / "log",
                        headers=headers,
                        seconds=self._seconds(job),
                        changed_header=self._changed(job, headers),
                    )
                )

    def _changed(self, job: CompileJob, headers: Sequence[Header]) -> str:
        """A header that was written since the build began, or that is gone: the compiler may have
        read its old text. uv and rsync give a new file its old time of modification; its change
        time cannot be set.

        Times in the future come from a file server's clock and are no change.
        """
        for header in headers:
            path = header.path(job.include_dirs)
            if not header.sha256:
                return path
            with contextlib.suppress(OSError):
                if self._began_ns <= os.stat(path).st_ctime_ns <= time.time_ns():
                    return path
        return ""

    def _failure(self, job: CompileJob) -> Failed:
        folder = self._folder / job.ident
        log = files.head_and_tail(folder / "log") or "\n".join(self._said)
        compiled = os.path.exists(folder / f"{job.name}.o")
        command = shlex.join(commands(job)[1 if compiled else 0])
        return Failed(job, log, command, shortages.free_space(self._folder), self._folder)

    def _seconds(self, job: CompileJob) -> float:
        """Seconds from the start of the first command to the end of the last one; ninja's log is
        written too late for that.
        """
        folder = self._folder / job.ident
        with contextlib.suppress(OSError):
            ended = (folder / _library(job)).stat().st_mtime
            return max(ended - begun_file(self._folder, job).stat().st_mtime, 0.0)
        return 0.0


def begun_file(folder: Path, job: CompileJob) -> Path:
    """The file that appears when a unit's first command begins, in a run's folder."""
    return folder / job.ident / _BEGUN


def commands(job: CompileJob) -> tuple[list[str], list[str]]:
    """The commands that compile and link, to be run in the unit's folder.

    Prefix maps and a fixed seed keep folder names and random numbers out of the library: equal keys
    give equal bytes.
    """
    compiler = str(job.compiler)
    source, host = f"{job.name}{job.suffix}", job.suffix == ".cpp"
    folders = _include_folders(job)
    steady = [f"-ffile-prefix-map={folder}=." for folder in folders]
    steady.append(f"-frandom-seed={job.name}")
    if not host:  # nvcc hands them to its host compiler
        steady = [word for flag in steady for word in ("-Xcompiler", flag)]
    includes = [f"-I{folder}" for folder in folders]
    depfile = ["-MD", "-MF", f"{job.name}.d"]
    compile_ = [compiler, *job.flags, *job.local_flags, *steady, *includes, *depfile]
    link = [compiler, "-shared", f"{job.name}.o", *job.link_flags, *job.local_flags]
    if not host:  # nvcc names its temporary files, by process id, in the symbol table
        link += ["-Xlinker", "--strip-all"]
    return [*compile_, "-c", source, "-o", f"{job.name}.o"], [*link, "-o", _library(job)]


def _include_folders(job: CompileJob) -> list[str]:
    """The names of the include folders in the commands. nvcc splits lists at commas and hands flags
    to its host compiler unquoted: a folder with such letters is reached through a link.
    """
    return [
        f"include-{index}" if job.suffix == ".cu" and _AWKWARD.search(str(path)) else str(path)
        for index, path in enumerate(job.include_dirs)
    ]


def _library(job: CompileJob) -> str:
    return f"{job.name}.so"


def _edge(job: CompileJob) -> str:
    """Compiles and links as one: ninja would put off linking until everything is compiled."""
    command = " && ".join(shlex.join(words) for words in commands(job))
    logged = _LOGGED.format(command=command, log="log")
    inside = f"cd {shlex.quote(job.ident)} && : > {_BEGUN} && {logged} && : > {_LINKED}"
    return (
        f"build {job.ident}/{_LINKED}: run\n"
        f"  command = {inside.replace('$', '$$')}\n"
        f"  what = {_library(job)}\n"
    )
