"""Backward of attention whose q, k, v, gate and pair bias are columns of one matrix product. Their
gradients are written as columns of one tensor; autograd would copy five tensors together.

    product [*, I, J, W]   columns: q, k, v and the gate, H * D each; the pair bias, H; padding

Dimension I is the rows n, and J the queries and keys; at an ending node it is the reverse.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepspeed4science import below_autograd, flops, registration
from deepspeed4science.arguments import canonicalise
from deepspeed4science.call import BackwardCall, PackedBackwardCall, schema
from deepspeed4science.non_differentiable import non_differentiable


def columns(product: Tensor, H: int, D: int, ending: bool) -> list[Tensor]:
    """Views of product: q, k, v and gate `[*, N, L, H * D]`, and the rest of its columns
    `[*, I, J, W - 4 H D]`.
    """
    *parts, rest = product.split([*[H * D] * 4, product.shape[-1] - 4 * H * D], dim=-1)
    return [*(part.transpose(-2, -3) if ending else part for part in parts), rest]


def pair_bias(z: Tensor, transposed: bool) -> Tensor:
    """A view of z `[*, I, J, H]` as the pair bias `[*, 1, H, L, L]`: queries are I and keys J, or
    the reverse where it is transposed.
    """
    z = z.movedim(-1, -3).unsqueeze(-4)
    return z.mT if transposed else z


def heads(parts: list[Tensor], H: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, the first three of `columns`, as `[B, N, L, H, D]`."""
    q, k, v = (part.unflatten(-1, (H, -1)) for part in parts[:3])
    return canonicalise(q, k, v, None, None)[:3]


def _backward(*arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
    call = PackedBackwardCall(*arguments, **named)
    H, D = call.o.shape[3:]
    gradient = torch.empty_like(call.product, memory_format=torch.contiguous_format)
    used = 4 * H * D + H * (not call.apart)
    for padding in _in_widest_elements(gradient[..., used:]):
        padding.zero_()
    *dqkv, dgate, rest = columns(gradient, H, D, call.ending)
    into = heads(dqkv, H)
    q, k, v = heads(columns(call.product, H, D, call.ending), H)
    wanted = [True, True, True, False, True]
    whole = BackwardCall(call.do_, q, k, v, call.o, call.lse, call.bias1, call.bias2, wanted)
    dbias2 = below_autograd.backward_into(whole, into)
    to, of = _in_widest_elements(dgate, call.dgate)
    to.copy_(of)
    if call.apart:
        return gradient, dbias2
    dz = pair_bias(rest[..., :H], call.ending != call.transpose_bias)
    dz.copy_(dbias2.reshape(dz.shape))
    return gradient, dbias2.new_empty(0)


def _in_widest_elements(*tensors: Tensor) -> list[Tensor]:
    """Views of the tensors with wider elements, up to 16 bytes. PyTorch copies rows with gaps
    between them one element at a time (0.18 ms for 589,824 rows of 128 channels in bfloat16).
    """
    for dtype in (torch.complex128, torch.float64, torch.float32):
        try:
            return [tensor.view(dtype) for tensor in tensors]
        except RuntimeError:  # sizes or strides are no multiples
            continue
    return list(tensors)


def _fake_backward(*arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
    call = PackedBackwardCall(*arguments, **named)
    product, shape = call.product, call.bias2.shape if call.apart else (0,)
    dbias2 = call.lse.new_empty(shape)
    return torch.empty_like(product, memory_format=torch.contiguous_format), dbias2


(backward_packed_op,) = registration.register(
    registration.Operator(
        schema("evoformer_attn_backward_packed", PackedBackwardCall, num_results=2),
        kernels={
            "CompositeExplicitAutograd": _backward,
            "Autograd": non_differentiable("evoformer_attn_backward_packed", PackedBackwardCall),
        },
        fake=_fake_backward,
    ),
)
flops.register(backward_packed_op)
