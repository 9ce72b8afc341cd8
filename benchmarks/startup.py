"""Host overhead of a call, and what a first call costs: compiled, and loaded from the cache."""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.inputs import make_inputs
from benchmarks.peers import Eager, Ours, Peer, Sdpa
from benchmarks.shapes import Workload
from deepspeed4science.demo.measure import synchronize
from deepspeed4science.demo.startup import Startup, measure_startup

TINY = Workload("tiny", 1, 1, 8, 1, 16, "next to no arithmetic")
SMALL = Workload("small", 1, 1, 65, 1, 16, "as little as has a kernel on a GPU")
CALLS_PER_SAMPLE = 200  # few enough that a GPU's launch queue does not fill
NUM_SAMPLES = 25


@dataclass(frozen=True)
class Overhead:
    """Host time of one forward call on a tiny input, no gradient wanted, both biases given."""

    peer: str
    median_us: float
    p20_us: float
    p80_us: float


@dataclass(frozen=True)
class StartupResult:
    """Seconds in new processes, beyond `import torch`."""

    first_call_s: float  # empty cache, forward only
    first_training_call_s: float  # empty cache, forward and backward
    cached_call_s: float  # the same, median of several, kernels in the cache
    cached_training_call_s: float
    compile_s: dict[str, float | None]  # of each kernel of the first training call, side by side


def measure_overhead(*, dtype: torch.dtype, device: torch.device) -> list[Overhead]:
    """Ours, eager and SDPA in turn, again and again."""
    workload = TINY if device.type == "cpu" else SMALL
    inputs = make_inputs(workload, dtype=dtype, device=device, seed=0)
    peers: tuple[Peer, ...] = (Ours(), Eager(), Sdpa())
    leaves = {peer.name: peer.adapt(inputs) for peer in peers}
    samples: dict[str, list[float]] = {peer.name: [] for peer in peers}
    with torch.no_grad():
        for sample in range(NUM_SAMPLES + 2):
            for peer in peers:
                tensors = leaves[peer.name]
                synchronize(device)
                start = time.perf_counter()
                for _ in range(CALLS_PER_SAMPLE):
                    peer.forward(tensors)
                elapsed = time.perf_counter() - start
                if sample >= 2:
                    samples[peer.name].append(1e6 * elapsed / CALLS_PER_SAMPLE)
    return [_overhead(name, sorted(values)) for name, values in samples.items()]


def _overhead(peer: str, ordered: list[float]) -> Overhead:
    last = len(ordered) - 1
    return Overhead(
        peer, statistics.median(ordered), ordered[round(0.2 * last)], ordered[round(0.8 * last)]
    )


def measure_startups(*, dtype: str, device: str, num_runs: int = 5) -> StartupResult:
    """A compile into an empty folder, then loads from that folder, each in a new process.

    Raises:
        RuntimeError: a process failed, or compiled what should have been in the cache.
    """

    def startup(folder: str, *, train: bool) -> Startup:
        return measure_startup(device=device, dtype=dtype, train=train, cache_dir=Path(folder))

    with tempfile.TemporaryDirectory() as infer, tempfile.TemporaryDirectory() as train:
        first = startup(infer, train=False)
        first_training = startup(train, train=True)
        cached = [startup(infer, train=False) for _ in range(num_runs)]
        cached_training = [startup(train, train=True) for _ in range(num_runs)]
    if any(run.num_built for run in (*cached, *cached_training)):
        raise RuntimeError("the cache was not used: did the kernels' sources change meanwhile?")
    return StartupResult(
        first_call_s=first.beyond_torch_s,
        first_training_call_s=first_training.beyond_torch_s,
        cached_call_s=statistics.median(run.beyond_torch_s for run in cached),
        cached_training_call_s=statistics.median(run.beyond_torch_s for run in cached_training),
        compile_s=first_training.compile_s,
    )
