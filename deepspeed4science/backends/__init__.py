"""Who computes calls: one module for each kind of kernels, none of which knows of another. The walk
over them is `deepspeed4science.dispatch`'s.
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
    """One kind of kernels. `tensors` are q, k, v, and of a backward o and do_ where they are known,
    before `prepare`.
    """

    name: str  # in messages
    kernels: Kernels

    def device_obstacle(self, device: torch.device) -> str:
        """Why the calls of a device are not this backend's; empty when they are."""

    def obstacles(self, problem: Problem, direction: str, tensors: Sequence[Tensor]) -> list[str]:
        """Why it cannot take a call on one of its devices; empty when it can."""

    def spec(self, problem: Problem, direction: str, tensors: Sequence[Tensor]) -> Any:
        """The kernel for a call without obstacles: a row of op_builder's instantiations.py."""

    def prepare(self, problem: Problem, call: CallT) -> CallT:
        """The call as kernels read it. They compute in the dtype that q has then."""

    def options(self) -> Options:
        """Those of the process."""

    def workspace_bytes(self, kernel: LoadedKernel, packed: bytes, device: torch.device) -> int:
        """What `packed.workspace` must hold, which addresses have no part in but for their
        alignment.
        """

    def launch(self, kernel: LoadedKernel, packed: bytes, device: torch.device) -> int:
        """Run the kernel, and return its status."""


def in_order() -> tuple[Backend, ...]:
    """The CPU's, since its refusal is the cheapest; then every CUDA family's, newest first."""
    found = [importlib.import_module(f"{__name__}.cpu").backend()]
    for family in reversed(FAMILIES.values()):
        module = importlib.import_module(f"{__name__}.{family.backend}")
        found.append(module.backend(family))
    return tuple(found)
