"""Small answers that are slow to find, kept on disk: a compiler's version, a processor's flags.

    version = memo.remember("compiler", memo.file_stamp(path), lambda: ask(path))

An answer is one JSON file under the cache folder, replaced by an atomic rename: concurrent writers
leave one whole answer, a cache that cannot be written or read only costs the computation. The key
must name all that the answer depends on. Memos never decide a cache key's *content*: they only save
running a program to learn it again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import paths

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
    """`compute()`'s answer (anything JSON can hold), from this process, from disk or computed now.

    What `compute` raises is passed on and not remembered.
    """
    folder = paths.cache_root() / "memo"
    known = (str(folder), kind, key)
    if known in _answers:
        return _answers[known]
    digest = hashlib.sha256(key.encode()).hexdigest()[:20]
    path = folder / f"{kind}-{digest}.json"
    answer = _read(path, key)
    if answer is _MISSING:
        answer = compute()
        _write(path, key, answer)
    _answers[known] = answer
    return answer


_MISSING = object()


def _read(path: Path, key: str) -> Any:
    try:
        stored = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return _MISSING
    if not isinstance(stored, dict) or stored.get("key") != key or "answer" not in stored:
        return _MISSING
    return stored["answer"]


def _write(path: Path, key: str, answer: Any) -> None:
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".memo-")
        try:
            with os.fdopen(handle, "w") as stream:
                json.dump({"key": key, "answer": answer}, stream)
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
