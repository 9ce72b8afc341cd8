"""From a described call to a kernel: `choose` walks over the backends and says who computes it, and
`run_forward`, `run_backward` do what was chosen.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deepspeed4science import params
from deepspeed4science.backends import Backend, Kernel, in_order
from deepspeed4science.backends.kernels import is_verbose
from deepspeed4science.call import BackwardCall, ForwardCall
from deepspeed4science.errors import KernelError, NoBackendError
from deepspeed4science.params import Layout
from deepspeed4science.problem import Problem

logger = logging.getLogger(__name__)

BACKENDS: tuple[Backend, ...] = in_order()

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


class KernelChoice(NamedTuple):
    """Who computes a call."""

    kernel: Kernel
    backend: Backend  # whose kernel it is
    reason: str = ""  # why it is not the first backend of the device; empty when it is


def choose(problem: Problem, direction: str, tensors: Sequence[Tensor]) -> KernelChoice:
    """The kernel of the first backend that takes the call. Runs nothing, loads nothing, says
    nothing.

    direction   "fwd" or "bwd"
    tensors     q, k, v, and of a backward o and do_ where they are known: some of them as they come

    Raises NoBackendError, with everybody's reasons, when none takes it.
    """
    first, why = "", ""  # whose place another takes
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


def run_forward(choice: KernelChoice, problem: Problem, call: ForwardCall) -> tuple[Tensor, Tensor]:
    """O `[B, N, Lq, H, Dv]`, and lse `[B, N, H, Lq]` in float32 (no elements unless asked for)."""
    p, backend = problem, choice.backend
    if call.with_lse:  # somebody will differentiate: both directions are compiled side by side
        _prefetch_backward(p, call)
    call = backend.prepare(p, call)
    o = torch.empty((p.B, p.N, p.Lq, p.H, p.Dv), dtype=call.q.dtype, device=p.device)
    if call.with_lse:
        lse = torch.empty((p.B, p.N, p.H, p.Lq), dtype=torch.float32, device=p.device)
    else:
        lse = torch.empty(0, dtype=torch.float32, device=p.device)
    q, k, v, bias1, bias2, with_lse, row_mask, _ = call
    packed = params.FWD.pack(
        p, q, k, v, bias1, bias2, row_mask, o, lse if with_lse else None, backend.options()
    )
    _launch(choice, p, params.FWD, packed)
    return (o if o.dtype == p.dtype else o.to(p.dtype)), lse


def _prefetch_backward(problem: Problem, call: ForwardCall) -> None:
    try:
        ahead = choose(problem, "bwd", call[:3])
    except NoBackendError:  # lse alone may be wanted; a backward says it itself
        return
    ahead.backend.kernels.prefetch(ahead.kernel)


def run_backward(choice: KernelChoice, problem: Problem, call: BackwardCall) -> Gradients:
    """dq, dk, dv in the dtype of Q, dbias1 `[B, N, 1, 1, Lk]` and dbias2 `[B, 1, H, Lq, Lk]` in
    float32; None where a gradient is not wanted.

    A softmax over one key (attention over the columns of a lone sequence) is 1 whatever its score:
    all gradients but dv are exactly 0, where a kernel would find what it rounded.
    """
    p, backend = problem, choice.backend
    one_key = p.Lk == 1 and not call.partial_keys
    new: Callable[..., Tensor] = torch.zeros if one_key else torch.empty
    call = backend.prepare(p, call)
    want_q, want_k, want_v, want_bias1, want_bias2 = call.wanted
    new_as_q = functools.partial(new, dtype=call.q.dtype, device=p.device)
    new32 = functools.partial(new, dtype=torch.float32, device=p.device)
    dq = new_as_q(call.q.shape) if want_q else None
    dk = new_as_q(call.k.shape) if want_k else None
    dv = torch.empty(call.v.shape, dtype=call.q.dtype, device=p.device) if want_v else None
    dbias1 = new32((p.B, p.N, 1, 1, p.Lk)) if want_bias1 else None
    dbias2 = new32((p.B, 1, p.H, p.Lq, p.Lk)) if want_bias2 else None
    computed = (None, None, dv, None, None) if one_key else (dq, dk, dv, dbias1, dbias2)
    if any(gradient is not None for gradient in computed):
        do_, q, k, v, o, lse, bias1, bias2, _, row_mask, _, partial_keys = call
        packed = params.BWD.pack(
            *(p, do_, q, k, v, o, lse, bias1, bias2, row_mask),
            *computed,
            partial_keys,
            backend.options(),
        )
        _launch(choice, p, params.BWD, packed)
    if call.q.dtype != p.dtype:
        dq, dk, dv = (None if one is None else one.to(p.dtype) for one in (dq, dk, dv))
    return dq, dk, dv, dbias1, dbias2


def _launch(choice: KernelChoice, problem: Problem, layout: Layout, packed: bytes) -> None:
    if choice.reason:
        _tell(choice.reason)
    kernel = choice.backend.kernels.load(choice.kernel)
    status = choice.backend.launch(kernel, layout, packed, problem.device)
    if status != 0:
        raise KernelError(
            f"{kernel.name} stopped with status {status}: {kernel.status_string(status)}. "
            f"Results of this call are not valid. The call was {problem}."
        )


_told: set[str] = set()


def _tell(reason: str) -> None:
    """Each reason once; on stderr, through logging, under DS4S_VERBOSE=1."""
    if reason in _told:
        return
    _told.add(reason)
    with contextlib.suppress(Exception):  # what can be shown decides over no call
        logger.log(logging.WARNING if is_verbose() else logging.INFO, reason)
