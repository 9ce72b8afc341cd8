"""The time of a first call: compiled, and loaded from the cache."""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

from deepspeed4science.demo.startup import Startup, measure_startup


@dataclass(frozen=True)
class StartupResult:
    """Seconds in new processes, beyond `import torch`."""

    first_call_s: float  # empty cache, forward only
    first_training_call_s: float  # empty cache, forward and backward
    cached_call_s: float  # the same, median of several, kernels in the cache
    cached_training_call_s: float
    compile_s: dict[str, float | None]  # of each kernel of the first training call, side by side


def measure_startups(*, dtype: str, device: str, num_runs: int = 5) -> StartupResult:
    """A compile into an empty folder, then loads from that folder, each in a new process.

    Raises:
        RuntimeError: a process failed, compiled what should have been in the cache, or found what
            it should have compiled.
    """

    def startup(folder: str, *, train: bool) -> Startup:
        return measure_startup(device=device, dtype=dtype, train=train, cache_dir=Path(folder))

    with tempfile.TemporaryDirectory() as infer, tempfile.TemporaryDirectory() as train:
        first = startup(infer, train=False)
        first_training = startup(train, train=True)
        cached = [startup(infer, train=False) for _ in range(num_runs)]
        cached_training = [startup(train, train=True) for _ in range(num_runs)]
    if not (first.num_built and first_training.num_built):
        raise RuntimeError("nothing was compiled: kernels of an install were used")
    if any(run.num_built for run in (*cached, *cached_training)):
        raise RuntimeError("the cache was not used: did the kernels' sources change meanwhile?")
    return StartupResult(
        first_call_s=first.beyond_torch_s,
        first_training_call_s=first_training.beyond_torch_s,
        cached_call_s=statistics.median(run.beyond_torch_s for run in cached),
        cached_training_call_s=statistics.median(run.beyond_torch_s for run in cached_training),
        compile_s=first_training.compile_s,
    )
