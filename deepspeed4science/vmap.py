"""The vmap rules of the operators: the mapped dimension is folded into B, the results are unfolded.

`operator` is one of the operators, or the autograd.Function of the same signature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from deepspeed4science.call import BackwardCall, ForwardCall, LargestScores

CallT = TypeVar("CallT", ForwardCall, BackwardCall, LargestScores)


def map_forward(
    operator: Callable[..., Any], size: int, in_dims: Sequence[Any], *arguments: Any
) -> Any:
    """The forward's rule: (o, lse) of all mapped calls, from one call with `size` times as many
    batches.
    """
    call, dims = ForwardCall(*arguments), ForwardCall(*in_dims)
    B = _unmapped_size(call.q, dims.q)
    o, lse = operator(*_folded(size, B, call, dims))
    if not call.with_lse:
        return (_unfolded(o, size, B), lse), (0, None)
    return (_unfolded(o, size, B), _unfolded(lse, size, B)), (0, 0)


def map_backward(
    operator: Callable[..., Any], size: int, in_dims: Sequence[Any], *arguments: Any
) -> Any:
    """The backward's rule: every mapped call has gradients of its own."""
    call, dims = BackwardCall(*arguments), BackwardCall(*in_dims)
    B = _unmapped_size(call.q, dims.q)
    wanted = list(call.wanted)
    gradients = list(operator(*_folded(size, B, call, dims)._replace(wanted=wanted)))
    for i, name in enumerate(("q", "k", "v", "bias1", "bias2")):
        tensor = getattr(call, name)
        if not wanted[i] or tensor is None:
            continue
        gradient = _unfolded(gradients[i], size, B)
        if _unmapped_size(tensor, getattr(dims, name)) != gradient.shape[1]:  # broadcast over B
            gradient = gradient.sum(1, keepdim=True)
        gradients[i] = gradient
    return tuple(gradients), tuple(0 if want else None for want in wanted)


def map_largest_scores(
    operator: Callable[..., Any], size: int, in_dims: Sequence[Any], *arguments: Any
) -> Any:
    """The rule of the largest scores."""
    call, dims = LargestScores(*arguments), LargestScores(*in_dims)
    B = _unmapped_size(call.q, dims.q)
    return _unfolded(operator(*_folded(size, B, call, dims)), size, B), 0


def _folded(size: int, B: int, call: CallT, dims: Any) -> CallT:
    """The call with tensors `[size * B, ...]` made of `[B|1, ...]`, mapped over one more dimension
    or not. A tensor that is the same for all mapped calls is expanded, without a copy where B
    allows.
    """
    changes: dict[str, Any] = {}
    for name, tensor, dim in zip(call._fields, call, dims, strict=True):
        if isinstance(tensor, Tensor):
            tensor = tensor[None] if dim is None else tensor.movedim(dim, 0)
            changes[name] = tensor.expand(size, B, *tensor.shape[2:]).flatten(0, 1)
    return call._replace(**changes)


def _unfolded(tensor: Tensor, size: int, B: int) -> Tensor:
    unfolded: Tensor = tensor.unflatten(0, (size, B))
    return unfolded


def _unmapped_size(tensor: Tensor, dim: Any) -> int:
    """B of a tensor without its mapped dimension."""
    size: int = tensor.shape[1 if dim == 0 else 0]
    return size
