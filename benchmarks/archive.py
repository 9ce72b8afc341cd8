"""All result files as one list of measurements, whatever command wrote each file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.shapes import WORKLOADS

RESULTS = Path(__file__).parent / "results"
_WORKLOAD_OF = {w.shape: w.id for w in reversed(WORKLOADS) if w.bias2}


@dataclass(frozen=True)
class Measurement:
    """One call of one implementation. `extra_bytes` is the peak on top of the inputs, of forward
    and backward together where the direction is `bwd`; `error` that of O against the reference.
    """

    file: str
    date: str  # with the time, where the file has it
    machine: str
    family: str  # whose CUDA kernels `ours` took; "cpu" on a CPU
    commit: str | None
    workload: str
    mask: str
    shape: tuple[int, ...]
    dtype: str
    direction: str
    peer: str
    ms: float
    extra_bytes: int | None = None
    error: float | None = None


def load(folder: Path = RESULTS) -> list[Measurement]:
    """The measurements of all files that hold calls of the op, oldest file first."""
    measurements: list[Measurement] = []
    for path in folder.glob("*.json"):
        content = json.loads(path.read_text())
        reader = _READERS.get(content["kind"])
        if reader:
            measurements += reader(path.name, content)
    return sorted(measurements, key=lambda m: m.date)


def latest(kind: str, folder: Path = RESULTS, *, device: str) -> tuple[str, dict[str, Any]] | None:
    """Name and content of the newest file of a kind, such as "startup", from a "cpu" or "cuda"."""
    files = [(path.name, json.loads(path.read_text())) for path in folder.glob("*.json")]
    there = [
        (name, content)
        for name, content in files
        if content["kind"] == kind and (device == "cuda") == bool(content["environment"]["gpu"])
    ]
    return max(there, key=lambda entry: entry[1]["environment"]["date"], default=None)


def _run(file: str, content: dict[str, Any]) -> Iterator[Measurement]:
    environment = content["environment"]
    for row in content["results"]:
        workload, _, mask = row["workload"].partition("/")
        yield Measurement(
            file=file,
            date=environment["date"],
            machine=environment["gpu"] or environment["cpu"],
            family=_family(file, environment),
            commit=environment["commit"],
            workload=workload,
            mask=mask or "random",
            shape=tuple(row["shape"]),
            dtype=row["dtype"],
            direction=row["direction"],
            peer=row["peer"],
            ms=row["timing"]["median_ms"],
            extra_bytes=row["peak_extra_bytes"],
            error=row["errors"].get("O"),
        )


def _graph_replay(file: str, content: dict[str, Any]) -> Iterator[Measurement]:
    environment = content["environment"]
    for row in content["results"]:
        if row.get("commit") is None and row.get("version") != "new":
            continue  # tried and not kept
        shape = tuple(row["shape"])
        yield Measurement(
            file=file,
            date=environment["date"],
            machine=environment["gpu"],
            family=row["family"],
            commit=row.get("commit") or row.get("version"),
            workload=_WORKLOAD_OF.get(shape, "x".join(map(str, shape))),
            mask=row["mask"],
            shape=shape,
            dtype=content["settings"]["dtype"],
            direction=row["direction"],
            peer="ours",
            ms=median(row["median_us"]) / 1e3,
        )


def _family(file: str, environment: dict[str, Any]) -> str:
    """Files name the family only where it was forced: by their name until there was another way."""
    if not environment["gpu"]:
        return "cpu"
    return str(environment.get("cuda_family") or ("sm80" if "-sm80" in file else "sm90"))


_READERS = {"run": _run, "graph-replay": _graph_replay}
