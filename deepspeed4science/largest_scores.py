"""The largest score of each query, which cuEquivariance's triangle attention returns beside lse."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from deepspeed4science import autocast, registration
from deepspeed4science.call import LargestScores, schema
from deepspeed4science.dtensor import is_dtensor
from deepspeed4science.vmap import map_largest_scores


@torch.no_grad()
def largest_scores(
    q: Tensor, k: Tensor, bias: Tensor, visible: Tensor | None, scale: float | None
) -> Tensor:
    """`[B, N, H, Lq]`; `-inf` where a query sees no key."""
    q, k, _ = autocast.cast_inputs(q, k, k)
    is_traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined]
    if is_traced and not is_dtensor(q):  # the loop below would be N copies of its body
        traced: Tensor = _operator(q, k, bias, visible, None if scale is None else float(scale))
        return traced
    return _compute(q, k, bias, visible, scale)


def _compute(*arguments: Any, **named: Any) -> Tensor:
    """One row n after another, so that the scores of one row at a time are in memory."""
    q, k, bias, visible, scale = LargestScores(*arguments, **named)
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    B, N, Lq, H, _ = q.shape
    if N == 0:
        return q.new_empty((B, N, H, Lq), dtype=torch.float32)
    largest = []
    with autocast.off(q.device.type):
        for n in range(N):
            scores = torch.einsum("bqhd,bkhd->bhqk", q[:, n].float(), k[:, n].float()) * scale
            scores = scores + bias[:, 0].float()  # not in place, which vmap refuses
            if visible is not None:
                hidden = ~visible[:, min(n, visible.shape[1] - 1)]
                scores = scores.masked_fill(hidden, -math.inf)
            largest.append(scores.amax(dim=-1))
    return torch.stack(largest, dim=1)


def _fake(*arguments: Any, **named: Any) -> Tensor:
    q = LargestScores(*arguments, **named).q
    B, N, Lq, H, _ = q.shape
    return q.new_empty((B, N, H, Lq), dtype=torch.float32)


def _vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
    return map_largest_scores(_operator, info.batch_size, in_dims, *arguments)


(_operator,) = registration.register(
    registration.Operator(
        schema("evoformer_attn_largest_scores", LargestScores, num_results=1),
        kernels={"CompositeExplicitAutograd": _compute},
        fake=_fake,
        vmap=_vmap,
    )
)
