"""DTensors, as far as the op itself has to know of them: `torch.distributed.tensor` is loaded by
whoever makes one, never from here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor


def is_dtensor(tensor: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def comes_sharded(x: Tensor, parameter: Tensor) -> bool:
    """A DTensor that meets plain parameters: all of them are in every process."""
    return type(x) is not Tensor and is_dtensor(x) and not is_dtensor(parameter)


def require_sharding_rules(tensor: Tensor) -> None:
    """Before the operators meet a DTensor."""
    if is_dtensor(tensor):
        _load_sharding_rules()


def _load_sharding_rules() -> None:
    from deepspeed4science.distributed import sharding

    sharding.register()


# torch.compile calls it while it traces, and traces none of it: what its decorator would do, which
# loads all of torch._dynamo.
_load_sharding_rules._dynamo_marked_constant = True  # type: ignore[attr-defined]


Placements = Sequence[Any] | None  # None: of a tensor that is no DTensor


def placements_of(tensors: Sequence[Tensor | None]) -> Sequence[Placements]:
    return [tensor.placements if is_dtensor(tensor) else None for tensor in tensors]  # type: ignore[union-attr]


def summed(gradient: Any, placements: Placements) -> Tensor:
    """A gradient whose parts have been added up, as `placements` say: before it is rounded."""
    partial = any(placement.is_partial() for placement in gradient.placements)
    complete: Tensor = gradient.redistribute(placements=placements) if partial else gradient
    return complete
