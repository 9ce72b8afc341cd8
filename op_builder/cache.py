"""Libraries on disk: found by content, published whole or not at all, set aside when damaged.

    <root>/units/<name>-<key>/     <name>.so, <name>.cpp or .cu, meta.json, log
    <root>/aside/<name>-<key>/     an entry that turned out to be damaged, kept to be looked at
    <root>/locks/  failed/  memo/  see lock.py, compile_error.py, memo.py

An entry appears by renaming a finished folder: readers never see half of one, and no lock is
needed to be right. The same layout serves the cache, read-only caches and what an install compiled
beforehand.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import logging
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import elf
from .key import LAYOUT, OWN, CompileJob, Hashes, Header, content_key

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Built:
    """One finished library in a private folder, not yet published."""

    job: CompileJob
    library: Path
    log: Path
    headers: tuple[Header, ...]
    seconds: float
    changed_header: str = ""  # one that was written while it was compiled, if there was one

    @functools.cached_property
    def contents(self) -> elf.Library:
        """Raises ValueError when the library is not one."""
        return elf.read(self.library)

    @property
    def key(self) -> str:
        found = self.contents
        return content_key(self.job, self.headers, found.machine, found.glibc)


@dataclass(frozen=True)
class Entry:
    folder: Path
    meta: dict[str, Any]

    @property
    def library(self) -> Path:
        return self.folder / f"{self.meta['name']}.so"

    @property
    def key(self) -> str:
        return self.folder.name.removeprefix(f"{self.meta['name']}-")

    @property
    def flags(self) -> list[str]:
        return list(self.meta["flags"])

    def damage(self) -> str | None:
        """What is wrong with the library's bytes; None when they are those that were published."""
        try:
            data = self.library.read_bytes()
        except OSError as error:
            return f"{self.library.name} cannot be read ({error.strerror})"
        if len(data) != self.meta["size"]:
            return f"{self.library.name} has {len(data)} bytes, expected {self.meta['size']}"
        if hashlib.sha256(data).hexdigest() != self.meta["sha256"]:
            return f"{self.library.name} has other bytes than when it was published"
        return None


def find(root: Path, job: CompileJob, hashes: Hashes, *, any_toolchain: bool) -> Entry | None:
    """The entry under `root` that was made of exactly what `job` would be made of now.

    With `any_toolchain` only our own sources count: neither the compiler's identity nor headers
    that are not ours (the compiler's, CUTLASS's) are compared, and `job.stand_ins` serve as well.
    This is for libraries that somebody made on purpose for machines other than his own (an install,
    a shared read-only cache), and where no compiler is left. An entry for another kind of machine,
    or for a glibc newer than this one, is not a match.
    """
    for folder in _candidates(root, job, job.accepted if any_toolchain else (job.asked,)):
        meta = _read_meta(folder)
        if meta is None or meta["machine"] != elf.own_machine():
            continue
        if tuple(meta["glibc"]) > elf.own_glibc():
            continue
        if not any_toolchain and meta["identity"] != _listed(job.identity):
            continue
        headers = [Header(*header) for header in meta["headers"]]
        if any_toolchain:
            headers = [header for header in headers if header.root == OWN]
        if all(_unchanged(header, job, hashes) for header in headers):
            return Entry(folder, meta)
    return None


def entries(root: Path) -> list[Entry]:
    """Every entry under `root` whose meta.json can be read, by name."""
    return [entry for folder in _folders(root, "") if (entry := _entry(folder)) is not None]


def last_seconds(root: Path, name: str) -> float | None:
    """How long the unit `name` took to compile when it was last compiled into `root`."""
    newest: tuple[float, float] | None = None
    for folder in _folders(root, f"{name}-"):
        meta = _read_meta(folder)
        if meta is not None and meta["name"] == name:
            newest = max(newest or (0.0, 0.0), (meta["created"]["time"], meta["seconds"]))
    return newest[1] if newest else None


def publish(root: Path, built: Built) -> Entry:
    """Put a finished library under `root`; the entry that was there first wins if it is sound.

    Raises OSError when `root` cannot be written (read-only, full, not allowed).
    """
    units = root / "units"
    units.mkdir(parents=True, exist_ok=True)
    _sweep(units)
    folder = units / f"{built.job.name}-{built.key}"
    temporary = Path(tempfile.mkdtemp(dir=units, prefix=_unfinished_prefix()))
    try:
        os.chmod(temporary, 0o755)  # mkdtemp's 0700 would keep a shared cache from being shared
        entry = Entry(folder, _write_entry(temporary, built))
        _fsync(temporary)
        for _ in range(2):
            try:
                os.rename(temporary, folder)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
                winner = _entry(folder)
                damage = winner.damage() if winner else "its meta.json is damaged"
                if winner is not None and damage is None:
                    return winner
                set_aside(root, folder, damage or "")
                continue
            _fsync(units)
            return entry
        raise OSError(errno.EEXIST, "a damaged entry cannot be moved away", str(folder))
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def set_aside(root: Path, folder: Path, why: str) -> bool:
    """Move a damaged entry out of the way, replacing an earlier one; False when not allowed to."""
    aside = root / "aside" / folder.name
    try:
        aside.parent.mkdir(exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(folder, aside)
    except FileNotFoundError:
        return True  # another process has just done it
    except OSError as error:
        logger.warning("%s cannot be used (%s) nor moved away (%s)", folder, why, error.strerror)
        return False
    logger.warning("%s cannot be used (%s); moved to %s, compiled again", folder, why, aside)
    return True


def discard(entry: Entry) -> None:
    """Take back what was published and turned out to be wrong from the beginning."""
    shutil.rmtree(entry.folder, ignore_errors=True)


def _candidates(root: Path, job: CompileJob, asked: Sequence[str]) -> list[Path]:
    """What may fit, in the order of `asked`."""
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
    """None when it is missing, damaged or of another layout: then the entry counts as absent."""
    try:
        meta = json.loads((folder / "meta.json").read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(meta, dict) or meta.get("layout") != LAYOUT:
        return None
    return meta if meta.keys() >= _META_FIELDS else None


_META_FIELDS = frozenset(
    {
        *("name", "flags", "identity", "headers", "machine", "glibc", "size", "sha256"),
        *("seconds", "created"),
    }
)


def _entry(folder: Path) -> Entry | None:
    meta = _read_meta(folder)
    return Entry(folder, meta) if meta else None


def _unchanged(header: Header, job: CompileJob, hashes: Hashes) -> bool:
    return hashes.of(header.path(job.include_dirs)) == header.sha256


def _write_entry(folder: Path, built: Built) -> dict[str, Any]:
    job = built.job
    data = built.library.read_bytes()
    system = os.uname()
    meta: dict[str, Any] = {
        "layout": LAYOUT,
        "name": job.name,
        "key": built.key,
        "flags": list(job.flags),
        "link_flags": list(job.link_flags),
        "identity": _listed(job.identity),
        "headers": [list(asdict(header).values()) for header in built.headers],
        "machine": built.contents.machine,
        "glibc": list(built.contents.glibc),
        "size": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "seconds": round(built.seconds, 3),
        "created": {
            "time": time.time(),
            "host": socket.gethostname(),
            "system": " ".join((system.sysname, system.release, system.machine)),
            "compiler": str(job.compiler),
        },
    }
    _write(folder / f"{job.name}.so", data, mode=0o755)
    _write(folder / f"{job.name}{job.suffix}", job.source.encode())
    _write(folder / "log", built.log.read_bytes())
    _write(folder / "meta.json", json.dumps(meta, indent=1).encode())
    return meta


def _listed(identity: tuple[tuple[str, str], ...]) -> list[list[str]]:
    return [list(pair) for pair in sorted(identity)]  # as JSON gives it back


def _write(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(handle, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def _fsync(folder: Path) -> None:
    """Make a folder's list of names survive a crash, on file systems where that is needed."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _unfinished_prefix() -> str:
    return f".unfinished-{socket.gethostname()}-{os.getpid()}-"


def _sweep(units: Path) -> None:
    """Remove what processes of this host, killed while publishing, left behind.

    A wrong guess (another container of the same host name) makes that process keep its own copy,
    nothing worse.
    """
    here = f".unfinished-{socket.gethostname()}-"
    for name in os.listdir(units):
        pid = name.removeprefix(here).partition("-")[0]
        if name.startswith(here) and pid.isdecimal() and not _alive(int(pid)):
            shutil.rmtree(units / name, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
