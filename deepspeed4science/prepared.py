"""Prepared calls, the last step of every call: allocate the results, write the addresses before the
other parameters, which are already packed, and launch the kernel. A prepared call computes any
number of calls of its kind (replay.py); a call that is not replayed uses one, too.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from deepspeed4science import params
from deepspeed4science.backends.kernels import is_verbose
from deepspeed4science.backends.prepare import CallT
from deepspeed4science.call import BackwardCall, ForwardCall, Gradients
from deepspeed4science.dispatch import KernelChoice
from deepspeed4science.errors import KernelError
from deepspeed4science.params import Layout
from deepspeed4science.problem import Problem

logger = logging.getLogger(__name__)

# Up to so many elements, a kernel rounds the bias gradients, which spares a launch for each. Their
# float32 sums, at most 4 MiB, then exist together with the tensors that the forward saved. Larger
# gradients are rounded by autograd, after those tensors are freed, unless a kernel should round
# them anyway (`rounds_dbias2`).
_MOST_ROUNDED = 2**20

# Of cudaError_t: what stops a kernel that runs. All later launches, of any library, return it.
_LATE_STATUSES = frozenset({700, 702, 710, 714, 715, 716, 717, 718, 719})
_LATE = (
    " CUDA tells of this at a later launch, so that a kernel of any library may have caused it. "
    "CUDA_LAUNCH_BLOCKING=1 finds out which."
)


class _RowsRefusedError(Exception):
    """The kernels of this call take no dbias2 in padded rows."""


class _Prepared:
    """A kernel and its parameters without addresses. They are filled in at the first call, since
    all calls of a kind have the same strides and the same alignment.
    """

    _layout: Layout

    def __init__(self, choice: KernelChoice, problem: Problem) -> None:
        self._choice, self._problem, self._backend = choice, problem, choice.backend
        self._converts = True  # until a call has shown that kernels read its tensors as they are
        self._rest: bytes | None = None
        self._workspace_bytes = 0

    def _converted(self, call: CallT) -> CallT:
        """The call with tensors that kernels can read."""
        converted = self._backend.prepare(self._problem, call)
        self._converts = converted is not call
        return converted

    def _launch(self, *tensors: Tensor | None) -> None:
        """tensors: those of the layout, in its order."""
        rest = self._rest
        if rest is None:
            rest = self._load(*tensors)
        device = self._problem.device
        workspace, address = None, 0
        if self._workspace_bytes:
            # Freed after the launch: the allocator reuses its memory in the order of the stream.
            workspace = torch.empty(self._workspace_bytes, dtype=torch.uint8, device=device)
            address = workspace.data_ptr()
        packed = self._layout.pack_pointers(*tensors, address) + rest
        status = self._backend.launch(self._kernel, packed, device)
        if status != 0:
            self._rest = None  # a device without memory may not have told the workspace's size
            raise KernelError(
                f"{self._kernel.name} stopped with status {status}: "
                f"{self._kernel.status_string(status)}. Results of this call are not valid. "
                f"The call was {self._problem}."
                + (_LATE if device.type == "cuda" and status in _LATE_STATUSES else "")
            )

    def _load(self, *tensors: Tensor | None) -> bytes:
        """Loads the kernel and returns its parameters without addresses. Raises BuildError."""
        if self._choice.reason:
            _tell(self._choice.reason)
        kernel = self._backend.kernels.load(self._choice.kernel)
        rest = self._layout.pack_rest(self._problem, self._backend.options(), *tensors)
        packed = self._layout.pack_pointers(*tensors, 0) + rest
        device = self._problem.device
        self._kernel = kernel
        workspace_bytes = self._backend.workspace_bytes(kernel, packed, device)
        if workspace_bytes < 0:
            raise _RowsRefusedError
        self._workspace_bytes = workspace_bytes
        self._rest = rest  # set last: another thread that finds it finds all the others set
        return rest


class PreparedForward(_Prepared):
    _layout = params.FWD

    def __init__(self, choice: KernelChoice, problem: Problem) -> None:
        super().__init__(choice, problem)
        p = problem
        self._o_shape = None if p.Dv == p.D else (p.B, p.N, p.Lq, p.H, p.Dv)  # None: that of q
        self._lse_shape = (p.B, p.N, p.H, p.Lq)

    def __call__(self, call: ForwardCall) -> tuple[Tensor, Tensor | None]:
        """O `[B, N, Lq, H, Dv]` and, where it is wanted, lse `[B, N, H, Lq]` in float32."""
        if self._converts:
            call = self._converted(call)
        q, k, v, bias1, bias2, with_lse, row_mask, _ = call
        o = _new_like(q) if self._o_shape is None else q.new_empty(self._o_shape)
        lse = q.new_empty(self._lse_shape, dtype=torch.float32) if with_lse else None
        self._launch(q, k, v, bias1, bias2, row_mask, o, lse)
        dtype = self._problem.dtype
        return (o if o.dtype == dtype else o.to(dtype)), lse


class PreparedBackward(_Prepared):
    """rounds: kernels may return bias gradients in the dtype and shape of the biases."""

    _layout = params.BWD

    def __init__(self, choice: KernelChoice, problem: Problem, *, rounds: bool = False) -> None:
        super().__init__(choice, problem)
        p = problem
        may_round = (
            rounds
            and p.device.type == "cuda"
            and p.dtype != torch.float32
            and {p.bias1_dtype, p.bias2_dtype} <= {None, p.dtype}
        )
        self._rounds = may_round and p.B * (p.N + p.H * p.Lq) * p.Lk <= _MOST_ROUNDED
        # Where dq, dk and dv are wanted, too: without one of them, other kernels run.
        self._rounds_with_all = may_round and choice.backend.rounds_dbias2(p)
        # Sums that autograd rounds may have any strides.
        padding = -p.Lk % 4 if may_round and choice.backend.pads_dbias2 else 0
        self._row_elements = p.Lk + padding
        self._first_call = threading.RLock()

    def __call__(self, call: BackwardCall, into: Sequence[Tensor] = ()) -> Gradients:
        """dq, dk, dv in the dtype of Q, dbias1 `[B, N, 1, 1, Lk]` and dbias2 `[B, 1, H, Lq, Lk]` in
        float32 or rounded; None for a gradient that is not wanted.

        into   tensors for dq, dk and dv, with the strides of q, k and v

        A softmax over one key (attention over the columns of a single sequence) is 1 for every
        score. All gradients but dv are then exactly 0; a kernel would return rounding errors.
        """
        if self._rest is None:  # the first call finds out whether rows of dbias2 may be padded
            with self._first_call:
                return self._compute(call, into)
        return self._compute(call, into)

    def _compute(self, call: BackwardCall, into: Sequence[Tensor]) -> Gradients:
        if self._converts:
            call = self._converted(call)
        p = self._problem
        do_, q, k, v, o, lse, bias1, bias2, wanted, row_mask, _, _ = call
        lse = lse.contiguous()  # kernels have no strides of it; vmap and callers may expand it
        one_key = p.Lk == 1 and not p.partial_keys
        want_q, want_k, want_v, want_bias1, want_bias2 = wanted
        dq: Tensor | None
        dk: Tensor | None
        dv: Tensor | None
        if into and q.dtype == p.dtype and not one_key:
            dq, dk, dv = into
        else:
            dq = _new_like(q) if want_q else None
            dk = _new_like(k) if want_k else None
            dv = _new_like(v) if want_v else None
        rounds = self._rounds or (self._rounds_with_all and want_q and want_k and want_v)
        rounds = rounds and q.dtype == p.dtype
        dbias1 = dbias2 = None
        if want_bias1 and bias1 is not None:
            dbias1 = _new_like(bias1) if rounds else lse.new_empty((p.B, p.N, 1, 1, p.Lk))
        if want_bias2 and bias2 is not None:
            dbias2 = _new_like(bias2) if rounds else self._new_sums(lse)
        computed: Gradients = (dq, dk, dv, dbias1, dbias2)
        if one_key:
            for gradient in (dq, dk, dbias1, dbias2):
                if gradient is not None:
                    gradient.zero_()
            computed = (None, None, dv, None, None)
        if want_v or (any(wanted) and not one_key):
            dbias: tuple[Tensor | None, ...] = computed[3:]
            dbias = (None, None, *dbias) if rounds else (*dbias, None, None)
            try:
                self._launch(do_, q, k, v, o, lse, bias1, bias2, row_mask, *computed[:3], *dbias)
            except _RowsRefusedError:
                self._row_elements = p.Lk
                return self._compute(call, into)
        if q.dtype != p.dtype:
            dq, dk, dv = (None if one is None else one.to(p.dtype) for one in (dq, dk, dv))
        return dq, dk, dv, dbias1, dbias2

    def _new_sums(self, lse: Tensor) -> Tensor:
        """Memory for the float32 sums of dbias2."""
        p = self._problem
        rows = lse.new_empty((p.B, 1, p.H, p.Lq, self._row_elements))
        return rows if self._row_elements == p.Lk else rows[..., : p.Lk]


def _new_like(tensor: Tensor) -> Tensor:
    """A new tensor of the same shape and dtype; faster than one from a shape."""
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


_told: set[str] = set()


def _tell(reason: str) -> None:
    """Logs each reason once: as a warning under DS4S_VERBOSE=1, else as information."""
    if reason in _told:
        return
    _told.add(reason)
    with contextlib.suppress(Exception):  # an error in a log handler must not fail the call
        logger.log(logging.WARNING if is_verbose() else logging.INFO, reason)
