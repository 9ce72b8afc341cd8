"""From a described call to a kernel: `choose` asks the backends in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from deepspeed4science.backends import Backend, Kernel, in_order
from deepspeed4science.errors import NoBackendError
from deepspeed4science.problem import Problem

BACKENDS: tuple[Backend, ...] = in_order()


class KernelChoice(NamedTuple):
    """The kernel that computes a call, and why it is this one."""

    kernel: Kernel
    backend: Backend  # the backend of the kernel
    reason: str = ""  # why an earlier backend of the device does not take the call; empty: it does


def choose(problem: Problem, direction: str, tensors: Sequence[Tensor]) -> KernelChoice:
    """The kernel of the first backend that takes the call. Runs, loads and logs nothing.

    direction   "fwd" or "bwd"
    tensors     q, k, v, and in a backward o and do_ where they are known, as the caller has them

    Raises NoBackendError, with the reasons of every backend, when none takes it.
    """
    first, why = "", ""  # the device's first backend, and why it does not take the call
    for backend in BACKENDS:
        if backend.device_obstacle(problem.device):
            continue
        obstacles = backend.obstacles(problem, direction, tensors)
        if not obstacles:
            kernel = backend.spec(problem, direction, tensors)
            reason = first and f"{backend.name} takes the place of {first} ({direction}): {why}"
            return KernelChoice(kernel, backend, reason)
        if not first:
            first, why = backend.name, "; ".join(obstacles)
    raise _refusal(problem, direction, tensors)


def _refusal(problem: Problem, direction: str, tensors: Sequence[Tensor]) -> NoBackendError:
    reasons = []
    for backend in BACKENDS:
        obstacle = backend.device_obstacle(problem.device)
        obstacles = [obstacle] if obstacle else backend.obstacles(problem, direction, tensors)
        reasons.append(f"  {backend.name}: {'; '.join(obstacles)}\n")
    return NoBackendError(
        f"no backend takes this call ({problem}):\n{''.join(reasons)}"
        "`ds_report` shows what this machine can run; "
        "deepspeed4science.reference.evoformer_attention runs anywhere."
    )
