"""How C++ and CUDA become loaded libraries.

Importing it costs little, runs nothing, needs no torch and never raises.
"""

from __future__ import annotations

from typing import Any

from .builder import OpBuilder
from .cpu_builder import CPUOpBuilder
from .cuda_builder import CUDAOpBuilder
from .evoformer_attn import EvoformerAttnBuilder
from .evoformer_attn_cpu import EvoformerAttnCPUBuilder
from .toolchain import command_exists, installed_cuda_version

__all__ = [
    "ALL_OPS",
    "CPUOpBuilder",
    "CUDAOpBuilder",
    "EvoformerAttnBuilder",
    "EvoformerAttnCPUBuilder",
    "OpBuilder",
    "command_exists",
    "installed_cuda_version",
]

# Every op by name, in the order in which reports list them.
ALL_OPS: dict[str, OpBuilder[Any]] = {
    builder.NAME: builder for builder in (EvoformerAttnBuilder(), EvoformerAttnCPUBuilder())
}
