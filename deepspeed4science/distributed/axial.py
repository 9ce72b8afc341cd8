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

from deepspeed4science.distributed.gather import Gather
from deepspeed4science.distributed.gathered import gathered_attention
from deepspeed4science.distributed.placements import local_beside, placed_as, sharded_by
from deepspeed4science.nn import fused
from deepspeed4science.nn.gated import can_be_recorded, gated_attention
from deepspeed4science.nn.parameters import join, project
from deepspeed4science.packed import columns

if TYPE_CHECKING:
    from deepspeed4science.nn.attention import EvoformerAttention
    from deepspeed4science.nn.triangle import TriangleAttentionStartingNode


def triangle_attention(layer: TriangleAttentionStartingNode, x: Any, mask: Any = None) -> DTensor:
    """`layer(x, mask)` around the starting or the ending node.

    Args:
        x: a DTensor `[*, I, J, c_in]`, sharded over one dimension of the mesh: by I for the
            starting node, by J for the ending node. If it is sharded by the other one, it is
            redistributed, and the result redistributed back. Other dimensions of the mesh may shard
            `*`.
        mask: a DTensor `[*, I, J]`. Default: all pairs are seen.

    Returns:
        `[*, I, J, c_in]`, placed as x is.
    """
    row_dim = x.dim() - (2 if layer.is_ending else 3)
    moved, mesh_dim = sharded_by(x, row_dim)
    seen = None
    if mask is not None:
        seen = mask.redistribute(placements=moved.placements).to_local() != 0
        seen = (seen.mT if layer.is_ending else seen)[..., None, None, :]
    gathers = partial(_gather_pair_bias, layer, moved, mesh_dim)
    local = moved.to_local()
    if fused.serves(layer, local) and not torch.compiler.is_compiling():
        o = fused.triangle_attention(layer, local, seen, False, gathers)
    else:
        o = _by_parts(layer, local, seen, gathers)
    return placed_as(moved, o, o.shape[-1]).redistribute(placements=x.placements)


def _by_parts(
    layer: TriangleAttentionStartingNode,
    x: Tensor,
    seen: Tensor | None,
    gathers: Callable[[Tensor], Gather],
) -> Tensor:
    mha, ending = layer.mha, layer.is_ending
    x = layer.layer_norm(x)
    z = layer.linear_z(x).movedim(-1, -3).unsqueeze(-4)
    gather = gathers(z.mT if ending else z)
    product = join(x, mha.projections())
    H, D = mha.no_heads, mha.c_hidden
    if can_be_recorded(product) and not torch.compiler.is_compiling():
        o: Tensor = mha.linear_o(gated_attention(product, seen, H, D, ending, gather))
    else:
        q, k, v, gate = columns(product, H, D, ending, pair_bias=False)
        # Sizes are written out so that processes with shards of different sizes have different
        # keys in torch.compile's cache.
        q, k, v = (part.view(*part.shape[:-1], H, D) for part in (q, k, v))
        o = mha.gated(gathered_attention(q, k, v, seen, gather), [gate])
    return o.transpose(-2, -3) if ending else o


def _gather_pair_bias(
    layer: TriangleAttentionStartingNode, x: DTensor, mesh_dim: int, z: Tensor
) -> Gather:
    """Starts to gather z, `[*, 1, H, L, L]`, whose queries are sharded as the rows n of x are."""
    batch, lengths = x.shape[:-3], x.shape[-3:-1]
    lengths = lengths[::-1] if layer.is_ending else lengths
    shape = (*batch, 1, z.shape[-3], *lengths)
    placements = list(x.placements)
    placements[mesh_dim] = Shard(len(shape) - 2)
    return Gather(z, shape, x.device_mesh, placements, mesh_dim)


def attention(layer: EvoformerAttention, x: Any, biases: Sequence[Any] = ()) -> DTensor:
    """`layer(x, biases=biases)`: MSA row attention with sequences sharded, or column attention with
    columns sharded.

    Args:
        x: a DTensor `[*, N, L, c_q]`, sharded by N over one dimension of the mesh; other dimensions
            of the mesh may shard `*`.
        biases: those of the layer, as DTensors with as many dimensions as the scores `[*, N, H, L,
            L]`. bias1 is placed as x is. bias2 is either replicated, or sharded by its queries over
            the dimension of the mesh that shards N; then it is gathered.

    Returns:
        `[*, N, L, c_q]`, placed as x is.
    """
    moved, mesh_dim = sharded_by(x, x.dim() - 3)
    bias1, bias2 = (*biases, None, None)[:2]
    gather = None
    if isinstance(bias2, DTensor) and bias2.placements[mesh_dim] == Shard(bias2.dim() - 2):
        shard = bias2.to_local()
        gather = Gather(shard, bias2.shape, bias2.device_mesh, bias2.placements, mesh_dim)
    q, k, v, *gates = project(moved.to_local(), layer.projections())
    own = [None if one is None else local_beside(one, moved) for one in (bias1, bias2)]
    if gather is None:
        o = layer.attend(q, k, v, gates, own)
    else:
        H, D = layer.no_heads, layer.c_hidden
        q, k, v = (part.view(*part.shape[:-1], H, D) for part in (q, k, v))
        o = layer.gated(gathered_attention(q, k, v, own[0], gather), gates)
    return placed_as(moved, o, o.shape[-1]).redistribute(placements=x.placements)


def apply_locally(module: Callable[[Tensor], Tensor], x: Any) -> Any:
    """`module(x)` for a module that treats each pair alone: a norm, linear map or transition. `x`
    is a tensor, or a DTensor that is not sharded along its last dimension.
    """
    if not isinstance(x, DTensor):
        return module(x)
    local = module(x.to_local())
    return placed_as(x, local, local.shape[-1])
