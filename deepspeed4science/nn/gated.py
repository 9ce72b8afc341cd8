"""Attention and its gate as one differentiable function of a layer's projections, which are the
columns of one matrix product (packed.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deepspeed4science import autocast
from deepspeed4science.arguments import canonicalise
from deepspeed4science.dtensor import is_dtensor
from deepspeed4science.operators import forward_op, is_transformed
from deepspeed4science.packed import backward_packed_op, columns, pair_bias

if TYPE_CHECKING:
    from deepspeed4science.distributed.gather import Gather


def can_be_recorded(product: Tensor) -> bool:
    """Whether `gated_attention` is useful (autograd records) and possible: torch.func and DTensors
    know rules for operators, but none for an autograd.Function. The operator refuses dual tensors.
    """
    return (
        torch.is_grad_enabled()
        and product.requires_grad
        and not is_transformed()
        and not is_dtensor(product)
    )


def gated_attention(
    product: Tensor,
    seen: Tensor | None,
    no_heads: int,
    c_hidden: int,
    ending: bool,
    transpose_bias: bool,
    gather: Gather | None = None,
) -> Tensor:
    """softmax(q k^T / sqrt(c_hidden) + z + mask) v * sigmoid(gate) with q, k, v, gate and z, the
    columns of product.

    Args:
        product: `[*, I, J, W]`, as in packed.py.
        transpose_bias: of z, which has I and J in the order of q and k otherwise.
        seen: `[*, N, 1, 1, L]`, bool: keys that are seen.
        gather: gathers z, `[*, 1, H, L, L]`, from all processes; product then has no columns for z.

    Returns:
        `[*, N, L, no_heads * c_hidden]`.
    """
    # A wrapped map may give float32 under autocast, and the backward takes one dtype.
    product, _, _ = autocast.cast_inputs(product, product, product)
    result: Tensor = _GatedAttention.apply(
        product,
        None if gather is None else gather.shard,
        seen,
        no_heads,
        c_hidden,
        ending,
        transpose_bias,
        gather,
    )
    return result


class _GatedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        product: Tensor,
        shard: Tensor | None,
        seen: Tensor | None,
        H: int,
        D: int,
        ending: bool,
        transpose_bias: bool,
        gather: Gather | None,
    ) -> Tensor:
        *qkv, gate, rest = columns(product, H, D, ending)
        if gather is None:
            z = pair_bias(rest[..., :H], ending != transpose_bias)
            # Both directions repack z, which is eight times as fast from contiguous rows.
            z = z.contiguous()
        else:
            z = gather.whole()
            ctx.gather, ctx.shape = gather, z.shape
        q, k, v = (part.unflatten(-1, (H, D)) for part in qkv)
        q, k, v, bias1, bias2 = canonicalise(q, k, v, seen, z)
        o, lse = forward_op(q, k, v, bias1, bias2, True, None, None)
        ctx.save_for_backward(product, o, lse, bias1, bias2)
        ctx.ending, ctx.transpose_bias, ctx.apart = ending, transpose_bias, gather is not None
        gated: Tensor = (o.reshape(gate.shape) * _sigmoid(gate)).to(o.dtype)
        return gated

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        product, o, lse, bias1, bias2 = ctx.saved_tensors
        H, D = o.shape[3:]
        gate = columns(product, H, D, ctx.ending)[3]
        opened = _sigmoid(gate)
        do_ = (gradient * opened).to(o.dtype).reshape(o.shape)
        of_opened = (gradient * o.reshape(gate.shape)).to(opened.dtype)
        dgate = torch.ops.aten.sigmoid_backward(of_opened, opened).to(o.dtype)
        tensors = (do_, dgate, product, o, lse, bias1, bias2)
        dproduct, dbias2 = backward_packed_op(*tensors, ctx.ending, ctx.apart, ctx.transpose_bias)
        dshard = ctx.gather.reduce_scatter(dbias2.view(ctx.shape)) if ctx.apart else None
        return dproduct, dshard, *(None,) * 6


def _sigmoid(gate: Tensor) -> Tensor:
    """sigmoid(gate), in float32 if torch.compile fuses it, where float32 costs nothing."""
    return (gate.float() if torch.compiler.is_compiling() else gate).sigmoid()
