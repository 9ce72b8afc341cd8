"""Every op by name, in the order in which reports list them."""

from __future__ import annotations

from typing import Any

from .builder import OpBuilder
from .evoformer_attn import EvoformerAttnBuilder
from .evoformer_attn_cpu import EvoformerAttnCPUBuilder

ALL_OPS: dict[str, OpBuilder[Any]] = {
    builder.NAME: builder for builder in (EvoformerAttnBuilder(), EvoformerAttnCPUBuilder())
}
