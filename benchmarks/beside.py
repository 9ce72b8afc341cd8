"""Versions of this package in turn on one device, each in a process of its own, whose calls
alternate: for differences of one or two percent, which clocks hide between separate runs.

A version is `[NAME=]WHAT[@FLAGS]`: a folder, or a revision of this repository, and flags for nvcc,
such as `wide=.@-DTILE=128`. All of them are measured with this tree's workloads.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.shapes import Workload

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("op_builder", "csrc", "deepspeed4science")  # what a version consists of
METHOD = (
    "bursts of 0.012 s after a pause of 0.03 s, of all versions in turn, each in a process of its "
    "own, calls of a CUDA graph on a GPU; of the first version the median, of a later one that "
    "median times the median of its rounds' ratios to the first; caches are not flushed"
)
PAUSE_SECONDS, BURST_SECONDS = 0.03, 0.012


@dataclass(frozen=True)
class Version:
    name: str
    what: str  # a folder or a revision
    flags: str = ""

    @classmethod
    def of(cls, text: str) -> Version:
        before, _, flags = text.partition("@")
        name, named, what = before.partition("=")
        return cls(name, what, flags) if named else cls(text, before, flags)

    def unpack(self, place: Path) -> Path:
        """A folder with nothing but this version's parts.

        Raises:
            ValueError: there is no such folder or revision, or it is none of this package.
        """
        place.mkdir()
        folder = Path(self.what).resolve()
        if folder.is_dir():
            if missing := [part for part in PARTS if not (folder / part).is_dir()]:
                raise ValueError(f"{self.what}: no version of this package: no {missing[0]}")
            for part in PARTS:
                (place / part).symlink_to(folder / part)
            return place
        packed = subprocess.run(
            ["git", "-C", str(ROOT), "archive", self.what, *PARTS], capture_output=True
        )
        if packed.returncode != 0:
            raise ValueError(f"{self.what}: neither a folder nor a revision of {ROOT}")
        with tarfile.open(fileobj=BytesIO(packed.stdout)) as archive:
            archive.extractall(place, filter="data")
        return place


class Worker:
    """The process of a version (beside_worker.py)."""

    def __init__(self, version: Version, folder: Path) -> None:
        self.name = version.name
        paths = [str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        if version.flags:
            environment["NVCC_APPEND_FLAGS"] = version.flags
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.beside_worker"],
            cwd=folder,  # Python finds modules there before all other places
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **question: Any) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # answer() says so
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()

    def answer(self) -> float:
        """Seconds.

        Raises:
            RuntimeError: the process has ended. It has printed the reason.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} has failed; its message is above")
        return float(json.loads(line))

    def seconds(self, num_calls: int) -> float:
        self.ask(num_calls=num_calls)
        return self.answer()

    def end(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def measure(
    versions: Sequence[Version],
    workloads: Sequence[Workload],
    *,
    directions: Sequence[str],
    dtype: str,
    device: str,
    rounds: int,
) -> Iterator[tuple[Workload, str, dict[str, float]]]:
    """Of each workload and direction, the microseconds of a call of each version.

    Raises:
        ValueError: two versions have one name, or Version.unpack.
        RuntimeError: a version's process has ended.
    """
    if len({version.name for version in versions}) < len(versions):
        raise ValueError("two versions have the same name; NAME=WHAT gives one another name")
    with ExitStack() as stack:
        here = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workers = []
        for number, version in enumerate(versions):
            workers.append(Worker(version, version.unpack(here / str(number))))
            stack.callback(workers[-1].end)
        for workload in workloads:
            for direction in directions:
                for worker in workers:  # all compile at the same time
                    worker.ask(
                        workload=workload.id, direction=direction, dtype=dtype, device=device
                    )
                for worker in workers:
                    worker.answer()
                yield workload, direction, in_turn(workers, rounds)


def in_turn(workers: Sequence[Worker], rounds: int) -> dict[str, float]:
    """Each round begins at another end, since a burst leaves the device warmer."""
    slowest = max(worker.seconds(2) for worker in workers)
    num_calls = max(1, round(BURST_SECONDS / slowest))
    samples: dict[str, list[float]] = {worker.name: [] for worker in workers}
    for number in range(rounds):
        for worker in workers if number % 2 == 0 else reversed(workers):
            time.sleep(PAUSE_SECONDS)
            samples[worker.name].append(worker.seconds(num_calls))
    first = samples[workers[0].name]
    return {
        name: 1e6 * median(first) * median(a / b for a, b in zip(of_one, first, strict=True))
        for name, of_one in samples.items()
    }
