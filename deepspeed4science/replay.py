"""Replay: a call of the same kind as an earlier one skips PyTorch's dispatcher, all checks of
arguments and the choice of a kernel.

plain call   all its tensors are of PyTorch's own classes, on a CPU or a CUDA GPU, and no mode,
             transform, tracing or profiler would see the operator
kind         everything about a plain call but its values and addresses (shapes, strides, dtypes,
             devices, options), and the settings of the process on which its kernel or parameters
             depend

If their tensors are aligned to 16 bytes, all plain calls of a kind pass the same checks and take
the same kernel. These results are therefore kept. Other calls go through the operator, which checks
and chooses each time.
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

_MOST_GROUPS = 256  # when one more is added, all are dropped
_MOST_OF_A_GROUP = 8  # kinds of a group differ in properties that TensorGuards compare, as strides

CallT = TypeVar("CallT", bound=Call)
ResultT = TypeVar("ResultT")

_CLASSES = (Tensor, torch.nn.Parameter)
_DEVICES = ("cpu", "cuda")  # compared by name: a difference of key sets keeps the device bits


def _keys(*names: str) -> Any:
    found = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, names[0]))
    for name in names[1:]:
        found = found | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))
    return found


# Names outside of PyTorch's public interface. With a release that lacks one, no call is replayed:
# all go through the operator. They are looked up once, since every call uses them.
try:
    from torch._C._dynamo.guards import TensorGuards

    _is_function_mode_enabled = torch._C._is_torch_function_mode_enabled
    # TensorGuards do not notice all dispatch modes: not selective checkpointing, nor fake tensors.
    _num_dispatch_modes = torch._C._len_torch_dispatch_stack
    _fp32_precision = torch._C._get_fp32_precision_getter  # the public property takes 5 us
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
    """The tensors of a forward that are not None, and a bit mask of the optional ones given."""
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
    """The kinds of calls of one operator that are kept.

    prepare   called with a call; returns a function that computes all calls of its kind
    """

    def __init__(self, prepare: Callable[[CallT], Callable[..., ResultT]]) -> None:
        self._prepare = prepare
        # Groups are replaced, never changed: other threads may be reading them.
        self._groups: dict[object, tuple[tuple[Any, Callable[..., ResultT]], ...]] = {}

    def known(
        self, q: Tensor, tensors: Sequence[Tensor], *others: object
    ) -> Callable[..., ResultT] | None:
        """The function that computes calls of this kind; None if the call is not plain, its tensors
        are not aligned, or its kind is not kept. Keeps nothing.

        tensors   the tensors of the call that are not None, q among them
        others    the other properties of the kind, such as which tensors are None
        """
        if not IS_POSSIBLE or type(q) not in _CLASSES or q.is_nested:  # its sizes are symbolic
            return None
        if _is_observed():
            return None
        for guards, compute in self._groups.get((q.shape, others, _settings(q)), ()):
            if guards.check(*tensors):
                return compute if _are_aligned(tensors) else None
        return None

    def find(
        self, call: CallT, tensors: Sequence[Tensor], *others: object
    ) -> Callable[..., ResultT] | None:
        """As `known`, but a plain call of a new kind is prepared and kept, if no tensor is twice in
        it.
        """
        if not IS_POSSIBLE:
            return None
        compute = self.known(call.q, tensors, *others)
        if compute is not None or not _are_plain(tensors) or not _are_aligned(tensors):
            return compute
        if len({id(tensor) for tensor in tensors}) < len(tensors):  # TensorGuards would refuse it
            return None
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
    """The settings of the process on which the choice of a kernel or its parameters depend."""
    if q.is_cuda:
        return (
            dispatch.BACKENDS,
            torch._C._get_deterministic_algorithms(),
            _fp32_precision("cuda", "matmul"),
            env.text("DS4S_CUDA_FAMILY"),
        )
    return dispatch.BACKENDS, openmp.threads(torch.get_num_threads())


def _is_observed() -> bool:
    """Whether a mode or a profiler would see the operator."""
    return _is_function_mode_enabled() or _is_profiler_enabled() or _num_dispatch_modes() > 0


def _are_aligned(tensors: Sequence[Tensor]) -> bool:
    bits = 0
    for tensor in tensors:
        bits |= tensor.data_ptr()
    return bits % 16 == 0


def _are_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether PyTorch's dispatcher would call this package's kernel for these tensors and nothing
    before it. Autocast has been applied already.
    """
    if _is_observed() or _are_transforms_active():
        return False
    on, off = _included(), _excluded()
    for tensor in tensors:
        if type(tensor) not in _CLASSES or tensor.device.type not in _DEVICES:
            return False
        beyond = ((_keys_of(tensor) | on) - off) - _PLAIN_KEYS
        is_plain = beyond.highestPriorityTypeId() == _NO_KEY  # Dynamo of PyTorch 2.12 fails at `!=`
        if not is_plain:
            return False
    return True
