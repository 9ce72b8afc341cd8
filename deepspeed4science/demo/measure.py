"""Time and memory of a call, the same way on a CPU and on a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call over `num_runs` runs."""

    median_ms: float
    p20_ms: float
    p80_ms: float
    num_runs: int

    @staticmethod
    def of(samples_ms: list[float]) -> Timing:
        ordered = sorted(samples_ms)
        last = len(ordered) - 1
        return Timing(
            statistics.median(ordered),
            ordered[round(0.2 * last)],
            ordered[round(0.8 * last)],
            len(ordered),
        )


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_interleaved(
    calls: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    num_runs: int = 7,
    num_warmups: int = 1,
) -> dict[str, Timing]:
    """Time every call in turn, again and again, so that a slow moment of the machine hits all of
    them alike.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for run in range(num_warmups + num_runs):
        for name, call in calls.items():
            synchronize(device)
            start = time.perf_counter()
            call()
            synchronize(device)
            if run >= num_warmups:
                samples[name].append(1e3 * (time.perf_counter() - start))
    return {name: Timing.of(values) for name, values in samples.items()}


def peak_extra_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    """Most memory in use during the call on top of what was in use before it, results included.

    On a CPU this is resident memory: the kernel's high-water mark is reset before the call, so
    memory that never passes through PyTorch counts too. None where the system does not let a
    process reset it.
    """
    # autograd's own thread may still hold a call's results when the call has returned
    with torch.autograd.set_multithreading_enabled(False):
        call()  # one-time allocations do not count
        gc.collect()  # garbage of earlier calls must not be freed during the measured one
        if device.type == "cuda":
            return _peak_extra_bytes_of_gpu(call, device)
        return _peak_extra_bytes_of_process(call)


def _peak_extra_bytes_of_gpu(call: Callable[[], object], device: torch.device) -> int:
    """Bytes that were asked for. A block of the allocator's cache may have 1 MiB more, depending on
    the calls before. PyTorch's other allocator, cudaMallocAsync, does not count them.
    """

    def requested(when: str) -> int:
        stats = torch.cuda.memory_stats(device)
        return int(stats[f"requested_bytes.all.{when}"] or stats[f"allocated_bytes.all.{when}"])

    torch.cuda.synchronize(device)
    before = requested("current")
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return requested("peak") - before


def _peak_extra_bytes_of_process(call: Callable[[], object]) -> int | None:
    try:
        _give_back_free_memory()
        # 5: reset the peak of resident memory, see man 5 proc.
        Path("/proc/self/clear_refs").write_text("5")
        before = _status_bytes("VmRSS")
        call()
        return max(0, _status_bytes("VmHWM") - before)
    except (OSError, KeyError):
        return None


def _give_back_free_memory() -> None:
    """Return malloc's free blocks to the system; a call that reuses them would seem to need no
    memory.
    """
    with contextlib.suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)
