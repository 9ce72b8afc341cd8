"""This op under the import paths of DeepSpeed and of cuEquivariance, whether they are installed or
not: where they are, only the functions are changed.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from deepspeed4science.drop_in.import_hook import Switch


def use_as_deepspeed() -> Switch:
    """From now on `from deepspeed.ops.deepspeed4science import DS4Sci_EvoformerAttention` imports
    this op.

    Without DeepSpeed there are also what models look for around it: `deepspeed.comm.comm.
    is_initialized` and `deepspeed.checkpointing.is_configured` (False), specs for `find_spec`,
    `deepspeed.ops.op_builder.EvoformerAttnBuilder` and, for checks of its arguments,
    `deepspeed.accelerator.get_accelerator().on_accelerator`. There is no distribution of that name:
    who asks importlib.metadata (transformers, accelerate) learns that DeepSpeed is not installed.
    Lightning would be content with a module, and is told.

    Call it before the model is imported.

    Returns:
        The switch, on: `with use_as_deepspeed(): ...` or `.back()` turns it off.
    """
    if _is_installed("deepspeed"):
        package = "deepspeed.ops.deepspeed4science"
        names = (package, f"{package}.evoformer_attn")
        return Switch(changed=dict.fromkeys(names, _op), served={})
    return Switch(
        changed=dict.fromkeys(_LIGHTNING, _without_deepspeed),
        served={
            "deepspeed": lambda _: {"__version__": "0"},
            "deepspeed.comm": lambda _: {"is_initialized": _no},
            "deepspeed.comm.comm": lambda _: {"is_initialized": _no},
            "deepspeed.accelerator": lambda _: {"get_accelerator": _Accelerator},
            "deepspeed.checkpointing": lambda _: {"is_configured": _no},
            "deepspeed.ops": lambda _: {},
            "deepspeed.ops.op_builder": _builder,
            "deepspeed.ops.deepspeed4science": _op,
            "deepspeed.ops.deepspeed4science.evoformer_attn": _op,
        },
    )


def use_as_cuequivariance() -> Switch:
    """From now on `from cuequivariance_torch import triangle_attention` imports this one's, and so
    do `cuequivariance_torch.primitives.triangle` and, unless cuEquivariance has its kernels
    installed, `triangle_multiplicative_update`.

    Call it before the model is imported.

    Returns:
        The switch, on: `with use_as_cuequivariance(): ...` or `.back()` turns it off.
    """
    names = ("cuequivariance_torch", "cuequivariance_torch.primitives.triangle")
    if _is_installed("cuequivariance_torch"):
        has_kernels = _is_installed("cuequivariance_ops_torch")
        functions = _triangle_attention if has_kernels else _triangle
        return Switch(changed=dict.fromkeys(names, functions), served={})
    return Switch(
        changed={},
        served={
            **dict.fromkeys(names, _triangle),
            "cuequivariance_torch.primitives": lambda _: {},
            "cuequivariance_ops_torch": _triangle,
            # OpenFold 3 reads it: the length up to which cuEquivariance itself takes PyTorch.
            "cuequivariance_ops_torch.triangle_attention": lambda _: {
                "CUEQ_TRIATTN_FALLBACK_THRESHOLD": 0
            },
        },
    )


def _is_installed(package: str) -> bool:
    return package in sys.modules or importlib.util.find_spec(package) is not None


# Where Lightning, under each of its names, keeps whether DeepSpeed's strategy can be used.
_LIGHTNING = tuple(
    f"{package}.deepspeed"
    for package in (
        "lightning.fabric.strategies",
        "lightning.pytorch.strategies",
        "lightning.pytorch.utilities",
        "lightning_fabric.strategies",
        "pytorch_lightning.strategies",
        "pytorch_lightning.utilities",
    )
)


def _without_deepspeed(module: ModuleType) -> Mapping[str, Any]:
    name = "_DEEPSPEED_AVAILABLE"
    return {name: False} if hasattr(module, name) else {}


def _no() -> bool:
    return False


class _Accelerator:
    def on_accelerator(self, _: Any) -> bool:
        """Whether kernels can read a tensor: this op says itself where they cannot."""
        return True


def _op(_: ModuleType) -> Mapping[str, Any]:
    from deepspeed4science import evoformer_attn

    names = ("DS4Sci_EvoformerAttention", "EvoformerFusedAttention")
    return {name: getattr(evoformer_attn, name) for name in names}


def _builder(_: ModuleType) -> Mapping[str, Any]:
    from op_builder import EvoformerAttnBuilder

    return {"EvoformerAttnBuilder": EvoformerAttnBuilder}


def _triangle_attention(_: ModuleType) -> Mapping[str, Any]:
    from deepspeed4science import triangle

    return {"triangle_attention": triangle.triangle_attention}


def _triangle(module: ModuleType) -> Mapping[str, Any]:
    from deepspeed4science import triangle

    multiplication = triangle.triangle_multiplicative_update
    return {
        **_triangle_attention(module),
        "triangle_multiplicative_update": multiplication,
    }
