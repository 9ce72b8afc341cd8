"""Communication of ring attention: each process sends its present part of the keys to the next
process of the group and receives another part from the previous one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

Part = Sequence[Tensor | None]
KEY_DIMS = (2, 2, 4)  # of k, v and bias1, and of their gradients


def extents(length: int, size: int) -> list[int]:
    """The sizes of DTensor's shards: equal parts, rounded up; the last are smaller or empty."""
    part = -(-length // size)
    return [max(0, min(part, length - i * part)) for i in range(size)]


class Transfer:
    """Sends a part to the next process and receives one of `extent` keys from the previous one. In
    a group of one process the part stays where it is.
    """

    def __init__(self, group: dist.ProcessGroup, part: Part, extent: int) -> None:
        rank, size = group.rank(), group.size()
        self._part: list[Tensor | None]
        self._works: Sequence[dist.Work] = ()
        if size == 1:
            self._part = list(part)
            return
        after = dist.get_global_rank(group, (rank + 1) % size)
        before = dist.get_global_rank(group, (rank - 1) % size)
        self._part = []
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
        self._operations = operations  # they keep the tensors alive that are being sent
        if operations:
            self._works = dist.batch_isend_irecv(operations)

    def wait(self) -> Part:
        for work in self._works:
            work.wait()
        return self._part


class Ring:
    """The parts of all processes' keys, each of which is received once."""

    def __init__(self, group: dist.ProcessGroup, num_keys: int) -> None:
        self._group = group
        self._extents = extents(num_keys, group.size())
        self._origin = group.rank()  # the process whose keys the present part is
        self._sums: Transfer | None = None

    def parts(self, own: Part) -> Iterator[tuple[slice, Part]]:
        """Yields the range of keys of each part with its k, v and bias1. The next part is received
        while the caller computes with this one.
        """
        part, size = own, self._group.size()
        for step in range(size):
            self._origin = (self._group.rank() - step) % size
            following = self._pass_on(part) if step < size - 1 else None
            first = sum(self._extents[: self._origin])
            yield slice(first, first + self._extents[self._origin]), part
            if following is not None:
                part = following.wait()

    def add(self, gradients: Part) -> None:
        """Adds gradients of the present part to the sum that other processes computed for it, and
        sends the sum on.
        """
        if self._sums is not None:
            sums = self._sums.wait()
            pairs = zip(sums, gradients, strict=True)
            gradients = [None if x is None or y is None else x + y for x, y in pairs]
        self._sums = self._pass_on(gradients)

    def own_sums(self) -> Part:
        """The gradients of this process's own part, summed over all processes."""
        assert self._sums is not None
        return self._sums.wait()

    def _pass_on(self, part: Part) -> Transfer:
        """Starts to send a part. The part that arrives belongs to the process before its origin."""
        return Transfer(self._group, part, self._extents[self._origin - 1])
