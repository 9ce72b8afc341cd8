"""Triangle attention around the starting and around the ending node."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from deepspeed4science.dtensor import is_dtensor, is_sharded
from deepspeed4science.errors import InvalidInputError
from deepspeed4science.nn import fused
from deepspeed4science.nn.attention import EvoformerAttention
from deepspeed4science.nn.gated import can_be_recorded, gated_attention
from deepspeed4science.nn.names import TRIANGLE, accept
from deepspeed4science.nn.parameters import LayerNorm, Linear, is_untouched, join, leaves_out
from deepspeed4science.packed import columns, pair_bias
from deepspeed4science.problem import shape_of


class TriangleAttentionStartingNode(nn.Module):
    """Attention of the pairs (i, j) over all (i, k), with a bias from (j, k).

    Parameters: layer_norm, linear_z (the bias of pairs), mha (an EvoformerAttention).

    Args:
        c_in: channels of a pair.
        c_hidden: channels of a head.
        no_heads: number of heads.
        bias: mha.linear_g and mha.linear_o have a bias, as in AlphaFold 2; in AlphaFold 3 and Boltz
            they have none.
        transpose_bias: the bias is that of (k, j). For the ending node: that of (i, k), as in
            OpenFold 3's pair blocks, IntelliFold and RosettaFold 3.
    """

    is_ending: ClassVar[bool] = False

    def __init__(
        self,
        c_in: int,
        c_hidden: int,
        no_heads: int,
        *,
        bias: bool = True,
        transpose_bias: bool = False,
    ) -> None:
        super().__init__()
        self.c_in = c_in
        self.transpose_bias = transpose_bias
        self.layer_norm = LayerNorm(c_in)
        self.linear_z = Linear(c_in, no_heads, "normal")
        self.mha = EvoformerAttention(c_in, c_in, c_in, c_hidden, no_heads, bias=bias)
        accept(self, TRIANGLE)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, residual: bool = False) -> Tensor:
        """
        Args:
            x: `[*, I, J, c_in]`, with I = J.
            mask: `[*, I, J]`, or what broadcasts to it; pairs of 0 or False are hidden from every
                query. In a row (ending node: a column) in which all pairs are hidden, attention is
                0. Default: no pair is hidden. It may not leave out a dimension of `*` and have
                another of more than 1: batches would be taken for templates.
            residual: add x to the result, without another pass over the pairs. With dropout
                between layer and residual, write `x = x + dropout(layer(x, mask))` instead.

        Returns:
            `[*, I, J, c_in]`.

        Raises:
            InvalidInputError: I and J differ, or a shape does not fit.
        """
        if x.dim() < 3 or x.shape[-3] != x.shape[-2] or x.shape[-1] != self.c_in:
            raise InvalidInputError(
                f"x: expected pairs [*, L, L, c_in], c_in = {self.c_in}; got {shape_of(x)}."
            )
        if mask is not None and (mask.dim() >= x.dim() or leaves_out(mask.shape[:-2], x.dim() - 3)):
            raise InvalidInputError(
                f"mask: expected {list(x.shape[:-1])}, a number for each pair, or 1 in the place "
                f"of a size; got {shape_of(mask)}."
            )
        if is_sharded(x, self.linear_z):
            from deepspeed4science.distributed.axial import triangle_attention

            sharded: Tensor = triangle_attention(self, x, mask)
            return x + sharded if residual else sharded
        seen = None
        if mask is not None:
            mask = torch.atleast_2d(mask)
            seen = ((mask.mT if self.is_ending else mask) != 0)[..., None, None, :]
        if fused.serves(self, x):
            return fused.triangle_attention(self, x, seen, residual)
        # ColwiseParallel divides heads among processes; the columns of one product are all heads.
        divided = any(map(is_dtensor, self.mha.parameters()))
        one_product = self.is_one_product() and not divided
        o = self._by_parts(x, seen) if one_product else self._by_modules(x, seen)
        return x + o if residual else o

    def is_one_product(self) -> bool:
        """Whether mha's projections may be columns of one product with the pair bias, and mha is
        not called itself: it is a gated EvoformerAttention, and nothing waits for its call.
        """
        own = type(self.mha) is EvoformerAttention and is_untouched(self.mha)
        return own and self.mha.linear_g is not None

    def _by_modules(self, x: Tensor, seen: Tensor | None) -> Tensor:
        """The layer as calls of its modules."""
        x = self.layer_norm(x)
        z = pair_bias(self.linear_z(x), self.is_ending != self.transpose_bias)
        x = x.transpose(-2, -3) if self.is_ending else x
        o: Tensor = self.mha(x, biases=(seen, z))
        return o.transpose(-2, -3) if self.is_ending else o

    def _by_parts(self, x: Tensor, seen: Tensor | None) -> Tensor:
        """The layer in plain PyTorch around the op."""
        product = join(self.layer_norm(x), [*self.mha.projections(), self.linear_z])
        H, D, ending = self.mha.no_heads, self.mha.c_hidden, self.is_ending
        if can_be_recorded(product):
            gated = gated_attention(product, seen, H, D, ending, self.transpose_bias)
            o: Tensor = self.mha.linear_o(gated)
        else:
            q, k, v, gate, rest = columns(product, H, D, ending)  # views: no pair is moved
            z = pair_bias(rest[..., :H], ending != self.transpose_bias)
            o = self.mha.attend(q, k, v, [gate], (seen, z))
        return o.transpose(-2, -3) if ending else o


class TriangleAttentionEndingNode(TriangleAttentionStartingNode):
    """Attention of the pairs (i, j) over all (k, j), with a bias from (k, i): the starting node's
    layer on transposed pairs.
    """

    is_ending = True
