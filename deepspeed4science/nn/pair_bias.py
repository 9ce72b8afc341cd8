"""Attention of tokens with a bias from pairs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from deepspeed4science.dtensor import is_sharded
from deepspeed4science.errors import InvalidInputError
from deepspeed4science.nn.attention import EvoformerAttention
from deepspeed4science.nn.names import PAIR_BIAS, accept
from deepspeed4science.nn.parameters import LayerNorm, Linear, leaves_out
from deepspeed4science.problem import shape_of


class AdaptiveLayerNorm(nn.Module):
    """sigmoid(linear_g(s)) * norm(a) + linear_s(s), s normalised (AlphaFold 3, algorithm 26)."""

    def __init__(self, c_a: int, c_s: int) -> None:
        super().__init__()
        self.layer_norm_a = LayerNorm(c_a, elementwise_affine=False)
        self.layer_norm_s = LayerNorm(c_s, bias=False)
        self.linear_g = Linear(c_s, c_a, "zero", bias=0.0)
        self.linear_s = Linear(c_s, c_a, "zero")

    def forward(self, a: Tensor, s: Tensor) -> Tensor:
        s = self.layer_norm_s(s)
        adapted: Tensor = self.linear_g(s).sigmoid() * self.layer_norm_a(a) + self.linear_s(s)
        return adapted


class AttentionPairBias(nn.Module):
    """Gated attention of tokens, with a bias from pairs of tokens (AlphaFold 3, algorithm 24). It
    computes in the dtype of its inputs, or in autocast's.

    Parameters: layer_norm_a, layer_norm_z, linear_z, mha (an EvoformerAttention). With c_s,
    layer_norm_a is an AdaptiveLayerNorm, and there is also linear_ada_out.

    Args:
        c_a: channels of a token.
        c_z: channels of a pair.
        c_hidden: channels of a head.
        no_heads: number of heads.
        c_s: channels of s, which adapts the norm and gates the result. Default: the layer has no s.
        norm_a: normalise tokens in this layer; Boltz 2 does it before.
        norm_z: normalise pairs in this layer; OpenFold 3's diffusion transformer does it before.

    Raises:
        InvalidInputError: c_s without norm_a, since s adapts that norm.
    """

    def __init__(
        self,
        c_a: int,
        c_z: int,
        c_hidden: int,
        no_heads: int,
        *,
        c_s: int | None = None,
        norm_a: bool = True,
        norm_z: bool = True,
    ) -> None:
        super().__init__()
        self.c_a, self.c_z, self.c_s = c_a, c_z, c_s
        self.layer_norm_a: nn.Module | None = LayerNorm(c_a) if norm_a else None
        self.linear_ada_out = None
        if c_s is not None:
            if not norm_a:
                raise InvalidInputError(
                    "norm_a: expected True with c_s, since s adapts this norm; drop one of them."
                )
            self.layer_norm_a = AdaptiveLayerNorm(c_a, c_s)
            self.linear_ada_out = Linear(c_s, c_a, "zero", bias=-2.0)
        self.layer_norm_z = LayerNorm(c_z) if norm_z else None
        self.linear_z = Linear(c_z, no_heads, "default")
        self.mha = EvoformerAttention(
            c_a, c_a, c_a, c_hidden, no_heads, bias=False, bias_q=True, init="default"
        )
        if c_s is not None:  # the result is gated, so its last map does not begin with zeros
            self.mha.linear_o = Linear(no_heads * c_hidden, c_a, "default")
        accept(self, PAIR_BIAS)

    def forward(
        self, a: Tensor, z: Tensor, s: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """
        Args:
            a: `[*, L, c_a]`.
            z: `[*, L, L, c_z]`. If the last dimension of its `*` has size 1, all elements of a in
                that dimension (the samples of a diffusion) share it, and it is read once.
            s: `[*, L, c_s]`, for layers with c_s.
            mask: `[*, L]`, or what broadcasts to it; 0 or False hides a token from all others.
                Default: all are seen. None of z, s and mask may leave out a dimension of `*` and
                have another of more than 1: batches would be taken for samples.

        Returns:
            `[*, L, c_a]`.

        Raises:
            InvalidInputError: s is there for a layer without c_s, or is not for one with c_s; a
                shape does not fit; or a is a DTensor, while parameters are none.
        """
        if is_sharded(a, self):
            raise InvalidInputError(
                "a: expected a tensor; got a DTensor. Where batches or samples are sharded, call "
                "the layer with local tensors: a.to_local(), z.to_local(), ..."
            )
        if a.dim() < 2 or a.shape[-1] != self.c_a:
            raise InvalidInputError(
                f"a: expected tokens [*, L, c_a], c_a = {self.c_a}; got {shape_of(a)}."
            )
        if (s is None) != (self.linear_ada_out is None):
            raise InvalidInputError(
                "s: expected [*, L, c_s] for a layer with c_s, and None for one without; got "
                f"{None if s is None else shape_of(s)} for one "
                f"{'without' if self.linear_ada_out is None else 'with'} c_s."
            )
        lead, L = a.shape[:-2], a.shape[-2]
        for name, form, given, own, channels, fewest in (
            ("z", f"[*, L, L, c_z], c_z = {self.c_z}", z, (L, L), self.c_z, min(a.dim() + 1, 4)),
            ("s", f"[*, L, c_s], c_s = {self.c_s}", s, (L,), self.c_s, 0),
            ("mask", "[*, L], one number for each token", mask, (L,), None, 0),
        ):
            if given is not None and (
                given.dim() < fewest or not _fits(given.shape, lead, own, channels)
            ):
                raise InvalidInputError(
                    f"{name}: expected {form}, with L and the leading dimensions of a, or 1 in "
                    f"their place; got {shape_of(given)} for a of {shape_of(a)}."
                )
        if self.layer_norm_a is not None:
            a = self.layer_norm_a(a) if s is None else self.layer_norm_a(a, s)
        if self.layer_norm_z is not None:
            z = self.layer_norm_z(z)
        bias = self.linear_z(z).movedim(-1, -3)
        seen = None if mask is None else (mask != 0)[..., None, None, :]
        if a.dim() > 3 and bias.shape[-4] == 1:
            o = self.mha(a, biases=(seen, bias))
        else:  # each sample has pairs of its own: samples are batches
            seen = None if seen is None else seen.unsqueeze(-4)
            o = self.mha(a.unsqueeze(-3), biases=(seen, bias.unsqueeze(-4))).squeeze(-3)
        if self.linear_ada_out is not None:
            o = o * self.linear_ada_out(s).sigmoid()
        result: Tensor = o
        return result


def _fits(
    given: Sequence[int], lead: Sequence[int], own: Sequence[int], channels: int | None
) -> bool:
    """Whether a tensor of the shape `given` can be broadcast to `[*lead, *own]`, and `channels`
    behind it, which are not broadcast.
    """
    if channels is not None:
        if len(given) == 0 or given[-1] != channels:
            return False
        given = given[:-1]
    sizes = (*lead, *own)
    if leaves_out(given[: -len(own)], len(lead)) or len(given) > len(sizes):
        return False
    pairs = zip(reversed(given), reversed(sizes), strict=False)
    return all(size == full or size == 1 for size, full in pairs)
