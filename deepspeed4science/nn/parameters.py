"""Linear maps and norms with OpenFold's initialisations (AlphaFold 2, section 1.11.4)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from deepspeed4science import autocast, mixed_precision
from deepspeed4science.dtensor import is_dtensor
from deepspeed4science.errors import InvalidInputError

# The number of columns of a joined projection is a multiple of this. For 589,824 rows of 128 inputs
# cuBLAS takes 0.64 ms with 576 columns and 0.78 ms with 528 (forward, and backward with the
# gradient of the weights; H200, bfloat16).
_ROW = 64
_STD_OF_TRUNCATED = 0.8796256610342398  # of a standard normal distribution truncated at -2 and 2


class Linear(nn.Linear):
    """A linear map that takes activations of any dtype.

    Args:
        init: initialisation of the weight: "default" (truncated normal of variance 1 / fan_in),
            "glorot", "normal" (of variance 1 / fan_in) or "zero".
        bias: initial value of every element of the bias; None: no bias.

    Raises:
        InvalidInputError: there is no such initialisation, or it maps from or to no channel.
    """

    def __init__(
        self, in_features: int, out_features: int, init: str, bias: float | None = None
    ) -> None:
        for size in (in_features, out_features):
            if not hasattr(size, "__index__") or size < 1:
                raise InvalidInputError(
                    "a layer's channels and heads: expected integers from 1 up; got a linear map "
                    f"from {in_features} to {out_features} channels."
                )
        self._init, self._fill = init, bias
        super().__init__(in_features, out_features, bias=bias is not None)

    def reset_parameters(self) -> None:
        std = math.sqrt(1.0 / self.in_features)
        if self._init == "glorot":
            nn.init.xavier_uniform_(self.weight)
        elif self._init == "normal":
            nn.init.normal_(self.weight, std=std)
        elif self._init == "default":
            std /= _STD_OF_TRUNCATED
            nn.init.trunc_normal_(self.weight, std=std, a=-2 * std, b=2 * std)
        elif self._init == "zero":
            nn.init.zeros_(self.weight)
        else:
            raise InvalidInputError(
                f"init: expected 'default', 'glorot', 'normal' or 'zero'; got {self._init!r}."
            )
        if self._fill is not None:
            nn.init.constant_(self.bias, self._fill)

    def forward(self, input: Tensor) -> Tensor:
        return mixed_precision.linear(input, self.weight, self.bias)


class LayerNorm(nn.LayerNorm):
    """Layer norm computed in float32, whatever the dtype of the activations."""

    def forward(self, input: Tensor) -> Tensor:
        return mixed_precision.layer_norm(input, self.weight, self.bias, self.eps)


_PLAIN = (Linear.forward, nn.Linear.forward, LayerNorm.forward, nn.LayerNorm.forward)
_NUMBERS = (Tensor, nn.Parameter, FakeTensor, FunctionalTensor)  # the latter two while tracing


def is_plain(part: nn.Module) -> bool:
    """Whether its weight and bias are all there is to a linear map or norm: nothing wraps it, as
    LoRA does, and nothing waits for its call. They are tensors or DTensors: other subclasses, such
    as quantised weights, may know no operator but that of their map.
    """
    return (
        type(part).forward in _PLAIN
        and is_untouched(part)
        and all(
            one is None or type(one) in _NUMBERS or is_dtensor(one)
            for one in part._parameters.values()
        )
    )


def is_untouched(module: nn.Module) -> bool:
    """Whether a call of the module is one of its class's `forward` only: nothing replaces that in
    this module, and no hook of its own waits for the call. Global hooks do not count:
    FlopCounterMode has them, and is to see what runs without it.
    """
    hooks = module._forward_hooks or module._forward_pre_hooks
    hooks = hooks or module._backward_hooks or module._backward_pre_hooks
    return "forward" not in vars(module) and not hooks


def leaves_out(leading: Sequence[int], number: int) -> bool:
    """Whether these leading dimensions of an argument are fewer than the layer's input has, and not
    all of size 1. Broadcasting would take them for the last ones of the input.
    """
    return len(leading) < number and any(size != 1 for size in leading)


def project(x: Tensor, maps: Sequence[Linear]) -> Sequence[Tensor]:
    """`map(x)` for each map. Plain maps are one product, so that x is read once."""
    # Padding has no gradient. Autograd takes zeros for it that are no DTensor, beside DTensors.
    if not all(is_plain(one) for one in maps) or is_dtensor(maps[0].weight):
        return [one(x) for one in maps]
    product = mixed_precision.linear(x, *joined(maps))
    sizes = [one.out_features for one in maps]
    parts: Sequence[Tensor] = product.split([*sizes, product.shape[-1] - sum(sizes)], dim=-1)
    return parts[: len(maps)]


def join(x: Tensor, maps: Sequence[Linear]) -> Tensor:
    """`map(x)` for each map, side by side along the last dimension, padded with zeros to a multiple
    of 64 columns. Plain maps are one product, so that x is read once.
    """
    if all(is_plain(one) for one in maps):
        return mixed_precision.linear(x, *joined(maps))
    parts = [one(x) for one in maps]
    rest = -sum(one.shape[-1] for one in parts) % _ROW
    return torch.cat([*parts, parts[0].new_zeros(*parts[0].shape[:-1], rest)], dim=-1)


def joined(maps: Sequence[Linear]) -> tuple[Tensor, Tensor | None]:
    """The weight and bias with which `join` computes its product."""
    rest = -sum(one.out_features for one in maps) % _ROW
    weights = [one.weight for one in maps]
    if rest:
        weights.append(weights[0].new_zeros(rest, maps[0].in_features))
    biases: list[Tensor] = []
    if any(one.bias is not None for one in maps):
        zeros = weights[0].new_zeros
        biases = [zeros(one.out_features) if one.bias is None else one.bias for one in maps]
        biases.append(zeros(rest))
    # Under autocast in one 16-bit dtype, torch.cat refuses the other. The product is cast anyway.
    with autocast.off(weights[0].device.type):
        weight, bias = torch.cat(weights), torch.cat(biases) if biases else None
    return weight, bias
