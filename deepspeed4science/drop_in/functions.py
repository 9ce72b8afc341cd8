"""Functions on this op with the signatures of the models' functions that they replace.

heads_first...   q, k, v [*, H, L, D], biases that broadcast to [*, H, Lq, Lk], o [*, Lq, H, D]
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from deepspeed4science.evoformer_attn import DS4Sci_EvoformerAttention
from deepspeed4science.triangle import triangle_attention


def heads_first_attention(
    q: Tensor, k: Tensor, v: Tensor, biases: Sequence[Tensor], scale: float | None = None
) -> Tensor:
    """Replaces `_deepspeed_evo_attn` of OpenFold and Protenix, and OpenFold 3's `_triton_evo_attn`
    and `_cueq_triangle_attn`. Takes tensors of any rank, in the caller's dtype, float32 included.
    """
    q, k, v = q.transpose(-2, -3), k.transpose(-2, -3), v.transpose(-2, -3)
    if not any(_differs_by_row(bias, q) for bias in biases[1:]):
        return DS4Sci_EvoformerAttention(q, k, v, list(biases), scale=scale)
    # Chunked over a flattened batch: each row n has a pair bias of its own, and is a batch of one.
    q, k, v = q.unsqueeze(-4), k.unsqueeze(-4), v.unsqueeze(-4)
    own = [bias.unsqueeze(-4) if bias.dim() > 3 else bias for bias in biases]
    return DS4Sci_EvoformerAttention(q, k, v, own, scale=scale).squeeze(-4)


def triangle_attention_of_boltz(
    q: Tensor, k: Tensor, v: Tensor, tri_bias: Tensor, mask: Tensor, scale: float
) -> Tensor:
    """Replaces `kernel_triangular_attn` of Boltz and BoltzGen."""
    return triangle_attention(q, k, v, tri_bias, mask, scale)


def _differs_by_row(bias: Tensor, q: Tensor) -> bool:
    return bias.dim() == q.dim() > 3 and bias.shape[-4] > 1 and bias.stride(-4) != 0
