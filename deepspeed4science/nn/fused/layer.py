"""A triangle layer around the Triton kernels, as one differentiable function."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deepspeed4science.arguments import canonical_bias
from deepspeed4science.call import TriangleBackward, TriangleForward
from deepspeed4science.dtensor import is_dtensor
from deepspeed4science.nn.fused import operators, steps
from deepspeed4science.nn.parameters import is_plain
from deepspeed4science.operators import is_transformed

if TYPE_CHECKING:
    from deepspeed4science.distributed.gather import Gather
    from deepspeed4science.nn.triangle import TriangleAttentionStartingNode

logger = logging.getLogger(__name__)

_CHANNELS = (32, 64, 128)  # a program holds all channels of a pair in registers
_HEADS = (1, 2, 4, 8, 16)  # the product that gives the pair bias has 16 columns
_LEAST_MAJOR = 9  # compute capability: the first with a tensor memory accelerator
_SHARED_BYTES = 192 * 1024 + 512  # three tiles of 64 pairs and 128 channels, and barriers


def serves(layer: TriangleAttentionStartingNode, x: Tensor) -> bool:
    """Whether the Triton kernels support this call."""
    return (
        x.is_cuda
        and not is_dtensor(x)
        and _dtype_of_products(x) in (torch.bfloat16, torch.float16)
        and x.dtype in (torch.float32, _dtype_of_products(x))
        and x.shape[-1] in _CHANNELS
        and layer.is_one_product()
        and layer.mha.no_heads * layer.mha.c_hidden in _CHANNELS
        and layer.mha.no_heads in _HEADS
        and all(is_plain(part) for part in _parts(layer))
        and _has_parameters_of_kernels(layer)
        and not is_transformed()
        and _compiles_for(x.device.index)
    )


def _parts(layer: TriangleAttentionStartingNode) -> list[nn.Module]:
    return [layer.layer_norm, layer.linear_z, *layer.mha.projections(), layer.mha.linear_o]


def _has_parameters_of_kernels(layer: TriangleAttentionStartingNode) -> bool:
    """Whether the norm has a weight and a bias, and the maps to q, k, v and z have no bias."""
    norm, mha = layer.layer_norm, layer.mha
    maps = (layer.linear_z, mha.linear_q, mha.linear_k, mha.linear_v)
    has_both = norm.weight is not None and norm.bias is not None
    return has_both and all(one.bias is None for one in maps)


def _dtype_of_products(x: Tensor) -> torch.dtype:
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def _compiles_for(device: int) -> bool:
    if device not in _compiled_for:
        _compiled_for[device] = (
            find_spec("triton") is not None
            and find_spec("triton.tools.tensor_descriptor") is not None
            and torch.version.hip is None
            and torch.cuda.get_device_properties(device).major >= _LEAST_MAJOR
            and _shared_bytes(device) >= _SHARED_BYTES
        )
    return _compiled_for[device]


def _shared_bytes(device: int) -> int:
    """Bytes of shared memory that a block may use; 0 where Triton cannot be used."""
    try:  # Triton compiles its driver at first use, which fails without a C compiler
        from triton.runtime import driver

        found: int = driver.active.utils.get_device_properties(device)["max_shared_mem"]
    except Exception as problem:
        logger.info("triangle layers take plain PyTorch: Triton cannot be used: %s", problem)
        return 0
    return found


_compiled_for: dict[int, bool] = {}
# This attribute makes torch.compile call the function while tracing and not trace into it. The
# decorator that sets it would import all of torch._dynamo.
_compiles_for._dynamo_marked_constant = True  # type: ignore[attr-defined]


def triangle_attention(
    layer: TriangleAttentionStartingNode,
    x: Tensor,
    seen: Tensor | None,
    residual: bool,
    gathers: Callable[[Tensor], Gather] | None = None,
) -> Tensor:
    """`layer(x)`, plus x if `residual` is set.

    Args:
        seen: `[*, N, 1, 1, L]`, bool: keys that are seen.
        gathers: where x is one process's part of the rows n: called with this process's part of
            the pair bias, starts to gather the whole of it.
    """
    mha, norm, dtype = layer.mha, layer.layer_norm, _dtype_of_products(x)
    gate = mha.linear_g
    assert gate is not None
    out_bias = mha.linear_o.bias
    result: Tensor = _TriangleAttention.apply(
        x.contiguous(),  # kernels know no strides, of parameters neither
        norm.weight.float().contiguous(),
        norm.bias.float().contiguous(),
        layer.linear_z.weight.contiguous(),
        mha.linear_q.weight,
        mha.linear_k.weight,
        mha.linear_v.weight,
        gate.weight,
        gate.bias,
        mha.linear_o.weight.contiguous(),
        None if out_bias is None else out_bias.contiguous(),
        None if seen is None else _bias_of_mask(seen, x, dtype, layer.is_ending),
        dtype,
        mha.no_heads,
        norm.eps,
        layer.is_ending,
        residual,
        layer.transpose_bias,
        gathers,
    )
    return result


def _bias_of_mask(seen: Tensor, x: Tensor, dtype: torch.dtype, ending: bool) -> Tensor | None:
    """bias1 of attention, `[B|1, N|1, 1, 1, L]`."""
    *batch, rows, columns, _ = x.shape
    bias1 = torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, -math.inf)
    return canonical_bias("mask", bias1, (*batch, columns if ending else rows))


_WEIGHTS = slice(TriangleForward._fields.index("z_weight"), TriangleForward._fields.index("bias1"))


class _TriangleAttention(torch.autograd.Function):
    """Its arguments are the fields of a `TriangleForward` and `gathers`."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *fields, gathers = arguments
        call = TriangleForward(*fields)
        if gathers is None:
            (y, *kept), ctx.gather = operators.forward(call), None
        else:
            (y, *kept), ctx.gather = steps.forward(call, gathers)
        inputs = (call.x, call.norm_weight, call.norm_bias, call.z_weight, call.out_weight)
        ctx.save_for_backward(*inputs, *kept, call.bias1)
        ctx.options = (call.eps, call.ending, call.residual, call.transpose_bias)
        weights: Any = call[_WEIGHTS]
        ctx.dtypes = [None if one is None else one.dtype for one in weights]
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dtypes = ctx.dtypes
        has_bias = dtypes[5] is not None or dtypes[7] is not None
        options: Any = (has_bias, *ctx.options)
        call = TriangleBackward(dy.contiguous(), *ctx.saved_tensors, *options)
        gather = ctx.gather
        found = operators.backward(call) if gather is None else steps.backward(call, gather)
        dx, dnorm, dweight, dgate_bias, *of_output = found
        dweights = dweight.to(dtypes[1]).chunk(4)  # one launch, as their dtypes are the same
        own = (
            None if dtype is None else one.to(dtype)
            for one, dtype in zip(
                (dnorm[2:], *dweights, dgate_bias, *of_output), dtypes, strict=True
            )
        )
        return (dx, dnorm[0], dnorm[1], *own, *(None,) * 8)
