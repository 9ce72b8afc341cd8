"""The definition of the op in plain PyTorch: every backend is compared with it.

Nothing here is fast. With float64 tensors it is the reference of the error law, math.md (17); with
tensors of the working dtype it is the eager implementation of that law.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def evoformer_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    *,
    scale: float | None = None,
    row_mask: Tensor | None = None,
) -> Tensor:
    """softmax(scale Q K^T + bias1 + bias2) V, math.md (1) to (5), in the dtype of the inputs.

    Args:
        q: `[*, Lq, H, D]`.
        k: `[*, Lk, H, D]`.
        v: `[*, Lk, H, Dv]`.
        bias1: broadcastable to `[*, 1, 1, Lk]` (key mask), or None. In a mask of booleans or
            integers, a key is seen where it is not 0.
        bias2: broadcastable to `[*, H, Lq, Lk]` with size 1 in the last dimension of `*` (pair
            bias), or None.
        scale: a number; default 1 / sqrt(D).
        row_mask: bool, broadcastable to `[*]`, or None. Where it is False the result and its
            gradients are 0.

    Returns:
        `[*, Lq, H, Dv]`. A query whose scores are all `-inf` gives 0 and contributes 0 to all
        gradients, whatever v and the gradient of the result hold there.
    """
    hidden = None if row_mask is None else ~row_mask[..., None, None, None]
    if hidden is not None:  # whatever such a row holds, NaN included, reaches no gradient
        q, k, v = (tensor.masked_fill(hidden, 0.0) for tensor in (q, k, v))
    scores = torch.einsum("...qhd,...khd->...hqk", q, k)
    scores = scores / math.sqrt(q.shape[-1]) if scale is None else scores * scale
    if bias1 is not None:
        if not bias1.is_floating_point():
            bias1 = torch.zeros_like(bias1, dtype=q.dtype).masked_fill(bias1 == 0, -math.inf)
        scores = scores + _shifted(bias1.to(scores.dtype))
    if bias2 is not None:
        scores = scores + bias2.to(scores.dtype)
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    no_visible_key = scores.amax(dim=-1, keepdim=True) == -math.inf
    weights = scores.masked_fill(no_visible_key, 0.0).softmax(dim=-1)
    weights = weights.masked_fill(no_visible_key, 0.0)
    out = torch.einsum("...hqk,...khd->...qhd", weights, v)
    return out.masked_fill(no_visible_key.transpose(-3, -2), 0.0)  # 0 times NaN is NaN


def _shifted(bias1: Tensor) -> Tensor:
    """bias1 less its shift, math.md (1a), which changes no softmax. Where one large finite number
    hides all keys, scores would lose all digits beside it.
    """
    finite = bias1.detach().masked_fill(~bias1.isfinite(), -math.inf)
    largest = finite.amax(dim=-1, keepdim=True)
    return bias1 - largest.masked_fill(largest == -math.inf, 0.0)
