"""All result files as one list of measurements, whichever command wrote them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.shapes import WORKLOADS

RESULTS = Path(__file__).parent / "results"
GPU_OF_RECORD = "NVIDIA H200"  # of the goals, and of every table and picture that names no other
_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_WORKLOAD_OF = {w.shape: w.id for w in WORKLOADS}


@dataclass(frozen=True)
class Measurement:
    """One call of one implementation.

    `extra_bytes` is the peak memory beyond the inputs; where the direction is `bwd`, that of
    forward and backward together. The keys of `errors` are "O", "dq" and so on.
    """

    file: str
    date: str  # with the time of day, if the file has it
    machine: str
    family: str  # the family of the CUDA kernels that `ours` ran; "cpu" on a CPU
    commit: str | None
    workload: str
    mask: str
    shape: tuple[int, ...]
    dtype: str
    direction: str
    peer: str
    ms: float
    extra_bytes: int | None = None
    errors: Mapping[str, float] = field(default_factory=dict)
    replayed: bool = False  # the device's time alone, by CUDA graphs


def load(folder: Path = RESULTS) -> list[Measurement]:
    """The measurements of all files that hold calls of the op, oldest file first."""
    measurements: list[Measurement] = []
    for path in folder.glob("*.json"):
        content = json.loads(path.read_text())
        reader = _READERS.get(content["kind"])
        if reader:
            measurements += reader(path.name, content)
    return sorted(measurements, key=lambda m: m.date)


def on_gpu_of_record(measurements: Iterable[Measurement]) -> list[Measurement]:
    """Those on a CPU, too."""
    return [m for m in measurements if m.family == "cpu" or m.machine == GPU_OF_RECORD]


def latest(kind: str, folder: Path = RESULTS, *, device: str) -> tuple[str, dict[str, Any]] | None:
    """Name and content of the newest file of a kind, such as "startup", from a CPU or, for "cuda",
    the GPU of record.
    """
    gpu = GPU_OF_RECORD if device == "cuda" else None
    files = [(path.name, json.loads(path.read_text())) for path in folder.glob("*.json")]
    there = [
        (name, content)
        for name, content in files
        if content["kind"] == kind and content["environment"]["gpu"] == gpu
    ]
    return max(there, key=lambda entry: entry[1]["environment"]["date"], default=None)


def environment(file: str, folder: Path = RESULTS) -> dict[str, Any]:
    """The description of the machine on which a file was measured."""
    content: dict[str, Any] = json.loads((folder / file).read_text())
    return content["environment"]  # type: ignore[no-any-return]


def skipped(file: str, folder: Path = RESULTS) -> dict[str, list[str]]:
    """The reasons for which peers could not run, each once, from one file."""
    content = json.loads((folder / file).read_text())
    reasons: dict[str, list[str]] = {}
    for entry in content.get("skipped", ()):
        known = reasons.setdefault(entry["peer"], [])
        if entry["reason"] not in known:
            known.append(entry["reason"])
    return reasons


def command(file: str, folder: Path = RESULTS) -> str:
    """The command behind a file: recorded there, or rebuilt from its settings and rows."""
    content = json.loads((folder / file).read_text())
    if "command" in content:
        return str(content["command"])
    kind, words = content["kind"], ["python", "-m", "benchmarks"]
    words.append({"graph-replay": "replay"}.get(kind, kind))
    if content["environment"]["gpu"] and kind != "graph-replay":
        words += ["--device", "cuda"]
    settings, rows = content.get("settings", {}), content.get("results", [])
    if kind == "run":
        words += ["--shapes", ",".join(dict.fromkeys(row["workload"] for row in rows))]
        words += ["--dtype", ",".join(dict.fromkeys(_SHORT[row["dtype"]] for row in rows))]
        words += ["--direction", ",".join(settings["directions"])]
        words += ["--peers", ",".join(settings["peers"])]
    elif kind == "graph-replay":
        shapes = dict.fromkeys(tuple(row["shape"]) for row in rows)
        words += ["--shapes", ",".join(_WORKLOAD_OF.get(shape, "...") for shape in shapes)]
        words += ["--masks", ",".join(dict.fromkeys(row["mask"] for row in rows))]
    return shlex.join(words)


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
            errors=row["errors"],
        )


def _graph_replay(file: str, content: dict[str, Any]) -> Iterator[Measurement]:
    environment = content["environment"]
    for row in content["results"]:
        if row.get("commit") is None and row.get("version") != "new":
            continue  # a version that was tried and not kept
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
            replayed=True,
        )


def _family(file: str, environment: dict[str, Any]) -> str:
    """The family of the kernels that a file measured. A file says so only where the family was
    forced, in `cuda_family` or, in older files, in its name.
    """
    if not environment["gpu"]:
        return "cpu"
    return str(environment.get("cuda_family") or ("sm80" if "-sm80" in file else "sm90"))


_READERS = {"run": _run, "graph-replay": _graph_replay}
