"""`python -m deepspeed4science cache`: lists, explains and clears compiled kernels.

    cache list                every kernel: size, last use, where and with what it was compiled
    cache explain NAME        the component of the key that changed between entries of that name
    cache explain KEY KEY     the components in which these two differ
    cache clear [NAME ...]    removes kernels from the cache; shared folders are never touched

NAME and KEY are those of `cache list`, or a beginning of them.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import itertools
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from deepspeed4science.printing import show
from op_builder import paths
from op_builder.cache import cache, evict, key_difference, search, staging
from op_builder.cache.cache import Entry
from op_builder.errors import BuildError

_ASKED = 12  # digits of a key that identify the request; the others distinguish its entries
_PLACES = {"prebuilt": "install", "cache": "cache"}


@dataclass(frozen=True)
class Row:
    place: str  # "install", "shared" or "cache"
    name: str
    key: str
    targets: tuple[str, ...]  # "sm_80"; empty for a CPU kernel
    size_bytes: int  # the whole entry
    last_used: float  # seconds since 1970, to the hour; outside the cache: when it was put there
    compiled: float  # seconds since 1970
    seconds: float  # duration of its compilation
    host: str  # where it was compiled
    compiler: str
    folder: str


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    commands = {"list": _list, "explain": _explain, "clear": _clear}
    try:
        return commands[options.command](options)
    except BuildError as error:
        return _fail(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m deepspeed4science cache",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    list_ = commands.add_parser("list", help="what is there")
    list_.add_argument("--json", action="store_true", help="for programs")
    explain_ = commands.add_parser("explain", help="which component of the key changed")
    explain_.add_argument("entry", nargs="+", help="one name, or two keys")
    clear = commands.add_parser("clear", help="remove from the cache")
    clear.add_argument("entry", nargs="*", type=_entry, help="names or keys (everything)")
    clear.add_argument("--unused-days", type=_days, help="only what was not used for so long")
    return parser


def _entry(text: str) -> str:
    """An empty one, as of a variable that is not set, would be a beginning of every name."""
    if not text:
        raise argparse.ArgumentTypeError("expected a name or key, got ''")
    return text


def _days(text: str) -> float:
    try:
        days = float(text)
    except ValueError:
        days = -1.0
    if not days >= 0:
        raise argparse.ArgumentTypeError(f"expected a number of days, 0 or more, got {text!r}")
    return days


def rows() -> list[tuple[Row, Entry]]:
    """Every entry that a load would consider, in the order of its search."""
    found = []
    for root in search.roots():
        for entry in cache.entries(root.path):
            place = "shared" if root.shared and root.origin == "cache" else _PLACES[root.origin]
            found.append((_row(place, entry), entry))
    return found


def _row(place: str, entry: Entry) -> Row:
    usage = evict.usage(entry.folder)
    created = entry.meta["created"]
    tools = dict(entry.meta["identity"])
    return Row(
        place=place,
        name=entry.name,
        key=entry.key,
        targets=entry.targets,
        size_bytes=usage.size_bytes,
        last_used=usage.last_used,
        compiled=created["time"],
        seconds=entry.meta["seconds"],
        host=created["host"],
        compiler=tools.get("compiler", ""),
        folder=str(entry.folder),
    )


def _list(options: argparse.Namespace) -> int:
    found = [row for row, _ in rows()]
    if options.json:
        show(json.dumps([asdict(row) for row in found], indent=1))
        return 0
    width = max([6, *(len(row.name) for row in found)])
    lines = [
        f"{'place':8} {'kernel':{width}} {'key':10} {'for':7} {'size':>9} {'used':>9}  compiled"
    ]
    for row in found:
        day = time.strftime("%Y-%m-%d", time.localtime(row.compiled))
        key, targets = row.key[_ASKED:][:10], ",".join(row.targets) or "-"
        lines.append(
            f"{row.place:8} {row.name:{width}} {key:10} {targets:7} "
            f"{row.size_bytes / 2**20:5.1f} MiB {_ago(row.last_used):>9}  "
            f"{day} on {row.host} in {row.seconds:.1f} s"
        )
    total = sum(row.size_bytes for row in found if row.place == "cache") / 2**20
    limit = evict.limit_bytes()
    lines.append(
        f"cache: {paths.cache_root()}, {total:.1f} MiB of "
        f"{f'{limit >> 20} MiB (DS4S_CACHE_MAX_MB)' if limit else 'as much as there is'}"
    )
    show("\n".join(lines))
    return 0


def _ago(when: float) -> str:
    seconds = max(time.time() - when, 0.0)
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return "now"


def _matching(text: str) -> list[Entry]:
    return [
        entry
        for _, entry in rows()
        if entry.folder.name.startswith(text)
        or (len(text) >= 4 and (entry.key.startswith(text) or entry.key[_ASKED:].startswith(text)))
    ]


def _explain(options: argparse.Namespace) -> int:
    if len(options.entry) > 2:
        return _fail(f"expected one name or two keys, got {len(options.entry)}")
    groups = [_matching(text) for text in options.entry]
    for text, group in zip(options.entry, groups, strict=True):
        if not group:
            return _fail(f"there is no entry {text}; see `cache list`")
    if len(groups) == 2:
        pairs = [(groups[0][0], groups[1][0])]
    else:
        ordered = sorted(groups[0], key=lambda entry: (entry.name, entry.meta["created"]["time"]))
        pairs = [pair for pair in itertools.pairwise(ordered) if pair[0].name == pair[1].name]
        if not pairs:
            return _fail(f"there is only one entry {options.entry[0]}: nothing to compare it with")
    show("\n".join(line for before, after in pairs for line in _comparison(before, after)))
    return 0


def _comparison(before: Entry, after: Entry) -> list[str]:
    lines = [before.folder.name, after.folder.name]
    found = key_difference.differences(before, after)
    for one in found:
        lines.append(f"  {one.component}: {one.before} -> {one.after}")
        if one.component == "source":
            lines += [f"    {line}" for line in key_difference.source_changes(before, after)]
    if not found:
        lines.append(
            "  nothing: one was copied from the other, replaced a damaged one, or was compiled "
            "where the compiler's headers are in other folders"
        )
    return lines


def _clear(options: argparse.Namespace) -> int:
    root = paths.cache_root()
    mine = {entry.folder: row for row, entry in rows() if row.place == "cache"}
    chosen = mine
    if options.entry:
        matching = {entry.folder for text in options.entry for entry in _matching(text)}
        chosen = {folder: row for folder, row in mine.items() if folder in matching}
        if not chosen:
            return _fail(f"the cache holds no entry {' '.join(options.entry)}; see `cache list`")
    if options.unused_days is not None:
        oldest = time.time() - 86400.0 * options.unused_days
        chosen = {folder: row for folder, row in chosen.items() if row.last_used < oldest}
    removed = [row for folder, row in chosen.items() if staging.remove(folder)]
    if not options.entry and options.unused_days is None:
        for part in ("units", "aside"):  # remains of entries
            for left in evict.usages(root, part):
                staging.remove(left.folder)
        for pattern in ("failed/*.log", "memo/*.json"):
            for file in glob.glob(pattern, root_dir=root):
                with contextlib.suppress(OSError):
                    (root / file).unlink()
    size = sum(row.size_bytes for row in removed) / 2**20
    show(f"removed {len(removed)} kernels, {size:.1f} MiB, from {root}")
    if len(removed) < len(chosen):
        return _fail(f"{len(chosen) - len(removed)} could not be removed from {root}")
    return 0


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 1
