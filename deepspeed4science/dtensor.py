"""DTensors, as far as the op itself has to know them. This module never imports
`torch.distributed.tensor`: where a DTensor exists, its maker has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn


def is_dtensor(tensor: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_sharded(x: Tensor, part: nn.Module) -> bool:
    """Whether x is a DTensor, and the part's parameters are plain tensors, which every process has
    whole.
    """
    return type(x) is not Tensor and is_dtensor(x) and not any(map(is_dtensor, part.parameters()))


def require_sharding_rules(tensor: Tensor) -> None:
    """Registers the sharding rules before the operators get a DTensor."""
    if is_dtensor(tensor):
        _load_sharding_rules()


def _load_sharding_rules() -> None:
    from deepspeed4science.distributed import sharding

    sharding.register()


# This attribute makes torch.compile call the function while tracing and not trace into it. The
# decorator that sets it would import all of torch._dynamo.
_load_sharding_rules._dynamo_marked_constant = True  # type: ignore[attr-defined]


Placements = Sequence[Any] | None  # None: the tensor is no DTensor


def placements_of(tensors: Sequence[Tensor | None]) -> Sequence[Placements]:
    return [tensor.placements if is_dtensor(tensor) else None for tensor in tensors]  # type: ignore[union-attr]


def summed(gradient: Any, placements: Placements) -> Tensor:
    """The gradient with the placements of its tensor, replicated where that is a partial sum. If
    the gradient is a partial sum, it is summed over processes; it must not have been rounded
    before.
    """
    if any(placement.is_partial() for placement in gradient.placements):
        whole = sys.modules["torch.distributed.tensor"].Replicate()
        gradient = gradient.redistribute(
            placements=[whole if one.is_partial() else one for one in placements or ()]
        )
    complete: Tensor = gradient
    return complete
