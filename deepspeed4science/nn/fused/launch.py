"""Launches the Triton kernels: allocates results, makes TMA descriptors, adds up partial sums."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from deepspeed4science.nn.fused import kernels

_BLOCK = 64  # pairs of a tile of gated_output and its backward: three stages fill shared memory
_BLOCK_OF_NORM = 32
_STAGES = 3
_MOST_KINDS = 256  # of calls of a kernel; when one more is added, all are dropped


class _Kernel:
    """A Triton kernel, in the compiled form of each kind of call. Triton would find that form by an
    inspection of every argument, which takes longer than the launch.
    """

    def __init__(self, function: Any, num_warps: int) -> None:
        self._function, self._num_warps = function, num_warps
        self._compiled: dict[object, Any] = {}

    def launch(
        self,
        programs: int,
        descriptors: Sequence[TensorDescriptor],
        pointers: Sequence[Tensor],
        numbers: tuple[float, ...],
        constants: tuple[int, ...],
    ) -> None:
        """Launches on the pointers' device; the arguments have the order of the function's."""
        index = pointers[0].device.index
        if torch._C._cuda_getDevice() != index:
            with torch.cuda.device(index):
                return self.launch(programs, descriptors, pointers, numbers, constants)
        bits, dtypes = 0, [one.base.dtype for one in descriptors]
        for tensor in pointers:
            bits |= tensor.data_ptr()
            dtypes.append(tensor.dtype)
        kind = (index, numbers, constants, bits % 16 == 0, *dtypes)
        compiled = self._compiled.get(kind)
        arguments = (*descriptors, *pointers, *numbers, *constants)
        if compiled is not None:
            stream = torch._C._cuda_getCurrentRawStream(index)
            compiled[programs, 1, 1](*arguments, stream=stream)
            return None
        compiled = self._function[(programs,)](*arguments, num_warps=self._num_warps)
        if bits % 16 == 0:  # otherwise the kind does not say which of them are aligned
            if len(self._compiled) >= _MOST_KINDS:
                self._compiled = {}
            self._compiled[kind] = compiled
        return None


_norm_pair_bias = _Kernel(kernels.norm_pair_bias, num_warps=4)
_gated_output = _Kernel(kernels.gated_output, num_warps=4)
_gated_output_backward = _Kernel(kernels.gated_output_backward, num_warps=8)
_column_sums_of = _Kernel(kernels.column_sums, num_warps=4)
_norm_pair_bias_backward = _Kernel(kernels.norm_pair_bias_backward, num_warps=4)


def norm_pair_bias(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    weight: Tensor,
    dtype: torch.dtype,
    eps: float,
    transposed: bool,
) -> tuple[Tensor, Tensor]:
    """normed, of x's shape, and z, `[*, 1, H, queries, keys]`."""
    normed = x.new_empty(x.shape, dtype=dtype)
    *batch, rows, columns, C = x.shape
    H = weight.shape[0]
    heads = (columns, rows) if transposed else (rows, columns)
    z = x.new_empty((*batch, 1, H, *heads), dtype=dtype)
    num_pairs = x.numel() // C
    _norm_pair_bias.launch(
        -(-num_pairs // _BLOCK_OF_NORM),
        (),
        (x, norm_weight, norm_bias, weight, normed, z),
        (num_pairs, rows, columns, eps),
        (C, H, transposed, _BLOCK_OF_NORM),
    )
    return normed, z


def gated_output(
    o: Tensor,
    gate: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    ending: bool,
) -> Tensor:
    """y, in residual's dtype; without a residual in gate's."""
    *_, rows, columns, C = gate.shape
    N, num_pairs = weight.shape[0], gate.numel() // C
    dtype = gate.dtype if residual is None else residual.dtype
    y = gate.new_empty((*gate.shape[:-1], N), dtype=dtype)
    num_tiles = _num_tiles(num_pairs, columns, ending)
    of_gate = _descriptor(gate, _BLOCK)
    _gated_output.launch(
        _num_programs(o, num_tiles),
        (
            _descriptor_of_o(o, rows, C, ending),
            of_gate,
            of_gate if residual is None else _descriptor(residual, _BLOCK),
        ),
        (weight, weight if bias is None else bias, y),
        (num_pairs, rows, columns, num_tiles),
        (C, N, bias is not None, residual is not None, ending, _BLOCK, _STAGES),
    )
    return y


def gated_output_backward(
    dy: Tensor,
    weight: Tensor,
    o: Tensor,
    gate: Tensor,
    dgate: Tensor,
    has_bias: bool,
    ending: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dO and the gradients of weight, of bias and of the gate's bias; writes into dgate."""
    *_, rows, columns, C = gate.shape
    N, num_pairs = weight.shape[0], gate.numel() // C
    num_tiles = _num_tiles(num_pairs, columns, ending)
    programs = _num_programs(o, num_tiles)
    do = torch.empty_like(o)
    dweight = _parts(o, programs, N, C)
    _gated_output_backward.launch(
        programs,
        (
            _descriptor(dy, _BLOCK),
            _descriptor_of_o(o, rows, C, ending),
            _descriptor(gate, _BLOCK),
        ),
        (weight, do, dgate, dweight),
        (num_pairs, rows, columns, num_tiles, _row_stride(dgate)),
        (C, N, ending, _BLOCK, _STAGES),
    )
    dbias, dgate_bias = (_column_sums(x) if has_bias else _parts(x, 0) for x in (dy, dgate))
    return do, dweight.sum(0), dbias, dgate_bias


def _column_sums(x: Tensor) -> Tensor:
    C, block = x.shape[-1], 32
    num_tiles = -(-x.numel() // C // block)
    programs = _num_programs(x, num_tiles, per_multiprocessor=4)
    sums = _parts(x, programs, C)
    numbers = (x.numel() // C, num_tiles, _row_stride(x))
    _column_sums_of.launch(programs, (), (x, sums), numbers, (C, block))
    return sums.sum(0)


def norm_pair_bias_backward(
    dnormed: Tensor,
    dz: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    weight: Tensor,
    dresidual: Tensor | None,
    eps: float,
    transposed: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of x, and of norm_weight, norm_bias and weight, one below the other."""
    *_, rows, columns, C = x.shape
    H, num_pairs = weight.shape[0], x.numel() // C
    num_tiles = -(-num_pairs // _BLOCK_OF_NORM)
    programs = _num_programs(x, num_tiles, per_multiprocessor=2)
    dx = torch.empty_like(x)
    parts = _parts(x, programs, 2 + H, C)
    of_x = _descriptor(x, _BLOCK_OF_NORM)
    _norm_pair_bias_backward.launch(
        programs,
        (
            _descriptor(dnormed, _BLOCK_OF_NORM),
            of_x,
            of_x if dresidual is None else _descriptor(dresidual, _BLOCK_OF_NORM),
        ),
        (dz, norm_weight, norm_bias, weight, dx, parts),
        (num_pairs, rows, columns, num_tiles, eps),
        (C, H, dresidual is not None, transposed, _BLOCK_OF_NORM, _STAGES),
    )
    return dx, parts.sum(0)


def _num_tiles(num_pairs: int, columns: int, ending: bool) -> int:
    """The number of tiles that the kernels' `_tile` divides the pairs into."""
    return num_pairs // columns * -(-columns // _BLOCK) if ending else -(-num_pairs // _BLOCK)


def _num_programs(x: Tensor, num_tiles: int, *, per_multiprocessor: int = 1) -> int:
    """The number of persistent programs, all of which run at the same time."""
    return min(num_tiles, _num_multiprocessors(x.device.index) * per_multiprocessor)


@functools.cache
def _num_multiprocessors(device: int) -> int:
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def _parts(like: Tensor, *size: int) -> Tensor:
    """A float32 tensor for partial sums, uninitialised; size[0] is the number of programs."""
    return like.new_empty(size, dtype=torch.float32)


class _Matrix(TensorDescriptor):  # type: ignore[misc]  # mypy finds no Triton here
    """A TMA descriptor without Triton's checks, which take a third of a launch."""

    def __post_init__(self) -> None:
        """Nothing: what is checked holds for all tensors below."""


def _descriptor(x: Tensor, block: int) -> TensorDescriptor:
    """The TMA descriptor of a tensor of pairs, as a matrix with a row for each pair."""
    if x.data_ptr() % 16:
        x = x.clone()
    C = x.shape[-1]
    return _Matrix(x, [x.numel() // C, C], [_row_stride(x), 1], [block, C])


def _row_stride(x: Tensor) -> int:
    """Elements from one pair to the next. Where there is one column of pairs, the stride of a
    contiguous tensor along it may be any number.
    """
    return x.shape[-1] if x.is_contiguous() else x.stride(-2)


def _descriptor_of_o(o: Tensor, rows: int, C: int, ending: bool) -> TensorDescriptor:
    """The TMA descriptor of o. For the ending node o is stored as [*, columns, rows, C], and a row
    of the matrix holds all pairs of one column.
    """
    width = rows * C if ending else C
    return _Matrix(o, [o.numel() // width, width], [width, 1], [_BLOCK, C])
