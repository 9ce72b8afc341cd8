"""This op under the import paths of DeepSpeed and of cuEquivariance, installed or not. Of an
installed library only the attention functions are replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from deepspeed4science.drop_in.import_hook import Switch, is_installed


def use_as_deepspeed() -> Switch:
    """From now on `from deepspeed.ops.deepspeed4science import DS4Sci_EvoformerAttention` imports
    this op.

    Without DeepSpeed, the names that models use around it are there too:
    `deepspeed.comm.comm.is_initialized` and `deepspeed.checkpointing.is_configured` (both False),
    specs for `find_spec`, `deepspeed.ops.op_builder.EvoformerAttnBuilder` and, for checks of its
    arguments, `deepspeed.accelerator.get_accelerator().on_accelerator`. There is no distribution of
    that name: code that asks importlib.metadata (transformers, accelerate) finds DeepSpeed not
    installed. Lightning asks for the module only, so its variable for this answer is set.

    Call it before the model is imported.

    Returns:
        The switch, on: `with use_as_deepspeed(): ...` or `.back()` turns it off.
    """
    if is_installed("deepspeed"):
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
    """From now on `from cuequivariance_torch import triangle_attention` imports this package's
    function. So do the same name in `cuequivariance_torch.primitives.triangle` and, unless
    cuEquivariance's kernels are installed, `triangle_multiplicative_update`.

    Without cuEquivariance, the names that models use around them are there too:
    `mask_to_kv_lengths`, `TriMulPrecision`, `cuequivariance_ops_torch.init_triton_cache`, and an
    empty module `cuequivariance`, which OpenDDE imports to learn whether the library is installed.
    Its other functions, such as `attention_pair_bias`, are not: models that check find them not
    installed.

    Call it before the model is imported.

    Returns:
        The switch, on: `with use_as_cuequivariance(): ...` or `.back()` turns it off.
    """
    names = ("cuequivariance_torch", "cuequivariance_torch.primitives.triangle")
    if is_installed("cuequivariance_torch"):
        has_kernels = is_installed("cuequivariance_ops_torch")
        functions = _triangle_attention if has_kernels else _triangle
        return Switch(changed=dict.fromkeys(names, functions), served={})
    # Imported by OpenDDE before it uses the functions: the library's own part without PyTorch.
    core = [] if is_installed("cuequivariance") else ["cuequivariance"]
    return Switch(
        changed={},
        served={
            **dict.fromkeys(core, lambda _: {}),
            **dict.fromkeys(names, _all_of_triangle),
            "cuequivariance_torch.primitives": lambda _: {},
            "cuequivariance_ops_torch": lambda module: {
                **_all_of_triangle(module),
                "init_triton_cache": lambda: None,
            },
            # Read by OpenFold 3: the length up to which cuEquivariance itself runs PyTorch.
            "cuequivariance_ops_torch.triangle_attention": lambda _: {
                "CUEQ_TRIATTN_FALLBACK_THRESHOLD": 0
            },
        },
    )


# The variable in which Lightning, under each of its names, keeps whether DeepSpeed is available.
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
        """Always True: this op itself says which tensors it cannot read."""
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


def _all_of_triangle(module: ModuleType) -> Mapping[str, Any]:
    from deepspeed4science import triangle

    names = ("mask_to_kv_lengths", "TriMulPrecision")
    return {**_triangle(module), **{name: getattr(triangle, name) for name in names}}


def _triangle(module: ModuleType) -> Mapping[str, Any]:
    from deepspeed4science import triangle

    multiplication = triangle.triangle_multiplicative_update
    return {
        **_triangle_attention(module),
        "triangle_multiplicative_update": multiplication,
    }
