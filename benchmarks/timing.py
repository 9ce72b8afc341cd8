"""Interleaved timing with cold caches: rounds of one call of every peer, and the median for each
peer. Each round begins with another peer, since a long call leaves the device warmer and its clocks
lower.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

from deepspeed4science.demo.measure import Timing

# Far above a core's second-level cache and our share of a server's third level.
CPU_FLUSH_BYTES = 128 * 2**20
# Many times any L2; writing it takes an H200 over a millisecond, longer than a slow host needs to
# launch a backward pass of several kernels.
CUDA_FLUSH_BYTES = 5 * 2**30
MIN_RUNS, MAX_RUNS = 5, 100
NUM_WARMUPS = 3


class CallError(Exception):
    """One of the timed calls failed; its error is the cause."""

    def __init__(self, name: str, error: Exception) -> None:
        super().__init__(f"{name}: {error}")
        self.name = name


def _make(name: str, call: Callable[[], object]) -> None:
    try:
        call()
    except Exception as error:
        raise CallError(name, error) from error


class CpuClock:
    """Wall clock; before each call a large buffer passes through the caches."""

    def __init__(self) -> None:
        self._buffer = torch.zeros(CPU_FLUSH_BYTES // 4)

    def time_ms(self, calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        """One call of each."""
        elapsed = {}
        for name, call in calls.items():
            self._buffer.add_(1.0)
            start = time.perf_counter()
            _make(name, call)
            elapsed[name] = 1e3 * (time.perf_counter() - start)
        return elapsed


class CudaClock:
    """Events around each call; before it a large buffer is written, which empties L2 and keeps the
    GPU busy while the host prepares the call.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer = torch.empty(CUDA_FLUSH_BYTES, dtype=torch.int8, device=device)

    def time_ms(self, calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        """One call of each."""
        events = {}
        with torch.cuda.device(self._device):
            for name, call in calls.items():
                start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                self._buffer.zero_()
                start.record()
                _make(name, call)
                end.record()
                torch.cuda.synchronize()  # a large result must be free again before the next call
                events[name] = start.elapsed_time(end)
        return events


def measure(
    calls: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    budget_s: float,
    max_runs: int = MAX_RUNS,
) -> dict[str, Timing]:
    """Median, p20 and p80 of every call; the number of runs follows from the budget, at least 5
    (unless `max_runs` is less) and at most `max_runs`.

    Raises:
        CallError: one of the calls failed.
    """
    clock = CudaClock(device) if device.type == "cuda" else CpuClock()
    for _ in range(NUM_WARMUPS - 1):
        clock.time_ms(calls)
    start = time.perf_counter()
    clock.time_ms(calls)
    one_round_s = time.perf_counter() - start
    num_runs = int(min(max_runs, max(MIN_RUNS, budget_s / one_round_s)))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for number in range(num_runs):
        first = number % len(names)
        turn = {name: calls[name] for name in (*names[first:], *names[:first])}
        for name, elapsed in clock.time_ms(turn).items():
            samples[name].append(elapsed)
    return {name: Timing.of(values) for name, values in samples.items()}
