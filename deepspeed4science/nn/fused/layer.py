"""A triangle layer around the Triton kernels, as one differentiable function."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from deepspeed4science.arguments import canonicalise
from deepspeed4science.dtensor import is_dtensor
from deepspeed4science.nn.fused import operators
from deepspeed4science.nn.parameters import joined
from deepspeed4science.operators import forward_op
from deepspeed4science.packed import columns

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
        and layer.mha.no_heads * layer.mha.c_hidden in _CHANNELS
        and layer.mha.no_heads in _HEADS
        and not torch._C._are_functorch_transforms_active()
        and _compiles_for(x.device.index)
    )


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
    norm, out, dtype = layer.layer_norm, layer.mha.linear_o, _dtype_of_products(x)
    weight, bias = joined(layer.mha.projections())
    result: Tensor = _TriangleAttention.apply(
        x.contiguous(),
        norm.weight.float(),
        norm.bias.float(),
        layer.linear_z.weight,
        weight,
        bias,
        out.weight,
        out.bias,
        seen,
        dtype,
        layer.mha.no_heads,
        layer.mha.c_hidden,
        norm.eps,
        layer.is_ending,
        residual,
        gathers,
    )
    return result


class _TriangleAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor,
        z_weight: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        out_weight: Tensor,
        out_bias: Tensor | None,
        seen: Tensor | None,
        dtype: torch.dtype,
        H: int,
        D: int,
        eps: float,
        ending: bool,
        residual: bool,
        gathers: Callable[[Tensor], Gather] | None,
    ) -> Tensor:
        parameters = (z_weight, weight, bias, out_weight, out_bias)
        ctx.dtypes = [None if one is None else one.dtype for one in parameters]
        z_weight, weight, out_weight = (one.to(dtype) for one in (z_weight, weight, out_weight))
        bias, out_bias = (None if one is None else one.to(dtype) for one in (bias, out_bias))
        normed, z = operators.norm_pair_bias_op(x, norm_weight, norm_bias, z_weight, eps, ending)
        gather = None if gathers is None else gathers(z)  # while the product runs
        product = functional.linear(normed, weight, bias)
        z = z if gather is None else gather.whole()
        q, k, v, gate = columns(product, H, D, ending, pair_bias=False)
        shape = gate.shape
        q, k, v = (part.unflatten(-1, (H, D)) for part in (q, k, v))
        q, k, v, bias1, bias2 = canonicalise(q, k, v, seen, z)
        o, lse = forward_op(q, k, v, bias1, bias2, True, None, None)
        gate = product[..., 3 * H * D :]
        y: Tensor = operators.gated_output_op(
            o.view(shape), gate, out_weight, out_bias, x if residual else None, ending
        )
        ctx.save_for_backward(
            x,
            normed,
            product,
            o,
            lse,
            bias1,
            bias2,
            norm_weight,
            norm_bias,
            z_weight,
            weight,
            out_weight,
        )
        ctx.eps, ctx.ending, ctx.residual = eps, ending, residual
        ctx.gather, ctx.z_shape = gather, z.shape
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, normed, product, o, lse, bias1, bias2, *parameters = ctx.saved_tensors
        norm_weight, norm_bias, z_weight, weight, out_weight = parameters
        has_bias = ctx.dtypes[2] is not None or ctx.dtypes[4] is not None
        dy = dy.contiguous()
        gradient, dz, dout_weight, dout_bias, dgate_bias = operators.gated_backward_op(
            dy, out_weight, product, o, lse, bias1, bias2, has_bias, ctx.ending
        )
        if ctx.gather is not None:  # while both products run
            part = ctx.gather.reduce_scatter(dz.view(ctx.z_shape))
        rows = gradient.flatten(0, -2)
        dweight = rows.mT @ normed.flatten(0, -2)
        dnormed = (rows @ weight).view(x.shape)
        dresidual = dy if ctx.residual else None
        dz = dz if ctx.gather is None else ctx.gather.local(part)
        dx, *dnorm, dz_weight = operators.norm_pair_bias_backward_op(
            dnormed, dz, x, norm_weight, norm_bias, z_weight, dresidual, ctx.eps, ctx.ending
        )
        dbias = functional.pad(dgate_bias, (3 * dgate_bias.shape[0], 0))  # q, k, v have no bias
        found = (dz_weight, dweight, dbias, dout_weight, dout_bias)
        own = (
            None if dtype is None else one.to(dtype)
            for one, dtype in zip(found, ctx.dtypes, strict=True)
        )
        return (dx, *dnorm, *own, *(None,) * 8)
