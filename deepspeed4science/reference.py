"""The definition of the op in plain PyTorch: the specification that every backend is compared with.

Nothing here is fast. Given float64 tensors it is the reference of the error law; given tensors of
the working dtype it is the eager implementation that the law compares with.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def evoformer_attention(
    q: Tensor, k: Tensor, v: Tensor, bias1: Tensor | None = None, bias2: Tensor | None = None
) -> Tensor:
    """softmax(Q K^T / sqrt(D) + bias1 + bias2) V, in the dtype of the inputs.

    Args:
        q: `[*, Lq, H, D]`.
        k: `[*, Lk, H, D]`.
        v: `[*, Lk, H, Dv]`.
        bias1: broadcastable to `[*, 1, 1, Lk]` (key mask), or None.
        bias2: broadcastable to `[*, H, Lq, Lk]` with size 1 in the last dimension of `*` (pair
            bias), or None.

    Returns:
        `[*, Lq, H, Dv]`. A row whose scores are all `-inf` is 0, and so are its gradients.
    """
    scores = torch.einsum("...qhd,...khd->...hqk", q, k) / math.sqrt(q.shape[-1])
    for bias in (bias1, bias2):
        if bias is not None:
            scores = scores + bias.to(scores.dtype)
    no_visible_key = scores.amax(dim=-1, keepdim=True) == -math.inf
    weights = scores.masked_fill(no_visible_key, 0.0).softmax(dim=-1)
    weights = weights.masked_fill(no_visible_key, 0.0)
    return torch.einsum("...hqk,...khd->...qhd", weights, v)
