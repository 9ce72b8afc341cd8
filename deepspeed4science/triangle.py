"""Triangle attention and multiplication with cuEquivariance's signatures: heads before lengths,
boolean masks, weights as arguments.
"""

from __future__ import annotations

import enum
from typing import Any, Literal, overload

import torch
from torch import Tensor

from deepspeed4science.arguments import without_rows
from deepspeed4science.errors import InvalidInputError
from deepspeed4science.evoformer_attn import DS4Sci_EvoformerAttention
from deepspeed4science.largest_scores import largest_scores
from deepspeed4science.mixed_precision import layer_norm, linear
from deepspeed4science.problem import shape_of


class TriMulPrecision(enum.IntEnum):
    """Values of `precision`, which is ignored in these; for code that names them."""

    NONE = -1
    DEFAULT = 0
    TF32 = 1
    TF32x3 = 2
    IEEE = 3


@overload
def triangle_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None = ...,
    scale: float | None = ...,
    return_aux: Literal[False] = ...,
    *,
    kv_lengths: Tensor | None = ...,
) -> Tensor: ...


@overload
def triangle_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None = ...,
    scale: float | None = ...,
    *,
    return_aux: Literal[True],
    kv_lengths: Tensor | None = ...,
) -> tuple[Tensor, Tensor, Tensor]: ...


def triangle_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    return_aux: bool = False,
    *,
    kv_lengths: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """`DS4Sci_EvoformerAttention` with the signature and the layouts of cuEquivariance's function
    of this name. Nothing is copied: q, k and v go in and o comes out as transposed views.

    Args:
        q: `[B, N, H, Q, D]`. Tensors of four dimensions are a batch of 1, here and below.
        k: `[B, N, H, K, D]`.
        v: `[B, N, H, K, D]`.
        bias: `[B, 1, H, Q, K]`, the pair bias; may need a gradient.
        mask: `[B, N, 1, 1, K]`; True (or not 0) is a key that is seen. Default: all are seen.
        scale: any finite number of float32. Default: 1 / sqrt(D).
        return_aux: whether to return `(o, lse, max)`. Default: o alone.
        kv_lengths: integers `[B, N, 1, 1, 1]`, instead of `mask`: that many first keys are seen.

    Returns:
        o: `[B, N, H, Q, D]` in q's dtype, always of five dimensions. A row n that sees no key gives
            0 with zero gradients; under a mask, cuEquivariance gives the mean of v there.
        lse, max: `[B, N, H, Q]`, float32, without gradients: logarithm of the sum of exponentials
            of the scores, and largest score; `-inf` in a row that sees no key. max needs a second
            pass over the scores, in plain PyTorch.

    Raises:
        InvalidInputError: both masks are given, a mask has another shape, or the op refuses the
            call.
    """
    q, k, v, bias = _five("q", q), _five("k", k), _five("v", v), _five("bias", bias)
    bias = without_rows(bias, q)
    _check_shapes(q, k, v, bias)
    visible = _visible_keys(mask, kv_lengths, k)
    q, k, v = q.transpose(2, 3), k.transpose(2, 3), v.transpose(2, 3)
    if not return_aux:
        return DS4Sci_EvoformerAttention(q, k, v, (visible, bias), scale=scale).transpose(2, 3)
    o, lse = DS4Sci_EvoformerAttention(q, k, v, (visible, bias), scale=scale, return_lse=True)
    return o.transpose(2, 3), lse, largest_scores(q, k, bias, visible, scale)


def mask_to_kv_lengths(mask: Tensor) -> Tensor:
    """`kv_lengths` of `triangle_attention` for a mask in which the first keys of a row are seen.

    Args:
        mask: `[B, N, 1, 1, K]`, or of fewer dimensions; True (or not 0) is a key that is seen.

    Returns:
        `[B, N, 1, 1, 1]`, int32.

    Raises:
        InvalidInputError: the mask has another shape, or hides a key before one that is seen.
    """
    seen = _five("mask", mask) != 0
    if seen.shape[2:4] != (1, 1):
        raise InvalidInputError(f"mask: expected [B, N, 1, 1, K]; got {shape_of(mask)}.")
    if (seen[..., 1:] & ~seen[..., :-1]).any():
        raise InvalidInputError(
            "mask: expected the seen keys of each row first; got a hidden key before a seen one. "
            "Pass it to triangle_attention as mask."
        )
    return seen.sum(dim=-1, keepdim=True, dtype=torch.int32)


def triangle_multiplicative_update(
    x: Tensor,
    direction: str = "outgoing",
    mask: Tensor | None = None,
    norm_in_weight: Tensor | None = None,
    norm_in_bias: Tensor | None = None,
    p_in_weight: Tensor | None = None,
    p_in_bias: Tensor | None = None,
    g_in_weight: Tensor | None = None,
    g_in_bias: Tensor | None = None,
    norm_out_weight: Tensor | None = None,
    norm_out_bias: Tensor | None = None,
    p_out_weight: Tensor | None = None,
    p_out_bias: Tensor | None = None,
    g_out_weight: Tensor | None = None,
    g_out_bias: Tensor | None = None,
    eps: float = 1e-5,
    precision: Any = None,
) -> Tensor:
    """Triangle multiplication with the signature of cuEquivariance's function, in plain PyTorch. It
    is here because models turn on both functions by one switch.

        a, b = mask * sigmoid(g_in(norm_in(x))) * p_in(norm_in(x)),  halves of the channels
        p_out(norm_out(sum_k a_ik b_jk)) * sigmoid(g_out(norm_in(x)))         outgoing
                       sum_k a_ki b_kj                                        incoming

    Args:
        x: `[*, L, L, C]`.
        direction: "outgoing" or "incoming".
        mask: `[*, L, L]`, multiplied into a and b; broadcast, and leading dimensions of size 1 are
            ignored. Default: ones.
        norm_in_weight, norm_in_bias: `[C]`. Default: 1 and 0; biases throughout: 0.
        p_in_weight, g_in_weight: `[2 D, C]`; the first D rows are those of a.
        norm_out_weight, norm_out_bias: `[D]`.
        p_out_weight: `[C, D]`.
        g_out_weight: `[C, C]`.
        eps: of both norms.
        precision: "bfloat16" rounds all inputs first. Any other value is ignored: products are
            PyTorch's, in TF32 where torch.backends.cuda.matmul.fp32_precision says so.

    Returns:
        `[*, L, L, C]`.

    Raises:
        InvalidInputError: the direction is neither, the mask has another shape, or one of the four
            projections has no weight.

    Source: Jumper et al. 2021, supplementary algorithms 11 and 12.
    """
    if direction not in ("outgoing", "incoming"):
        raise InvalidInputError(
            f'direction: expected "outgoing" or "incoming"; got {direction!r}. Choose one.'
        )
    if p_in_weight is None or g_in_weight is None or p_out_weight is None or g_out_weight is None:
        raise InvalidInputError(
            "triangle_multiplicative_update: expected p_in_weight, g_in_weight, p_out_weight and "
            "g_out_weight; got None for at least one. Pass the weights of the layer."
        )
    if str(precision).lower() in ("bfloat16", "bf16"):
        given = locals().items()
        rounded = {name: value.bfloat16() for name, value in given if isinstance(value, Tensor)}
        return triangle_multiplicative_update(**rounded, direction=direction, eps=eps)
    x = layer_norm(x, norm_in_weight, norm_in_bias, eps)
    ab = linear(x, p_in_weight, p_in_bias) * linear(x, g_in_weight, g_in_bias).sigmoid()
    if mask is not None:
        ab = ab * _pair_mask(mask, x).unsqueeze(-1).to(ab.dtype)
    a, b = ab.chunk(2, dim=-1)
    equation = "...ikd,...jkd->...ijd" if direction == "outgoing" else "...kid,...kjd->...ijd"
    product = layer_norm(torch.einsum(equation, a, b), norm_out_weight, norm_out_bias, eps)
    gate = linear(x, g_out_weight, g_out_bias).sigmoid()
    return linear(product, p_out_weight, p_out_bias) * gate


def _pair_mask(mask: Tensor, x: Tensor) -> Tensor:
    """With no more dimensions than x has before its channels: the result would have them, too."""
    seen = mask
    while seen.dim() >= x.dim() and seen.shape[0] == 1:
        seen = seen[0]
    sizes = zip(seen.shape[::-1], x.shape[-2::-1], strict=False)
    if seen.dim() >= x.dim() or any(own not in (1, full) for own, full in sizes):
        raise InvalidInputError(
            f"mask: expected [*, L, L], the shape of x {shape_of(x)} without its channels; got "
            f"{shape_of(mask)}."
        )
    return seen


def _five(name: str, tensor: Tensor) -> Tensor:
    """With leading dimensions of size 1 where it has fewer than five."""
    if not isinstance(tensor, Tensor):
        raise InvalidInputError(f"{name}: expected a tensor; got {type(tensor).__name__}.")
    if tensor.dim() > 5:
        raise InvalidInputError(
            f"{name}: expected at most five dimensions; got {shape_of(tensor)}. Flatten leading "
            "dimensions into B."
        )
    return tensor[(None,) * (5 - tensor.dim())]


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> None:
    """Here, where tensors have these names and layouts; the op checks dtypes and devices."""
    B, N, H, Q, D = q.shape
    K = k.shape[3]
    heads_first = "Heads come before lengths here, unlike in DS4Sci_EvoformerAttention."
    if k.shape != (B, N, H, K, D):
        raise InvalidInputError(
            f"k: expected [B, N, H, K, D] with the B, N, H, D of q {shape_of(q)}; got "
            f"{shape_of(k)}. {heads_first}"
        )
    if v.shape[:4] != (B, N, H, K):
        raise InvalidInputError(
            f"v: expected [B, N, H, K, D] with the B, N, H, K of k {shape_of(k)}; got "
            f"{shape_of(v)}. {heads_first}"
        )
    wanted = (H, Q, K)
    if any(size not in (1, full) for size, full in zip(bias.shape[2:], wanted, strict=True)):
        raise InvalidInputError(
            f"bias: expected [B, 1, H, Q, K] with H, Q, K = {list(wanted)}, those of q "
            f"{shape_of(q)} = [B, N, H, Q, D] and k {shape_of(k)} = [B, N, H, K, D]; got "
            f"{shape_of(bias)}. {heads_first}"
        )
    if bias.shape[0] not in (1, B) or bias.shape[1] != 1:
        raise InvalidInputError(
            f"bias: expected [B, 1, H, Q, K] with B = {B}, one bias for all n; got "
            f"{shape_of(bias)}. Where each n has a bias of its own, make each n a batch: q, k, v "
            "as [B * N, 1, H, L, D], bias as [B * N, 1, H, Q, K]."
        )


def _visible_keys(mask: Tensor | None, kv_lengths: Tensor | None, k: Tensor) -> Tensor | None:
    """`[B, N, 1, 1, K]`, bool; None where all keys are seen."""
    if mask is not None and kv_lengths is not None:
        raise InvalidInputError(
            "triangle_attention: expected mask or kv_lengths; got both. Pass the mask alone."
        )
    given = mask if mask is not None else kv_lengths
    if given is None:
        return None
    B, N, _, K, _ = k.shape
    name, last, keys = ("mask", "K", K) if mask is not None else ("kv_lengths", "1", 1)
    given = _five(name, given)
    wanted = (B, N, 1, 1, keys)
    if any(size not in (1, full) for size, full in zip(given.shape, wanted, strict=True)):
        raise InvalidInputError(
            f"{name}: expected [B, N, 1, 1, {last}] with B, N, K = {[B, N, K]}; got "
            f"{shape_of(given)}. A term for each query belongs to bias."
        )
    if mask is not None:
        return given if given.dtype == torch.bool else given != 0
    return torch.arange(K, device=given.device) < given
