"""EvoformerAttnCPUBuilder: Evoformer attention on the CPU."""

from __future__ import annotations

from collections.abc import Iterable

from . import calls, cpu_isa, ending
from .calls import Call
from .cpu_builder import CPUOpBuilder
from .instantiations import DIRECTIONS, CpuKernel


class EvoformerAttnCPUBuilder(CPUOpBuilder):
    NAME = "evoformer_attn_cpu"
    BUILD_VAR = "DS_BUILD_EVOFORMER_ATTN_CPU"

    def kernel(self, *, direction: str, dtype: str) -> CpuKernel:
        """The kernel for this machine.

        direction   "fwd" or "bwd"
        dtype       "fp32", "fp16" or "bf16"

        Raises ToolchainError or BuildError when `DS4S_CPU_ISA` asks for what cannot be had.
        """
        with ending.slow_section():
            return CpuKernel(direction, dtype, cpu_isa.best(dtype))

    def default_kernels(self) -> list[CpuKernel]:
        return [self.kernel(direction=direction, dtype="fp32") for direction in DIRECTIONS]

    def prebuilt_kernels(self) -> list[CpuKernel]:
        """`calls.INSTALL_CPU`, for the processor that installs."""
        return self.kernels_for(calls.INSTALL_CPU)

    def kernels_for(self, wanted: Iterable[Call]) -> list[CpuKernel]:
        """The kernels that these calls would choose here, each once: one serves all biases and
        head dimensions.
        """
        chosen = (self.kernel(direction=one.direction, dtype=one.dtype) for one in wanted)
        return list(dict.fromkeys(chosen))
