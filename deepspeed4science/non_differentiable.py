"""Operators without a derivative, which a layer's backward calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd import forward_ad

from deepspeed4science.errors import DoubleBackwardError
from deepspeed4science.operators import recorded


def non_differentiable(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """The registered operator `name`, with `call`'s arguments; differentiating it is an error."""

    def record(*arguments: Any, **named: Any) -> Any:
        operator = getattr(torch.ops.deepspeed4science, name).default
        if not torch.is_grad_enabled() and forward_ad._current_level < 0:
            with torch._C._AutoDispatchBelowAutograd():
                return operator(*arguments, **named)
        return recorded(
            partial(_NonDifferentiable.apply, operator), operator, call(*arguments, **named)
        )

    return record


class _NonDifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operator: Any, *arguments: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> None:
        raise DoubleBackwardError(
            "Layers of deepspeed4science.nn have first derivatives only: their backward was "
            "differentiated again (create_graph=True, a gradient penalty or a Hessian)."
        )
