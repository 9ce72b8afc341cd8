"""The two functions of the module that DeepSpeed's `EvoformerAttnBuilder().load()` returns. They
write results to tensors of the caller, and autograd does not record them.

q, k, v [*, L, H, D]; lse [prod(*), H, at least Lq]; a bias without elements counts as no bias
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deepspeed4science.arguments import canonicalise
from deepspeed4science.operators import backward_op, forward_op


@torch.no_grad()
def attention(
    q: Tensor, k: Tensor, v: Tensor, bias1: Tensor, bias2: Tensor, o: Tensor, lse: Tensor
) -> None:
    """Write O and lse. This lse is for `attention_bwd`: it is that of shifted scores, math.md (1a).
    `DS4Sci_EvoformerAttention(..., return_lse=True)` gives that of the scores themselves.
    """
    arguments = canonicalise(q, k, v, _given(bias1), _given(bias2))
    own_o, own_lse = forward_op(*arguments, True)
    o.copy_(own_o.reshape(o.shape))
    _part(lse, q).copy_(own_lse.flatten(0, 1))


@torch.no_grad()
def attention_bwd(
    go: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    delta: Tensor,
    bias1: Tensor,
    bias2: Tensor,
    gq: Tensor,
    gk: Tensor,
    gv: Tensor,
    gb1: Tensor,
    gb2: Tensor,
) -> None:
    """Write dq, dk and dv into `gq`, `gk` and `gv`; add dbias1 and dbias2 to `gb1` and `gb2` where
    these have elements. `delta` is not written: kernels here keep it in their workspace.
    """
    arguments = canonicalise(q, k, v, _given(bias1), _given(bias2))
    do_, own_o, _, _, _ = canonicalise(go, o.contiguous(), o, None, None)
    B, N, Lq, H, _ = arguments[0].shape
    own_lse = _part(lse, q).reshape(B, N, H, Lq).contiguous()
    wanted = [True, True, True, gb1.numel() > 0, gb2.numel() > 0]
    q5, k5, v5, *biases = arguments
    gradients = backward_op(do_, q5, k5, v5, own_o, own_lse, *biases, wanted)
    for into, gradient in zip((gq, gk, gv), gradients[:3], strict=True):
        into.copy_(gradient.reshape(into.shape))
    for into, gradient in zip((gb1, gb2), gradients[3:], strict=True):
        if into.numel() > 0:
            into.add_(gradient.reshape(into.shape))


def _given(bias: Tensor) -> Tensor | None:
    return bias if bias.numel() > 0 else None


def _part(lse: Tensor, q: Tensor) -> Tensor:
    """The part `[prod(*), H, Lq]` of a buffer whose last dimension is rounded up."""
    Lq, H = q.shape[-3], q.shape[-2]
    return lse.view(math.prod(q.shape[:-3]), H, -1)[..., :Lq]
