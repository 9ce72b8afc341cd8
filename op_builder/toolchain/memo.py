"""Keeps small answers on disk that are slow to find: a compiler's version, a processor's flags.

    version = memo.remember("compiler", memo.file_stamp(path), lambda: ask(path))

An answer is one JSON file under the cache folder, replaced by an atomic rename: concurrent writers
leave one complete answer, and a cache that cannot be written or read only costs the computation.
Read-only caches are searched as well, for users who cannot write their own. The key must name all
that the answer depends on. Memos never change the *content* of a cache key: they only save running
a program again.
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
    """A text that changes when the file behind `path` is replaced."""
    real = os.path.realpath(path)
    try:
        stat = os.stat(real)
    except OSError:
        return f"{real} (missing)"
    return f"{path} {real} {stat.st_size} {stat.st_mtime_ns} {stat.st_ino}"


def remember(kind: str, key: str, compute: Callable[[], Any]) -> Any:
    """The answer of `compute()`, remembered or computed now: any value of JSON but None.

    Exceptions of `compute` are passed on and not remembered.
    """
    answer = known(kind, key)
    if answer is None:
        root = paths.cache_root()
        answer = compute()
        _write(_place(root, kind, key), key, answer)
        _answers[str(root), kind, key] = answer
    return answer


def known(kind: str, key: str) -> Any:
    """The remembered answer; None where there is none."""
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
    """Copy the answers that this process has used to another cache folder, if it can be written."""
    for (_, kind, key), answer in list(_answers.items()):
        _write(_place(root, kind, key), key, answer)


def _place(root: Path, kind: str, key: str) -> Path:
    digest = hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()[:20]
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
    """A digest that is stored with the answer: an answer that was changed is computed again."""
    return hashlib.sha256(json.dumps([key, answer], sort_keys=True).encode()).hexdigest()
