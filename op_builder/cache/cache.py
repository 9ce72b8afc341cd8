"""The layout of a folder of libraries, and the entry that fits a job.

    <root>/units/<name>-<key>/     <name>.so, <name>.cpp or .cu, meta.json, log
    <root>/aside/<name>-<key>/     an entry that turned out to be damaged, kept to be looked at
    <root>/locks/  failed/  memo/  see lock.py, compile_error.py, memo.py

The cache, read-only caches and prebuilt kernels have the same layout. This module writes nothing
but the time of last use: see publish.py and evict.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..system import files
from ..toolchain import elf
from .key import LAYOUT, OWN, SYSTEM, CompileJob, Hashes, Header

USE_GRAIN_S = 3600.0  # see evict.py


@dataclass(frozen=True)
class Entry:
    folder: Path
    meta: dict[str, Any]

    @property
    def library(self) -> Path:
        return self.folder / f"{self.name}.so"

    @property
    def name(self) -> str:
        return str(self.meta["name"])

    @property
    def key(self) -> str:
        return self.folder.name.removeprefix(f"{self.name}-")

    @property
    def flags(self) -> list[str]:
        return list(self.meta["flags"])

    @property
    def headers(self) -> list[Header]:
        return [Header(*header) for header in self.meta["headers"]]

    @property
    def targets(self) -> tuple[str, ...]:
        """nvcc's targets, "sm_80"; empty for a CPU kernel, whose name says its own."""
        return tuple(re.findall(r",code=(\w+)", " ".join(self.flags)))

    def damage(self) -> str | None:
        """How the library's bytes differ from those that were published; None: not at all."""
        try:
            data = files.read(self.library)
        except OSError as error:
            return f"{self.library.name} cannot be read ({error.strerror})"
        if len(data) != self.meta["size"]:
            return f"{self.library.name} has {len(data)} bytes, expected {self.meta['size']}"
        if hashlib.sha256(data).hexdigest() != self.meta["sha256"]:
            return f"{self.library.name} has other bytes than when it was published"
        return None


def find(root: Path, job: CompileJob, hashes: Hashes, *, any_toolchain: bool) -> Iterator[Entry]:
    """The entries under `root` whose components are exactly those that `job` has now. There is at
    most one, unless a damaged one could not be removed, or system headers are in several places.

    With `any_toolchain` only our own sources are compared, neither the compiler's identity nor
    others' headers (the compiler's, CUTLASS's), and `job.stand_ins` match as well. This is for
    libraries that were made for other machines (an install, a shared read-only cache), and for
    machines without a compiler. An entry for another kind of machine, or for a glibc newer than
    this one, never matches.
    """
    for folder in _candidates(root, job, job.accepted if any_toolchain else (job.asked,)):
        meta = _read_meta(folder)
        if meta is None or meta["machine"] != elf.own_machine():
            continue
        if tuple(meta["glibc"]) > elf.own_glibc():
            continue
        if not any_toolchain and meta["identity"] != listed(job.identity):
            continue
        entry = Entry(folder, meta)
        headers = [header for header in entry.headers if header.root == OWN or not any_toolchain]
        if _are_here(headers, entry, job, hashes):
            yield entry


def headers_are_here(entry: Entry, job: CompileJob) -> bool:
    """Whether `find` finds the headers of an entry on this machine, as they were."""
    return _are_here(entry.headers, entry, job, Hashes())


def used(folder: Path) -> float:
    """When the entry in `folder` was last used, in seconds since 1970; 0 when it is not there."""
    try:
        return os.stat(folder).st_mtime
    except OSError:
        return 0.0


def note_use(folder: Path) -> None:
    """Record that an entry is used now, if its folder can be written."""
    with contextlib.suppress(OSError):
        if abs(time.time() - used(folder)) > USE_GRAIN_S:  # a clock may have been set back
            os.utime(folder)


def entries(root: Path) -> list[Entry]:
    """Every entry under `root` whose meta.json can be read, by name."""
    return [entry for folder in _folders(root, "") if (entry := read(folder)) is not None]


def holds(root: Path, prefix: str) -> bool:
    """Whether there is an entry under `root` whose name begins so, fitting or not."""
    return any(True for _ in _folders(root, prefix))


def last_seconds(root: Path, name: str) -> float | None:
    """How long the unit `name` took to compile when it was last compiled into `root`."""
    newest: tuple[float, float] | None = None
    for folder in _folders(root, f"{name}-"):
        meta = _read_meta(folder)
        if meta is not None and meta["name"] == name:
            newest = max(newest or (0.0, 0.0), (meta["created"]["time"], meta["seconds"]))
    return newest[1] if newest else None


def _candidates(root: Path, job: CompileJob, asked: Sequence[str]) -> list[Path]:
    """Folders of entries that may fit, in the order of `asked`."""
    named = list(_folders(root, f"{job.name}-"))
    return [
        folder
        for one in (asked if named else ())
        for folder in named
        if folder.name.startswith(f"{job.name}-{one}")
    ]


def _folders(root: Path, prefix: str) -> Iterator[Path]:
    try:
        names = sorted(name for name in os.listdir(root / "units") if name.startswith(prefix))
    except OSError:
        return
    for name in names:
        yield root / "units" / name


def _read_meta(folder: Path) -> dict[str, Any] | None:
    """The contents of meta.json; None where it is missing, damaged or of another layout: the entry
    then counts as absent.
    """
    try:
        meta = json.loads(files.read(folder / "meta.json"))
    except (OSError, ValueError, RecursionError):
        return None
    return meta if isinstance(meta, dict) and _is_whole(meta) else None


def _is_whole(meta: dict[str, Any]) -> bool:
    """Whether every field is there and has the type that we write."""
    created = meta.get("created")
    return (
        meta.get("layout") == LAYOUT
        and all(isinstance(meta.get(name), str) for name in ("name", "sha256"))
        and all(_is_number(meta.get(name)) for name in ("machine", "size", "seconds"))
        and _are(meta.get("flags"), str)
        and _are(meta.get("glibc"), int)
        and all(_are(pair, str) and len(pair) == 2 for pair in _items(meta.get("identity")))
        and all(_is_header(header) for header in _items(meta.get("headers")))
        and isinstance(created, dict)
        and _is_number(created.get("time"))
        and all(isinstance(created.get(name), str) for name in ("host", "compiler"))
    )


def _is_header(value: object) -> bool:
    """Whether `value` is a written `Header`: [-1, "/usr/include/math.h", "ab12..."]."""
    if not isinstance(value, list) or len(value) != 3:
        return False
    return isinstance(value[0], int) and value[0] >= SYSTEM and _are(value[1:], str)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _are(value: object, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(one, kind) for one in value)


def _items(value: object) -> list[Any]:
    """A list's items; [None] where it is no list."""
    return value if isinstance(value, list) else [None]


def read(folder: Path) -> Entry | None:
    meta = _read_meta(folder)
    return Entry(folder, meta) if meta else None


def _are_here(headers: Iterable[Header], entry: Entry, job: CompileJob, hashes: Hashes) -> bool:
    """Whether headers of an entry are unchanged. A system header below a folder that has been moved
    together with the compiler, such as a virtual environment, is looked for there first.
    """
    compiler = os.path.realpath(job.compiler) if job.compiler else ""
    before, now = _moved(entry.meta["created"]["compiler"], compiler)
    for header in headers:
        path = header.path(job.include_dirs)
        found = None
        if header.root == SYSTEM and before and path.startswith(before):
            found = hashes.of(now + path.removeprefix(before))
        if (found or hashes.of(path)) != header.sha256:
            return False
    return True


def _moved(before: str, now: str) -> tuple[str, str]:
    """The two folders in which a program has the same relative path: ("/a/", "/b/") for
    /a/bin/nvcc and /b/bin/nvcc. ("", "") where its path is the same.
    """
    if before == now or not now:
        return "", ""
    folders, others = before.split("/"), now.split("/")
    while folders and others and folders[-1] == others[-1]:
        folders.pop()
        others.pop()
    return "/".join([*folders, ""]), "/".join([*others, ""])


def listed(identity: tuple[tuple[str, str], ...]) -> list[list[str]]:
    return [list(pair) for pair in sorted(identity)]  # the form in which JSON returns it
