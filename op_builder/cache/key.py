"""What decides the bytes of one shared library, and the key made of it.

A key is content only: the generated source, the bytes of every header that the compiler really
read, flags, the compiler's identity. No path, no time, no torch and no Python version, so that the
same sources compiled with the same compiler have the same key on every machine and in every folder.
It has two parts:

    12 digits of what is asked for: name, source, flags
    20 digits of that, the compiler's identity, the headers, and the machine and glibc it runs on

The first part is known before anything is compiled and finds the candidates on disk; the second
needs the list of headers, which the compiler itself writes down while compiling
(`headers_from_depfile`) and which is kept beside the library. A later process compares the same
headers, as they are now, with the recorded hashes: no compiler is run. What this cannot see is a
new header that would be found *earlier* than a recorded one; the include folders are our own, so
that does not happen by accident.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

# Part of every key: raise it when the layout of an entry or the meaning of its meta.json changes.
LAYOUT = 1

OWN = 0  # Header.root of our own sources: a job's first include folder is theirs
SYSTEM = -1  # Header.root of a header from outside the job's include folders


@dataclass(frozen=True)
class CompileJob:
    """Everything that decides the bytes of one library, and what is needed to make it here."""

    name: str  # the unit's name, also what ds4s_name() answers
    source: str  # the translation unit
    suffix: str  # ".cpp" or ".cu"
    compiler: (
        Path | None
    )  # None: there is none, see `problem`; an existing library may still be found
    flags: tuple[str, ...]  # for compiling; may name no folder of this machine
    include_dirs: tuple[Path, ...]
    link_flags: tuple[str, ...]  # for linking; may name no folder of this machine
    identity: tuple[tuple[str, str], ...]  # (what, value): compiler version, target, NVCC_* ...
    local_flags: tuple[str, ...] = ()  # flags that do name folders (-L, -ccbin): not in the key
    problem: str = ""  # why `compiler` is None, and what to do about it
    memory_bytes: int = 1 << 30  # what compiling this may take, to limit how many run at once
    usual_seconds: float | None = field(default=None, compare=False)  # that compiling it takes
    label: str = ""  # for messages, where one name has several targets
    # Other flags whose library runs wherever this one's does, best first: for what somebody made on
    # purpose for machines other than his own.
    stand_ins: tuple[tuple[str, ...], ...] = ()
    # Asked before compiling; raises ToolchainError where the compiler is not what it seems.
    prove: Callable[[], None] | None = field(default=None, compare=False)

    @property
    def title(self) -> str:
        return self.label or self.name

    @functools.cached_property
    def asked(self) -> str:
        """12 digits: what is asked for, whichever compiler makes it."""
        return self._asked(self.flags)

    @functools.cached_property
    def accepted(self) -> tuple[str, ...]:
        """`asked`, then the same with each of `stand_ins`."""
        return (self.asked, *(self._asked(flags) for flags in self.stand_ins))

    def _asked(self, flags: tuple[str, ...]) -> str:
        return _digest(LAYOUT, self.name, self.source, self.suffix, flags, self.link_flags, size=12)

    @functools.cached_property
    def ident(self) -> str:
        """Names this job within a process and its lock file between processes."""
        return f"{self.name}-{_digest(self.asked, self.identity, size=16)}"


@dataclass(frozen=True)
class Header:
    root: int  # index into the job's include_dirs (OWN is the first), or SYSTEM
    name: str  # relative to that folder; absolute for SYSTEM
    sha256: str

    def path(self, include_dirs: tuple[Path, ...]) -> str:
        """Where this header is now; "" when the job has fewer include folders."""
        if self.root == SYSTEM:
            return self.name
        if self.root >= len(include_dirs):
            return ""
        return f"{include_dirs[self.root]}/{self.name}"

    @property
    def portable_name(self) -> str:
        """The name without this machine's folders: what an #include would say, near enough."""
        return self.name.rpartition("/include/")[2] if self.root == SYSTEM else self.name


def content_key(
    job: CompileJob, headers: Iterable[Header], machine: int, glibc: tuple[int, int]
) -> str:
    """The key of a library that turned out to be for `machine` and to need `glibc`.

    Two hosts may share a cache and a compiler's version and still make libraries that only one of
    them can load.
    """
    read = sorted((header.root, header.portable_name, header.sha256) for header in headers)
    return job.asked + _digest(job.asked, sorted(job.identity), read, machine, glibc, size=20)


class Hashes:
    """The hash of each header, computed once per load: units share most of their headers.

    Between the loads of one process a hash is kept as long as the file system says that nobody has
    touched the file (its change time cannot be set back); never between processes.
    """

    def __init__(self) -> None:
        self._known: dict[str, str | None] = {}

    def of(self, name: str) -> str | None:
        """None when the file `name` cannot be read."""
        if name not in self._known:
            try:
                self._known[name] = _hash(name)
            except OSError:
                self._known[name] = None
        return self._known[name]


_hashes: dict[str, tuple[tuple[int, ...], str]] = {}


def _hash(name: str) -> str:
    handle = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO is not waited for
    try:
        stat = os.fstat(handle)
        stamp = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        known = _hashes.get(name)
        if known is None or known[0] != stamp:
            with open(handle, "rb", buffering=0, closefd=False) as stream:
                known = _hashes[name] = (stamp, hashlib.sha256(stream.read()).hexdigest())
        return known[1]
    finally:
        os.close(handle)


def headers_from_depfile(text: str, folder: Path, job: CompileJob) -> tuple[Header, ...]:
    """The headers a compiler read, from the Makefile rule (`-MD`) it wrote while in `folder`.

    Files inside `folder` are the generated source itself and left out.
    """
    hashes = Hashes()
    headers: dict[tuple[int, str], Header] = {}
    roots = [Path(os.path.realpath(path)) for path in job.include_dirs]
    for word in _dependencies(text):
        path = Path(os.path.realpath(folder / word))
        if path.is_relative_to(os.path.realpath(folder)):
            continue
        root, name = SYSTEM, str(path)
        for index, candidate in enumerate(roots):
            if path.is_relative_to(candidate):
                root, name = index, path.relative_to(candidate).as_posix()
                break
        sha256 = hashes.of(str(path))
        if sha256 is not None:
            headers[root, name] = Header(root, name, sha256)
    return tuple(headers[place] for place in sorted(headers))


def _dependencies(text: str) -> list[str]:
    """What stands right of the colon. Make writes blank and # behind a backslash, and $ twice."""
    joined = text.replace("\\\n", " ")
    words = re.findall(r"(?:\\.|[^\s\\])+", joined)
    plain = [re.sub(r"\\(.)", r"\1", word).replace("$$", "$") for word in words]
    first = next((index for index, word in enumerate(plain) if word.endswith(":")), -1)
    return [word for word in plain[first + 1 :] if not word.endswith(":")]


def _digest(*parts: object, size: int) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:size]
