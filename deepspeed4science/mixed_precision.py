"""Layer norm and linear maps whose parameters may have another dtype than their input, such as
float32 weights and 16-bit activations, with or without autocast.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5) -> Tensor:
    """Layer norm, computed in float32 or wider, as under autocast, and returned in the dtype of
    `x`. On a GPU, PyTorch's own layer norm refuses weights of another dtype.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    weight, bias = (None if tensor is None else tensor.to(wide) for tensor in (weight, bias))
    return functional.layer_norm(x.to(wide), x.shape[-1:], weight, bias, eps).to(x.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear map in the dtype of `x`, or in autocast's dtype where autocast is on."""
    return functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
