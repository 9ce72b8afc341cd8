"""The arguments of the operators: schema, autocast, vmap and FLOPs take them from here. What else a
new one concerns: docs/adding-a-kernel.md, An argument.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class ForwardCall(NamedTuple):
    """`evoformer_attn` -> O `[B, N, Lq, H, Dv]`, lse `[B, N, H, Lq]` (without elements unless
    `with_lse`).
    """

    q: Tensor  # [B, N, Lq, H, D]
    k: Tensor  # [B, N, Lk, H, D]
    v: Tensor  # [B, N, Lk, H, Dv]
    bias1: Tensor | None  # broadcastable to [B, N, 1, 1, Lk]
    bias2: Tensor | None  # broadcastable to [B, 1, H, Lq, Lk]
    with_lse: bool
    row_mask: Tensor | None = None  # broadcastable to [B, N]
    scale: float | None = None  # None: 1 / sqrt(D)


class BackwardCall(NamedTuple):
    """`evoformer_attn_backward` -> dq, dk, dv in the dtype of Q, dbias1 and dbias2 in float32, each
    in the shape of its input (without elements where it is not wanted).
    """

    do_: Tensor  # the gradient of O
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    lse: Tensor
    bias1: Tensor | None
    bias2: Tensor | None
    wanted: Sequence[bool]  # of q, k, v, bias1, bias2
    row_mask: Tensor | None = None
    scale: float | None = None
    # k and v are only some of the keys of o and lse: the gradients are the part of these keys.
    partial_keys: bool = False


class PackedBackwardCall(NamedTuple):
    """`evoformer_attn_backward_packed` -> the gradient of product, and of bias2 in float32 (no
    elements unless it is apart).
    """

    do_: Tensor  # [B, N, L, H, D]
    dgate: Tensor  # [*, N, L, H * D]
    product: Tensor
    o: Tensor  # [B, N, L, H, D]
    lse: Tensor
    bias1: Tensor | None
    bias2: Tensor  # [B, 1, H, L, L], a copy of the columns of `product`
    ending: bool
    apart: bool = False  # bias2 is no part of product
    transpose_bias: bool = False


class TriangleForward(NamedTuple):
    """`evoformer_attn_triangle` -> y `[*, I, J, c_out]`, and what the backward needs: normed, z,
    weight, product, o and lse, as in `TriangleBackward`.
    """

    x: Tensor  # [*, I, J, c_in]
    norm_weight: Tensor  # [c_in], float32
    norm_bias: Tensor  # [c_in], float32
    z_weight: Tensor  # [H, c_in]
    q_weight: Tensor  # [C, c_in], C channels of all heads together
    k_weight: Tensor
    v_weight: Tensor
    gate_weight: Tensor
    gate_bias: Tensor | None  # [C]
    out_weight: Tensor  # [c_out, C]
    out_bias: Tensor | None  # [c_out]
    bias1: Tensor | None  # broadcastable to [B, N, 1, 1, L]
    dtype: torch.dtype  # of products
    H: int
    eps: float
    ending: bool
    residual: bool  # x is added to y
    transpose_bias: bool = False  # of z


class TriangleBackward(NamedTuple):
    """`evoformer_attn_triangle_backward` -> the gradients of x; of norm_weight, norm_bias and
    z_weight, one below the other, `[2 + H, c_in]`; of weight, gate_bias, out_weight and out_bias.
    Those of x and weight have their dtypes, the others float32; those of biases have no elements
    unless has_bias.
    """

    dy: Tensor  # [*, I, J, c_out]
    x: Tensor
    norm_weight: Tensor
    norm_bias: Tensor
    z_weight: Tensor
    out_weight: Tensor
    normed: Tensor  # [*, I, J, c_in]: norm(x)
    z: Tensor  # [B, 1, H, L, L]: the pair bias
    weight: Tensor  # [4 C, c_in]: of q, k, v and gate
    product: Tensor  # [*, I, J, 4 C]: q, k, v and gate
    o: Tensor  # [B, N, L, H, D]
    lse: Tensor
    bias1: Tensor | None
    has_bias: bool
    eps: float
    ending: bool
    residual: bool
    transpose_bias: bool = False


class LargestScores(NamedTuple):
    """`evoformer_attn_largest_scores` -> `[B, N, H, Lq]`, float32: the largest score of each query,
    `-inf` where it sees no key.
    """

    q: Tensor  # [B, N, Lq, H, D]
    k: Tensor  # [B, N, Lk, H, D]
    bias: Tensor  # broadcastable to [B, 1, H, Lq, Lk]
    visible: Tensor | None  # bool, broadcastable to [B, N, 1, 1, Lk]
    scale: float | None  # None: 1 / sqrt(D)


Call = ForwardCall | BackwardCall

# Gradients of q, k, v, bias1 and bias2; None where one is not wanted.
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]

_SCHEMA_TYPES = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    bool: "bool",
    int: "int",
    torch.dtype: "ScalarType",
    Sequence[bool]: "bool[5]",
    float: "float",
    float | None: "float?",
}


def schema(name: str, call: Any, *, num_results: int) -> str:
    """The operator's signature as `torch.library` reads it."""
    defaults = call._field_defaults
    arguments = [
        f"{_SCHEMA_TYPES[kind]} {field}" + (f"={defaults[field]}" if field in defaults else "")
        for field, kind in call.__annotations__.items()
    ]
    return f"{name}({', '.join(arguments)}) -> ({', '.join(['Tensor'] * num_results)})"
