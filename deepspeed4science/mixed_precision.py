"""Layer norm and linear maps whose parameters may have another dtype than their input: float32
weights and activations in 16 bits, with or without autocast.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5) -> Tensor:
    """Layer norm in at least float32, as under autocast. PyTorch's own accepts no weights of
    another dtype on a GPU.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    weight, bias = (None if tensor is None else tensor.to(wide) for tensor in (weight, bias))
    return functional.layer_norm(x.to(wide), x.shape[-1:], weight, bias, eps).to(x.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear map in the dtype of `x`, or in autocast's where it is on."""
    return functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
