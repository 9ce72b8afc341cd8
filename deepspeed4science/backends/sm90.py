"""Hopper's own kernels: TMA and wgmma."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepspeed4science.backends.cuda import CudaBackend
from deepspeed4science.backends.prepare import CallT, unit_strides, with_biases_in_dtype
from deepspeed4science.call import BackwardCall
from deepspeed4science.problem import DTYPE_NAMES, Problem
from op_builder.ops.instantiations import CudaKernel

# TMA's tensor maps (CUDA driver API, cuTensorMapEncodeTiled): strides are multiples of 16 bytes
# below 2^40.
_PIECE_BYTES = 16
_LIMIT_BYTES = 1 << 40
_DIMENSIONS = ("B", "N", "L", "H")
# ClusterFused of sm90/backward/tile_sizes.h, for one row n: its queries, the keys of a block, and
# those of the largest cluster. A test compares them.
CLUSTER_FUSED = (768, 128, 1024)


class Sm90Backend(CudaBackend):
    """Takes the tensors that TMA can read. For a backward only q, k and v decide, as for its
    forward, so that the kernel runs that was compiled ahead.
    """

    pads_dbias2 = True

    def obstacles(self, problem: Problem, direction: str, tensors: Sequence[Tensor]) -> list[str]:
        found = self.head_dim_obstacles(problem, direction)
        if not self.family.dtype_for(direction, DTYPE_NAMES[problem.dtype]):
            return ["float32: wgmma multiplies 16-bit numbers", *found]
        piece = _PIECE_BYTES // problem.dtype.itemsize
        if not found and (problem.D % piece or problem.Dv % piece):
            heads = f"D = {problem.D}, Dv = {problem.Dv}"
            found.append(f"{heads}: TMA reads head dimensions that are multiples of {piece}")
        if found:
            return found
        return [
            f"{name}: {obstacle}"
            for name, tensor in zip("qkv", tensors, strict=False)
            if tensor.stride(-1) == 1 and (obstacle := tma_obstacle(tensor))  # others are copied
        ][:1]

    def spec(self, problem: Problem, direction: str, tensors: Sequence[Tensor]) -> CudaKernel:
        return self.row(problem, direction, DTYPE_NAMES[problem.dtype], aligned=True)

    def rounds_dbias2(self, problem: Problem) -> bool:
        """Where a cluster of blocks divides the keys of one row n (`splits_keys`, plan.h)."""
        p = problem
        queries, block_keys, cluster_keys = CLUSTER_FUSED
        fits = p.N == 1 and p.Lq <= queries and max(p.D, p.Dv) <= 32
        return fits and block_keys < p.Lk <= cluster_keys and p.Lk % 8 == 0

    def prepare(self, problem: Problem, call: CallT) -> CallT:
        """A gradient of O may have any layout (that of a mean over L is one row, expanded). It is
        copied where TMA cannot read it, which costs far less than another family's backward, which
        would have to be compiled first.
        """
        call = with_biases_in_dtype(unit_strides(call), problem.dtype)
        if isinstance(call, BackwardCall):
            for name in ("o", "do_"):
                tensor = getattr(call, name)
                if tma_obstacle(tensor):
                    copy = tensor.clone(memory_format=torch.contiguous_format)
                    call = call._replace(**{name: copy})
        return call


backend = Sm90Backend


def tma_obstacle(tensor: Tensor) -> str:
    """Why TMA cannot read or write this `[B, N, L, H, D]` tensor; empty when it can."""
    size = tensor.element_size()
    address = tensor.data_ptr()
    b, n, row, h, _ = tensor.stride()
    bits = (b | n | row | h) * size  # a multiple of 16 if all are; below a power of two if all are
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
