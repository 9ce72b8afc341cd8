"""Gathers a sharded pair bias, in its own dtype, while a projection is computed, and reduces and
scatters its gradient, in float32, while the projection is differentiated.

Autograd runs nodes in the reverse of the order in which they were recorded. A gather that starts
before the projection but is recorded after it therefore starts its reduce-scatter before the
projection's gradient. torch.compile chooses an order itself; for it, `finish` gathers and waits in
one step, in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard


class Gather:
    """An asynchronous gather, which starts when the object is made.

    Args:
        shard: the local part of the tensor.
        shape: the shape of the whole tensor.
        mesh, placements: how the tensor is sharded.
        mesh_dim: the dimension of the mesh over which it is gathered.
    """

    def __init__(
        self,
        shard: Tensor,
        shape: Sequence[int],
        mesh: DeviceMesh,
        placements: Sequence[Any],
        mesh_dim: int,
    ) -> None:
        # The gathered dimension comes first. Along any other dimension, PyTorch copies the parts
        # into place after they have arrived, and would wait for them here.
        dim = placements[mesh_dim].dim
        self._dim = dim
        self._mesh = mesh
        self._shape = torch.Size((shape[dim], *shape[:dim], *shape[dim + 1 :]))
        self._sharded = [_moved(one, dim) for one in placements]
        self._gathered = [
            one if i != mesh_dim else Replicate() for i, one in enumerate(self._sharded)
        ]
        self._partial = [one if i != mesh_dim else Partial() for i, one in enumerate(self._sharded)]
        # For autograd the shard has the gradient's dtype, float32: rounding the gradient would wait
        # for its arrival.
        wide = shard.float() if torch.is_grad_enabled() else shard
        self.shard = wide.movedim(dim, 0)
        if not torch.compiler.is_compiling():
            with torch.no_grad():
                part = shard.movedim(dim, 0).contiguous()
                self._coming = self._redistribute(part, self._sharded, self._gathered)

    def whole(self) -> Tensor:
        """The tensor gathered along mesh_dim. Its parts may not have arrived yet; the first
        operator that uses it waits.
        """
        return self._coming.detach().movedim(0, self._dim)

    def arrived(self) -> Tensor:
        """As `whole`, after all parts have arrived."""
        whole = self.whole()
        return whole.wait() if isinstance(whole, AsyncCollectiveTensor) else whole

    def reduce_scatter(self, gradient: Tensor) -> Tensor:
        """Starts to reduce and scatter the float32 gradient of the whole tensor; `local` waits for
        the result, the gradient of `shard`.
        """
        # The backward frees what the forward saved. These would live as long as the loss.
        self.shard = self._coming = gradient.new_empty(0)
        part = gradient.movedim(self._dim, 0).contiguous()
        return self._redistribute(part, self._partial, self._sharded)

    def local(self, part: Tensor) -> Tensor:
        """The result of `reduce_scatter`, with its dimensions in the tensor's order."""
        return part.movedim(0, self._dim).contiguous()

    def finish(self) -> Tensor:
        """The whole tensor in float32, in operators that torch.compile can differentiate."""
        sharded = self._of_local(self.shard.float().contiguous(), self._sharded)
        gathered = sharded.redistribute(placements=self._gathered)
        return gathered.to_local(grad_placements=self._partial).movedim(0, self._dim)

    def _redistribute(self, local: Tensor, before: Sequence[Any], after: Sequence[Any]) -> Tensor:
        return (
            self._of_local(local, before).redistribute(placements=after, async_op=True).to_local()
        )

    def _of_local(self, local: Tensor, placements: Sequence[Any]) -> DTensor:
        stride = torch.empty(self._shape, device="meta").stride()
        return DTensor.from_local(
            local, self._mesh, placements, run_check=False, shape=self._shape, stride=stride
        )


def _moved(placement: Any, dim: int) -> Any:
    """The placement after dimension `dim` has become the first one."""
    if not placement.is_shard():
        return placement
    return Shard(0 if placement.dim == dim else placement.dim + (placement.dim < dim))
