"""Parts of keys on their way around the processes of a group: each sends to the next one and
receives from the one before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

Part = Sequence[Tensor | None]
KEY_DIMS = (2, 2, 4)  # of k, v and bias1, and of their gradients


def extents(length: int, size: int) -> list[int]:
    """As DTensor shards: even parts, rounded up, and what is left."""
    part = -(-length // size)
    return [max(0, min(part, length - i * part)) for i in range(size)]


class Transfer:
    """A part on its way to the next process, and one of `extent` keys from the one before."""

    def __init__(self, group: dist.ProcessGroup, part: Part, extent: int) -> None:
        rank, size = group.rank(), group.size()
        after = dist.get_global_rank(group, (rank + 1) % size)
        before = dist.get_global_rank(group, (rank - 1) % size)
        self._part: list[Tensor | None] = []
        operations = []
        for tensor, dim in zip(part, KEY_DIMS, strict=True):
            if tensor is None:
                self._part.append(None)
                continue
            shape = (*tensor.shape[:dim], extent, *tensor.shape[dim + 1 :])
            coming = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
            self._part.append(coming)
            operations.append(dist.P2POp(dist.isend, tensor.contiguous(), after, group))
            operations.append(dist.P2POp(dist.irecv, coming, before, group))
        self._operations = operations  # they own what is being sent
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> Part:
        for work in self._works:
            work.wait()
        return self._part


class Ring:
    """Every part of the keys comes by once."""

    def __init__(self, group: dist.ProcessGroup, num_keys: int) -> None:
        self._group = group
        self._extents = extents(num_keys, group.size())
        self._origin = group.rank()  # whose part is at hand
        self._sums: Transfer | None = None

    def parts(self, own: Part) -> Iterator[tuple[slice, Part]]:
        """Which keys of all, and k, v and bias1 of them; the next ones come in meanwhile."""
        part, size = own, self._group.size()
        for step in range(size):
            self._origin = (self._group.rank() - step) % size
            following = self._pass_on(part) if step < size - 1 else None
            first = sum(self._extents[: self._origin])
            yield slice(first, first + self._extents[self._origin]), part
            if following is not None:
                part = following.wait()

    def add(self, gradients: Part) -> None:
        """Gradients of the part at hand, to those that other processes had for it."""
        if self._sums is not None:
            sums = self._sums.wait()
            pairs = zip(sums, gradients, strict=True)
            gradients = [None if x is None or y is None else x + y for x, y in pairs]
        self._sums = self._pass_on(gradients)

    def own_sums(self) -> Part:
        """Gradients of the own part, from all processes."""
        assert self._sums is not None
        return self._sums.wait()

    def _pass_on(self, part: Part) -> Transfer:
        """The next one to come is that of the process before the origin of this one."""
        return Transfer(self._group, part, self._extents[self._origin - 1])
