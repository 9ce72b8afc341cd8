"""A triangle layer and its gradients as two PyTorch operators. Their steps are Triton kernels,
products and attention (steps.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deepspeed4science import flops, registration
from deepspeed4science.call import TriangleBackward, TriangleForward, schema
from deepspeed4science.nn.fused import steps
from deepspeed4science.non_differentiable import non_differentiable


def _forward(*arguments: Any, **named: Any) -> tuple[Tensor, ...]:
    results, _ = steps.forward(TriangleForward(*arguments, **named))
    return results


def _fake_forward(*arguments: Any, **named: Any) -> tuple[Tensor, ...]:
    call = TriangleForward(*arguments, **named)
    *batch, rows, cols, c_in = call.x.shape
    B, H, C = steps.flattened(batch), call.H, call.gate_weight.shape[0]
    N, L = (cols, rows) if call.ending else (rows, cols)
    empty = call.x.new_empty
    return (
        empty((*batch, rows, cols, call.out_weight.shape[0]), dtype=steps.dtype_of_y(call)),
        empty((*batch, rows, cols, c_in), dtype=call.dtype),
        empty((B, 1, H, L, L), dtype=call.dtype),
        empty((4 * C, c_in), dtype=call.dtype),
        empty((*batch, rows, cols, 4 * C), dtype=call.dtype),
        empty((B, N, L, H, C // H), dtype=call.dtype),
        empty((B, N, H, L), dtype=torch.float32),
    )


def _backward(*arguments: Any, **named: Any) -> tuple[Tensor, ...]:
    return steps.backward(TriangleBackward(*arguments, **named))


def _fake_backward(*arguments: Any, **named: Any) -> tuple[Tensor, ...]:
    call = TriangleBackward(*arguments, **named)
    c_out, C = call.out_weight.shape

    def empty(*size: int) -> Tensor:
        return call.x.new_empty(size, dtype=torch.float32)

    return (
        torch.empty_like(call.x),
        empty(2 + call.z_weight.shape[0], call.z_weight.shape[1]),
        torch.empty_like(call.weight),
        empty(C if call.has_bias else 0),
        empty(c_out, C),
        empty(c_out if call.has_bias else 0),
    )


def _operator(
    name: str, call: Any, num_results: int, function: Callable[..., Any], fake: Callable[..., Any]
) -> registration.Operator:
    return registration.Operator(
        schema(name, call, num_results=num_results),
        kernels={"CompositeExplicitAutograd": function, "Autograd": non_differentiable(name, call)},
        fake=fake,
    )


forward_op, backward_op = registration.register(
    _operator("evoformer_attn_triangle", TriangleForward, 7, _forward, _fake_forward),
    _operator("evoformer_attn_triangle_backward", TriangleBackward, 6, _backward, _fake_backward),
)
flops.register(forward_op, backward_op)


def forward(call: TriangleForward) -> tuple[Tensor, ...]:
    """The forward operator within an autograd.Function, where autograd records nothing."""
    return _below_autograd(forward_op, call)


def backward(call: TriangleBackward) -> tuple[Tensor, ...]:
    """The backward operator within an autograd.Function. Autograd records it only to refuse its
    derivative.
    """
    if torch.is_grad_enabled():
        recorded: tuple[Tensor, ...] = backward_op(*call)
        return recorded
    return _below_autograd(backward_op, call)


def _below_autograd(operator: Any, call: Any) -> tuple[Tensor, ...]:
    results: tuple[Tensor, ...]
    if torch.compiler.is_compiling():
        results = operator(*call)
    else:  # spares the operator's implementation for autograd
        with torch._C._AutoDispatchBelowAutograd():
            results = operator(*call)
    return results
