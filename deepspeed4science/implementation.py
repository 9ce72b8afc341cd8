"""What the operators compute: a call is described, dispatch finds its kernel and runs it, gradients
get the shape of what they belong to. Beside each, the same without values, for tracing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepspeed4science import dispatch, few_scores
from deepspeed4science.call import BackwardCall, Call, ForwardCall
from deepspeed4science.problem import describe


def forward(*arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
    """A `ForwardCall`'s arguments."""
    call = ForwardCall(*arguments, **named)
    problem = describe(call)
    if problem.is_empty:
        return _empty_results(call)
    choice = dispatch.choose(problem, "fwd", call[:3])
    if few_scores.serves(problem):
        return few_scores.forward(problem, call)
    return dispatch.run_forward(choice, problem, call)


def fake_forward(*arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
    call = ForwardCall(*arguments, **named)
    _check_what_is_known(call)
    return _empty_results(call)


def _empty_results(call: ForwardCall) -> tuple[Tensor, Tensor]:
    B, N, Lq, H, _ = call.q.shape
    o = call.q.new_empty((B, N, Lq, H, call.v.shape[4]))
    lse_shape = (B, N, H, Lq) if call.with_lse else (0,)
    return o, call.q.new_empty(lse_shape, dtype=torch.float32)


def backward(*arguments: Any, **named: Any) -> tuple[Tensor, ...]:
    """A `BackwardCall`'s arguments."""
    call = BackwardCall(*arguments, **named)
    problem = describe(call)
    likes = _gradient_likes(call)
    if problem.is_empty:
        return tuple(_empty_gradient(like, call).zero_() for like in likes)
    choice = dispatch.choose(problem, "bwd", (call.q, call.k, call.v, call.o, call.do_))
    if few_scores.serves(problem) and not call.partial_keys:
        gradients = few_scores.backward(problem, call)
    else:
        gradients = dispatch.run_backward(choice, problem, call)
    return tuple(
        like if gradient is None else _sum_to(gradient, like)
        for gradient, like in zip(gradients, likes, strict=True)
    )


def fake_backward(*arguments: Any, **named: Any) -> tuple[Tensor, ...]:
    call = BackwardCall(*arguments, **named)
    _check_what_is_known(call)
    return tuple(_empty_gradient(like, call) for like in _gradient_likes(call))


def _sum_to(gradient: Tensor, like: Tensor) -> Tensor:
    """The gradient of what was broadcast, in its own shape (docs/math.md, 15 and 16)."""
    if gradient.shape == like.shape:  # nearly always: 2 us less for each
        return gradient
    total = gradient.sum_to_size(like.shape)
    if like.shape[-1] < gradient.shape[-1]:
        total = total * 0.0  # the same for all keys changes nothing; NaN stays NaN
    return total


def _check_what_is_known(call: Call) -> None:
    """As `describe`, unless sizes depend on data: then it checks them when the kernel runs."""
    tensors = [one for one in call if isinstance(one, Tensor)]
    if any(isinstance(size, torch.SymInt) for tensor in tensors for size in tensor.shape):
        from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols

        if any(has_free_unbacked_symbols(tensor) for tensor in tensors):
            return
    describe(call)


def _empty_gradient(like: Tensor, call: BackwardCall) -> Tensor:
    of_bias = like is call.bias1 or like is call.bias2
    return torch.empty_like(
        like,
        dtype=torch.float32 if of_bias else like.dtype,
        memory_format=torch.contiguous_format,
    )


def _gradient_likes(call: BackwardCall) -> list[Tensor]:
    """What each gradient looks like: the input itself, or no elements where none is wanted."""
    inputs = (call.q, call.k, call.v, call.bias1, call.bias2)
    return [
        tensor if want and tensor is not None else call.q.new_empty(0)
        for tensor, want in zip(inputs, call.wanted, strict=True)
    ]
