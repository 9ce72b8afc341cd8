"""Evoformer attention for AlphaFold-type models, compiled for the machine it runs on.

    from deepspeed4science import DS4Sci_EvoformerAttention

The names below arrive on first use, so that the report works on a machine whose PyTorch does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepspeed4science.evoformer_attn import DS4Sci_EvoformerAttention, EvoformerFusedAttention

__all__ = ["DS4Sci_EvoformerAttention", "EvoformerFusedAttention", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in ("DS4Sci_EvoformerAttention", "EvoformerFusedAttention"):
        from deepspeed4science import evoformer_attn

        return getattr(evoformer_attn, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
