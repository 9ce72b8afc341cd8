"""What torch.utils.flop_counter.FlopCounterMode counts of the operators: their matrix products, the
backward's repeated Q K^T included, as of PyTorch's own attention. Hidden keys count as visible.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.flop_counter import flop_registry, register_flop_formula

from deepspeed4science.call import BackwardCall, ForwardCall


def register(forward_op: Any, backward_op: Any) -> None:
    """Once in a process, like the operators."""
    for operator, formula in ((forward_op, _forward), (backward_op, _backward)):
        if operator.overloadpacket not in flop_registry:
            register_flop_formula(operator.overloadpacket)(formula)


def _forward(*shapes: Any, **named: Any) -> int:
    """Q K^T and P V (docs/math.md, 1 and 5)."""
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


def _call(kind: Any, shapes: Sequence[Any], named: dict[str, Any]) -> Any:
    """The call, with shapes in the places of its tensors."""
    return kind(*shapes, **{name: named[name] for name in kind._fields if name in named})


def _product(call: Any, depth: int) -> int:
    B, N, Lq, H, _ = call.q
    products: int = 2 * B * N * H * Lq * call.k[2] * depth
    return products
