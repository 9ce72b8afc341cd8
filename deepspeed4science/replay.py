"""Calls like one that was made before: what was found out about that one is kept, and PyTorch's
dispatcher, where it would only come back to this package, is passed by.

    plain call   tensors of PyTorch's own classes on a device of ours, and nothing between caller
                 and operator: no mode, no transform, no tracing, no profiler
    kind         all of a plain call but values and addresses, and what of the process chooses its
                 kernel or is among its parameters

All that is asked before a kernel is launched has one answer for all plain calls of a kind whose
tensors are on 16 bytes. Other calls go through the operator, which does the same each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from deepspeed4science import dispatch
from deepspeed4science.call import Call
from op_builder import env
from op_builder.toolchain import openmp

_MOST_GROUPS = 256  # then all is forgotten
_MOST_OF_A_GROUP = 8  # kinds that differ in what only PyTorch compares: strides, dtypes, devices

CallT = TypeVar("CallT", bound=Call)
ResultT = TypeVar("ResultT")

_CLASSES = (Tensor, torch.nn.Parameter)
_DEVICES = ("cpu", "cuda")  # what is subtracted from a key set leaves its devices


def _keys(*names: str) -> Any:
    found = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, names[0]))
    for name in names[1:]:
        found = found | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))
    return found


# Not PyTorch's public interface: a release without one of them replays nothing, and all calls go
# through the operator. Looked up once, since they are asked for at every call.
try:
    from torch._C._dynamo.guards import TensorGuards

    _is_function_mode_enabled = torch._C._is_torch_function_mode_enabled
    _is_profiler_enabled = torch._C._autograd._profiler_enabled
    _are_transforms_active = torch._C._are_functorch_transforms_active
    _included = torch._C._dispatch_tls_local_include_set
    _excluded = torch._C._dispatch_tls_local_exclude_set
    _keys_of, _NO_KEY = torch._C._dispatch_keys, torch._C.DispatchKey.Undefined
    _PLAIN_KEYS = _keys(
        *("CPU", "AutogradCPU", "AutocastCPU", "CUDA", "AutogradCUDA", "AutocastCUDA"),
        *("BackendSelect", "ADInplaceOrView"),
    )
    IS_POSSIBLE = True
except (ImportError, AttributeError):
    IS_POSSIBLE = False


def tensors_of(call: Call) -> tuple[list[Tensor], int]:
    """Those of a forward, and a number that says which of them are there."""
    tensors, given = [call.q, call.k, call.v], 0
    if call.bias1 is not None:
        tensors.append(call.bias1)
        given += 1
    if call.bias2 is not None:
        tensors.append(call.bias2)
        given += 2
    if call.row_mask is not None:
        tensors.append(call.row_mask)
        given += 4
    return tensors, given


class Replay(Generic[CallT, ResultT]):
    """The kinds of calls of one operator that have been made.

    prepare(call) -> compute, which serves all calls of the kind of `call`
    """

    def __init__(self, prepare: Callable[[CallT], Callable[[CallT], ResultT]]) -> None:
        self._prepare = prepare
        # Groups are replaced, not changed: other threads read meanwhile.
        self._groups: dict[object, tuple[tuple[Any, Callable[[CallT], ResultT]], ...]] = {}

    def known(
        self, q: Tensor, tensors: Sequence[Tensor], *others: object
    ) -> Callable[[CallT], ResultT] | None:
        """What computes calls of this kind, where one has been made. Changes nothing.

        tensors   those of the call that are there, q among them
        others    what kinds differ in beside them: which of the tensors are there, for one
        """
        if (
            not IS_POSSIBLE or type(q) not in _CLASSES or q.is_nested
        ):  # whose shape is not one of numbers
            return None
        if _is_function_mode_enabled() or _is_profiler_enabled():
            return None
        for guards, compute in self._groups.get((q.shape, others, _settings(q)), ()):
            if guards.check(*tensors):
                return compute if _are_aligned(tensors) else None
        return None

    def find(
        self, call: CallT, tensors: Sequence[Tensor], *others: object
    ) -> Callable[[CallT], ResultT] | None:
        """As `known`; of a plain call whose kind is not known it is prepared and kept."""
        if not IS_POSSIBLE:
            return None
        compute = self.known(call.q, tensors, *others)
        if compute is not None or not _are_plain(tensors) or not _are_aligned(tensors):
            return compute
        compute = self._prepare(call)
        guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        if len(self._groups) >= _MOST_GROUPS:
            self._groups = {}
        group = (call.q.shape, others, _settings(call.q))
        known = self._groups.get(group, ())[-_MOST_OF_A_GROUP + 1 :]
        self._groups[group] = (*known, (guards, compute))
        return compute

    def forget(self) -> None:
        self._groups = {}


def _settings(q: Tensor) -> tuple[object, ...]:
    """What of the process chooses a kernel or is among its parameters."""
    if q.is_cuda:
        return (
            dispatch.BACKENDS,
            torch._C._get_deterministic_algorithms(),
            torch.get_float32_matmul_precision(),
            env.text("DS4S_CUDA_FAMILY"),
        )
    return dispatch.BACKENDS, openmp.threads(torch.get_num_threads())


def _are_aligned(tensors: Sequence[Tensor]) -> bool:
    bits = 0
    for tensor in tensors:
        bits |= tensor.data_ptr()
    return bits % 16 == 0


def _are_plain(tensors: Sequence[Tensor]) -> bool:
    """PyTorch would come back to this package at once. Autocast has been heard already."""
    if _is_function_mode_enabled() or _is_profiler_enabled() or _are_transforms_active():
        return False
    on, off = _included(), _excluded()
    for tensor in tensors:
        if type(tensor) not in _CLASSES or tensor.device.type not in _DEVICES:
            return False
        beyond = ((_keys_of(tensor) | on) - off) - _PLAIN_KEYS
        if beyond.highestPriorityTypeId() != _NO_KEY:
            return False
    return True
