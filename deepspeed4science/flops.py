"""The operators in torch.utils.flop_counter.FlopCounterMode: their matrix products are counted,
with the backward's repeated Q K^T, as for PyTorch's own attention. Hidden keys count as visible
ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch.utils.flop_counter import flop_registry, register_flop_formula

from deepspeed4science.call import (
    BackwardCall,
    ForwardCall,
    PackedBackwardCall,
    TriangleBackward,
    TriangleForward,
)


def register(*operators: Any) -> None:
    """To be called once in a process, like the registration of the operators."""
    for operator in operators:
        if operator.overloadpacket not in flop_registry:
            formula = _FORMULAS[operator.overloadpacket.__name__]
            register_flop_formula(operator.overloadpacket)(formula)


def _forward(*shapes: Any, **named: Any) -> int:
    """Q K^T and P V, math.md (1) and (5)."""
    call = _call(ForwardCall, shapes, named)
    return _product(call, call.q[4] + call.v[4])


def _backward(*shapes: Any, **named: Any) -> int:
    """Q K^T again, dO V^T where dS is wanted, and one product for each of dq, dk and dv."""
    call = _call(BackwardCall, shapes, named)
    D, Dv = call.q[4], call.v[4]
    want_q, want_k, want_v, want_bias1, want_bias2 = call.wanted
    depth = D + D * want_q + D * want_k + Dv * want_v
    if want_q or want_k or want_bias1 or want_bias2:
        depth += Dv
    return _product(call, depth)


def _backward_packed(*shapes: Any, **named: Any) -> int:
    """The same, with all gradients wanted."""
    B, N, L, H, D = _call(PackedBackwardCall, shapes, named).do_
    products: int = 2 * B * N * H * L * L * 5 * D
    return products


def _triangle(*shapes: Any, **named: Any) -> int:
    """The maps of every pair, and attention's forward."""
    call = _call(TriangleForward, shapes, named)
    *batch, rows, columns, _ = call.x
    L, C = rows if call.ending else columns, call.q_weight[0]
    num_pairs = math.prod(batch) * rows * columns
    weights = _elements(call.z_weight, *[call.q_weight] * 4, call.out_weight)
    products: int = 2 * num_pairs * (weights + L * 2 * C)
    return products


def _triangle_backward(*shapes: Any, **named: Any) -> int:
    """Two gradients of each map, and attention's backward with all gradients wanted."""
    call = _call(TriangleBackward, shapes, named)
    B, N, L, H, D = call.o
    weights = _elements(call.z_weight, call.weight, call.out_weight)
    products: int = 2 * B * N * L * (2 * weights + H * L * 5 * D)
    return products


def _elements(*shapes: Sequence[int]) -> int:
    return sum(math.prod(shape) for shape in shapes)


_FORMULAS = {
    "evoformer_attn": _forward,
    "evoformer_attn_backward": _backward,
    "evoformer_attn_backward_packed": _backward_packed,
    "evoformer_attn_triangle": _triangle,
    "evoformer_attn_triangle_backward": _triangle_backward,
}


def _call(kind: Any, shapes: Sequence[Any], named: dict[str, Any]) -> Any:
    """The call, with shapes instead of tensors."""
    return kind(*shapes, **{name: named[name] for name in kind._fields if name in named})


def _product(call: Any, depth: int) -> int:
    B, N, Lq, H, _ = call.q
    products: int = 2 * B * N * H * Lq * call.k[2] * depth
    return products
