"""Conversion of tensors to what kernels can read. Each function returns the call itself where
nothing is to be converted, as nearly always.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from deepspeed4science.call import BackwardCall, ForwardCall

CallT = TypeVar("CallT", ForwardCall, BackwardCall)


def unit_strides(call: CallT) -> CallT:
    """The call with channels of stride 1. Gradients of stride 0 and those of transposed consumers
    are copied.
    """
    if call.q.stride(-1) == call.k.stride(-1) == call.v.stride(-1) == 1 and (
        isinstance(call, ForwardCall) or call.o.stride(-1) == call.do_.stride(-1) == 1
    ):
        return call
    changes: dict[str, Any] = {
        name: tensor.contiguous() for name, tensor in _of_q(call).items() if tensor.stride(-1) != 1
    }
    return call._replace(**changes)


def in_dtype(call: CallT, dtype: torch.dtype) -> CallT:
    """The call with contiguous copies in another dtype of all tensors with the dtype of Q."""
    changes: dict[str, Any] = {
        name: tensor.to(dtype, memory_format=torch.contiguous_format)
        for name, tensor in _of_q(call).items()
    }
    return call._replace(**changes)


def with_biases_in_dtype(call: CallT, dtype: torch.dtype) -> CallT:
    """The call with biases in the dtype of Q. Finite numbers stay finite (-1e9 in float16)."""
    bias1, bias2 = call.bias1, call.bias2
    if (bias1 is None or bias1.dtype == dtype) and (bias2 is None or bias2.dtype == dtype):
        return call
    return call._replace(bias1=_in_dtype(bias1, dtype), bias2=_in_dtype(bias2, dtype))


def _in_dtype(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if bias is None or bias.dtype == dtype:
        return bias
    limits = torch.finfo(dtype)
    if torch.finfo(bias.dtype).max <= limits.max:
        return bias.to(dtype)
    bias = bias.float()  # bfloat16 has no number between float16's largest and 65,536
    within = bias.clamp(limits.min, limits.max)
    return torch.where(bias.isfinite(), within, bias).to(dtype)


def _of_q(call: ForwardCall | BackwardCall) -> dict[str, Tensor]:
    """The tensors that have the dtype of Q, by name."""
    found = {"q": call.q, "k": call.k, "v": call.v}
    return found if isinstance(call, ForwardCall) else found | {"o": call.o, "do_": call.do_}
