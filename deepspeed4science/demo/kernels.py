"""The two implementations the demo compares, and which compiled kernels this process has loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deepspeed4science import DS4Sci_EvoformerAttention
from deepspeed4science.reference import evoformer_attention
from op_builder.build import jit

Biases = Sequence[torch.Tensor | None]


@dataclass(frozen=True)
class LoadedKernelInfo:
    """One compiled kernel in this process."""

    name: str
    origin: str  # "built" | "cache" | "prebuilt"


def op(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, biases: Biases) -> torch.Tensor:
    """The op."""
    return DS4Sci_EvoformerAttention(q, k, v, biases)


def eager_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, biases: Biases
) -> torch.Tensor:
    """The op's definition in plain PyTorch."""
    bias1, bias2 = (*biases, None, None)[:2]
    return evoformer_attention(q, k, v, bias1, bias2)


def loaded_kernels() -> tuple[LoadedKernelInfo, ...]:
    """Every kernel that this process has loaded, by name."""
    return tuple(LoadedKernelInfo(kernel.name, kernel.origin) for kernel in jit.loaded_kernels())
