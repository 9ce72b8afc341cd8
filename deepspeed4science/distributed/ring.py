"""Ring attention: queries and keys are sharded, keys and values are passed from process to process.

Every process keeps its queries and their rows of bias2. In step s, process r has the keys of
process r - s, sends them to process r + 1 while it attends over them, and merges the results
(merge.py). The backward passes the keys around once more and uses lse and delta of all keys; dk, dv
and dbias1 are sent on as the keys are. docs/many-gpus.md has bytes and times.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from deepspeed4science import autocast, dispatch
from deepspeed4science.arguments import canonicalise, canonicalise_scale, largest_finite
from deepspeed4science.call import ForwardCall
from deepspeed4science.distributed.exchange import Ring, extents
from deepspeed4science.distributed.merge import merge_attention
from deepspeed4science.distributed.placements import (
    beside,
    local_beside,
    placed_as,
    require_member,
)
from deepspeed4science.distributed.sharding import AXES
from deepspeed4science.errors import InvalidInputError
from deepspeed4science.operators import backward_op, forward_op
from deepspeed4science.problem import describe, mask_threshold

# The axes that other dimensions of the mesh may shard.
_OTHER_AXES = [axis for name, axis in AXES.items() if name != "Lq"]


def ring_attention(
    q: DTensor,
    k: DTensor,
    v: DTensor,
    bias1: DTensor | None = None,
    bias2: DTensor | None = None,
    *,
    mesh_dim: int = 0,
    scale: float | None = None,
) -> DTensor:
    """`DS4Sci_EvoformerAttention` of DTensors whose queries and keys are sharded over one dimension
    of the mesh. No process holds all keys, nor more of bias2 than the rows of its queries.

    Args:
        q: `[B, N, Lq, H, D]`, sharded by Lq; float32, bfloat16 or float16.
        k, v: `[B, N, Lk, H, D]`, sharded by Lk.
        bias1: `[B|1, N|1, 1, 1, Lk]`, sharded by Lk; numbers, or a mask of booleans or integers.
        bias2: `[B|1, 1, H|1, Lq, Lk]`, sharded by Lq.
        mesh_dim: the dimension of the mesh that shards Lq and Lk. Other dimensions may shard
            batches, rows n or heads of q; other tensors are redistributed to fit q.
        scale: any finite number of float32. Default: 1 / sqrt(D).

    Returns:
        O, placed as q is, in the promoted dtype of q, k and v, or in autocast's. Gradients are
        placed as their tensors are. If another dimension of the mesh shards q along an axis along
        which a replicated bias is broadcast, the bias's gradient is a partial sum.

    Raises:
        InvalidInputError: placements, shapes, dtypes or the scale do not fit, a process would have
            no key or query, or this process is not in the mesh.
        NoBackendError: no kernel takes this call.

    Source: Liu, Zaharia and Abbeel, arXiv:2310.01889.
    """
    # All is refused before the first transfer. An error between transfers would leave one behind,
    # for which the group's next collective would wait.
    for name, tensor in (("q", q), ("k", k), ("v", v), ("bias1", bias1), ("bias2", bias2)):
        if tensor is not None:
            _check_mesh(name, tensor, q)
    require_member("q", q)
    mesh_dim = _check_queries(q, mesh_dim)
    q, k, v, bias1, bias2, scale = _as_the_op_does(q, k, v, bias1, bias2, scale)
    given = [("q", q, 2), ("k", k, 2), ("v", v, 2), ("bias1", bias1, 4), ("bias2", bias2, 3)]
    for name, tensor, dim in given:
        if tensor is not None:
            _check(name, tensor, dim, mesh_dim, q, k)
    problem = describe(ForwardCall(q, k, v, bias1, bias2, with_lse=True, scale=scale))
    own: list[Any] = [None if x is None else _local(name, x, q, mesh_dim) for name, x, _ in given]
    dispatch.choose(problem, "fwd", own[:3])
    o = _RingAttention.apply(*own, k.shape[2], q.device_mesh.get_group(mesh_dim), scale)
    return placed_as(q, o, v.shape[4])


def _check_mesh(name: str, tensor: DTensor, q: DTensor) -> None:
    if not isinstance(tensor, DTensor):
        raise InvalidInputError(
            f"{name}: expected a DTensor; got {type(tensor).__name__}. A process that has all "
            "queries and keys calls DS4Sci_EvoformerAttention."
        )
    if tensor.device_mesh != q.device_mesh:
        raise InvalidInputError(
            f"{name}: expected the mesh of q, {q.device_mesh}; got {tensor.device_mesh}. "
            "Distribute both over one mesh."
        )


def _check_queries(q: DTensor, mesh_dim: int) -> int:
    """mesh_dim, counted from the first dimension of the mesh."""
    num_dims = q.device_mesh.ndim
    if mesh_dim not in range(-num_dims, num_dims):
        raise InvalidInputError(
            f"mesh_dim: expected one of the {num_dims} dimensions of the mesh, by its number; got "
            f"{mesh_dim!r}."
        )
    mesh_dim %= num_dims
    allowed = [Replicate(), *(Shard(axis["q"]) for axis in _OTHER_AXES)]
    others = (*q.placements[:mesh_dim], *q.placements[mesh_dim + 1 :])
    if q.dim() != 5 or any(one not in allowed for one in others):
        raise InvalidInputError(
            "q: expected [B, N, Lq, H, D], of which dimensions of the mesh other than dimension "
            f"{mesh_dim} shard B, N, H or nothing; got {list(q.shape)}, {q.placements}. Use "
            "redistribute."
        )
    return mesh_dim


def _as_the_op_does(
    q: Any, k: Any, v: Any, bias1: Any, bias2: Any, scale: float | None
) -> tuple[Any, ...]:
    """The arguments with one dtype of q, k and v, numbers for a mask, and a positive scale."""
    q, k, v, bias1, bias2 = canonicalise(q, k, v, bias1, bias2)
    q, k, v = autocast.cast_inputs(q, k, v)
    if scale is not None:
        q, scale = canonicalise_scale(q, scale)
    return q, k, v, bias1, bias2, scale


def _check(name: str, tensor: DTensor, dim: int, mesh_dim: int, q: DTensor, k: DTensor) -> None:
    length = k.shape[2] if name in ("k", "v", "bias1") else q.shape[2]
    if tensor.placements[mesh_dim] != Shard(dim) or tensor.shape[dim] != length:
        raise InvalidInputError(
            f"{name}: expected {length} elements in dimension {dim}, sharded over dimension "
            f"{mesh_dim} of the mesh; got {list(tensor.shape)}, {tensor.placements}. Redistribute "
            "it; what is broadcast there is expanded first."
        )
    size = tensor.device_mesh.size(mesh_dim)
    if min(extents(length, size)) < 1:
        raise InvalidInputError(
            f"{name}: expected a part of dimension {dim} for each of {size} processes; got "
            f"{length} elements, of which some get none. Use fewer processes."
        )


def _local(name: str, tensor: DTensor, q: DTensor, mesh_dim: int) -> Tensor:
    """The part of `tensor` that belongs to the local part of q, of all keys or rows that
    `mesh_dim` gives this process.
    """
    dims = {axis["q"]: axis[name] for axis in _OTHER_AXES if name in axis}
    return local_beside(beside(tensor, q, dims, kept=mesh_dim), q)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias1: Tensor | None,
        bias2: Tensor | None,
        num_keys: int,
        group: dist.ProcessGroup,
        scale: float | None,
    ) -> Tensor:
        shift = None
        if bias1 is not None:
            shift = _largest_of_all(bias1, group)
            bias1 = _hide(bias1, shift)
        ring = Ring(group, num_keys)
        o = torch.zeros((*q.shape[:4], v.shape[4]), dtype=torch.float32, device=q.device)
        lse = o.new_full((*q.shape[:2], q.shape[3], q.shape[2]), -math.inf)
        for keys, (k_part, v_part, bias1_part) in ring.parts((k, v, bias1)):
            columns = None if bias2 is None else bias2[..., keys]
            o_part, lse_part = forward_op(q, k_part, v_part, bias1_part, columns, True, None, scale)
            lse_part = lse_part + _offset(bias1_part, shift)
            o, lse = merge_attention(o, lse, o_part, lse_part)
        o = o.to(q.dtype)
        ctx.save_for_backward(q, k, v, bias1, bias2, o, lse, shift)
        ctx.num_keys, ctx.group, ctx.scale = num_keys, group, scale
        return o

    @staticmethod
    def backward(ctx: Any, do_: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias1, bias2, o, lse, shift = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[:5])
        dq = torch.zeros_like(q, dtype=torch.float32) if wanted[0] else None
        dbias2 = torch.empty_like(bias2) if wanted[4] else None  # each column is written once
        ring = Ring(ctx.group, ctx.num_keys)
        for keys, (k_part, v_part, bias1_part) in ring.parts((k, v, bias1)):
            columns = None if bias2 is None else bias2[..., keys]
            lse_part = lse - _offset(bias1_part, shift)
            arguments = (do_, q, k_part, v_part, o, lse_part, bias1_part, columns)
            part = backward_op(*arguments, wanted, None, ctx.scale, partial_keys=True)
            if dq is not None:
                dq += part[0]
            if dbias2 is not None:
                dbias2[..., keys] = part[4]
            parts = zip(part[1:4], wanted[1:4], strict=True)
            ring.add([x.float() if want else None for x, want in parts])
        gradients = (dq, *ring.own_sums(), dbias2)
        inputs = (q, k, v, bias1, bias2)
        own = zip(gradients, inputs, strict=True)
        return (*(None if x is None else x.to(like.dtype) for x, like in own), None, None, None)


def _largest_of_all(bias1: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The shift, math.md (1a), over the keys of all processes, `[B|1, N|1, 1, 1, 1]`."""
    finite = bias1.float().masked_fill(~bias1.isfinite(), -math.inf)
    largest = finite.amax(-1, keepdim=True)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    return largest.masked_fill(largest == -math.inf, 0.0)


def _hide(bias1: Tensor, shift: Tensor) -> Tensor:
    """bias1 with -inf for the keys that are hidden, math.md (6a), beside those of all processes. An
    operator that gets a part of the keys, all of them hidden, would take them for visible. Hopper's
    backward would then find that dq is 0 everywhere, and compute it again (dq_range.h).
    """
    hidden = (bias1 <= shift - mask_threshold(bias1)) & (bias1 != shift)
    return bias1.masked_fill(hidden, -math.inf)


def _offset(bias1: Tensor | None, shift: Tensor | None) -> Tensor | float:
    """What must be added to the lse of some keys, which an operator returns for scores shifted by
    the largest bias1 of these keys, so that it is the lse of scores shifted by the largest bias1 of
    all keys. Both lse keep their digits where -1e9 hides every key.
    """
    if bias1 is None or shift is None:
        return 0.0
    return (largest_finite(bias1).float() - shift)[..., 0]
