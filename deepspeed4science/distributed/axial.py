"""Axial parallelism: layers whose rows n are sharded, with parameters that every process has.

Attention along an axis of a pair representation or an alignment treats the other axis as rows.
Rows need nothing of each other but the pair bias: it is made from the local rows, gathered while q,
k, v and the gate are projected, and its gradient is reduced and scattered while those are
differentiated. Between attention along one axis and along the other stands one all-to-all, which is
`x.redistribute(placements=...)`.

Layers of `deepspeed4science.nn` come here by themselves when they meet a DTensor and have plain
parameters. Each process then has the gradient of a parameter from its own rows: `sum_gradients`
adds them up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from deepspeed4science.distributed.gather import Gather
from deepspeed4science.distributed.placements import local_beside, placed_as, sharded_by
from deepspeed4science.nn.parameters import project

if TYPE_CHECKING:
    from deepspeed4science.nn.attention import EvoformerAttention
    from deepspeed4science.nn.triangle import TriangleAttentionStartingNode


def triangle_attention(layer: TriangleAttentionStartingNode, x: Any, mask: Any = None) -> DTensor:
    """`layer(x, mask)` around the starting or the ending node.

    Args:
        x: a DTensor `[*, I, J, c_in]`, sharded by I for the starting node and by J for the ending
            node over one dimension of the mesh. Sharded by the other one it is moved, and the
            result moved back. Other dimensions of the mesh may shard `*`.
        mask: a DTensor `[*, I, J]`. Default: all pairs are seen.

    Returns:
        `[*, I, J, c_in]`, placed as x is.
    """
    row_dim = x.dim() - (2 if layer.is_ending else 3)
    moved, mesh_dim = sharded_by(x, row_dim)
    local = layer.layer_norm(moved.to_local())
    z = layer.linear_z(local).float()
    shape = (*x.shape[:-1], layer.linear_z.out_features)
    gather = Gather(z, shape, x.device_mesh, moved.placements, mesh_dim)
    seen = None
    if mask is not None:
        seen = mask.redistribute(placements=moved.placements).to_local() != 0
    parts = list(project(local, layer.mha.projections()))
    bias = gather.finish()
    if layer.is_ending:
        *parts, bias = (part.transpose(-2, -3) for part in (*parts, bias))
        seen = None if seen is None else seen.transpose(-1, -2)
    q, k, v, *gates = parts
    seen = None if seen is None else seen[..., None, None, :]
    o = layer.mha.attend(q, k, v, gates, (seen, bias.movedim(-1, -3).unsqueeze(-4)))
    o = o.transpose(-2, -3) if layer.is_ending else o
    return placed_as(moved, o, o.shape[-1]).redistribute(placements=x.placements)


def attention(layer: EvoformerAttention, x: Any, biases: Sequence[Any] = ()) -> DTensor:
    """`layer(x, biases=biases)`: MSA row attention with sequences sharded, or column attention with
    columns sharded.

    Args:
        x: a DTensor `[*, N, L, c_q]`, sharded by N over one dimension of the mesh; others may shard
            `*`.
        biases: those of the layer, as DTensors of as many dimensions as scores have, `[*, N, H, L,
            L]`. bias1 is placed as x is. bias2 is sharded by its queries over the dimension of the
            mesh that shards N, and gathered; or replicated.

    Returns:
        `[*, N, L, c_q]`, placed as x is.
    """
    moved, mesh_dim = sharded_by(x, x.dim() - 3)
    bias1, bias2 = (*biases, None, None)[:2]
    gather = None
    if isinstance(bias2, DTensor) and bias2.placements[mesh_dim] == Shard(bias2.dim() - 2):
        shard = bias2.to_local().float()
        gather = Gather(shard, bias2.shape, bias2.device_mesh, bias2.placements, mesh_dim)
    q, k, v, *gates = project(moved.to_local(), layer.projections())
    own = [
        None if bias1 is None else local_beside(bias1, moved),
        gather.finish() if gather else None if bias2 is None else local_beside(bias2, moved),
    ]
    o = layer.attend(q, k, v, gates, own)
    return placed_as(moved, o, o.shape[-1]).redistribute(placements=x.placements)


def apply_locally(module: Callable[[Tensor], Tensor], x: Any) -> Any:
    """`module(x)` of what treats each pair alone: norms, linear maps, transitions. `x` is a DTensor
    of any placements but its last dimension's, or a tensor.
    """
    if not isinstance(x, DTensor):
        return module(x)
    local = module(x.to_local())
    return placed_as(x, local, local.shape[-1])
