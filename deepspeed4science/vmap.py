"""vmap of the operators: the mapped dimension is folded into B, and the results are unfolded.

`call` is an operator, or the autograd.Function of the same signature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


def map_forward(
    call: Callable[..., Any],
    size: int,
    in_dims: Sequence[Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias1: Tensor | None,
    bias2: Tensor | None,
    with_lse: bool,
    row_mask: Tensor | None = None,
    scale: float | None = None,
) -> Any:
    """The rule of vmap: (o, lse) of all mapped calls as one of `size` times as many batches."""
    B = _unmapped_size(q, in_dims[0])
    folded = _folded(size, B, (q, k, v, bias1, bias2), in_dims[:5])
    (rows,) = _folded(size, B, (row_mask,), in_dims[6:7])
    o, lse = call(*folded, with_lse, rows, scale)
    if not with_lse:
        return (_unfolded(o, size), lse), (0, None)
    return (_unfolded(o, size), _unfolded(lse, size)), (0, 0)


def map_backward(
    call: Callable[..., Any],
    size: int,
    in_dims: Sequence[Any],
    do_: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    bias1: Tensor | None,
    bias2: Tensor | None,
    wanted: Sequence[bool],
    row_mask: Tensor | None = None,
    scale: float | None = None,
) -> Any:
    """The rule of vmap: every mapped call has gradients of its own."""
    B = _unmapped_size(q, in_dims[1])
    folded = _folded(size, B, (do_, q, k, v, o, lse, bias1, bias2), in_dims[:8])
    (rows,) = _folded(size, B, (row_mask,), in_dims[9:10])
    gradients = list(call(*folded, list(wanted), rows, scale))
    inputs = zip((q, k, v, bias1, bias2), (*in_dims[1:4], *in_dims[6:8]), strict=True)
    for i, (tensor, dim) in enumerate(inputs):
        if not wanted[i] or tensor is None:
            continue
        gradient = _unfolded(gradients[i], size)
        if _unmapped_size(tensor, dim) != gradient.shape[1]:  # a bias of all B
            gradient = gradient.sum(1, keepdim=True)
        gradients[i] = gradient
    return tuple(gradients), tuple(0 if want else None for want in wanted)


def _folded(
    size: int, B: int, tensors: Sequence[Tensor | None], dims: Sequence[int | None]
) -> list[Tensor | None]:
    """`[size * B, ...]` of tensors `[B|1, ...]`, mapped over one more dimension or not. What is the
    same for all is expanded, without a copy where B allows.
    """
    dims = (*dims, *(None,) * (len(tensors) - len(dims)))  # a default that was left out
    results: list[Tensor | None] = []
    for tensor, dim in zip(tensors, dims, strict=True):
        if tensor is None:
            results.append(None)
            continue
        tensor = tensor[None] if dim is None else tensor.movedim(dim, 0)
        results.append(tensor.expand(size, B, *tensor.shape[2:]).flatten(0, 1))
    return results


def _unfolded(tensor: Tensor, size: int) -> Tensor:
    unfolded: Tensor = tensor.unflatten(0, (size, -1))
    return unfolded


def _unmapped_size(tensor: Tensor, dim: int | None) -> int:
    """B of a tensor without its mapped dimension."""
    size: int = tensor.shape[1 if dim == 0 else 0]
    return size
