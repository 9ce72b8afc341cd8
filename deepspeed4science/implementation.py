"""What the operators compute: a call described, given to a backend, and its gradients in the shape
of what they belong to. Beside each, the same without values, for tracing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed4science import backends
from deepspeed4science.problem import describe


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias1: Tensor | None,
    bias2: Tensor | None,
    with_lse: bool,
    row_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    problem = describe(q, k, v, bias1, bias2, row_mask, scale)
    if problem.is_empty:
        return fake_forward(q, k, v, bias1, bias2, with_lse, row_mask, scale)
    backend = backends.select(problem)
    return backend.forward(problem, q, k, v, bias1, bias2, row_mask, with_lse=with_lse)


def fake_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias1: Tensor | None,
    bias2: Tensor | None,
    with_lse: bool,
    row_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    _check_what_is_known(q, k, v, bias1, bias2, row_mask, scale)
    B, N, Lq, H, _ = q.shape
    o = q.new_empty((B, N, Lq, H, v.shape[4]))
    return o, q.new_empty((B, N, H, Lq) if with_lse else (0,), dtype=torch.float32)


def backward(
    do_: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    bias1: Tensor | None,
    bias2: Tensor | None,
    wanted: list[bool],
    row_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    problem = describe(q, k, v, bias1, bias2, row_mask, scale)
    shapes = _gradient_likes(q, k, v, bias1, bias2, wanted)
    if problem.is_empty:
        return tuple(_empty_gradient(like, bias1, bias2).zero_() for like in shapes)
    backend = backends.select(problem)
    gradients = backend.backward(
        problem, do_, q, k, v, o, lse, bias1, bias2, row_mask, wanted=wanted
    )
    return tuple(
        like if gradient is None else _sum_to(gradient, like)
        for gradient, like in zip(gradients, shapes, strict=True)
    )


def _sum_to(gradient: Tensor, like: Tensor) -> Tensor:
    """The gradient of what was broadcast, in its own shape (docs/math.md, 15 and 16)."""
    if gradient.shape == like.shape:  # nearly always: 2 us less for each
        return gradient
    total = gradient.sum_to_size(like.shape)
    if like.shape[-1] < gradient.shape[-1]:
        total = total * 0.0  # the same for all keys changes nothing; NaN stays NaN
    return total


def fake_backward(
    do_: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    bias1: Tensor | None,
    bias2: Tensor | None,
    wanted: list[bool],
    row_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    _check_what_is_known(q, k, v, bias1, bias2, row_mask, scale)
    return tuple(
        _empty_gradient(like, bias1, bias2)
        for like in _gradient_likes(q, k, v, bias1, bias2, wanted)
    )


def _check_what_is_known(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> None:
    """As `describe`, unless sizes depend on data: then it checks them when the kernel runs."""
    tensors = [t for t in (q, k, v, *others) if isinstance(t, Tensor)]
    if any(isinstance(size, torch.SymInt) for tensor in tensors for size in tensor.shape):
        from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols

        if any(has_free_unbacked_symbols(tensor) for tensor in tensors):
            return
    describe(q, k, v, *others)


def _empty_gradient(like: Tensor, bias1: Tensor | None, bias2: Tensor | None) -> Tensor:
    of_bias = like is bias1 or like is bias2
    return torch.empty_like(
        like,
        dtype=torch.float32 if of_bias else like.dtype,
        memory_format=torch.contiguous_format,
    )


def _gradient_likes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias1: Tensor | None,
    bias2: Tensor | None,
    wanted: Sequence[bool],
) -> list[Tensor]:
    """What each gradient looks like: the input itself, or no elements where none is wanted."""
    return [
        tensor if want and tensor is not None else q.new_empty(0)
        for tensor, want in zip((q, k, v, bias1, bias2), wanted, strict=True)
    ]
