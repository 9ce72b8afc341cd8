"""The components in which the keys of two entries differ."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..system import files
from .cache import Entry
from .key import OWN, SYSTEM, Header

_WHOSE = {OWN: "header", SYSTEM: "system header"}
_MOST_LINES = 20  # of one component's changes


@dataclass(frozen=True)
class Difference:
    component: str  # "flags", "compiler", "header params.h", ...
    before: str
    after: str


def differences(before: Entry, after: Entry) -> list[Difference]:
    """Every component of the key that differs, [] for entries of one key.

    meta.json keeps each component, or its digest where that is long (sources and headers).
    """
    parts = [_components(entry) for entry in (before, after)]
    names = list(dict.fromkeys([*parts[0], *parts[1]]))
    return [
        Difference(name, parts[0].get(name, "absent"), parts[1].get(name, "absent"))
        for name in names
        if parts[0].get(name) != parts[1].get(name)
    ]


def _components(entry: Entry) -> dict[str, str]:
    meta = entry.meta
    found = {
        "name": entry.name,
        "source": str(meta.get("source", "unknown"))[:12],
        "flags": " ".join(meta["flags"]),
        "link flags": " ".join(meta["link_flags"]),
        **{str(what): str(value) or "unset" for what, value in meta["identity"]},
        "machine": str(meta["machine"]),
        "glibc": ".".join(map(str, meta["glibc"])),
    }
    for parts in meta["headers"]:
        header = Header(*parts)
        whose = _WHOSE.get(header.root, "CUTLASS header")
        found[f"{whose} {header.portable_name}"] = header.sha256[:12]
    return found


def source_changes(before: Entry, after: Entry) -> list[str]:
    """The lines of the generated sources that differ, where both can still be read."""
    old, new = list(_source(before)), list(_source(after))
    lines = difflib.unified_diff(old, new, n=0, lineterm="")
    return [line for line in lines if not line.startswith(("---", "+++", "@@"))][:_MOST_LINES]


def _source(entry: Entry) -> Iterator[str]:
    for suffix in (".cu", ".cpp"):
        path: Path = entry.folder / f"{entry.name}{suffix}"
        with contextlib.suppress(OSError):
            yield from files.read(path).decode(errors="replace").splitlines()
