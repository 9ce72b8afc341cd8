"""The op under load: calls one after another, without pauses. A large GPU then reaches its power
cap and lowers its clock, so that a kernel's energy counts as well as its cycles.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from benchmarks import replay
from benchmarks.power import Meter
from benchmarks.shapes import Workload

METHOD = (
    "a CUDA graph of a call, replayed without pauses, after 0.5 s of that; energy by the counter "
    "of NVML; the median of the clocks after each 0.1 s; caches are not flushed"
)
WARMUP_SECONDS = 0.5  # until the clock has reached its level
BATCH_SECONDS = 0.1  # between two looks at the clock


@dataclass(frozen=True)
class Load:
    """Of one call, and of the device meanwhile; None where NVML does not say."""

    us: float
    millijoules: float | None
    watts: float | None
    clock_mhz: int | None

    def __str__(self) -> str:
        def text(value: float | None, digits: int, unit: str) -> str:
            return f"{'?' if value is None else format(value, f'.{digits}f'):>9} {unit}"

        return (
            f"{self.us:>10.1f} us{text(self.millijoules, 2, 'mJ')}{text(self.watts, 0, 'W')}"
            f"{text(self.clock_mhz, 0, 'MHz')}"
        )


def measure_load(
    workload: Workload,
    *,
    directions: Sequence[str],
    dtype: torch.dtype,
    device: torch.device,
    seconds: float,
) -> Iterator[tuple[str, Load]]:
    """Each direction and its figures; `bwd` computes dq, dk, dv and dbias2."""
    meter = Meter(device)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        made = replay.calls(workload, dtype, device)
        for direction in directions:
            graph = replay.capture(made[direction], stream, num_calls=1)
            yield direction, _under_load(graph, meter, seconds)


def _under_load(graph: torch.cuda.CUDAGraph, meter: Meter, seconds: float) -> Load:
    num_replays = max(1, int(1e3 * BATCH_SECONDS / replay.replay_ms(graph)))
    warm = time.perf_counter() + WARMUP_SECONDS
    while time.perf_counter() < warm:
        replay.replay_ms(graph, num_replays)
    milliseconds, clocks = [], []
    joules, begin = meter.joules(), time.perf_counter()
    while not milliseconds or time.perf_counter() < begin + seconds:
        milliseconds.append(replay.replay_ms(graph, num_replays))
        clocks.append(meter.clock_mhz())
    end, joules_after = time.perf_counter(), meter.joules()
    used = None if joules is None or joules_after is None else joules_after - joules
    known = [clock for clock in clocks if clock is not None]
    num_calls = num_replays * len(milliseconds)
    return Load(
        us=round(1e3 * sum(milliseconds) / num_calls, 1),
        millijoules=None if used is None else round(1e3 * used / num_calls, 3),
        watts=None if used is None else round(used / (end - begin), 1),
        clock_mhz=int(median(known)) if known else None,
    )
