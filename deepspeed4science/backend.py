"""What every backend does alike: allocate outputs, fill the parameter struct, launch one kernel,
check its status.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from deepspeed4science import params
from deepspeed4science.errors import KernelError
from deepspeed4science.params import pointer
from deepspeed4science.problem import Problem
from op_builder.cache.loaded_kernel import LoadedKernel

DTYPE_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


class Backend(ABC):
    """One kind of hardware. `forward` and `backward` take checked, five-dimensional tensors."""

    name: str

    @abstractmethod
    def not_supported_reasons(self, problem: Problem) -> list[str]:
        """Why this backend cannot take the call; empty when it can. Cheap, and never raises."""

    @abstractmethod
    def _prefetch_backward(self, problem: Problem, inputs: Sequence[Tensor]) -> None:
        """Begin to make the backward of a call ready; `inputs` are q, k, v as kernels get them.
        Returns at once and leaves errors to `backward`.
        """

    @abstractmethod
    def _kernel(
        self, direction: str, problem: Problem, tensors: Sequence[Tensor | None]
    ) -> LoadedKernel:
        """The kernel for a call; `tensors` are all that it reads or writes in the dtype of Q."""

    @abstractmethod
    def _options(self, problem: Problem) -> tuple[int, int]:
        """num_threads and deterministic of the parameter struct."""

    @abstractmethod
    def _run(self, kernel: LoadedKernel, packed: bytes, device: torch.device) -> int:
        """Launch, and return the kernel's status."""

    def _prepare_bias(self, bias: Tensor | None, problem: Problem) -> Tensor | None:
        """A bias as this backend's kernels read it."""
        return bias

    def _prepare_output(self, tensor: Tensor) -> Tensor:
        """O or its gradient as this backend's backward reads it."""
        return _unit_stride(tensor)

    def forward(
        self,
        problem: Problem,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias1: Tensor | None,
        bias2: Tensor | None,
        row_mask: Tensor | None = None,
        *,
        with_lse: bool,
    ) -> tuple[Tensor, Tensor]:
        """O `[B, N, Lq, H, Dv]`, and lse `[B, N, H, Lq]` in float32 (no elements unless asked
        for).
        """
        p = problem
        q, k, v = _unit_stride(q), _unit_stride(k), _unit_stride(v)
        if with_lse:  # somebody will differentiate: both directions are compiled side by side
            self._prefetch_backward(p, (q, k, v))
        bias1, bias2 = self._prepare_bias(bias1, p), self._prepare_bias(bias2, p)
        o = torch.empty((p.B, p.N, p.Lq, p.H, p.Dv), dtype=p.dtype, device=p.device)
        if with_lse:
            lse = torch.empty((p.B, p.N, p.H, p.Lq), dtype=torch.float32, device=p.device)
        else:
            lse = torch.empty(0, dtype=torch.float32, device=p.device)
        packed = params.FWD_LAYOUT.pack(
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            pointer(bias1),
            pointer(bias2),
            pointer(row_mask),
            o.data_ptr(),
            lse.data_ptr() if with_lse else 0,
            0,
            *(p.B, p.N, p.Lq, p.Lk, p.H, p.D, p.Dv),
            *q.stride()[:4],
            *k.stride()[:4],
            *v.stride()[:4],
            *o.stride()[:4],
            *params.bias1_strides(bias1),
            *params.bias2_strides(bias2),
            *params.row_mask_strides(row_mask),
            _dtype_code(bias1),
            _dtype_code(bias2),
            *self._options(p),
            p.scale,
        )
        self._launch("fwd", p, (q, k, v, o), packed)
        return o, lse

    def backward(
        self,
        problem: Problem,
        do_: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        bias1: Tensor | None,
        bias2: Tensor | None,
        row_mask: Tensor | None = None,
        *,
        wanted: Sequence[bool],
    ) -> Gradients:
        """dq, dk, dv in the dtype of Q, dbias1 `[B, N, 1, 1, Lk]` and dbias2 `[B, 1, H, Lq, Lk]`
        in float32.

        A softmax over one key (attention over the columns of a lone sequence) is 1 whatever its
        score: all gradients but dv are exactly 0, where a kernel would find what it rounded.
        """
        p = problem
        new: Callable[..., Tensor] = torch.zeros if p.Lk == 1 else torch.empty
        q, k, v = _unit_stride(q), _unit_stride(k), _unit_stride(v)
        o, do_ = self._prepare_output(o), self._prepare_output(do_)
        bias1, bias2 = self._prepare_bias(bias1, p), self._prepare_bias(bias2, p)
        want_q, want_k, want_v, want_bias1, want_bias2 = wanted
        dq = new(q.shape, dtype=p.dtype, device=p.device) if want_q else None
        dk = new(k.shape, dtype=p.dtype, device=p.device) if want_k else None
        dv = torch.empty(v.shape, dtype=p.dtype, device=p.device) if want_v else None
        new32 = functools.partial(new, dtype=torch.float32, device=p.device)
        dbias1 = new32((p.B, p.N, 1, 1, p.Lk)) if want_bias1 else None
        dbias2 = new32((p.B, 1, p.H, p.Lq, p.Lk)) if want_bias2 else None
        gradients = (dq, dk, dv, dbias1, dbias2)
        outputs = (None, None, dv, None, None) if p.Lk == 1 else gradients
        if all(output is None for output in outputs):
            return gradients
        packed = params.BWD_LAYOUT.pack(
            *(pointer(t) for t in (q, k, v, bias1, bias2, row_mask, o, lse, do_, *outputs)),
            0,
            *(p.B, p.N, p.Lq, p.Lk, p.H, p.D, p.Dv),
            *(stride for t in (q, k, v, o, do_, *outputs[:3]) for stride in _four_strides(t)),
            *params.bias1_strides(bias1),
            *params.bias2_strides(bias2),
            *params.row_mask_strides(row_mask),
            _dtype_code(bias1),
            _dtype_code(bias2),
            *self._options(p),
            p.scale,
        )
        self._launch("bwd", p, (q, k, v, o, do_, *outputs[:3]), packed)
        return gradients

    def _launch(
        self, direction: str, problem: Problem, tensors: Sequence[Tensor | None], packed: bytes
    ) -> None:
        kernel = self._kernel(direction, problem, tensors)
        status = self._run(kernel, packed, problem.device)
        if status != 0:
            raise KernelError(
                f"{kernel.name} stopped with status {status}: {kernel.status_string(status)}. "
                f"Results of this call are not valid. The call was {problem}."
            )


def _unit_stride(tensor: Tensor) -> Tensor:
    """Kernels read channels at stride 1; a stride-0 gradient or a transposed consumer's is
    copied.
    """
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _four_strides(tensor: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0, 0) if tensor is None else tensor.stride()[:4]


def _dtype_code(bias: Tensor | None) -> int:
    return 0 if bias is None else params.DTYPE_CODES[bias.dtype]
