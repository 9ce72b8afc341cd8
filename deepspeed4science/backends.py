"""The border to hardware: which backend takes a call, and the launch of its kernels.

A backend says why it cannot take a `Problem` (an empty list: it can) and runs forward and backward on checked,
five-dimensional tensors. Order in `BACKENDS` is preference.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from deepspeed4science import params
from deepspeed4science.errors import KernelError, NoBackendError
from deepspeed4science.params import pointer
from deepspeed4science.problem import Problem
from op_builder.evoformer_attn_cpu import EvoformerAttnCPUBuilder
from op_builder.jit import LoadedKernel

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


class Backend(Protocol):
    """What `evoformer_attn.py` needs of a backend."""

    name: str

    def not_supported_reasons(self, problem: Problem) -> list[str]: ...

    def prefetch_backward(self, problem: Problem) -> None:
        """Begin to make the backward ready; returns at once and never raises."""

    def forward(
        self,
        problem: Problem,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias1: Tensor | None,
        bias2: Tensor | None,
        *,
        with_lse: bool,
    ) -> tuple[Tensor, Tensor]:
        """O `[B, N, Lq, H, Dv]`, and lse `[B, N, H, Lq]` in float32 (no elements unless asked for)."""

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
        *,
        wanted: list[bool],
    ) -> Gradients:
        """dq, dk, dv in the dtype of Q, dbias1 `[B, N, 1, 1, Lk]` and dbias2 `[B, 1, H, Lq, Lk]` in float32."""


class CpuBackend:
    """Vectorised C++ for the processor at hand; results do not depend on the number of threads."""

    name = "Cpu"

    def __init__(self) -> None:
        self._builder = EvoformerAttnCPUBuilder()
        self._kernels: dict[tuple[str, torch.dtype], LoadedKernel] = {}
        self._prefetched: set[torch.dtype] = set()

    def not_supported_reasons(self, problem: Problem) -> list[str]:
        if problem.device.type != "cpu":
            return [f"tensors are on {problem.device}, not on the CPU"]
        return []

    def prefetch_backward(self, problem: Problem) -> None:
        if problem.dtype not in self._prefetched:
            self._prefetched.add(problem.dtype)
            self._builder.prefetch([self._spec("bwd", problem.dtype)])

    def forward(self, problem, q, k, v, bias1, bias2, *, with_lse):  # noqa: ANN001, ANN201 (see Backend)
        p = problem
        q, k, v = _unit_stride(q), _unit_stride(k), _unit_stride(v)
        o = torch.empty((p.B, p.N, p.Lq, p.H, p.Dv), dtype=p.dtype)
        lse = torch.empty((p.B, p.N, p.H, p.Lq) if with_lse else 0, dtype=torch.float32)
        packed = params.FWD_LAYOUT.pack(
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            pointer(bias1),
            pointer(bias2),
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
            *self._options(p),
            p.scale,
        )
        self._launch("fwd", p.dtype, packed)
        return o, lse

    def backward(self, problem, do_, q, k, v, o, lse, bias1, bias2, *, wanted):  # noqa: ANN001, ANN201
        p = problem
        q, k, v, o, do_ = (_unit_stride(t) for t in (q, k, v, o, do_))
        dq = torch.empty(q.shape, dtype=p.dtype) if wanted[0] else None
        dk = torch.empty(k.shape, dtype=p.dtype) if wanted[1] else None
        dv = torch.empty(v.shape, dtype=p.dtype) if wanted[2] else None
        dbias1 = torch.empty((p.B, p.N, 1, 1, p.Lk)) if wanted[3] else None
        dbias2 = torch.empty((p.B, 1, p.H, p.Lq, p.Lk)) if wanted[4] else None
        packed = params.BWD_LAYOUT.pack(
            *(pointer(t) for t in (q, k, v, bias1, bias2, o, lse, do_)),
            *(pointer(t) for t in (dq, dk, dv, dbias1, dbias2)),
            0,
            *(p.B, p.N, p.Lq, p.Lk, p.H, p.D, p.Dv),
            *(stride for t in (q, k, v, o, do_) for stride in t.stride()[:4]),
            *(
                stride
                for t in (dq, dk, dv)
                for stride in (t.stride()[:4] if t is not None else (0,) * 4)
            ),
            *params.bias1_strides(bias1),
            *params.bias2_strides(bias2),
            *self._options(p),
            p.scale,
        )
        self._launch("bwd", p.dtype, packed)
        return dq, dk, dv, dbias1, dbias2

    def _options(self, p: Problem) -> tuple[int, int, int, int]:
        codes = params.DTYPE_CODES
        return (
            codes[p.bias1] if p.bias1 is not None else 0,
            codes[p.bias2] if p.bias2 is not None else 0,
            torch.get_num_threads(),
            1,
        )

    def _spec(self, direction: str, dtype: torch.dtype):  # noqa: ANN202 (CpuKernel)
        return self._builder.kernel(direction=direction, dtype=_DTYPE_NAMES[dtype])

    def _launch(self, direction: str, dtype: torch.dtype, packed: bytes) -> None:
        kernel = self._kernels.get((direction, dtype))
        if kernel is None:
            spec = self._spec(direction, dtype)
            kernel = self._builder.load(kernels=[spec]).kernel(spec)
            self._kernels[direction, dtype] = kernel
        status = kernel.run(packed, 0)
        if status != 0:
            raise KernelError(
                f"{kernel.name} stopped with status {status}: {kernel.status_string(status)}. "
                "Results of this call are not valid."
            )


_DTYPE_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}

BACKENDS: tuple[Backend, ...] = (CpuBackend(),)


def select(problem: Problem) -> Backend:
    """The first backend that takes `problem`; `NoBackendError` with everybody's reasons otherwise."""
    for backend in BACKENDS:
        if not backend.not_supported_reasons(problem):
            return backend
    reasons = "\n".join(
        f"  {backend.name}: {'; '.join(backend.not_supported_reasons(problem))}"
        for backend in BACKENDS
    )
    raise NoBackendError(
        f"no backend takes this call ({problem}):\n{reasons}\n"
        "`ds_report` shows what this machine can run; deepspeed4science.reference.evoformer_attention runs anywhere."
    )


def _unit_stride(tensor: Tensor) -> Tensor:
    """Kernels read channels at stride 1; anything else (a stride-0 gradient, a transposed consumer) is copied."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
