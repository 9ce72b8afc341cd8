"""How C++ and CUDA become loaded libraries.

Importing it costs little, runs nothing, needs no torch and never raises: the names below arrive on
first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .all_ops import ALL_OPS
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

_HOME = {
    "ALL_OPS": "all_ops",
    "CPUOpBuilder": "cpu_builder",
    "CUDAOpBuilder": "cuda_builder",
    "EvoformerAttnBuilder": "evoformer_attn",
    "EvoformerAttnCPUBuilder": "evoformer_attn_cpu",
    "OpBuilder": "builder",
    "command_exists": "toolchain",
    "installed_cuda_version": "toolchain",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value
