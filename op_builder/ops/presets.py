"""The kernels that are worth compiling beforehand, as data: the calls that models make.

A row stands for calls of one kind. The builders choose the kernel that serves a call on a device,
so a new kernel is compiled beforehand as soon as it is chosen. `DS_BUILD_*` compile `INSTALL`,
`python -m deepspeed4science build --preset` compiles `PRESETS`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .instantiations import DIRECTIONS, DTYPES


@dataclass(frozen=True)
class Call:
    """The properties of a call that decide its kernel, apart from device and alignment."""

    direction: str  # one of instantiations.DIRECTIONS
    dtype: str  # one of instantiations.CUDA_DTYPES
    head_dim: int  # the larger of D and Dv
    bias: str  # one of instantiations.CUDA_BIASES


@dataclass(frozen=True)
class Row:
    """One kind of attention in a model."""

    what: str
    head_dim: int
    bias: str


# Head dimension 32 takes nine tenths of the time that such models spend in this op while training.
INSTALL_ROWS = (
    Row("triangle attention, MSA row attention", 32, "both"),
    Row("MSA column attention", 32, "bias1"),
)
INSTALL_DTYPES = ("bf16", "fp16", "fp32")

PRESETS: dict[str, tuple[Row, ...]] = {
    "openfold": (
        *INSTALL_ROWS,
        Row("template pair stack, triangle attention", 16, "both"),
        Row("template pointwise attention", 16, "bias1"),
        Row("extra MSA row attention", 8, "both"),
        Row("extra MSA column attention", 8, "bias1"),
    ),
    "af3": (
        Row("triangle attention", 32, "both"),
        Row("template triangle attention", 16, "both"),
        Row("trunk attention with pair bias", 24, "both"),
        Row("trunk attention with pair bias, no mask", 24, "bias2"),
        Row("diffusion transformer", 48, "both"),
        Row("diffusion transformer, no mask", 48, "bias2"),
    ),
}


def calls(
    rows: Iterable[Row], *, dtypes: Sequence[str], directions: Sequence[str] = DIRECTIONS
) -> tuple[Call, ...]:
    """Every row in every dtype and direction."""
    return tuple(
        Call(direction, dtype, row.head_dim, row.bias)
        for dtype, row, direction in itertools.product(dtypes, rows, directions)
    )


INSTALL = calls(INSTALL_ROWS, dtypes=INSTALL_DTYPES)
INSTALL_CPU = calls(INSTALL_ROWS, dtypes=DTYPES)
