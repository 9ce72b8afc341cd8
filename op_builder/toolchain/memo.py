"""Small answers that are slow to find, kept on disk: a compiler's version, a processor's flags.

    version = memo.remember("compiler", memo.file_stamp(path), lambda: ask(path))

An answer is one JSON file under the cache folder, replaced by an atomic rename: concurrent writers
leave one whole answer, a cache that cannot be written or read only costs the computation. Read-only
caches are looked into as well, for those whose own cannot be written. The key must name all that
the answer depends on. Memos never decide a cache key's *content*: they only save running a program
to learn it again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import paths
from ..system import files, ownership

_answers: dict[tuple[str, str, str], Any] = {}


def file_stamp(path: str | Path) -> str:
    """What changes when the file behind `path` is replaced."""
    real = os.path.realpath(path)
    try:
        stat = os.stat(real)
    except OSError:
        return f"{real} (missing)"
    return f"{path} {real} {stat.st_size} {stat.st_mtime_ns} {stat.st_ino}"


def remember(kind: str, key: str, compute: Callable[[], Any]) -> Any:
    """`compute()`'s answer (what JSON can hold, but not None), known or computed now.

    What `compute` raises is passed on and not remembered.
    """
    answer = known(kind, key)
    if answer is None:
        root = paths.cache_root()
        answer = compute()
        _write(_place(root, kind, key), key, answer)
        _answers[str(root), kind, key] = answer
    return answer


def known(kind: str, key: str) -> Any:
    """What `remember` would answer without computing; None when it would have to."""
    root = paths.cache_root()
    place = (str(root), kind, key)
    if place not in _answers:
        folders = (root, *paths.readonly_roots())
        trusted = (folder for folder in folders if not ownership.doubt_about(folder))
        found = (_read(_place(folder, kind, key), key) for folder in trusted)
        answer = next((one for one in found if one is not None), None)
        if answer is None:
            return None
        _answers[place] = answer
    return _answers[place]


def export(root: Path) -> None:
    """Copy what this process has learnt to another cache folder, as far as that can be written."""
    for (_, kind, key), answer in list(_answers.items()):
        _write(_place(root, kind, key), key, answer)


def _place(root: Path, kind: str, key: str) -> Path:
    digest = hashlib.sha256(key.encode()).hexdigest()[:20]
    return root / "memo" / f"{kind}-{digest}.json"


def _read(path: Path, key: str) -> Any:
    try:
        stored = json.loads(files.read(path))
        fits = stored["key"] == key and stored["digest"] == _digest(key, stored["answer"])
        return stored["answer"] if fits else None
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return None


def _write(path: Path, key: str, answer: Any) -> None:
    stored = {"key": key, "answer": answer, "digest": _digest(key, answer)}
    with contextlib.suppress(OSError):
        paths.make_root(path.parents[1])
        files.make_part(path.parents[1], path.parent.name)
        files.replace(path, json.dumps(stored).encode())


def _digest(key: str, answer: Any) -> str:
    """Of what was written: what somebody has changed is asked for again."""
    return hashlib.sha256(json.dumps([key, answer], sort_keys=True).encode()).hexdigest()
