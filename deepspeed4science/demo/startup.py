"""How long a new process waits for the op: a fresh Python, torch imported first, then ours."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

# Runs in the other process. torch is imported and its threads and device are started before our
# clock starts.
_PROGRAM = """
import json, sys, time
started = time.perf_counter()
import torch
device, dtype, train = sys.argv[1], getattr(torch, sys.argv[2]), sys.argv[3] == "train"
q = torch.randn(1, 4, 32, 4, 32, device=device, dtype=dtype)  # scores enough for a kernel
bias1, bias2 = q.new_zeros(1, 4, 1, 1, 32), q.new_zeros(1, 1, 4, 32, 32)
(q @ q.transpose(-1, -2)).sum().item()
torch_ready = time.perf_counter()
from deepspeed4science import DS4Sci_EvoformerAttention
imported = time.perf_counter()
with torch.set_grad_enabled(train):
    q.requires_grad_(train)
    o = DS4Sci_EvoformerAttention(q, q, q, [bias1, bias2])
    if train:
        o.sum().backward()
if q.is_cuda:
    torch.cuda.synchronize()
done = time.perf_counter()
from op_builder import paths
from op_builder.build import jit
from op_builder.cache import cache
built = [kernel.name for kernel in jit.loaded_kernels() if kernel.origin == "built"]
result = {
    "compile_s": {name: cache.last_seconds(paths.cache_root(), name) for name in built},
    "torch_s": torch_ready - started,
    "import_s": imported - torch_ready,
    "first_call_s": done - imported,
}
print(json.dumps(result))
"""


@dataclass(frozen=True)
class Startup:
    """Seconds that a new process spent on each step."""

    torch_s: float  # import torch, with its device and threads started
    import_s: float  # import deepspeed4science
    first_call_s: float  # first call, kernels loaded (or compiled) in it
    # Of each kernel that it had to compile, side by side; None: the cache does not tell.
    compile_s: dict[str, float | None] = field(default_factory=dict)

    @property
    def num_built(self) -> int:
        return len(self.compile_s)

    @property
    def beyond_torch_s(self) -> float:
        return self.import_s + self.first_call_s


def measure_startup(
    *,
    device: str,
    dtype: str,
    train: bool = False,
    cache_dir: Path | None = None,
) -> Startup:
    """Start Python anew and make one tiny call; `train` adds the backward pass.

    `cache_dir` replaces the folder of compiled kernels: an empty one shows what a first call on a
    bare machine costs.

    Raises:
        RuntimeError: the process failed; the message ends with what it printed.
    """
    # env(1) sets variables for that process alone: nothing here touches our own environment.
    place = []
    if cache_dir is not None:
        place = ["env", "-u", "DS4S_CACHE_PATH", f"DS4S_CACHE_DIR={cache_dir}"]
    command = [*place, sys.executable, "-c", _PROGRAM, device, dtype, "train" if train else "infer"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(
            f"the second process failed with exit code {done.returncode}:\n{done.stderr[-2000:]}"
        )
    return Startup(**json.loads(done.stdout.splitlines()[-1]))
