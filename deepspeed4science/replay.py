"""Replay: a call like an earlier one skips PyTorch's dispatcher and all checks and choices.

plain call   its tensors are of PyTorch's own classes, on a CPU or a CUDA GPU, and nothing stands
             between caller and operator: no mode, transform, tracing or profiler
kind         everything about a plain call but values and addresses, together with the settings of
             the process that choose its kernel or are among its parameters

Every check and choice before the launch has the same result for all plain calls of a kind whose
tensors are aligned to 16 bytes, and is therefore kept. Other calls go through the operator, which
does the same each time.
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

_MOST_GROUPS = 256  # one more, and all are dropped
_MOST_OF_A_GROUP = 8  # kinds that differ only in what PyTorch compares: strides, dtypes, devices

CallT = TypeVar("CallT", bound=Call)
ResultT = TypeVar("ResultT")

_CLASSES = (Tensor, torch.nn.Parameter)
_DEVICES = ("cpu", "cuda")  # compared by name: subtracting key sets leaves their device bits


def _keys(*names: str) -> Any:
    found = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, names[0]))
    for name in names[1:]:
        found = found | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))
    return found


# These are not PyTorch's public interface. With a release that lacks one, nothing is replayed and
# all calls go through the operator. Looked up once, since every call uses them.
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
    """The tensors of a forward that are not None, and a number that says which these are."""
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
    """The kept kinds of calls of one operator.

    prepare(call) -> compute, a function that computes all calls of the kind of `call`
    """

    def __init__(self, prepare: Callable[[CallT], Callable[[CallT], ResultT]]) -> None:
        self._prepare = prepare
        # Groups are replaced, never changed: other threads may be reading them.
        self._groups: dict[object, tuple[tuple[Any, Callable[[CallT], ResultT]], ...]] = {}

    def known(
        self, q: Tensor, tensors: Sequence[Tensor], *others: object
    ) -> Callable[[CallT], ResultT] | None:
        """The function that computes calls of this kind, or None. Changes nothing.

        tensors   the tensors of the call that are not None, q among them
        others    the other properties of the kind, such as which tensors are None
        """
        if not IS_POSSIBLE or type(q) not in _CLASSES or q.is_nested:  # its sizes are symbolic
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
        """As `known`; where the kind of a plain call is not known, it is prepared and kept."""
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
    """The settings of the process that choose a kernel or are among its parameters."""
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
    """Whether PyTorch's dispatcher would come back to this package at once. Autocast has been
    applied already.
    """
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
