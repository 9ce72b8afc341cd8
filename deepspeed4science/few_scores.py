"""Calls of few scores on a GPU, in float64 by PyTorch's own operators.

In such calls nearly all of the error comes from the rounding of a handful of scores, or, in 16
bits, of the O from which delta is computed; no kernel keeps the error law there (docs/math.md,
"Where the law depends on chance"). Over many scores these errors average out. With few, exactness
costs some launches. On a CPU, where only float32 needs it, csrc/.../cpu/few_scores.h does the same.

Matrix products are written as sums of elements: cuBLAS's would refuse to run under
`torch.use_deterministic_algorithms` without its environment variable. Equation numbers are those of
docs/math.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed4science.call import BackwardCall, Call, ForwardCall, Gradients
from deepspeed4science.problem import Problem, mask_threshold

MOST_SCORES = 4096


def serves(problem: Problem) -> bool:
    p = problem
    few = p.B * p.N * p.H * p.Lq * p.Lk <= MOST_SCORES
    return few and p.device.type == "cuda" and not p.partial_keys


def forward(problem: Problem, call: ForwardCall) -> tuple[Tensor, Tensor | None]:
    """O and, where it is wanted, lse of the shifted scores, as kernels return them."""
    mask = _Mask.of(problem, call)
    weights, lse, unseen = _weights(problem, mask, call)
    values = mask.of_keys(call.v)
    o = (weights[..., None] * values[..., None, :, :]).sum(-2)  # (5)
    o = o.masked_fill(unseen, 0.0).transpose(2, 3).to(problem.dtype).contiguous()
    return o, lse.float() if call.with_lse else None


def backward(problem: Problem, call: BackwardCall) -> Gradients:
    """dq, dk, dv, dbias1 `[B, N, 1, 1, Lk]`, dbias2 `[B, 1, H, Lq, Lk]`; None where not wanted."""
    mask = _Mask.of(problem, call)
    weights, _, unseen = _weights(problem, mask, call)
    queries, keys, values = mask.of_queries(call.q), mask.of_keys(call.k), mask.of_keys(call.v)
    of_o = call.do_.double().transpose(2, 3).masked_fill(unseen, 0.0)[..., None, :]
    dp = (of_o * values[..., None, :, :]).sum(-1)  # (10)
    delta = (weights * dp).sum(-1, keepdim=True)  # (9)
    ds = (weights * (dp - delta)).masked_fill(unseen, 0.0)  # (11)

    def as_input(gradient: Tensor) -> Tensor:
        return gradient.transpose(2, 3).to(problem.dtype).contiguous()

    want_q, want_k, want_v, want_bias1, want_bias2 = call.wanted
    scaled = ds[..., None] * problem.scale
    return (
        as_input((scaled * keys[..., None, :, :]).sum(-2)) if want_q else None,  # (13)
        as_input((scaled * queries[..., None, :]).sum(-3)) if want_k else None,  # (14)
        as_input((weights[..., None] * of_o).sum(-3)) if want_v else None,  # (12)
        ds.sum((2, 3))[:, :, None, None].float() if want_bias1 else None,  # (15)
        ds.sum(1, keepdim=True).float() if want_bias2 else None,  # (16)
    )


@dataclass(frozen=True)
class _Mask:
    """The visible keys and rows, as bias1 and row_mask say; hidden ones are read as 0."""

    bias1: Tensor  # [B, N, 1, 1, Lk], less its shift, math.md (1a); -inf where a key is hidden
    hidden: Tensor  # the same shape

    @staticmethod
    def of(problem: Problem, call: Call) -> _Mask:
        p, bias1, row_mask = problem, call.bias1, call.row_mask
        shape = (p.B, p.N, 1, 1, p.Lk)
        if bias1 is None:
            shifted = torch.zeros(shape, dtype=torch.float64, device=p.device)
            hidden = torch.zeros(shape, dtype=torch.bool, device=p.device)
        else:
            threshold = mask_threshold(bias1)
            bias1 = bias1.double().expand(shape)
            below = torch.where(bias1 < math.inf, bias1, -math.inf)  # -inf in place of NaN, too
            largest = below.amax(-1, keepdim=True)
            is_largest = (bias1 == largest) & (bias1 > -math.inf)
            hidden = (bias1 <= largest - threshold) & ~is_largest  # (6a)
            shifted = bias1 - largest.masked_fill(largest == -math.inf, 0.0)
        if row_mask is not None:
            hidden = hidden | ~row_mask[:, :, None, None, None]
        return _Mask(shifted.masked_fill(hidden, -math.inf), hidden)

    def of_keys(self, tensor: Tensor) -> Tensor:
        """`[B, N, H, Lk, D]` of k or v."""
        return tensor.double().transpose(2, 3).masked_fill(self.hidden.transpose(-1, -2), 0.0)

    def of_queries(self, tensor: Tensor) -> Tensor:
        """`[B, N, H, Lq, D]` of q or of dO; zeros in a row n that sees nothing."""
        sees_nothing = self.hidden.all(-1, keepdim=True)
        return tensor.double().transpose(2, 3).masked_fill(sees_nothing, 0.0)


def _weights(problem: Problem, mask: _Mask, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """P `[B, N, H, Lq, Lk]`, lse `[B, N, H, Lq]`, and which queries see no key, bool
    `[B, N, H, Lq, 1]`.
    """
    queries, keys = mask.of_queries(call.q)[..., None, :], mask.of_keys(call.k)[..., None, :, :]
    scores = (queries * keys).sum(-1) * problem.scale + mask.bias1  # (1)
    if call.bias2 is not None:
        scores = scores + call.bias2.double()
    scores = scores.masked_fill(mask.hidden, -math.inf)
    largest = scores.amax(-1, keepdim=True)
    unseen = largest == -math.inf
    exponentials = (scores - largest.masked_fill(unseen, 0.0)).exp()
    total = exponentials.sum(-1, keepdim=True)
    weights = (exponentials / total).masked_fill(unseen, 0.0)
    return weights, (largest + total.log()).squeeze(-1), unseen
