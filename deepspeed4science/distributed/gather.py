"""A sharded pair bias, whole in every process, gathered in its own dtype while something else is
computed; its gradient is reduced in float32 and scattered while something else is differentiated.

Autograd takes nodes in the reverse of the order in which they were made. So a gather that begins
before a projection and is recorded behind it has a reduce-scatter that begins before the gradient
of that projection. torch.compile reorders by itself, and gets both in one, in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard


class Gather:
    """Begins when it is made.

    Args:
        shard: the local part.
        shape: of the whole tensor.
        mesh, placements: how it is sharded.
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
        # First the dimension that is gathered: parts of any other are copied into their places when
        # they have come, and that would be waited for here.
        dim = placements[mesh_dim].dim
        self._dim = dim
        self._mesh = mesh
        self._shape = torch.Size((shape[dim], *shape[:dim], *shape[dim + 1 :]))
        self._sharded = [_moved(one, dim) for one in placements]
        self._gathered = [
            one if i != mesh_dim else Replicate() for i, one in enumerate(self._sharded)
        ]
        self._partial = [one if i != mesh_dim else Partial() for i, one in enumerate(self._sharded)]
        # For autograd, in the dtype of its gradient, which nobody then waits for to round it.
        wide = shard.float() if torch.is_grad_enabled() else shard
        self.shard = wide.movedim(dim, 0)
        if not torch.compiler.is_compiling():
            with torch.no_grad():
                part = shard.movedim(dim, 0).contiguous()
                self._coming = self._redistribute(part, self._sharded, self._gathered)

    def whole(self) -> Tensor:
        """Of the mesh's dimension. What comes asynchronously waits for itself when an operator
        meets it.
        """
        return self._coming.detach().movedim(0, self._dim)

    def reduce_scatter(self, gradient: Tensor) -> Tensor:
        """The gradient of `shard`, on its way, from that of the whole in float32. `local` waits for
        it.
        """
        part = gradient.movedim(self._dim, 0).contiguous()
        return self._redistribute(part, self._partial, self._sharded)

    def local(self, part: Tensor) -> Tensor:
        """What `reduce_scatter` gave, in the order of the local part that was gathered."""
        return part.movedim(0, self._dim).contiguous()

    def finish(self) -> Tensor:
        """The whole in float32, differentiable by torch.compile."""
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
    """Where dimension `dim` has become the first one."""
    if not placement.is_shard():
        return placement
    return Shard(0 if placement.dim == dim else placement.dim + (placement.dim < dim))
