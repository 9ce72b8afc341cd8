"""FwdParams and BwdParams of csrc/.../params.h: their fields in the header's order, each with the
expression for its value. `tests/unit/test_params.py` compares them with the header.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# DType of params.h
DTYPE_CODES: dict[torch.dtype, int] = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class Options(NamedTuple):
    """Settings of the process that are parameters of a kernel."""

    num_threads: int  # CPU only
    deterministic: int  # 1: bit-identical results run to run


@dataclass(frozen=True)
class Field:
    name: str
    type: str  # in the notation of module struct: "Q" a pointer, "q" int64_t, "4q" an array
    # A Python expression in the arguments of `Layout`'s functions; a sequence for an array.
    value: str

    @property
    def num_bytes(self) -> int:
        return struct.calcsize(f"={self.type}")


class Layout:
    """A struct of params.h, without padding: first the pointers, then the fields that are the same
    for all calls with tensors of the same shapes and strides.

    pack_pointers(q, ..., workspace) -> bytes    `workspace`: an address, or 0
    pack_rest(p, options, q, ...) -> bytes       `p`: the Problem
    The tensors' names are listed below. Both functions are generated as source text: a mapping from
    names to values would cost 2 us a call.
    """

    pack_pointers: Callable[..., bytes]
    pack_rest: Callable[..., bytes]

    def __init__(self, tensors: str, *fields: Field) -> None:
        self.fields = fields
        pointers = list(itertools.takewhile(lambda one: one.type == "Q", fields))
        self.pack_pointers = _packer(f"{tensors}, workspace", pointers)
        self.pack_rest = _packer(f"p, options, {tensors}", fields[len(pointers) :])

    def offsets(self) -> dict[str, int]:
        """Byte offset of every field, in order; the total size under the key ``"sizeof"``."""
        ends = list(itertools.accumulate((one.num_bytes for one in self.fields), initial=0))
        names = [*(one.name for one in self.fields), "sizeof"]
        return dict(zip(names, ends, strict=True))


def _packer(arguments: str, fields: Sequence[Field]) -> Callable[..., bytes]:
    as_bytes = struct.Struct("=" + "".join(one.type for one in fields)).pack
    values = [f"*{one.value}" if len(one.type) > 1 else one.value for one in fields]
    source = f"lambda {arguments}: as_bytes({', '.join(values)})"
    packer: Callable[..., bytes] = eval(source, {**globals(), "as_bytes": as_bytes})
    return packer


def _pointers(*names: str) -> list[Field]:
    return [Field(name, "Q", f"{name}.data_ptr()") for name in names]


def _pointers_or_null(*names: str) -> list[Field]:
    return [Field(name, "Q", f"0 if {name} is None else {name}.data_ptr()") for name in names]


def _strides(*names: str) -> list[Field]:
    return [Field(_stride_name(name), "4q", f"{name}.stride()[:4]") for name in names]


def _strides_or_zeros(*names: str) -> list[Field]:
    zeros = (0, 0, 0, 0)
    return [
        Field(_stride_name(name), "4q", f"({zeros} if {name} is None else {name}.stride()[:4])")
        for name in names
    ]


def _dtypes(*names: str) -> list[Field]:
    return [
        Field(f"{name}_dtype", "i", f"0 if {name} is None else DTYPE_CODES[{name}.dtype]")
        for name in names
    ]


def _stride_name(name: str) -> str:
    return f"{name.rstrip('_')}_stride"


_SIZES = [Field(name, "q", f"p.{name}") for name in ("B", "N", "Lq", "Lk", "H", "D", "Dv")]
_WORKSPACE = Field("workspace", "Q", "workspace")
_MASK_STRIDES = [
    Field("bias1_stride", "3q", "_bias1_strides(bias1)"),
    Field("bias2_stride", "4q", "_bias2_strides(bias2)"),
    Field("row_mask_stride", "2q", "_row_mask_strides(row_mask)"),
]
_OPTIONS = [
    *_dtypes("bias1", "bias2"),
    Field("num_threads", "i", "options.num_threads"),
    Field("deterministic", "i", "options.deterministic"),
    Field("scale", "f", "p.scale"),
]


def _bias1_strides(bias1: Tensor | None) -> tuple[int, int, int]:
    """Strides over B, N, Lk of a `[B|1, N|1, 1, 1, Lk|1]` bias: 0 where it is broadcast."""
    if bias1 is None:
        return (0, 0, 0)
    b, n, _, _, lk = bias1.shape
    stride_b, stride_n, _, _, stride_lk = bias1.stride()
    return (stride_b if b > 1 else 0, stride_n if n > 1 else 0, stride_lk if lk > 1 else 0)


def _bias2_strides(bias2: Tensor | None) -> tuple[int, int, int, int]:
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


def _row_mask_strides(row_mask: Tensor | None) -> tuple[int, int]:
    """Strides over B, N of a `[B|1, N|1]` mask of booleans: 0 where it is broadcast."""
    if row_mask is None:
        return (0, 0)
    (b, n), (stride_b, stride_n) = row_mask.shape, row_mask.stride()
    return (stride_b if b > 1 else 0, stride_n if n > 1 else 0)


# A result that is None is not computed.
FWD = Layout(
    "q, k, v, bias1, bias2, row_mask, o, lse",
    *_pointers("q", "k", "v"),
    *_pointers_or_null("bias1", "bias2", "row_mask"),
    *_pointers("o"),
    *_pointers_or_null("lse"),
    _WORKSPACE,
    *_SIZES,
    *_strides("q", "k", "v", "o"),
    *_MASK_STRIDES,
    *_OPTIONS,
    Field("reserved", "i", "0"),
)
BWD = Layout(
    "do_, q, k, v, o, lse, bias1, bias2, row_mask, dq, dk, dv, dbias1, dbias2, "
    "rounded_dbias1, rounded_dbias2",
    *_pointers("q", "k", "v"),
    *_pointers_or_null("bias1", "bias2", "row_mask"),
    *_pointers("o", "lse", "do_"),
    *_pointers_or_null("dq", "dk", "dv", "dbias1", "dbias2", "rounded_dbias1", "rounded_dbias2"),
    _WORKSPACE,
    *_SIZES,
    *_strides("q", "k", "v", "o", "do_"),
    *_strides_or_zeros("dq", "dk", "dv"),
    *_MASK_STRIDES,
    Field("dbias2_stride", "q", "p.Lk if dbias2 is None else dbias2.stride(3)"),
    *_OPTIONS,
    Field("partial_keys", "i", "p.partial_keys"),
)
