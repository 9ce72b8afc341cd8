"""Merges the results of attention over two sets of keys, math.md (18)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deepspeed4science.errors import InvalidInputError
from deepspeed4science.problem import shape_of


def merge_attention(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """(O, lse) over all keys, from the results over two disjoint sets of keys.

    O = s(lse1 - lse2) O1 + s(lse2 - lse1) O2 with s(x) = 1 / (1 + exp(-x)), and
    lse = log(exp(lse1) + exp(lse2)), in float32. More sets are merged one by one, in any order:
    with `o1` in float32 the result is float32, too, and is rounded once at the end. Where lse is
    large, such as -1e9 of a query whose keys are all padding, it has no digits left for the number
    of keys: O1 and O2 get the same weight, and of more sets the last ones the most. It has no
    derivatives.

    Args:
        o1, o2: `[*, Lq, H, Dv]`, float32, bfloat16 or float16.
        lse1, lse2: `[*, H, Lq]`, float32, as `return_lse=True` returns them: `-inf` where a query
            sees none of the keys; its O is then ignored.

    Returns:
        O in the promoted dtype of o1 and o2, 0 where a query sees no key of either set; and lse.

    Raises:
        InvalidInputError: shapes do not fit.

    Source: Milakov and Gimelshein, arXiv:1805.02867.
    """
    expected = (*o1.shape[:-3], o1.shape[-2], o1.shape[-3])
    if o2.shape != o1.shape or not lse1.shape == lse2.shape == expected:
        raise InvalidInputError(
            f"o1, lse1, o2, lse2: expected [*, Lq, H, Dv] and [*, H, Lq] = {list(expected)} of one "
            f"call; got {', '.join(shape_of(one) for one in (o1, lse1, o2, lse2))}."
        )
    with torch.no_grad():
        o = _part(o1, lse1, lse2) + _part(o2, lse2, lse1)
        lse = torch.logaddexp(lse1, lse2)
        return o.to(torch.promote_types(o1.dtype, o2.dtype)), lse


def _part(o: Tensor, lse: Tensor, other: Tensor) -> Tensor:
    weight = torch.where(lse == -math.inf, 0.0, (lse - other).sigmoid())
    weight = weight.transpose(-1, -2)[..., None]
    # 0 times NaN is NaN. masked_fill's result is contiguous, whatever the order of the weights.
    return (o * weight).masked_fill(weight == 0, 0.0)
