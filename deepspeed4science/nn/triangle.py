"""Triangle attention around the starting and around the ending node."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from deepspeed4science.dtensor import comes_sharded
from deepspeed4science.nn.attention import EvoformerAttention
from deepspeed4science.nn.names import TRIANGLE, accept
from deepspeed4science.nn.parameters import LayerNorm, Linear, project


class TriangleAttentionStartingNode(nn.Module):
    """Attention of the pairs (i, j) over all (i, k), with a bias from (j, k). Without the residual:
    models write `z = z + dropout(layer(z, mask))`.

    Parameters: layer_norm, linear_z (the bias of pairs), mha (an EvoformerAttention).

    Args:
        c_in: channels of a pair.
        c_hidden: channels of a head.
        no_heads: number of heads.
        bias: of mha.linear_g and mha.linear_o, as in AlphaFold 2; AlphaFold 3 and Boltz have none.
    """

    is_ending: ClassVar[bool] = False

    def __init__(self, c_in: int, c_hidden: int, no_heads: int, *, bias: bool = True) -> None:
        super().__init__()
        self.layer_norm = LayerNorm(c_in)
        self.linear_z = Linear(c_in, no_heads, "normal")
        self.mha = EvoformerAttention(c_in, c_in, c_in, c_hidden, no_heads, bias=bias)
        accept(self, TRIANGLE)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """
        Args:
            x: `[*, I, J, c_in]`.
            mask: `[*, I, J]`; pairs that are 0 or False are seen by nobody. A row (ending node: a
                column) of them alone gets what an attention of 0 gives. Default: all are seen.

        Returns:
            `[*, I, J, c_in]`.
        """
        if comes_sharded(x, self.linear_z.weight):
            from deepspeed4science.distributed.axial import triangle_attention

            return triangle_attention(self, x, mask)
        maps = [*self.mha.projections(), self.linear_z]
        parts = project(self.layer_norm(x), maps)
        if self.is_ending:  # of views: no pair is moved
            parts = [part.transpose(-2, -3) for part in parts]
            mask = None if mask is None else mask.transpose(-1, -2)
        q, k, v, *gates, z = parts
        seen = None if mask is None else (mask != 0)[..., None, None, :]
        o = self.mha.attend(q, k, v, gates, (seen, z.movedim(-1, -3).unsqueeze(-4)))
        return o.transpose(-2, -3) if self.is_ending else o


class TriangleAttentionEndingNode(TriangleAttentionStartingNode):
    """Attention of the pairs (i, j) over all (k, j), with a bias from (k, i): the above, of
    transposed pairs.
    """

    is_ending = True
