"""The limits of an attention kernel on this GPU, each measured alone: exponentials, fused
multiply-adds, tensor cores, reads out of L2, DRAM, float32 additions into L2. The kernels are in
ceilings.cu and compiled by the op's toolchain; matrix product and copy are PyTorch's.
"""

from __future__ import annotations

import ctypes
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from op_builder.toolchain import nvcc, nvcc_wheels
from op_builder.toolchain.host_compiler import find_host_compiler

SOURCE = Path(__file__).with_name("ceilings.cu")
NUM_RUNS = 7
NUM_THREADS, NUM_CHAINS = 256, 8  # kThreads and kChains of ceilings.cu
L2_BYTES = 16 * 2**20  # well below any L2 that holds a pair bias
COPY_BYTES = 4 * 2**30
MATMUL_SIZE = 8192


@dataclass(frozen=True)
class Ceilings:
    """Per second, the median of `NUM_RUNS` launches."""

    exponentials: float
    multiply_adds: float  # fp32, each one operation here
    tensor_flop: float  # bfloat16 with fp32 accumulation, two for each multiply-add
    l2_read_bytes: float  # every block reads elsewhere
    l2_shared_bytes: float  # all blocks read the same lines at about the same time
    l2_sums: float  # fp32 additions into L2
    dram_bytes: float  # read and written


def measure_ceilings(device: torch.device) -> Ceilings:
    with torch.cuda.device(device), tempfile.TemporaryDirectory() as folder:
        kernels = _compiled(Path(folder), torch.cuda.get_device_capability(device))
        blocks = 8 * torch.cuda.get_device_properties(device).multi_processor_count
        out = torch.zeros(NUM_THREADS, device=device)
        buffer = torch.zeros(L2_BYTES // 4, device=device)

        def launch(name: str, *arguments: object) -> Callable[[], None]:
            function = getattr(kernels, f"ceiling_{name}")

            def call() -> None:
                stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
                if status := function(*arguments, stream):
                    raise RuntimeError(f"ceiling_{name}: CUDA error {status}")

            return call

        to_out, to_buffer = (ctypes.c_void_p(x.data_ptr()) for x in (out, buffer))
        num_bytes = ctypes.c_int64(L2_BYTES)
        chains = 4096  # iterations
        operations = blocks * NUM_THREADS * NUM_CHAINS * chains
        left, right = (
            torch.randn(MATMUL_SIZE, MATMUL_SIZE, device=device, dtype=torch.bfloat16)
            for _ in range(2)
        )
        source = torch.zeros(COPY_BYTES, device=device, dtype=torch.int8)
        target = torch.empty_like(source)
        return Ceilings(
            exponentials=operations / _seconds(launch("exp2", to_out, blocks, chains)),
            multiply_adds=operations / _seconds(launch("fma", to_out, blocks, chains)),
            tensor_flop=2 * MATMUL_SIZE**3 / _seconds(lambda: left @ right),
            l2_read_bytes=blocks
            * L2_BYTES
            / _seconds(launch("read_l2", to_buffer, num_bytes, 0, to_out, blocks, 1)),
            l2_shared_bytes=blocks
            * L2_BYTES
            / _seconds(launch("read_l2", to_buffer, num_bytes, 1, to_out, blocks, 1)),
            l2_sums=blocks
            * (L2_BYTES // 4)
            / _seconds(launch("reduce_l2", to_buffer, num_bytes, blocks, 1)),
            dram_bytes=2 * COPY_BYTES / _seconds(lambda: target.copy_(source)),
        )


def _compiled(folder: Path, capability: tuple[int, int]) -> ctypes.CDLL:
    tool = next(iter(nvcc.survey().fit), None)
    if tool is None:
        raise RuntimeError(f"the ceilings need nvcc: {nvcc_wheels.install()}")
    library = folder / "ceilings.so"
    architecture = "{}{}".format(*capability)
    command = [
        *(str(tool.require()), *nvcc.FLAGS, *nvcc.local_flags(tool, find_host_compiler())),
        *("-gencode", f"arch=compute_{architecture},code=sm_{architecture}"),
        *("-shared", *nvcc.LINK_FLAGS, str(SOURCE), "-o", str(library)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{SOURCE.name}: {done.stderr.strip()}")
    return ctypes.CDLL(str(library))


def _seconds(call: Callable[[], object]) -> float:
    """Median time of a call on the device."""
    call()
    samples: list[float] = []
    for _ in range(NUM_RUNS):
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(end) / 1e3)
    return statistics.median(samples)
