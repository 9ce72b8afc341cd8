"""The CPU: vectorised C++ for the processor at hand. Results do not depend on the number of
threads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepspeed4science.backends.kernels import Kernels
from deepspeed4science.backends.prepare import CallT, unit_strides
from deepspeed4science.params import Options
from deepspeed4science.problem import DTYPE_NAMES, Problem
from op_builder import EvoformerAttnCPUBuilder
from op_builder.cache.loaded_kernel import LoadedKernel
from op_builder.ops.instantiations import CpuKernel
from op_builder.toolchain import openmp


class CpuBackend:
    name = "Cpu"
    pads_dbias2 = False

    def __init__(self) -> None:
        self._builder = EvoformerAttnCPUBuilder()
        self.kernels = Kernels(self._builder)
        self._specs: dict[tuple[str, torch.dtype], CpuKernel] = {}

    def device_obstacle(self, device: torch.device) -> str:
        return "" if device.type == "cpu" else f"tensors are on {device}, not on the CPU"

    def obstacles(self, problem: Problem, direction: str, tensors: Sequence[Tensor]) -> list[str]:
        return []

    def spec(self, problem: Problem, direction: str, tensors: Sequence[Tensor]) -> CpuKernel:
        """One kernel serves all sizes and biases of a dtype."""
        key = (direction, problem.dtype)
        spec = self._specs.get(key)
        if spec is None:
            dtype = DTYPE_NAMES[problem.dtype]
            spec = self._specs[key] = self._builder.kernel(direction=direction, dtype=dtype)
        return spec

    def prepare(self, problem: Problem, call: CallT) -> CallT:
        return unit_strides(call)

    def rounds_dbias2(self, problem: Problem) -> bool:
        return False

    def options(self) -> Options:
        return Options(openmp.threads(torch.get_num_threads()), 1)  # always deterministic

    def workspace_bytes(self, kernel: LoadedKernel, packed: bytes, device: torch.device) -> int:
        return kernel.workspace_bytes(packed)

    def launch(self, kernel: LoadedKernel, packed: bytes, device: torch.device) -> int:
        return kernel.run(packed, 0)


backend = CpuBackend
