"""DTensor's sharding rules for the two operators (docs/many-gpus.md): by batch, by rows n, by
heads, by queries, or by several of these over several dimensions of the mesh.

There is a rule for each axis of the problem. A tensor that has the axis is sharded along it, and so
is its gradient. A tensor without the axis, or broadcast along it, is replicated, and its gradient
is a partial sum. DTensor chooses the rule that moves the fewest bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deepspeed4science.call import BackwardCall, ForwardCall
from deepspeed4science.operators import backward_op, forward_op

try:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
    from torch.distributed.tensor.experimental import register_sharding
except ImportError as error:
    raise ImportError(
        "DTensors need torch.distributed.tensor.experimental.register_sharding, which this PyTorch "
        f"lacks ({error}); expected PyTorch 2.10 or newer, built with torch.distributed. Without "
        "it, call the op on local tensors."
    ) from error

# Axis of the problem -> tensor -> the dimension of the tensor that is this axis.
AXES: Mapping[str, Mapping[str, int]] = {
    "B": {
        "q": 0,
        "k": 0,
        "v": 0,
        "o": 0,
        "do_": 0,
        "lse": 0,
        "bias1": 0,
        "bias2": 0,
        "row_mask": 0,
    },
    "N": {"q": 1, "k": 1, "v": 1, "o": 1, "do_": 1, "lse": 1, "bias1": 1, "row_mask": 1},
    "H": {"q": 3, "k": 3, "v": 3, "o": 3, "do_": 3, "lse": 2, "bias2": 2},
    "Lq": {"q": 2, "o": 2, "do_": 2, "lse": 3, "bias2": 3},
}
_GRADIENTS = ("q", "k", "v", "bias1", "bias2")  # the backward returns their gradients in this order

Rule = tuple[list[Any], list[Any]]  # placements of results and of arguments


def forward_rules(*arguments: Any, **named: Any) -> Sequence[Rule]:
    call = ForwardCall(*arguments, **named)
    shapes = {"o": call.q.shape, "lse": (*call.q.shape[:2], call.q.shape[3], call.q.shape[2])}
    return [
        (
            [
                _placement("o", shapes["o"], axis),
                _placement("lse", shapes["lse"], axis) if call.with_lse else Replicate(),
            ],
            _arguments(call, axis),
        )
        for axis in _axes(call)
    ]


def backward_rules(*arguments: Any, **named: Any) -> Sequence[Rule]:
    call = BackwardCall(*arguments, **named)
    return [
        ([_gradient(call, name, axis) for name in _GRADIENTS], _arguments(call, axis))
        for axis in _axes(call)
    ]


def _axes(call: Any) -> list[Mapping[str, int]]:
    """The axes along which this call may be sharded; the empty mapping replicates all tensors."""
    shape = call.q.shape
    axes = [axis for axis in AXES.values() if shape[axis["q"]] > 1]
    if AXES["Lq"] in axes and not _gives_all_queries(call.q):
        axes.remove(AXES["Lq"])
    return [{}, *axes]


def _gives_all_queries(q: Any) -> bool:
    """Whether every process gets a query. The op refuses tensors without one, and torch divides 5
    queries among 4 processes as 2, 2, 1 and 0.
    """
    length = q.shape[2]
    for size in q.mesh.shape:
        length -= (size - 1) * -(-length // size)  # the length of the last process
        if length < 1:
            return False
    return True


def _arguments(call: Any, axis: Mapping[str, int]) -> list[Any]:
    return [
        _placement(name, value.shape, axis) if hasattr(value, "placements") else None
        for name, value in zip(call._fields, call, strict=True)
    ]


def _placement(name: str, shape: Sequence[int], axis: Mapping[str, int]) -> Any:
    dim = axis.get(name)
    return Replicate() if dim is None or shape[dim] == 1 else Shard(dim)


def _gradient(call: Any, name: str, axis: Mapping[str, int]) -> Any:
    tensor, wanted = getattr(call, name), call.wanted[_GRADIENTS.index(name)]
    if not axis or tensor is None or not wanted:
        return Replicate()
    placement = _placement(name, tensor.shape, axis)
    return placement if placement.is_shard() else Partial()


def register() -> None:
    """Register the rules with DTensor, once in a process."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    if forward_op in propagator.op_to_schema_info:
        return
    for operator, rules in ((forward_op, forward_rules), (backward_op, backward_rules)):
        register_sharding(operator)(rules)
        # DTensor caches its choices, by default with only tensors in the key. They also depend on
        # which biases are given, on with_lse and on wanted.
        propagator.op_to_schema_info[operator] = RuntimeSchemaInfo(0, needs_pytree=True)
