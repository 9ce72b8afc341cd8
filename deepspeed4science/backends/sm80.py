"""The templates around warp-level tensor-core instructions: families sm70, sm75 and sm80, the last
of which also serves newer generations.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Sequence

from torch import Tensor

from deepspeed4science.backends import cuda
from deepspeed4science.backends.prepare import (
    CallT,
    in_dtype,
    unit_strides,
    with_biases_in_dtype,
)
from deepspeed4science.call import ForwardCall
from deepspeed4science.problem import DTYPE_NAMES, Problem
from op_builder.ops.instantiations import CudaKernel, device_head_dim

logger = logging.getLogger(__name__)


class Sm80Backend(cuda.CudaBackend):
    """Takes tensors of any strides."""

    def obstacles(self, problem: Problem, direction: str, tensors: Sequence[Tensor]) -> list[str]:
        found = self.head_dim_obstacles(problem, direction)
        dtype = self._dtype(problem, direction)
        most = device_head_dim(cuda.capability(problem.device), dtype)
        if not found and max(problem.D, problem.Dv) > most:
            found.append(
                f"float32 (through which bfloat16 goes, too) with a head dimension above {most} "
                "needs more than the 64 KiB of shared memory of compute capability 7.5; use float16"
            )
        return found

    def spec(self, problem: Problem, direction: str, tensors: Sequence[Tensor]) -> CudaKernel:
        dtype = self._dtype(problem, direction)
        copied = dtype != DTYPE_NAMES[problem.dtype]
        size = _TORCH_DTYPES[dtype].itemsize
        aligned = all(_will_be_aligned(tensor, size, copied=copied) for tensor in tensors)
        if dtype == "fp32" and self.family.dtype_for(direction, "tf32") and cuda.allows_tf32():
            dtype = "tf32"
        return self.row(problem, direction, dtype, aligned=aligned)

    def prepare(self, problem: Problem, call: CallT) -> CallT:
        direction = "fwd" if isinstance(call, ForwardCall) else "bwd"
        dtype = _TORCH_DTYPES[self._dtype(problem, direction)]
        if dtype == problem.dtype:
            call = unit_strides(call)
        else:
            _tell_of_float32()
            call = in_dtype(call, dtype)
        return with_biases_in_dtype(call, dtype)

    def _dtype(self, problem: Problem, direction: str) -> str:
        """The dtype in which kernels compute."""
        return self.family.dtypes[direction][DTYPE_NAMES[problem.dtype]]


backend = Sm80Backend

_TORCH_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@functools.cache
def _tell_of_float32() -> None:
    """Logs, once in a process, that bfloat16 is computed in float32."""
    with contextlib.suppress(Exception):  # an error in a log handler must not fail the call
        logger.warning(
            "bfloat16 is computed in float32 on this GPU: tensor cores of compute capability 7.0 "
            "and 7.5 do not multiply it. Results are right; float16 is faster."
        )


def _will_be_aligned(tensor: Tensor, size: int, *, copied: bool) -> bool:
    """Whether, after the copies that `prepare` makes, every row of elements of `size` bytes is
    aligned to 16 bytes and its channels are whole 16-byte pieces.
    """
    per_piece = 16 // size
    b, n, row, h, channels = tensor.stride()
    if tensor.shape[-1] % per_piece:
        return False
    if copied or channels != 1:
        return True
    return tensor.data_ptr() % 16 == 0 and (b | n | row | h) % per_piece == 0  # a power of two
