"""The backends: one module for each kind of kernels, none of which knows of another.
`deepspeed4science.dispatch` chooses among them.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from deepspeed4science.backends.kernels import Kernels
from deepspeed4science.backends.prepare import CallT
from deepspeed4science.params import Options
from deepspeed4science.problem import Problem
from op_builder.cache.loaded_kernel import LoadedKernel
from op_builder.ops.instantiations import FAMILIES, CpuKernel, CudaKernel

Kernel = CpuKernel | CudaKernel


class Backend(Protocol):
    """One kind of kernels. `tensors` are q, k, v, and in a backward o and do_ where they are known,
    before `prepare`.
    """

    name: str  # in messages
    kernels: Kernels
    pads_dbias2: bool  # some kernels want rows of dbias2 that begin at multiples of 16 bytes

    def device_obstacle(self, device: torch.device) -> str:
        """Why this backend takes no calls on a device; empty where it does."""

    def obstacles(self, problem: Problem, direction: str, tensors: Sequence[Tensor]) -> list[str]:
        """Why it does not take a call on one of its devices; empty where it does."""

    def spec(self, problem: Problem, direction: str, tensors: Sequence[Tensor]) -> Any:
        """The kernel for a call without obstacles: a row of op_builder's instantiations.py."""

    def prepare(self, problem: Problem, call: CallT) -> CallT:
        """The call with tensors that kernels can read. They compute in the dtype of that q."""

    def rounds_dbias2(self, problem: Problem) -> bool:
        """Whether a kernel should round dbias2 however large it is: with dq, dk and dv that is
        faster, and takes no more memory than sums in float32 that autograd rounds.
        """

    def options(self) -> Options:
        """The settings of the process that are parameters of kernels."""

    def workspace_bytes(self, kernel: LoadedKernel, packed: bytes, device: torch.device) -> int:
        """Size of the workspace that `packed` needs, or -1: not with these strides of dbias2. It
        depends on addresses by their alignment only.
        """

    def launch(self, kernel: LoadedKernel, packed: bytes, device: torch.device) -> int:
        """Launch the kernel and return its status."""


def in_order() -> tuple[Backend, ...]:
    """The CPU's backend, whose refusal is the cheapest; then every CUDA family's, newest first."""
    found = [importlib.import_module(f"{__name__}.cpu").backend()]
    for family in reversed(FAMILIES.values()):
        module = importlib.import_module(f"{__name__}.{family.backend}")
        found.append(module.backend(family))
    return tuple(found)
