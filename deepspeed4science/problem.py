"""The description of one call: `describe` checks five-dimensional tensors `[B, N, L, H, D]` and
returns the frozen description by which a backend is chosen.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from deepspeed4science.bias_advice import advice
from deepspeed4science.call import BackwardCall, Call
from deepspeed4science.errors import InvalidInputError

# The dtypes with op_builder's names for them.
DTYPE_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
SUPPORTED_DTYPES = tuple(DTYPE_NAMES)

_FLOAT32 = torch.finfo(torch.float32)

ROW_MASK_HELP = (
    "row_mask says which rows n of Q are read, one boolean for each, broadcastable to [B, N]; "
    "a mask of keys is bias1"
)


def mask_threshold(bias1: Tensor) -> float:
    """By how much less than the largest bias1 of its row n a number hides its key, math.md (6a)."""
    return 1e4 if bias1.dtype == torch.float16 else 1e8


class Problem(NamedTuple):
    """Everything about a call except its data. A NamedTuple, since every new call makes one: it
    takes a quarter of the time of a frozen dataclass.
    """

    B: int
    N: int
    Lq: int
    Lk: int
    H: int
    D: int
    Dv: int
    dtype: torch.dtype
    device: torch.device
    bias1_dtype: torch.dtype | None  # None without bias1
    bias2_dtype: torch.dtype | None
    given_scale: float | None = None  # None: the default
    partial_keys: bool = False  # BackwardCall's

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.D) if self.given_scale is None else self.given_scale

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute: the outputs have no elements."""
        return self.B * self.N * self.H == 0


def describe(call: Call) -> Problem:
    """Check five-dimensional tensors (`row_mask`: two) against the contract; raises
    `InvalidInputError` or returns the description. `row_mask` is not part of it: kernels do not
    depend on it.
    """
    q, k, v, bias1, bias2, scale = call.q, call.k, call.v, call.bias1, call.bias2, call.scale
    if q.dim() != 5 or k.dim() != 5 or v.dim() != 5:
        raise InvalidInputError(
            "Q, K, V: expected [B, N, L, H, D]; got "
            f"Q {shape_of(q)}, K {shape_of(k)}, V {shape_of(v)}."
        )
    B, N, Lq, H, D = q.shape
    of_k, of_v = k.shape, v.shape
    Lk, Dv = of_k[2], of_v[4]
    dtype, device = q.dtype, q.device
    if of_k != (B, N, Lk, H, D):
        raise InvalidInputError(
            f"K: expected [B, N, Lk, H, D] = [{B}, {N}, Lk, {H}, {D}] to match Q {shape_of(q)}; "
            f"got {shape_of(k)}."
        )
    if of_v != (B, N, Lk, H, Dv):
        raise InvalidInputError(
            f"V: expected [B, N, Lk, H, Dv] = [{B}, {N}, {Lk}, {H}, Dv] to match K {shape_of(k)}; "
            f"got {shape_of(v)}."
        )
    if Lq < 1 or Lk < 1 or D < 1 or Dv < 1:
        raise InvalidInputError(
            "Q, K, V: expected L, D and Dv of at least 1 (attention over no keys has no value); "
            f"got Q {shape_of(q)}, K {shape_of(k)}, V {shape_of(v)}."
        )
    if dtype not in SUPPORTED_DTYPES:
        float64 = ", or use deepspeed4science.reference.evoformer_attention, which takes float64"
        raise InvalidInputError(
            f"Q: expected float32, bfloat16 or float16; got {dtype}. Cast it"
            f"{float64 if dtype == torch.float64 else ''}."
        )
    if k.dtype != dtype or v.dtype != dtype:
        raise InvalidInputError(
            f"K, V: expected the dtype of Q, {dtype}; got K {k.dtype}, V {v.dtype}. "
            "Cast them to one dtype."
        )
    if k.device != device or v.device != device:
        raise InvalidInputError(
            f"K, V: expected the device of Q, {device}; got K on {k.device}, V on {v.device}. "
            "Move them there."
        )
    if bias1 is not None:
        _check_bias("bias1", bias1, (B, N, 1, 1, Lk), (B, N, H, Lq, Lk), device)
    if bias2 is not None:
        _check_bias("bias2", bias2, (B, 1, H, Lq, Lk), (B, N, H, Lq, Lk), device)
    if call.row_mask is not None:
        _check_row_mask(call.row_mask, B, N, device)
    if isinstance(call, BackwardCall):
        _check_result("dO", call.do_, (B, N, Lq, H, Dv), dtype, device)
        _check_result("O", call.o, (B, N, Lq, H, Dv), dtype, device)
        _check_result("lse", call.lse, (B, N, H, Lq), torch.float32, device)
    if scale is not None and not _FLOAT32.tiny <= scale <= _FLOAT32.max:
        raise InvalidInputError(
            f"scale: the operators take a positive normal number of float32; got {scale}. "
            "DS4Sci_EvoformerAttention takes zero and negative ones, too."
        )
    return Problem(
        B,
        N,
        Lq,
        Lk,
        H,
        D,
        Dv,
        dtype,
        device,
        None if bias1 is None else bias1.dtype,
        None if bias2 is None else bias2.dtype,
        scale,
        isinstance(call, BackwardCall) and call.partial_keys,
    )


def _check_bias(
    name: str,
    bias: Tensor,
    target: tuple[int, ...],
    sizes: tuple[int, int, int, int, int],
    device: torch.device,
) -> None:
    shape = bias.shape
    if shape != target and (
        len(shape) != 5
        or any(size != 1 and size != full for size, full in zip(shape, target, strict=True))
    ):
        fewer = ", with leading dimensions of size 1 where it had fewer" if shape[0] == 1 else ""
        names = "[B, N, 1, 1, Lk]" if name == "bias1" else "[B, 1, H, Lq, Lk]"
        raise InvalidInputError(
            f"{name}: expected a shape broadcastable to {names} = {list(target)}; got "
            f"{shape_of(bias)}{fewer}. "
            f"{advice(name, shape, *sizes)}."
        )
    if bias.dtype not in SUPPORTED_DTYPES:
        of_mask = (
            "A boolean mask becomes one by torch.where(mask, 0.0, -torch.inf); bias1 may be a mask"
        )
        remedy = f"Pass {name}.float()" if bias.is_floating_point() else of_mask
        raise InvalidInputError(
            f"{name}: expected float32, bfloat16 or float16, added to the scores; got "
            f"{bias.dtype}. {remedy}."
        )
    if bias.device != device:
        raise InvalidInputError(
            f"{name}: expected the device of Q, {device}; got {bias.device}. Move it there."
        )


def _check_row_mask(row_mask: Tensor, B: int, N: int, device: torch.device) -> None:
    if row_mask.dtype != torch.bool:
        raise InvalidInputError(
            f"row_mask: expected torch.bool, True for rows that are read; got {row_mask.dtype}. "
            "A mask of ones and zeros becomes one by row_mask != 0."
        )
    shape = row_mask.shape
    if len(shape) != 2 or shape[0] not in (1, B) or shape[1] not in (1, N):
        raise InvalidInputError(
            f"row_mask: expected a shape broadcastable to [B, N] = [{B}, {N}]; got "
            f"{shape_of(row_mask)}. {ROW_MASK_HELP}."
        )
    if row_mask.device != device:
        raise InvalidInputError(
            f"row_mask: expected the device of Q, {device}; got {row_mask.device}. Move it there."
        )


def _check_result(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Checks an argument of the backward that is a result of the forward, or its gradient."""
    if tensor.shape != shape or tensor.dtype != dtype or tensor.device != device:
        raise InvalidInputError(
            f"{name}: expected {list(shape)}, {dtype}, on {device}, as the forward returns it for "
            f"these Q and V; got {shape_of(tensor)}, {tensor.dtype}, on {tensor.device}."
        )


def shape_of(tensor: Tensor) -> str:
    """As `str(list(tensor.shape))`, which torch.compile cannot trace where sizes are dynamic."""
    return f"[{', '.join([f'{size}' for size in tensor.shape])}]"
