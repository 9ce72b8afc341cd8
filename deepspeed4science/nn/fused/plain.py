"""The functions of launch.py in plain PyTorch: for tensors outside of a GPU, and as the reference
with which tests compare the Triton kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def norm_pair_bias(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    weight: Tensor,
    dtype: torch.dtype,
    eps: float,
    transposed: bool,
) -> tuple[Tensor, Tensor]:
    normed = functional.layer_norm(x.float(), x.shape[-1:], norm_weight, norm_bias, eps)
    normed = normed.to(dtype)
    z = functional.linear(normed, weight.to(dtype)).movedim(-1, -3).unsqueeze(-4)
    return normed, (z.mT if transposed else z).contiguous()


def norm_pair_bias_backward(
    dnormed: Tensor,
    dz: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    weight: Tensor,
    dresidual: Tensor | None,
    eps: float,
    transposed: bool,
) -> tuple[Tensor, Tensor]:
    weight, wide = weight.to(dnormed.dtype), x.float()
    wide = wide - wide.mean(-1, keepdim=True)
    scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    wide = wide * scale
    dz = (dz.mT if transposed else dz).squeeze(-4).movedim(-3, -1)
    dz = dz.reshape(*x.shape[:-1], len(weight)).to(weight.dtype).float()
    scaled = (wide * norm_weight + norm_bias).to(weight.dtype).float()
    dweight = dz.flatten(0, -2).T @ scaled.flatten(0, -2)
    of_normed = dnormed.float() + dz @ weight.float()
    rows = tuple(range(x.dim() - 1))
    dnorm = torch.stack([(of_normed * wide).sum(rows), of_normed.sum(rows)])
    of_normed = of_normed * norm_weight
    along = (of_normed * wide).mean(-1, keepdim=True)
    dx = scale * (of_normed - of_normed.mean(-1, keepdim=True) - wide * along)
    if dresidual is not None:
        dx = dx + dresidual
    return dx.to(x.dtype), torch.cat([dnorm, dweight])


def gated_output(
    o: Tensor,
    gate: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    ending: bool,
) -> Tensor:
    o = _turned(o.reshape(_turned(gate, ending).shape), ending)
    gated = (o * gate.float().sigmoid()).to(gate.dtype)
    bias = None if bias is None else bias.to(gate.dtype)
    y = functional.linear(gated, weight.to(gate.dtype), bias)
    return y if residual is None else (y + residual).to(residual.dtype)


def gated_output_backward(
    dy: Tensor,
    weight: Tensor,
    o: Tensor,
    gate: Tensor,
    dgate: Tensor,
    has_bias: bool,
    ending: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dy, weight = dy.to(gate.dtype), weight.to(gate.dtype)
    values = _turned(o.reshape(_turned(gate, ending).shape), ending).float()
    opened = gate.float().sigmoid()
    dgated = (dy @ weight).float()
    dgate.copy_(dgated * values * opened * (1 - opened))
    do = _turned(dgated * opened, ending).to(o.dtype).reshape(o.shape)
    dy, gated = (x.float().flatten(0, -2) for x in (dy, (values * opened).to(dy.dtype)))
    dbias, dgate_bias = dy.new_empty(0), dy.new_empty(0)
    if has_bias:
        dbias, dgate_bias = dy.sum(0), dgate.float().flatten(0, -2).sum(0)
    return do, dy.T @ gated, dbias, dgate_bias


def _turned(x: Tensor, ending: bool) -> Tensor:
    return x.transpose(-2, -3) if ending else x
