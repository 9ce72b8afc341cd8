"""Launches the Triton kernels: allocates results, makes TMA descriptors, adds up partial sums."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from deepspeed4science.nn.fused import kernels

_BLOCK = 64  # pairs of a tile of gated_output and its backward: three stages fill shared memory
_BLOCK_OF_NORM = 32


def norm_pair_bias(
    x: Tensor, norm_weight: Tensor, norm_bias: Tensor, weight: Tensor, eps: float, ending: bool
) -> tuple[Tensor, Tensor]:
    """normed, of x's shape, and z, `[*, 1, H, queries, keys]`."""
    normed = torch.empty_like(x, dtype=weight.dtype)
    *batch, rows, columns, C = x.shape
    heads = (columns, rows) if ending else (rows, columns)
    z = x.new_empty((*batch, 1, weight.shape[0], *heads), dtype=weight.dtype)
    num_pairs = x.numel() // C
    with torch.cuda.device(x.device):
        kernels.norm_pair_bias[(-(-num_pairs // _BLOCK_OF_NORM),)](
            x,
            norm_weight,
            norm_bias,
            weight,
            normed,
            z,
            num_pairs,
            rows,
            columns,
            eps,
            C=C,
            H=weight.shape[0],
            ENDING=ending,
            BLOCK=_BLOCK_OF_NORM,
            num_warps=4,
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
    """y, in residual's dtype; without a residual in weight's."""
    *_, rows, columns, C = gate.shape
    N, num_pairs = weight.shape[0], gate.numel() // C
    dtype = weight.dtype if residual is None else residual.dtype
    y = torch.empty((*gate.shape[:-1], N), dtype=dtype, device=o.device)
    num_tiles = _num_tiles(num_pairs, columns, ending)
    with torch.cuda.device(o.device):
        kernels.gated_output[(_num_programs(o, num_tiles),)](
            _descriptor_of_o(o, rows, C, ending),
            _descriptor(gate, _BLOCK),
            _descriptor(gate if residual is None else residual, _BLOCK),
            weight,
            weight if bias is None else bias,
            y,
            num_pairs,
            rows,
            columns,
            num_tiles,
            C=C,
            N=N,
            HAS_BIAS=bias is not None,
            HAS_RESIDUAL=residual is not None,
            ENDING=ending,
            BLOCK=_BLOCK,
            STAGES=3,
            num_warps=4,
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
    with torch.cuda.device(o.device):
        kernels.gated_output_backward[(programs,)](
            _descriptor(dy, _BLOCK),
            _descriptor_of_o(o, rows, C, ending),
            _descriptor(gate, _BLOCK),
            weight,
            do,
            dgate,
            dweight,
            num_pairs,
            rows,
            columns,
            num_tiles,
            dgate.stride(-2),
            C=C,
            N=N,
            ENDING=ending,
            BLOCK=_BLOCK,
            STAGES=3,
            num_warps=8,
        )
    dbias, dgate_bias = (_column_sums(x) if has_bias else _parts(x, 0) for x in (dy, dgate))
    return do, dweight.sum(0), dbias, dgate_bias


def _column_sums(x: Tensor) -> Tensor:
    C, block = x.shape[-1], 32
    num_tiles = -(-x.numel() // C // block)
    programs = _num_programs(x, num_tiles, per_multiprocessor=4)
    sums = _parts(x, programs, C)
    with torch.cuda.device(x.device):
        kernels.column_sums[(programs,)](
            x, sums, x.numel() // C, num_tiles, x.stride(-2), C=C, BLOCK=block, num_warps=4
        )
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
    ending: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, of the norm's weight and bias, and of weight."""
    *_, rows, columns, C = x.shape
    num_pairs = x.numel() // C
    block = _BLOCK_OF_NORM
    num_tiles = -(-num_pairs // block)
    programs = _num_programs(x, num_tiles, per_multiprocessor=2)
    dx = torch.empty_like(x)
    dnorm, dweight = _parts(x, programs, 2, C), _parts(x, programs, 16, C)
    with torch.cuda.device(x.device):
        kernels.norm_pair_bias_backward[(programs,)](
            _descriptor(dnormed, block),
            _descriptor(x, block),
            _descriptor(x if dresidual is None else dresidual, block),
            dz,
            norm_weight,
            norm_bias,
            weight,
            dx,
            dnorm,
            dweight,
            num_pairs,
            rows,
            columns,
            num_tiles,
            eps,
            C=C,
            H=weight.shape[0],
            HAS_RESIDUAL=dresidual is not None,
            ENDING=ending,
            BLOCK=block,
            STAGES=3,
            num_warps=4,
        )
    dnorm_weight, dnorm_bias = (part.sum(0) for part in dnorm.unbind(1))
    return dx, dnorm_weight, dnorm_bias, dweight[:, : weight.shape[0]].sum(0)


def _num_tiles(num_pairs: int, columns: int, ending: bool) -> int:
    """The number of tiles that the kernels' `_tile` divides the pairs into."""
    return num_pairs // columns * -(-columns // _BLOCK) if ending else -(-num_pairs // _BLOCK)


def _num_programs(x: Tensor, num_tiles: int, *, per_multiprocessor: int = 1) -> int:
    """The number of persistent programs, all of which run at the same time."""
    count: int = torch.cuda.get_device_properties(x.device).multi_processor_count
    return min(num_tiles, count * per_multiprocessor)


def _parts(like: Tensor, *size: int) -> Tensor:
    """A float32 tensor for partial sums, uninitialised; size[0] is the number of programs."""
    return like.new_empty(size, dtype=torch.float32)


def _descriptor(x: Tensor, block: int) -> TensorDescriptor:
    """The TMA descriptor of a tensor of pairs, as a matrix with a row for each pair."""
    C = x.shape[-1]
    shape, stride = [x.numel() // C, C], [x.stride(-2), 1]
    return TensorDescriptor(x, shape, stride, [block, C])


def _descriptor_of_o(o: Tensor, rows: int, C: int, ending: bool) -> TensorDescriptor:
    """The TMA descriptor of o. For the ending node o is stored as [*, columns, rows, C], and a row
    of the matrix holds all pairs of one column.
    """
    width = rows * C if ending else C
    return TensorDescriptor(o, [o.numel() // width, width], [width, 1], [_BLOCK, C])
