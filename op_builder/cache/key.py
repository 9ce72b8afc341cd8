"""The components that decide the bytes of a shared library, and the key made of them.

A key depends on content only: the generated source, the bytes of every header that the compiler
really read, flags, the compiler's identity, and the variables that compilers read by themselves. It
contains no other path, and no time, torch or Python version: the same sources compiled with the
same compiler have the same key on every machine and in every folder. It has two parts:

    12 digits of the request: name, source, flags
    20 digits of that, the compiler's identity, the headers, and the machine and glibc it runs on

The first part is known before anything is compiled and finds the candidates on disk. The second
needs the list of headers, which the compiler itself writes while compiling (`headers_from_depfile`)
and which is kept beside the library. A later process compares these headers, as they are now, with
the recorded hashes, without running a compiler. A new header that would be found *earlier* than a
recorded one goes unnoticed; the include folders are our own, so that does not happen by accident.
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

OWN = 0  # Header.root of our own sources, which are in a job's first include folder
SYSTEM = -1  # Header.root of a header from outside the job's include folders


@dataclass(frozen=True)
class CompileJob:
    """All components of one library's key, and what is needed to compile it here."""

    name: str  # the unit's name, also what ds4s_name() answers
    source: str  # the translation unit
    suffix: str  # ".cpp" or ".cu"
    # None: there is none, see `problem`; an existing library may still be found.
    compiler: Path | None
    flags: tuple[str, ...]  # for compiling; may name no folder of this machine
    include_dirs: tuple[Path, ...]
    link_flags: tuple[str, ...]  # for linking; may name no folder of this machine
    identity: tuple[tuple[str, str], ...]  # (what, value): compiler version, target, NVCC_* ...
    # -L, -ccbin, threads: they change no code and are not in the key.
    local_flags: tuple[str, ...] = ()
    problem: str = ""  # why `compiler` is None, and what to do about it
    memory_bytes: int = 1 << 30  # that compiling it may need, which limits how many run at once
    usual_seconds: float | None = field(default=None, compare=False)  # duration of compiling it
    label: str = ""  # for messages, where one name has several targets
    # Other flags whose library runs wherever this one's does, best first: such libraries match in
    # folders that were filled for other machines.
    stand_ins: tuple[tuple[str, ...], ...] = ()
    # Called before compiling; raises ToolchainError where the compiler turns out to be unfit.
    prove: Callable[[], None] | None = field(default=None, compare=False)

    @property
    def title(self) -> str:
        return self.label or self.name

    @functools.cached_property
    def asked(self) -> str:
        """12 digits that identify the request, whichever compiler serves it."""
        return self._asked(self.flags)

    @functools.cached_property
    def accepted(self) -> tuple[str, ...]:
        """`asked`, then the same with each of `stand_ins`."""
        return (self.asked, *(self._asked(flags) for flags in self.stand_ins))

    def _asked(self, flags: tuple[str, ...]) -> str:
        return _digest(LAYOUT, self.name, self.source, self.suffix, flags, self.link_flags, size=12)

    @functools.cached_property
    def ident(self) -> str:
        """Identifies this job within a process, and its lock file between processes."""
        return f"{self.name}-{_digest(self.asked, self.identity, size=16)}"


@dataclass(frozen=True)
class Header:
    root: int  # index into the job's include_dirs (OWN is the first), or SYSTEM
    name: str  # relative to that folder; absolute for SYSTEM
    sha256: str

    def path(self, include_dirs: tuple[Path, ...]) -> str:
        """The header's present path; "" where the job has fewer include folders."""
        if self.root == SYSTEM:
            return self.name
        if self.root >= len(include_dirs):
            return ""
        return f"{include_dirs[self.root]}/{self.name}"

    @property
    def portable_name(self) -> str:
        """The name without this machine's folders, nearly as an #include would have it."""
        return self.name.rpartition("/include/")[2] if self.root == SYSTEM else self.name


def content_key(
    job: CompileJob, headers: Iterable[Header], machine: int, glibc: tuple[int, int]
) -> str:
    """The key of a library for `machine` that needs `glibc`, both read from the compiled library.

    Two hosts that share a cache and a compiler's version may still make libraries that only one of
    them can load.
    """
    read = sorted((header.root, header.portable_name, header.sha256) for header in headers)
    return job.asked + _digest(job.asked, sorted(job.identity), read, machine, glibc, size=20)


class Hashes:
    """The hash of each header, computed once per load: units share most of their headers.

    Within a process a hash is kept as long as the file's change time, which cannot be set back, is
    the same. It is never kept between processes.
    """

    def __init__(self) -> None:
        self._known: dict[str, str | None] = {}

    def of(self, name: str) -> str | None:
        """The file's hash; None where it cannot be read."""
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
    """The headers that a compiler read, from the Makefile rule (`-MD`) that it wrote in `folder`.

    Files inside `folder`, such as the generated source itself, are left out. A header that is there
    no longer has "" as its hash.
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
        headers[root, name] = Header(root, name, hashes.of(str(path)) or "")
    return tuple(headers[place] for place in sorted(headers))


def _dependencies(text: str) -> list[str]:
    """The files right of the colon. Compilers write blanks, # and : with a backslash in front, $
    twice, and a backslash that is part of a name as it is.
    """
    joined = text.replace("\\\n", " ")
    words = re.findall(r"(?:\\[\s#:]|\S)+", joined)
    plain = [re.sub(r"\\([\s#:])", r"\1", word).replace("$$", "$") for word in words]
    first = next((index for index, word in enumerate(plain) if word.endswith(":")), -1)
    return [word for word in plain[first + 1 :] if not word.endswith(":")]


def _digest(*parts: object, size: int) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:size]
