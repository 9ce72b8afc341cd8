"""Gated attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from deepspeed4science.dtensor import is_sharded
from deepspeed4science.errors import InvalidInputError
from deepspeed4science.evoformer_attn import DS4Sci_EvoformerAttention
from deepspeed4science.nn.parameters import Linear, project
from deepspeed4science.problem import shape_of


class EvoformerAttention(nn.Module):
    """Multi-head attention with up to two biases and a gate computed from the queries: the core of
    MSA row and column attention and of triangle attention.

    Parameters: linear_q, linear_k, linear_v, linear_g (with gating), linear_o. A linear map has a
    bias only if an argument below asks for it.

    Args:
        c_q, c_k, c_v: channels of the inputs of linear_q, linear_k and linear_v; the result has
            c_q channels.
        c_hidden: channels of a head.
        no_heads: number of heads.
        gating: multiply the result of each head by sigmoid(linear_g(q_x)).
        bias: linear_g and linear_o have a bias, as in AlphaFold 2; in AlphaFold 3 and Boltz they
            have none.
        bias_q: linear_q has a bias, as in AlphaFold 3's attention with pair bias.
        init: initialisation of linear_q, linear_k and linear_v: "glorot" (AlphaFold 2) or
            "default" (AlphaFold 3).

    Raises:
        InvalidInputError: there is no such initialisation, or a number of channels or heads is no
            integer from 1 up.
    """

    def __init__(
        self,
        c_q: int,
        c_k: int,
        c_v: int,
        c_hidden: int,
        no_heads: int,
        gating: bool = True,
        *,
        bias: bool = True,
        bias_q: bool = False,
        init: str = "glorot",
    ) -> None:
        super().__init__()
        self.c_q, self.c_k = c_q, c_k
        self.no_heads, self.c_hidden = no_heads, c_hidden
        width = no_heads * c_hidden
        self.linear_q = Linear(c_q, width, init, bias=0.0 if bias_q else None)
        self.linear_k = Linear(c_k, width, init)
        self.linear_v = Linear(c_v, width, init)
        self.linear_g = Linear(c_q, width, "zero", bias=1.0 if bias else None) if gating else None
        self.linear_o = Linear(width, c_q, "zero", bias=0.0 if bias else None)

    def forward(
        self, q_x: Tensor, kv_x: Tensor | None = None, biases: Sequence[Tensor | None] = ()
    ) -> Tensor:
        """
        Args:
            q_x: `[*, Lq, c_q]`.
            kv_x: `[*, Lk, c_k]`. Default: q_x.
            biases: as `DS4Sci_EvoformerAttention` takes them.

        Returns:
            `[*, Lq, c_q]`.

        Raises:
            InvalidInputError: kv_x is no tensor, q_x or kv_x has other channels, or q_x is a
                DTensor and kv_x another one.
        """
        if not (kv_x is None or isinstance(kv_x, Tensor)):
            raise InvalidInputError(
                f"kv_x: expected a tensor or None; got {type(kv_x).__name__}. Biases are passed as "
                "biases=[bias1, bias2]."
            )
        for name, form, x, channels in (
            ("q_x", "[*, Lq, c_q], c_q", q_x, self.c_q),
            ("kv_x", "[*, Lk, c_k], c_k", kv_x, self.c_k),
        ):
            if x is not None and (x.dim() < 2 or x.shape[-1] != channels):
                raise InvalidInputError(f"{name}: expected {form} = {channels}; got {shape_of(x)}.")
        if kv_x is None or kv_x is q_x:
            if is_sharded(q_x, self.linear_q):
                from deepspeed4science.distributed.axial import attention

                return attention(self, q_x, biases)
            q, k, v, *g = project(q_x, self.projections())
        elif is_sharded(q_x, self.linear_q):
            raise InvalidInputError(
                "kv_x: expected None where q_x is a DTensor; got another tensor. Call the layer "
                "with local tensors: q_x.to_local(), and all keys of these queries."
            )
        else:
            q, *g = project(q_x, [self.linear_q, *self.gates()])
            k, v = project(kv_x, [self.linear_k, self.linear_v])
        return self.attend(q, k, v, g, biases)

    def gates(self) -> list[Linear]:
        return [] if self.linear_g is None else [self.linear_g]

    def projections(self) -> list[Linear]:
        """The maps of one common input to q, k, v and the gate, in the order of `attend`."""
        return [self.linear_q, self.linear_k, self.linear_v, *self.gates()]

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: Sequence[Tensor],
        biases: Sequence[Tensor | None],
    ) -> Tensor:
        """The layer's result from its projections, `[*, L, H * D]` each. Where heads are divided
        among processes (ColwiseParallel), they are of this process's heads alone.
        """
        q, k, v = (tensor.unflatten(-1, (-1, self.c_hidden)) for tensor in (q, k, v))
        return self.gated(DS4Sci_EvoformerAttention(q, k, v, biases), gates)

    def gated(self, o: Tensor, gates: Sequence[Tensor]) -> Tensor:
        """The layer's result from the attention's, `[*, L, H, D]`."""
        o = o.flatten(-2)
        for gate in gates:
            if torch.compiler.is_compiling():
                # In a fused kernel float32 costs nothing. The backward then keeps the gate, a part
                # of the projection, which is kept anyway, and not the sigmoid as another tensor.
                gate = gate.float()
            o = (o * gate.sigmoid()).to(o.dtype)
        result: Tensor = self.linear_o(o)
        return result
