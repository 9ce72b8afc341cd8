"""The op over many processes, on PyTorch's DTensor and process groups (docs/many-gpus.md). It is
imported on first use only.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepspeed4science.distributed.axial import (
        apply_locally,
        attention,
        triangle_attention,
    )
    from deepspeed4science.distributed.merge import merge_attention
    from deepspeed4science.distributed.parameters import sum_gradients
    from deepspeed4science.distributed.ring import ring_attention

__all__ = [
    "apply_locally",
    "attention",
    "merge_attention",
    "ring_attention",
    "sum_gradients",
    "triangle_attention",
]

_MODULES = {
    "apply_locally": "axial",
    "attention": "axial",
    "merge_attention": "merge",
    "ring_attention": "ring",
    "sum_gradients": "parameters",
    "triangle_attention": "axial",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
