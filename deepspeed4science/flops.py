"""The operators in torch.utils.flop_counter.FlopCounterMode: their matrix products are counted,
with the backward's repeated Q K^T, as for PyTorch's own attention. Hidden keys count as visible
ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch.utils.flop_counter import flop_registry, register_flop_formula

from deepspeed4science.call import BackwardCall, ForwardCall, PackedBackwardCall


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


def _norm_pair_bias(x: Any, _weight: Any, _bias: Any, weight: Any, *_: Any, **__: Any) -> int:
    """The pair bias of every pair."""
    return _map(x, weight)


def _norm_pair_bias_backward(*shapes: Any, **_: Any) -> int:
    """Its two gradients."""
    x, weight = shapes[2], shapes[5]
    return 2 * _map(x, weight)


def _gated_output(_o: Any, gate: Any, weight: Any, *_: Any, **__: Any) -> int:
    """The output's map."""
    return _map(gate, weight)


def _gated_backward(dy: Any, weight: Any, _product: Any, o: Any, *_: Any, **__: Any) -> int:
    """Its two gradients, and attention's backward with all gradients wanted."""
    B, N, L, H, D = o
    products: int = 2 * B * N * H * L * L * 5 * D
    return products + 2 * _map(dy, weight)


def _map(x: Any, weight: Any) -> int:
    """A product of x `[*, c]` with a weight, or with its transpose."""
    products: int = 2 * math.prod(x[:-1]) * weight[0] * weight[1]
    return products


_FORMULAS = {
    "evoformer_attn": _forward,
    "evoformer_attn_backward": _backward,
    "evoformer_attn_backward_packed": _backward_packed,
    "evoformer_attn_norm_pair_bias": _norm_pair_bias,
    "evoformer_attn_norm_pair_bias_backward": _norm_pair_bias_backward,
    "evoformer_attn_gated_output": _gated_output,
    "evoformer_attn_gated_backward": _gated_backward,
}


def _call(kind: Any, shapes: Sequence[Any], named: dict[str, Any]) -> Any:
    """The call, with shapes instead of tensors."""
    return kind(*shapes, **{name: named[name] for name in kind._fields if name in named})


def _product(call: Any, depth: int) -> int:
    B, N, Lq, H, _ = call.q
    products: int = 2 * B * N * H * Lq * call.k[2] * depth
    return products
