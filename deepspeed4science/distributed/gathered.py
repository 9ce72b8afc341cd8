"""Attention with a pair bias that is being gathered. The bias's gradient is reduced in float32,
whatever the dtype of the bias.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepspeed4science import autocast
from deepspeed4science.arguments import canonicalise
from deepspeed4science.distributed.gather import Gather
from deepspeed4science.evoformer_attn import DS4Sci_EvoformerAttention
from deepspeed4science.operators import backward_op, forward_op


def gathered_attention(
    q: Tensor, k: Tensor, v: Tensor, bias1: Tensor | None, gather: Gather
) -> Tensor:
    """`DS4Sci_EvoformerAttention(q, k, v, [bias1, bias2])` with the bias2 that `gather` gathers."""
    if torch.compiler.is_compiling():
        traced: Tensor = DS4Sci_EvoformerAttention(q, k, v, [bias1, gather.finish()])
        return traced
    shape = (*q.shape[:-1], v.shape[-1])
    whole = gather.whole()
    q, k, v = autocast.cast_inputs(q, k, v)
    five = canonicalise(q, k, v, bias1, whole)
    o: Tensor = _GatheredAttention.apply(*five, gather.shard, gather, whole.shape, shape[:-4])
    result: Tensor = o.view(shape)
    return result


class _GatheredAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias1: Tensor | None,
        bias2: Tensor,
        shard: Tensor,
        gather: Gather,
        shape: torch.Size,
        batch: torch.Size,
    ) -> Tensor:
        o: Tensor
        o, lse = forward_op(q, k, v, bias1, bias2, True, None, None)
        ctx.save_for_backward(q, k, v, o, lse, bias1, bias2)
        ctx.gather, ctx.shape, ctx.batch = gather, shape, batch
        return o

    @staticmethod
    def backward(ctx: Any, do_: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, bias1, bias2 = ctx.saved_tensors
        wanted = [*ctx.needs_input_grad[:4], ctx.needs_input_grad[5]]
        gradients = backward_op(do_, *tensors, bias1, bias2, wanted)
        dq, dk, dv, dbias1, dbias2 = (
            one if want else None for one, want in zip(gradients, wanted, strict=True)
        )
        if dbias1 is not None:
            dbias1 = dbias1.to(bias1.dtype)
        if dbias2 is not None:
            if bias2.shape[0] > 1:  # canonicalise has expanded a bias2 that batches share
                dbias2 = dbias2.view(*ctx.batch, *dbias2.shape[1:]).sum_to_size(ctx.shape)
            dbias2 = ctx.gather.reduce_scatter(dbias2.view(ctx.shape))
        return dq, dk, dv, dbias1, None, dbias2, None, None, None
