"""The operators below autograd, where nothing is recorded. A call of a kind that was made before is
replayed (replay.py); others go through PyTorch's dispatcher.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deepspeed4science import implementation
from deepspeed4science.call import BackwardCall, ForwardCall, Gradients
from deepspeed4science.replay import Replay, tensors_of

differentiable_forwards = Replay(partial(implementation.prepare_forward, differentiable=True))
other_forwards = Replay(partial(implementation.prepare_forward, differentiable=False))
backwards = Replay(partial(implementation.prepare_backward, rounds=True))
backwards_into = Replay(implementation.prepare_backward_into)


def forward(call: ForwardCall, *, differentiable: bool) -> tuple[Tensor, Tensor | None]:
    """The forward operator, not recorded by autograd: O, and lse, which may be None if it is not
    wanted. Q, K and V have autocast's dtype already.

    differentiable   the backward may follow, and is compiled beside the forward
    """
    replay = differentiable_forwards if differentiable else other_forwards
    tensors, given = tensors_of(call)
    compute = replay.find(call, tensors, given, call.with_lse, call.scale)
    if compute is not None:
        return compute(call)
    with torch._C._AutoDispatchBelowAutograd():
        o, lse = _operators().evoformer_attn.default(*call)
    return o, lse


def backward(call: BackwardCall) -> Gradients:
    """The backward operator, not recorded by autograd. Bias gradients are in float32 or already
    rounded to the dtype of the bias.
    """
    tensors, given = tensors_of(call)
    tensors += call.do_, call.o, call.lse
    kind = given, tuple(call.wanted), call.scale, call.partial_keys
    compute = backwards.find(call, tensors, *kind)
    if compute is not None:
        return compute(call)
    with torch._C._AutoDispatchBelowAutograd():
        dq, dk, dv, dbias1, dbias2 = (
            one if want else None
            for one, want in zip(
                _operators().evoformer_attn_backward.default(*call), call.wanted, strict=True
            )
        )
    return dq, dk, dv, dbias1, dbias2


def backward_into(call: BackwardCall, into: Sequence[Tensor]) -> Tensor:
    """The backward within another operator: writes dq, dk and dv to `into`, tensors with the
    strides of q, k and v, and returns dbias2 in float32. All of them are wanted.
    """
    tensors, given = tensors_of(call)
    tensors += call.do_, call.o, call.lse
    compute = backwards_into.find(call, tensors, given, tuple(call.wanted), call.scale)
    if compute is None:
        compute = implementation.prepare_backward_into(call)
    dbias2 = compute(call, into)[4]
    assert dbias2 is not None
    return dbias2


def _operators() -> Any:
    """The registered operators. operators.py registers them, and imports this module."""
    return torch.ops.deepspeed4science


def forget() -> None:
    """Drops all kept kinds of calls, for code that replaces parts of the program while it runs."""
    for replay in (differentiable_forwards, other_forwards, backwards, backwards_into):
        replay.forget()
