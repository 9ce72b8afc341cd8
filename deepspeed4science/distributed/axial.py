"""Axial parallelism: layers whose rows n are sharded, with parameters that every process has whole.

Attention along one axis of a pair representation or an alignment treats the other axis as rows n.
Rows n share only the pair bias. Each process computes its part of the bias from its own rows and
gathers the other parts while q, k, v and the gate are projected; the bias's gradient is reduced and
scattered while the projections are differentiated. A change from attention along one axis to
attention along the other is one all-to-all, `x.redistribute(placements=...)`.

Layers of `deepspeed4science.nn` call these functions when they get a DTensor and have plain
parameters. Each process then has a parameter's gradient from its own rows only; `sum_gradients`
sums them over processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from deepspeed4science.arguments import split_biases
from deepspeed4science.distributed.gather import Gather
from deepspeed4science.distributed.gathered import gathered_attention
from deepspeed4science.distributed.placements import (
    beside,
    local_beside,
    placed_as,
    require_member,
    sharded_by,
)
from deepspeed4science.errors import InvalidInputError
from deepspeed4science.nn import fused
from deepspeed4science.nn.attention import EvoformerAttention
from deepspeed4science.nn.gated import can_be_recorded, gated_attention
from deepspeed4science.nn.parameters import join, project
from deepspeed4science.packed import columns, pair_bias

if TYPE_CHECKING:
    from deepspeed4science.nn.triangle import TriangleAttentionStartingNode


def triangle_attention(layer: TriangleAttentionStartingNode, x: Any, mask: Any = None) -> DTensor:
    """`layer(x, mask)` around the starting or the ending node.

    Args:
        x: a DTensor `[*, I, J, c_in]`, sharded over one dimension of the mesh: by I for the
            starting node, by J for the ending node. If it is sharded by the other one, it is
            redistributed, and the result redistributed back. Other dimensions of the mesh may shard
            `*`.
        mask: a DTensor `[*, I, J]`, placed in any way. Default: all pairs are seen.

    Returns:
        `[*, I, J, c_in]`, placed as x is.

    Raises:
        InvalidInputError: x is placed otherwise, or not in this process; the mask is no DTensor or
            does not fit; or mha is no gated EvoformerAttention.
    """
    if not isinstance(layer.mha, EvoformerAttention) or layer.mha.linear_g is None:
        raise InvalidInputError(
            "mha: expected a gated EvoformerAttention for pairs in a DTensor; got another "
            f"{type(layer.mha).__name__}. Give the layer whole pairs: x.full_tensor()."
        )
    row_dim = x.dim() - (2 if layer.is_ending else 3)
    moved, mesh_dim = sharded_by(x, row_dim)
    seen = None
    if mask is not None:
        seen = _beside("mask", mask, moved, x.dim() - 1, x.dim() - 1).to_local() != 0
        seen = (seen.mT if layer.is_ending else seen)[..., None, None, :]
    gathers = partial(_gather_pair_bias, layer, moved, mesh_dim)
    local = moved.to_local()
    if fused.serves(layer, local) and not torch.compiler.is_compiling():
        o = fused.triangle_attention(layer, local, seen, False, gathers)
        y: Any = placed_as(moved, o, o.shape[-1])
    else:
        o = _by_parts(layer, local, seen, gathers)
        # The DTensor is transposed, and not its local part: it then knows its strides.
        turned: Any = moved.transpose(-2, -3) if layer.is_ending else moved
        y = placed_as(turned, o, o.shape[-1])
        y = y.transpose(-2, -3) if layer.is_ending else y
    result: DTensor = y.redistribute(placements=x.placements)
    return result


def _by_parts(
    layer: TriangleAttentionStartingNode,
    x: Tensor,
    seen: Tensor | None,
    gathers: Callable[[Tensor], Gather],
) -> Tensor:
    """`[*, N, L, c_in]`: transposed for the ending node."""
    mha, ending = layer.mha, layer.is_ending
    x = layer.layer_norm(x)
    gather = gathers(pair_bias(layer.linear_z(x), ending != layer.transpose_bias))
    product = join(x, mha.projections())
    H, D = mha.no_heads, mha.c_hidden
    if can_be_recorded(product) and not torch.compiler.is_compiling():
        gated = gated_attention(product, seen, H, D, ending, layer.transpose_bias, gather)
        o: Tensor = mha.linear_o(gated)
    else:
        q, k, v, gate, _ = columns(product, H, D, ending)
        # Sizes are written out so that processes with shards of different sizes have different
        # keys in torch.compile's cache.
        q, k, v = (part.view(*part.shape[:-1], H, D) for part in (q, k, v))
        o = mha.gated(gathered_attention(q, k, v, seen, gather), [gate])
    return o


def _gather_pair_bias(
    layer: TriangleAttentionStartingNode, x: DTensor, mesh_dim: int, z: Tensor
) -> Gather:
    """Starts to gather z, `[*, 1, H, L, L]`, whose queries are sharded as the rows n of x are; with
    transpose_bias its keys are.
    """
    shape = (*x.shape[:-3], 1, z.shape[-3], *x.shape[-3:-1])
    placements = list(x.placements)
    placements[mesh_dim] = Shard(len(shape) - (1 if layer.transpose_bias else 2))
    return Gather(z, shape, x.device_mesh, placements, mesh_dim)


def attention(layer: EvoformerAttention, x: Any, biases: Sequence[Any] = ()) -> DTensor:
    """`layer(x, biases=biases)`: MSA row attention with sequences sharded, or column attention with
    columns sharded.

    Args:
        x: a DTensor `[*, N, L, c_q]`, sharded by N over one dimension of the mesh; other dimensions
            of the mesh may shard `*`.
        biases: those of the layer, as DTensors with as many dimensions as the scores `[*, N, H, L,
            L]`. bias1 is best placed as x is, bias2 replicated, or sharded by its queries over the
            dimension of the mesh that shards N; then it is gathered beside the projections. Other
            placements are redistributed.

    Returns:
        `[*, N, L, c_q]`, placed as x is. Gradients of biases are placed as they are. If x is
        sharded along an axis along which a replicated bias is broadcast, the bias's gradient is a
        partial sum.

    Raises:
        InvalidInputError: x is placed otherwise, or not in this process; or a bias is no DTensor or
            does not fit.
    """
    moved, mesh_dim = sharded_by(x, x.dim() - 3)
    bias1, bias2 = split_biases(biases)
    lead, rank = x.dim() - 2, x.dim() + 1
    own1 = own2 = gather = None
    if bias2 is not None:
        queries = isinstance(bias2, DTensor) and bias2.placements[mesh_dim] == Shard(rank - 2)
        placed = _beside("bias2", bias2, moved, lead, rank, mesh_dim if queries else None)
        own2 = local_beside(placed, moved)
        if queries:
            gather = Gather(own2, placed.shape, placed.device_mesh, placed.placements, mesh_dim)
    if bias1 is not None:
        own1 = local_beside(_beside("bias1", bias1, moved, lead, rank), moved)
    q, k, v, *gates = project(moved.to_local(), layer.projections())
    if gather is None:
        o = layer.attend(q, k, v, gates, [own1, own2])
    else:
        H, D = layer.no_heads, layer.c_hidden
        q, k, v = (part.view(*part.shape[:-1], H, D) for part in (q, k, v))
        o = layer.gated(gathered_attention(q, k, v, own1, gather), gates)
    return placed_as(moved, o, o.shape[-1]).redistribute(placements=x.placements)


def _beside(
    name: str, tensor: Any, x: DTensor, lead: int, rank: int, kept: int | None = None
) -> DTensor:
    """A mask or bias of `rank` dimensions, the first `lead` of which are those of x or 1, placed as
    x is; over the dimension `kept` of the mesh as it is.
    """
    if not isinstance(tensor, DTensor):
        raise InvalidInputError(
            f"{name}: expected a DTensor, as x is one; got {type(tensor).__name__}. Distribute it: "
            "distribute_tensor(tensor, x.device_mesh, placements)."
        )
    sizes = zip(tensor.shape[:lead], x.shape[:lead], strict=False)
    fits = tensor.dim() == rank and all(own in (1, size) for own, size in sizes)
    if not fits or tensor.device_mesh != x.device_mesh:
        raise InvalidInputError(
            f"{name}: expected {rank} dimensions, the first {lead} broadcastable to "
            f"{list(x.shape[:lead])} of x, on the mesh of x, {x.device_mesh}; got "
            f"{list(tensor.shape)} on {tensor.device_mesh}. Leading dimensions of size 1 may be "
            "missing in tensors, but not in DTensors: unsqueeze it."
        )
    return beside(tensor, x, {dim: dim for dim in range(lead)}, kept)


def apply_locally(module: Callable[[Tensor], Tensor], x: Any) -> Any:
    """`module(x)` for a module that treats each pair alone: a norm, linear map or transition. `x`
    is a tensor, or a DTensor that is neither sharded along its last dimension nor a partial sum.

    Raises:
        InvalidInputError: x is placed otherwise, or not in this process.
    """
    if not isinstance(x, DTensor):
        return module(x)
    require_member("x", x)
    if any(one.is_partial() or one == Shard(x.dim() - 1) for one in x.placements):
        raise InvalidInputError(
            f"x: expected a DTensor that is not sharded along its last dimension, {x.dim() - 1}, "
            f"and is no partial sum; got {x.placements}. Use redistribute."
        )
    local = module(x.to_local())
    return placed_as(x, local, local.shape[-1])
