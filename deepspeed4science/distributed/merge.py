"""Merges the results of attention over two sets of keys, math.md (18)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deepspeed4science.errors import InvalidInputError
from deepspeed4science.problem import shape_of


def merge_attention(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """(O, lse) over all keys, from the results over two disjoint sets of keys.

    O = exp(lse1 - lse) O1 + exp(lse2 - lse) O2 with lse = log(exp(lse1) + exp(lse2)), in float32.
    The order of the sets does not matter, and more sets are merged one by one: with `o1` in float32
    the result is float32, too, and is rounded once at the end. It has no derivatives.

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
        lse = torch.logaddexp(lse1, lse2)
        reference = lse.masked_fill(lse == -math.inf, 0.0)
        parts = [_part(o1, lse1, reference), _part(o2, lse2, reference)]
        return (parts[0] + parts[1]).to(torch.promote_types(o1.dtype, o2.dtype)), lse


def _part(o: Tensor, lse: Tensor, reference: Tensor) -> Tensor:
    weight = (lse - reference).exp().transpose(-1, -2)[..., None]
    return torch.where(weight == 0, 0.0, weight * o)  # 0 times NaN is NaN
