"""FwdParams and BwdParams of csrc/.../params.h as bytes: the same fields in the same order.

`tests/unit/test_params.py` compiles a program that prints the offset of every field there and
compares them with the tables here.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

# DType of params.h
DTYPE_CODES: dict[torch.dtype, int] = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}

_DIMS = ("B", "N", "Lq", "Lk", "H", "D", "Dv")
_OPTIONS = ("bias1_dtype", "bias2_dtype", "num_threads", "deterministic")

FWD_POINTERS = ("q", "k", "v", "bias1", "bias2", "row_mask", "o", "lse", "workspace")
FWD_STRIDES = (
    ("q_stride", 4),
    ("k_stride", 4),
    ("v_stride", 4),
    ("o_stride", 4),
    ("bias1_stride", 3),
    ("bias2_stride", 4),
    ("row_mask_stride", 2),
)
BWD_POINTERS = (
    *("q", "k", "v", "bias1", "bias2", "row_mask", "o", "lse", "do_"),
    *("dq", "dk", "dv", "dbias1", "dbias2", "workspace"),
)
BWD_STRIDES = (
    *(("q_stride", 4), ("k_stride", 4), ("v_stride", 4), ("o_stride", 4)),
    *(("do_stride", 4), ("dq_stride", 4), ("dk_stride", 4), ("dv_stride", 4)),
    *(("bias1_stride", 3), ("bias2_stride", 4), ("row_mask_stride", 2)),
)


def _layout(pointers: Sequence[str], strides: Sequence[tuple[str, int]]) -> struct.Struct:
    num_int64 = len(_DIMS) + sum(count for _, count in strides)
    return struct.Struct(f"={len(pointers)}Q{num_int64}q{len(_OPTIONS)}if4x")


FWD_LAYOUT = _layout(FWD_POINTERS, FWD_STRIDES)
BWD_LAYOUT = _layout(BWD_POINTERS, BWD_STRIDES)


def offsets(pointers: Sequence[str], strides: Sequence[tuple[str, int]]) -> dict[str, int]:
    """Byte offset of every field, in order; the total size under the key ``"sizeof"``."""
    table: dict[str, int] = {}
    position = 0
    fields = [(name, 8) for name in (*pointers, *_DIMS)]
    fields += [(name, 8 * count) for name, count in strides]
    fields += [(name, 4) for name in (*_OPTIONS, "scale", "reserved")]
    for name, num_bytes in fields:
        table[name] = position
        position += num_bytes
    table["sizeof"] = position
    return table


def pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def bias1_strides(bias1: Tensor | None) -> tuple[int, int, int]:
    """Strides over B, N, Lk of a `[B|1, N|1, 1, 1, Lk|1]` bias: 0 where it is broadcast."""
    if bias1 is None:
        return (0, 0, 0)
    b, n, _, _, lk = bias1.shape
    stride_b, stride_n, _, _, stride_lk = bias1.stride()
    return (stride_b if b > 1 else 0, stride_n if n > 1 else 0, stride_lk if lk > 1 else 0)


def bias2_strides(bias2: Tensor | None) -> tuple[int, int, int, int]:
    """Strides over B, H, Lq, Lk of a `[B|1, 1, H|1, Lq|1, Lk|1]` bias: 0 where it is broadcast."""
    if bias2 is None:
        return (0, 0, 0, 0)
    b, _, h, lq, lk = bias2.shape
    stride_b, _, stride_h, stride_lq, stride_lk = bias2.stride()
    return (
        stride_b if b > 1 else 0,
        stride_h if h > 1 else 0,
        stride_lq if lq > 1 else 0,
        stride_lk if lk > 1 else 0,
    )


def row_mask_strides(row_mask: Tensor | None) -> tuple[int, int]:
    """Strides over B, N of a `[B|1, N|1]` mask of booleans: 0 where it is broadcast."""
    if row_mask is None:
        return (0, 0)
    (b, n), (stride_b, stride_n) = row_mask.shape, row_mask.stride()
    return (stride_b if b > 1 else 0, stride_n if n > 1 else 0)
