"""The CPU backend: vectorised C++ for the processor at hand."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepspeed4science.backend import DTYPE_NAMES, Backend
from deepspeed4science.problem import Problem
from op_builder import EvoformerAttnCPUBuilder
from op_builder.cache.loaded_kernel import LoadedKernel
from op_builder.ops.instantiations import CpuKernel
from op_builder.toolchain import openmp


class CpuBackend(Backend):
    """Results do not depend on the number of threads."""

    name = "Cpu"

    def __init__(self) -> None:
        self._builder = EvoformerAttnCPUBuilder()
        self._kernels: dict[tuple[str, torch.dtype], LoadedKernel] = {}
        self._prefetched: set[torch.dtype] = set()

    def not_supported_reasons(self, problem: Problem) -> list[str]:
        if problem.device.type != "cpu":
            return [f"tensors are on {problem.device}, not on the CPU"]
        return []

    def _prefetch_backward(self, problem: Problem, inputs: Sequence[Tensor]) -> None:
        if problem.dtype not in self._prefetched:
            self._prefetched.add(problem.dtype)
            self._builder.prefetch([self._spec("bwd", problem.dtype)])

    def _kernel(
        self, direction: str, problem: Problem, tensors: Sequence[Tensor | None]
    ) -> LoadedKernel:
        key = (direction, problem.dtype)
        kernel = self._kernels.get(key)
        if kernel is None:
            spec = self._spec(direction, problem.dtype)
            kernel = self._kernels[key] = self._builder.load(kernels=[spec]).kernel(spec)
        return kernel

    def _spec(self, direction: str, dtype: torch.dtype) -> CpuKernel:
        return self._builder.kernel(direction=direction, dtype=DTYPE_NAMES[dtype])

    def _options(self, problem: Problem) -> tuple[int, int]:
        return openmp.threads(torch.get_num_threads()), 1

    def _run(self, kernel: LoadedKernel, packed: bytes, device: torch.device) -> int:
        return kernel.run(packed, 0)
