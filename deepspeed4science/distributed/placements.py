"""Placements of DTensors that are combined with a sharded DTensor."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from deepspeed4science.errors import InvalidInputError

# Where a partial sum is redistributed, and its gradient is a partial sum, too, PyTorch 2.10 takes
# the local part of the gradient for all of it.
_LOSES_SUMS = torch.__version__ < "2.11"


def beside(
    tensor: DTensor, like: DTensor, dims: Mapping[int, int], kept: int | None = None
) -> DTensor:
    """`tensor`, redistributed so that each process has what belongs to its part of `like`: sharded
    along an axis that shards `like` if it has all of the axis, and else replicated.

    Args:
        dims: the dimensions of `like` that are axes of both tensors -> those of `tensor`.
        kept: a dimension of the mesh over which `tensor` stays placed as it is.
    """
    placements = list(tensor.placements)
    for i, other in enumerate(like.placements):
        if i == kept:
            continue
        placements[i] = Replicate()
        if isinstance(other, Shard) and other.dim in dims:
            dim = dims[other.dim]
            if tensor.shape[dim] == like.shape[other.dim]:
                placements[i] = Shard(dim)
    if placements == list(tensor.placements):  # its gradient may then remain a partial sum
        return tensor
    moved = tensor.redistribute(placements=placements)
    if _LOSES_SUMS and any(one.is_partial() for one in tensor.placements):
        moved = moved.redistribute(placements=placements)  # moves nothing, and adds these parts
    return moved


def local_beside(tensor: DTensor, like: DTensor) -> Tensor:
    """The local part of `tensor`. Where `like` is sharded along a dimension that `tensor` does not
    have, the gradient of each process is a partial sum.
    """
    pairs = zip(tensor.placements, like.placements, strict=True)
    gradients = [
        Partial() if own == Replicate() and other.is_shard() else own for own, other in pairs
    ]
    local: Tensor = tensor.to_local(grad_placements=gradients)
    return local


def placed_as(like: DTensor, local: Tensor, channels: int) -> DTensor:
    """A DTensor of local parts, with the placements of `like` and its shape, except for the last
    dimension, which has `channels` elements.
    """
    shape = torch.Size((*like.shape[:-1], channels))
    stride = torch.empty(shape, device="meta").stride()
    # `reshape` and `contiguous` ask the DTensor for its strides, and not its local part.
    local = local.contiguous()
    placed: DTensor = DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride
    )
    return placed


def require_member(name: str, x: DTensor) -> None:
    """Raises InvalidInputError in a process outside of the mesh of `x`, which has no part of it."""
    if x.device_mesh.get_coordinate() is None:
        raise InvalidInputError(
            f"{name}: expected the mesh of this process; got {x.device_mesh}, without process "
            f"{dist.get_rank()}. Call this only in processes of the mesh."
        )


def sharded_by(x: DTensor, dim: int) -> tuple[DTensor, int]:
    """`x` sharded by its dimension `dim`, and the dimension of the mesh that shards it. `dim` is
    one of the two dimensions along which layers attend; x is redistributed if it was sharded by the
    other one.
    """
    require_member("x", x)
    axes = (x.dim() - 3, x.dim() - 2)
    found = [i for i, one in enumerate(x.placements) if one in (Shard(axes[0]), Shard(axes[1]))]
    others = [one for i, one in enumerate(x.placements) if i not in found]
    if len(found) != 1 or any(one.is_partial() or one == Shard(x.dim() - 1) for one in others):
        raise InvalidInputError(
            f"x: expected one dimension of the mesh to shard dimension {axes[0]} or {axes[1]} of "
            f"{list(x.shape)}, and others to shard those before or nothing; got {x.placements}. "
            "Use redistribute or distribute_tensor; with only batches sharded, x.to_local()."
        )
    placements = list(x.placements)
    placements[found[0]] = Shard(dim)
    return x.redistribute(placements=placements), found[0]
