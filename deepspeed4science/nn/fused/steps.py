"""The steps of a triangle layer and of its gradients, on tensors of a GPU by Triton kernels, on
others by plain PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from deepspeed4science import below_autograd
from deepspeed4science.call import (
    BackwardCall,
    ForwardCall,
    TriangleBackward,
    TriangleForward,
)
from deepspeed4science.nn.fused import plain

if TYPE_CHECKING:
    from deepspeed4science.distributed.gather import Gather

_WANTED = (True, True, True, False, True)  # gradients of q, k, v and bias2


def forward(
    call: TriangleForward, gathers: Callable[[Tensor], Gather] | None = None
) -> tuple[tuple[Tensor, ...], Gather | None]:
    """The operator's results.

    Args:
        gathers: where x is one process's part of the rows n: called with this process's part of
            the pair bias, `[*, 1, H, L, L]`, starts to gather the whole of it.
    """
    kernels = _kernels(call.x)
    x, H, dtype, ending = call.x, call.H, call.dtype, call.ending
    B, C = flattened(x.shape[:-3]), call.gate_weight.shape[0]
    normed, z = kernels.norm_pair_bias(
        x,
        call.norm_weight,
        call.norm_bias,
        call.z_weight,
        dtype,
        call.eps,
        ending != call.transpose_bias,
    )
    gather = None if gathers is None else gathers(z)  # while the product runs
    weights = (call.q_weight, call.k_weight, call.v_weight, call.gate_weight)
    weight, bias = _joined(weights, dtype), None
    if call.gate_bias is not None:  # q, k and v have none
        bias = functional.pad(call.gate_bias.to(dtype), (3 * C, 0))
    product = functional.linear(normed, weight, bias)
    z = z if gather is None else gather.arrived()
    z = z.reshape(B, 1, *z.shape[-3:])
    q, k, v = _heads(product, B, H, ending)
    attention = ForwardCall(q, k, v, call.bias1, z, True)
    o, lse = below_autograd.forward(attention, differentiable=True)
    assert lse is not None
    residual = x if call.residual else None
    gate = product.narrow(-1, 3 * C, C)
    y = kernels.gated_output(o, gate, call.out_weight, call.out_bias, residual, ending)
    return (y, normed, z, weight, product, o, lse), gather


def backward(call: TriangleBackward, gather: Gather | None = None) -> tuple[Tensor, ...]:
    """The operator's results.

    Args:
        gather: what gathered z, where x is one process's part of the rows n.
    """
    kernels = _kernels(call.x)
    x, product, ending = call.x, call.product, call.ending
    B, _, _, H, D = call.o.shape
    C = H * D
    dproduct = torch.empty_like(product)
    gate, dgate = (one.narrow(-1, 3 * C, C) for one in (product, dproduct))
    do, dout_weight, dout_bias, dgate_bias = kernels.gated_output_backward(
        call.dy, call.out_weight, call.o, gate, dgate, call.has_bias, ending
    )
    q, k, v = _heads(product, B, H, ending)
    attention = BackwardCall(do, q, k, v, call.o, call.lse, call.bias1, call.z, _WANTED)
    dz = below_autograd.backward_into(attention, _heads(dproduct, B, H, ending))
    if gather is not None:  # while both products run
        part = gather.reduce_scatter(dz.view(*x.shape[:-3], *dz.shape[1:]))
    rows = dproduct.view(-1, 4 * C)
    dweight = rows.mT @ call.normed.view(-1, x.shape[-1])
    dnormed = (rows @ call.weight).view(x.shape)
    dz = dz if gather is None else gather.local(part)
    dx, dnorm = kernels.norm_pair_bias_backward(
        dnormed,
        dz,
        x,
        call.norm_weight,
        call.norm_bias,
        call.z_weight,
        call.dy if call.residual else None,
        call.eps,
        ending != call.transpose_bias,
    )
    return dx, dnorm, dweight, dgate_bias, dout_weight, dout_bias


def dtype_of_y(call: TriangleForward) -> torch.dtype:
    return call.x.dtype if call.residual else call.dtype


def flattened(batch: Sequence[int]) -> int:
    """The number of batch elements."""
    return math.prod(batch)


def _heads(product: Tensor, B: int, H: int, ending: bool) -> Sequence[Tensor]:
    """q, k and v `[B, N, L, H, D]`, views of the product `[*, I, J, 4 H D]`."""
    *_, rows, columns, width = product.shape
    parts = product.view(B, rows, columns, 4, H, width // (4 * H))
    return (parts.transpose(1, 2) if ending else parts).unbind(3)[:3]


def _joined(weights: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    """The weights, one below the other."""
    C, c_in = weights[0].shape
    joined = weights[0].new_empty((len(weights) * C, c_in), dtype=dtype)
    torch._foreach_copy_(joined.view(len(weights), C, c_in).unbind(), weights)  # one launch
    return joined


def _kernels(x: Tensor) -> Any:
    if not x.is_cuda or x.numel() == 0:
        return plain
    from deepspeed4science.nn.fused import launch

    return launch
