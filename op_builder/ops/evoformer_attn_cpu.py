"""EvoformerAttnCPUBuilder: Evoformer attention on the CPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .. import env
from ..cache import search
from ..system import process_exit
from ..toolchain import cpu_isa
from ..toolchain.cpu_isa import CpuIsa
from . import presets
from .cpu_builder import CPUOpBuilder
from .instantiations import CPU_KERNELS, DIRECTIONS, CpuKernel
from .presets import Call


class EvoformerAttnCPUBuilder(CPUOpBuilder[CpuKernel]):
    NAME = "evoformer_attn_cpu"
    BUILD_VAR = "DS_BUILD_EVOFORMER_ATTN_CPU"

    def kernel(self, *, direction: str, dtype: str) -> CpuKernel:
        """The kernel for this machine.

        direction   "fwd" or "bwd"
        dtype       "fp32", "fp16" or "bf16"

        Raises ToolchainError or BuildError where `DS4S_CPU_ISA` names a set that cannot be used.
        """
        with process_exit.slow_section():
            return _chosen(cpu_isa.detect(), direction, dtype)

    def default_kernels(self) -> list[CpuKernel]:
        return [self.kernel(direction=direction, dtype="fp32") for direction in DIRECTIONS]

    def prebuilt_kernels(self) -> list[CpuKernel]:
        """`presets.INSTALL_CPU`, for the processor that installs."""
        return self.kernels_for(presets.INSTALL_CPU)

    def kernels_for(self, wanted: Iterable[Call]) -> list[CpuKernel]:
        """The kernels that these calls would choose here, each once: one serves all biases and
        head dimensions.
        """
        with process_exit.slow_section():
            found = cpu_isa.detect()  # once: an unfit compiler is tried at each search for one
            chosen = (_chosen(found, one.direction, one.dtype) for one in wanted)
            return list(dict.fromkeys(chosen))


def _chosen(found: CpuIsa, direction: str, dtype: str) -> CpuKernel:
    best = CpuKernel(direction, dtype, found.best(dtype))
    if found.compiler.ok or env.text("DS4S_CPU_ISA"):
        return best
    return next(_held(direction, dtype), best)


def _held(direction: str, dtype: str) -> Iterator[CpuKernel]:
    """The instruction sets of compiled kernels that this processor runs, best first; without a
    compiler there is no other choice. They may be older ones than this processor's, from another
    compiler or for other machines.
    """
    for kernel in CPU_KERNELS:  # of a direction and dtype, best first
        wanted = (kernel.direction, kernel.dtype) == (direction, dtype)
        if wanted and search.holds(f"{kernel.name}-") and not cpu_isa.why_not_here(kernel.isa):
            yield kernel
