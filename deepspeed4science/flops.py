"""What torch.utils.flop_counter.FlopCounterMode counts of the operators: their matrix products, the
backward's repeated Q K^T included, as of PyTorch's own attention. Hidden keys count as visible.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.flop_counter import flop_registry, register_flop_formula


def register(forward_op: Any, backward_op: Any) -> None:
    """Once in a process, like the operators."""
    for operator, formula in ((forward_op, _forward), (backward_op, _backward)):
        if operator.overloadpacket not in flop_registry:
            register_flop_formula(operator.overloadpacket)(formula)


def _forward(q: Sequence[int], k: Sequence[int], v: Sequence[int], *others: Any, **_: Any) -> int:
    """Q K^T and P V (docs/math.md, 1 and 5)."""
    return _product(q, k, q[4] + v[4])


def _backward(
    do_: Any,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    bias1: Any,
    bias2: Any,
    wanted: Sequence[bool],
    *others: Any,
    **_: Any,
) -> int:
    """Q K^T again, dO V^T where dS is wanted, and one product for each of dq, dk and dv."""
    D, Dv = q[4], v[4]
    want_q, want_k, want_v, want_bias1, want_bias2 = wanted
    depth = D + D * want_q + D * want_k + Dv * want_v
    if want_q or want_k or want_bias1 or want_bias2:
        depth += Dv
    return _product(q, k, depth)


def _product(q: Sequence[int], k: Sequence[int], depth: int) -> int:
    B, N, Lq, H, _ = q
    return 2 * B * N * H * Lq * k[2] * depth
