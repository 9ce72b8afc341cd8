"""What autocast makes of Q, K and V. Biases stay as they are; they are added in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deepspeed4science.call import ForwardCall
from deepspeed4science.problem import SUPPORTED_DTYPES

_DEVICES = ("cpu", "cuda")  # PyTorch knows no autocast of some others, "meta" for one


def heard(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor] | tuple[Tensor, Tensor, Tensor]:
    """As autocast, where it is on, wants them: outside of operators, where autograd sees it."""
    device_type = q.device.type
    if device_type in _DEVICES and torch.is_autocast_enabled(device_type):
        return cast(device_type, q, k, v)
    return q, k, v


def cast(device_type: str, *tensors: Tensor) -> list[Tensor]:
    """In autocast's dtype, float64 excepted, as PyTorch's own do it."""
    dtype = torch.get_autocast_dtype(device_type)
    return [tensor.to(dtype) if tensor.dtype in SUPPORTED_DTYPES else tensor for tensor in tensors]


def kernel(device_type: str, forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward operator under autocast: `forward` below it, with Q, K and V in its dtype."""
    key = getattr(torch._C.DispatchKey, f"Autocast{device_type.upper()}")
    keyset = torch._C.DispatchKeySet(key)

    def call(*arguments: Any, **named: Any) -> Any:
        given = ForwardCall(*arguments, **named)
        with torch._C._ExcludeDispatchKeyGuard(keyset):
            q, k, v = cast(device_type, given.q, given.k, given.v)
            return forward(*given._replace(q=q, k=k, v=v))

    return call
