"""The casts of Q, K and V under autocast. Biases are not cast: they are added in float32."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from deepspeed4science.call import ForwardCall
from deepspeed4science.problem import SUPPORTED_DTYPES

_DEVICES = ("cpu", "cuda")  # some others, such as "meta", have no autocast


def cast_inputs(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor] | tuple[Tensor, Tensor, Tensor]:
    """Q, K and V as autocast casts them, where it is on; outside of operators, so that autograd
    records the casts.
    """
    device_type = q.device.type
    if device_type in _DEVICES and torch.is_autocast_enabled(device_type):
        return cast(device_type, q, k, v)
    return q, k, v


def off(device_type: str) -> AbstractContextManager[Any]:
    """Autocast switched off, where it is on."""
    if device_type in _DEVICES and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def cast(device_type: str, *tensors: Tensor) -> list[Tensor]:
    """The tensors in autocast's dtype; float64 is not cast, as in PyTorch's own operators."""
    dtype = torch.get_autocast_dtype(device_type)
    return [tensor.to(dtype) if tensor.dtype in SUPPORTED_DTYPES else tensor for tensor in tensors]


def kernel(device_type: str, forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward operator's implementation under autocast: casts Q, K and V, then calls `forward`
    with autocast off.
    """
    key = getattr(torch._C.DispatchKey, f"Autocast{device_type.upper()}")
    keyset = torch._C.DispatchKeySet(key)

    def call(*arguments: Any, **named: Any) -> Any:
        given = ForwardCall(*arguments, **named)
        with torch._C._ExcludeDispatchKeyGuard(keyset):
            q, k, v = cast(device_type, given.q, given.k, given.v)
            return forward(*given._replace(q=q, k=k, v=v))

    return call
