"""Hopper: the Sm90 kernels (TMA and wgmma), and the Sm80 ones for what they do not take."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from deepspeed4science.backend_cuda import CudaBackend
from deepspeed4science.problem import Problem
from op_builder import env
from op_builder.errors import BuildError

logger = logging.getLogger(__name__)

# TMA's tensor maps (CUDA driver API, cuTensorMapEncodeTiled): strides are multiples of 16 bytes
# below 2^40.
_PIECE_BYTES = 16
_LIMIT_BYTES = 1 << 40
_TENSORS = ("q", "k", "v", "o", "do", "dq", "dk", "dv")  # as `Backend` hands them to `_kernel`
_DIMENSIONS = ("B", "N", "L", "H")


class Sm90Backend(CudaBackend):
    """Takes 16-bit calls on compute capability 9.0. What is known of tensors only when they come
    (`tma_obstacle`) makes one call an Sm80 kernel's.
    """

    def __init__(self) -> None:
        super().__init__("sm90")
        self._told: set[str] = set()

    def not_supported_reasons(self, problem: Problem) -> list[str]:
        reasons = super().not_supported_reasons(problem)
        piece = _PIECE_BYTES // problem.dtype.itemsize
        if not reasons and (problem.D % piece or problem.Dv % piece):
            heads = f"D = {problem.D}, Dv = {problem.Dv}"
            reasons.append(f"{heads}: TMA reads head dimensions that are multiples of {piece}")
            self._tell(f"Sm80 takes the place of Sm90: {reasons[0]}")
        return reasons

    def _row(
        self, direction: str, problem: Problem, tensors: Sequence[Tensor | None]
    ) -> tuple[str, bool]:
        obstacle = _first_obstacle(tensors)
        if not obstacle:
            return self._family, True
        self._tell(f"Sm80 takes the place of Sm90 ({direction}): {obstacle}")
        return "sm80", super()._row(direction, problem, tensors)[1]

    def _prepare_output(self, tensor: Tensor) -> Tensor:
        """A gradient may have any layout (that of a mean over L is one row, expanded). Where TMA
        cannot read it, one copy costs far less than another family's backward, which nobody has
        compiled yet.
        """
        tensor = super()._prepare_output(tensor)
        if not tma_obstacle(tensor):
            return tensor
        return tensor.clone(memory_format=torch.contiguous_format)

    def _tell(self, message: str) -> None:
        """Each message once; on stderr, through logging, under DS4S_VERBOSE=1."""
        if message in self._told:
            return
        self._told.add(message)
        try:
            wanted = env.flag("DS4S_VERBOSE")
        except BuildError:  # neither 1 nor 0: the loader says so
            wanted = False
        with contextlib.suppress(Exception):  # what can be shown decides over no call
            logger.log(logging.WARNING if wanted else logging.INFO, message)


def _first_obstacle(tensors: Sequence[Tensor | None]) -> str:
    for name, tensor in zip(_TENSORS, tensors, strict=False):  # a forward has four of them
        if tensor is not None and (obstacle := tma_obstacle(tensor)):
            return f"{name}: {obstacle}"
    return ""


def tma_obstacle(tensor: Tensor) -> str:
    """Why TMA cannot read or write this `[B, N, L, H, D]` tensor; empty when it can."""
    size = tensor.element_size()
    address = tensor.data_ptr()
    b, n, row, h, _ = tensor.stride()
    bits = (b | n | row | h) * size  # below a power of two, or its multiple, if all of them are
    if b and n and row and h and (address | bits) % _PIECE_BYTES == 0 and bits < _LIMIT_BYTES:
        return ""
    if address % _PIECE_BYTES:
        return f"its address is not a multiple of {_PIECE_BYTES} bytes"
    for name, extent, stride in zip(_DIMENSIONS, tensor.shape, tensor.stride(), strict=False):
        if stride * size % _PIECE_BYTES:
            return f"its stride over {name}, {stride}, is not a multiple of {_PIECE_BYTES} bytes"
        if stride == 0 and extent > 1:
            return f"it is expanded over {name} (stride 0)"
        if stride * size >= _LIMIT_BYTES:
            return f"its stride over {name}, {stride}, is 2^40 bytes or more"
    return ""
