"""Evoformer attention for AlphaFold-type models, compiled for the machine it runs on.

    from deepspeed4science import DS4Sci_EvoformerAttention

The names below are imported on first use, so that the report works on a machine whose PyTorch does
not.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepspeed4science.evoformer_attn import DS4Sci_EvoformerAttention, EvoformerFusedAttention
    from deepspeed4science.triangle import triangle_attention, triangle_multiplicative_update

__all__ = [
    "DS4Sci_EvoformerAttention",
    "EvoformerFusedAttention",
    "__version__",
    "triangle_attention",
    "triangle_multiplicative_update",
]
__version__ = "0.1.0"


def _import_own_op_builder() -> None:
    """DeepSpeed's sources have an op_builder, too, which Python finds where it starts in them."""
    beside = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    own = os.path.join(beside, "op_builder", "__init__.py")
    spec = spec_from_file_location("op_builder", own)
    if not os.path.isfile(own) or spec is None or spec.loader is None:
        return
    if (there := sys.modules.get("op_builder")) is not None:
        if there.__file__ and os.path.realpath(there.__file__) != own:
            raise ImportError(
                f"op_builder was imported from {there.__file__}, which is another package's; "
                "import deepspeed4science first"
            )
        return
    module = module_from_spec(spec)
    try:
        sys.modules["op_builder"] = module
        spec.loader.exec_module(module)
    except BaseException as error:  # an interrupt, too, leaves no half of it
        sys.modules.pop("op_builder", None)
        if not isinstance(error, (ImportError, OSError)):
            raise  # those are a damaged installation's: the report says more about it


_import_own_op_builder()
with suppress(ImportError):
    from op_builder import offered

    # DeepSpeed's `load()` returns a module with these two functions.
    offered.offer(f"{__name__}.drop_in.binding", "attention", "attention_bwd")

_MODULES = {
    "DS4Sci_EvoformerAttention": "evoformer_attn",
    "EvoformerFusedAttention": "evoformer_attn",
    "triangle_attention": "triangle",
    "triangle_multiplicative_update": "triangle",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        try:
            return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        except ModuleNotFoundError as error:
            if error.name == "torch":
                error.msg += f"; {sys.executable} has no PyTorch. pip install 'torch>=2.10'"
            raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
