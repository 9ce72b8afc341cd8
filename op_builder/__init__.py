"""Compiles C++ and CUDA sources into libraries, finds compiled ones, and loads them.

Importing this package is cheap, runs nothing, needs no torch and never raises: the names below are
imported on first use.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .ops.all_ops import ALL_OPS
    from .ops.builder import OpBuilder
    from .ops.cpu_builder import CPUOpBuilder
    from .ops.cuda_builder import CUDAOpBuilder
    from .ops.evoformer_attn import EvoformerAttnBuilder
    from .ops.evoformer_attn_cpu import EvoformerAttnCPUBuilder
    from .toolchain.tool import command_exists
    from .toolchain.toolkits import installed_cuda_version

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
    "ALL_OPS": "ops.all_ops",
    "CPUOpBuilder": "ops.cpu_builder",
    "CUDAOpBuilder": "ops.cuda_builder",
    "EvoformerAttnBuilder": "ops.evoformer_attn",
    "EvoformerAttnCPUBuilder": "ops.evoformer_attn_cpu",
    "OpBuilder": "ops.builder",
    "command_exists": "toolchain.tool",
    "installed_cuda_version": "toolchain.toolkits",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if not sys.platform.startswith("linux"):
        raise ImportError(
            f"deepspeed4science: expected Linux, where its kernels run, got {sys.platform}; "
            "use WSL 2 on Windows, and on a Mac a container or a machine with Linux"
        )
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value
