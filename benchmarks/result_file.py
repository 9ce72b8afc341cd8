"""The result file of a run: one JSON file with its environment."""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.environment import Environment, short_machine_name
from op_builder.system import files

SCHEMA = 1


def make_result(environment: Environment, kind: str, **content: object) -> dict[str, object]:
    return {"schema": SCHEMA, "kind": kind, "environment": asdict(environment), **content}


def make_folder(path: Path) -> None:
    """The folder of --json.

    Raises:
        OSError: no file can be written there.
    """
    folder = path.parent if path.suffix == ".json" else path
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()


def save(
    arguments: argparse.Namespace, environment: Environment, result: dict[str, object]
) -> None:
    if arguments.json is None:
        return
    path: Path = arguments.json
    if path.suffix != ".json":
        what = arguments.what or result["kind"]
        name = f"{environment.date[:10]}-{short_machine_name(environment)}-{what}"
        path = _unused(path / f"{name}.json")
        arguments.json = path  # where the next rows of this run go, too
    whole = {**result, "command": command_line(arguments.words)}
    files.replace(path, f"{json.dumps(whole, indent=1)}\n".encode())


def _unused(path: Path) -> Path:
    """The path, numbered if there is a file already: results are never changed."""
    others = (path.with_name(f"{path.stem}-{number}.json") for number in itertools.count(2))
    return next(one for one in itertools.chain([path], others) if not one.exists())


def command_line(words: Sequence[str]) -> str:
    """The command line that repeats a run, without the result file's path."""
    kept, skip = ["python", "-m", "benchmarks"], False
    for word in words:
        place = word in ("--json", "--what", "--commit")
        given = word.startswith(("--json=", "--what=", "--commit="))
        if not (place or skip or given):
            kept.append(word)
        skip = place
    return shlex.join(kept)
