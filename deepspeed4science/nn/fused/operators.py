"""The steps of a triangle layer around attention as PyTorch operators: Triton kernels for tensors
on a GPU, plain PyTorch for others.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepspeed4science import flops, implementation, registration
from deepspeed4science.call import BackwardCall, schema
from deepspeed4science.nn.fused import plain
from deepspeed4science.once import once
from deepspeed4science.packed import columns, heads


class NormPairBias(NamedTuple):
    """`evoformer_attn_norm_pair_bias` -> norm(x) in weight's dtype, and norm(x) weight^T in the
    layout of the attention's bias2, `[*, 1, H, L, L]`.
    """

    x: Tensor  # [*, I, J, C]
    norm_weight: Tensor  # [C], float32
    norm_bias: Tensor  # [C], float32
    weight: Tensor  # [H, C]
    eps: float
    ending: bool


class NormPairBiasBackward(NamedTuple):
    """`evoformer_attn_norm_pair_bias_backward` -> the gradient of x, and the float32 gradients of
    norm_weight, norm_bias and weight.
    """

    dnormed: Tensor  # [*, I, J, C]
    dz: Tensor  # [*, 1, H, L, L], float32
    x: Tensor
    norm_weight: Tensor
    norm_bias: Tensor
    weight: Tensor
    dresidual: Tensor | None  # [*, I, J, C]: added to the gradient of x
    eps: float
    ending: bool


class GatedOutput(NamedTuple):
    """`evoformer_attn_gated_output` -> (o * sigmoid(gate)) weight^T + bias + residual, `[*, I, J,
    c_out]`.
    """

    o: Tensor  # [*, N, L, C]
    gate: Tensor  # [*, I, J, C]
    weight: Tensor  # [c_out, C]
    bias: Tensor | None  # [c_out]
    residual: Tensor | None  # [*, I, J, c_out]
    ending: bool


class GatedAttentionBackward(NamedTuple):
    """`evoformer_attn_gated_backward` -> the gradient of product, and the float32 gradients of
    bias2, of the output's weight and bias and of the gate's bias (no elements unless has_bias).
    """

    dy: Tensor  # [*, I, J, c_out]
    weight: Tensor
    product: Tensor  # [*, I, J, 4 C]: q, k, v and gate
    o: Tensor  # [B, N, L, H, D]
    lse: Tensor
    bias1: Tensor | None
    bias2: Tensor  # [B, 1, H, L, L]
    has_bias: bool
    ending: bool


def _norm_pair_bias(*arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
    call = NormPairBias(*arguments, **named)
    found: tuple[Tensor, Tensor] = _kernels(call.x).norm_pair_bias(*call)
    return found


def _fake_norm_pair_bias(*arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
    call = NormPairBias(*arguments, **named)
    *batch, rows, cols, _ = call.x.shape
    (H, _), dtype = call.weight.shape, call.weight.dtype
    lengths = (cols, rows) if call.ending else (rows, cols)
    z = call.x.new_empty((*batch, 1, H, *lengths), dtype=dtype)
    return torch.empty_like(call.x, dtype=dtype), z


def _norm_pair_bias_backward(*arguments: Any, **named: Any) -> tuple[Tensor, ...]:
    call = NormPairBiasBackward(*arguments, **named)
    found: tuple[Tensor, ...] = _kernels(call.x).norm_pair_bias_backward(*call)
    return found


def _fake_norm_pair_bias_backward(*arguments: Any, **named: Any) -> tuple[Tensor, ...]:
    call = NormPairBiasBackward(*arguments, **named)
    norm = torch.empty_like(call.norm_weight)
    dweight = torch.empty_like(call.weight, dtype=torch.float32)
    return torch.empty_like(call.x), norm, torch.empty_like(norm), dweight


def _gated_output(*arguments: Any, **named: Any) -> Tensor:
    call = GatedOutput(*arguments, **named)
    y: Tensor = _kernels(call.o).gated_output(*call)
    return y


def _fake_gated_output(*arguments: Any, **named: Any) -> Tensor:
    call = GatedOutput(*arguments, **named)
    dtype = call.weight.dtype if call.residual is None else call.residual.dtype
    return call.o.new_empty((*call.gate.shape[:-1], call.weight.shape[0]), dtype=dtype)


def _gated_backward(*arguments: Any, **named: Any) -> tuple[Tensor, ...]:
    call = GatedAttentionBackward(*arguments, **named)
    H, D = call.o.shape[3:]
    gradient = torch.empty_like(call.product)
    gate, dgate = (one[..., 3 * H * D :] for one in (call.product, gradient))
    do, *parameters = _kernels(call.o).gated_output_backward(
        call.dy, call.weight, call.o, gate, dgate, call.has_bias, call.ending
    )
    q, k, v = heads(columns(call.product, H, D, call.ending, pair_bias=False), H)
    wanted = [True, True, True, False, True]
    whole = BackwardCall(do, q, k, v, call.o, call.lse, call.bias1, call.bias2, wanted)
    into = heads(columns(gradient, H, D, call.ending, pair_bias=False), H)
    *_, dbias2 = implementation.backward(*whole, into=into)
    return gradient, dbias2, *parameters


def _fake_gated_backward(*arguments: Any, **named: Any) -> tuple[Tensor, ...]:
    call = GatedAttentionBackward(*arguments, **named)
    N, C = call.weight.shape
    sizes = ((N, C), (N,), (C,)) if call.has_bias else ((N, C), (0,), (0,))
    parameters = (call.weight.new_empty(size, dtype=torch.float32) for size in sizes)
    dbias2 = torch.empty_like(call.bias2, dtype=torch.float32)
    return torch.empty_like(call.product), dbias2, *parameters


def _kernels(x: Tensor) -> Any:
    if not x.is_cuda or x.numel() == 0:
        return plain
    from deepspeed4science.nn.fused import launch

    return launch


def _operator(name: str, call: Any, num_results: int, function: Any, fake: Any) -> Any:
    name = f"evoformer_attn_{name}"
    return registration.Operator(
        schema(name, call, num_results=num_results),
        kernels={"CompositeExplicitAutograd": function, "Autograd": once(name, call)},
        fake=fake,
    )


norm_pair_bias_op, norm_pair_bias_backward_op, gated_output_op, gated_backward_op = (
    registration.register(
        _operator("norm_pair_bias", NormPairBias, 2, _norm_pair_bias, _fake_norm_pair_bias),
        _operator(
            "norm_pair_bias_backward",
            NormPairBiasBackward,
            4,
            _norm_pair_bias_backward,
            _fake_norm_pair_bias_backward,
        ),
        _operator("gated_output", GatedOutput, 1, _gated_output, _fake_gated_output),
        _operator(
            "gated_backward", GatedAttentionBackward, 5, _gated_backward, _fake_gated_backward
        ),
    )
)
flops.register(norm_pair_bias_op, norm_pair_bias_backward_op, gated_output_op, gated_backward_op)
