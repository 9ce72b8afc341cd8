"""Which backend takes a call."""

from __future__ import annotations

from deepspeed4science.backend import Backend
from deepspeed4science.backend_cpu import CpuBackend
from deepspeed4science.backend_cuda import CudaBackend
from deepspeed4science.backend_sm90 import Sm90Backend
from deepspeed4science.errors import NoBackendError
from deepspeed4science.problem import Problem

BACKENDS: tuple[Backend, ...] = (
    CpuBackend(),  # first, since its refusal is the cheapest
    Sm90Backend(),
    CudaBackend("sm80"),
    CudaBackend("sm75"),
    CudaBackend("sm70"),
)


def select(problem: Problem) -> Backend:
    """The first backend that takes `problem`; `NoBackendError` with everybody's reasons
    otherwise.
    """
    for backend in BACKENDS:
        if not backend.not_supported_reasons(problem):
            return backend
    reasons = "\n".join(
        f"  {backend.name}: {'; '.join(backend.not_supported_reasons(problem))}"
        for backend in BACKENDS
    )
    raise NoBackendError(
        f"no backend takes this call ({problem}):\n{reasons}\n"
        "`ds_report` shows what this machine can run; "
        "deepspeed4science.reference.evoformer_attention runs anywhere."
    )
