"""One call of the op, described: the only place that checks what the caller passed.

`canonicalise` turns tensors of any rank into the five dimensions `[B, N, L, H, D]` that everything
below speaks; `describe` checks the five-dimensional tensors and returns the frozen description
that backends are chosen by.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed4science.errors import InvalidInputError

SUPPORTED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

_BIAS_HELP = (
    "bias1 (first) is the key mask, broadcastable to [B, N, 1, 1, Lk]; "
    "bias2 (second) is the pair bias, broadcastable to [B, 1, H, Lq, Lk]; "
    "either may be None, so a pair bias alone is passed as [None, bias2]"
)
_ROW_MASK_HELP = (
    "row_mask says which rows n of Q are read, one boolean for each, broadcastable to [B, N]; "
    "a mask of keys is bias1"
)


@dataclass(frozen=True, slots=True)
class Problem:
    """Everything about a call except its data."""

    B: int
    N: int
    Lq: int
    Lk: int
    H: int
    D: int
    Dv: int
    dtype: torch.dtype
    device: torch.device
    bias1: torch.dtype | None  # dtype of bias1, None without it
    bias2: torch.dtype | None

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.D)

    @property
    def is_empty(self) -> bool:
        """Nothing to compute: the outputs have no elements."""
        return self.B * self.N * self.H == 0


def split_biases(biases: Sequence[Tensor | None] | None) -> tuple[Tensor | None, Tensor | None]:
    """The caller's sequence of 0, 1 or 2 biases as a pair; the sequence itself is left alone."""
    if biases is None:
        return None, None
    if not isinstance(biases, (list, tuple)):
        raise InvalidInputError(
            f"biases: expected a list or tuple of 0, 1 or 2 entries, each a tensor or None; got "
            f"{type(biases).__name__}. Write [bias1, bias2]: {_BIAS_HELP}."
        )
    if len(biases) > 2:
        raise InvalidInputError(
            f"biases: expected at most 2 entries, got {len(biases)}. Add further terms to one of "
            f"the two: {_BIAS_HELP}."
        )
    first = biases[0] if len(biases) > 0 else None
    second = biases[1] if len(biases) > 1 else None
    for name, bias in (("bias1", first), ("bias2", second)):
        if bias is not None and not isinstance(bias, Tensor):
            raise InvalidInputError(
                f"{name}: expected a tensor or None, got {type(bias).__name__}. {_BIAS_HELP}."
            )
    return first, second


def canonicalise(
    q: Tensor, k: Tensor, v: Tensor, bias1: Tensor | None, bias2: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """`[*, L, H, D]` of any rank >= 3 as `[B, N, L, H, D]`: views wherever strides allow.

    The last dimension of `*` is N, the ones before it are flattened into B; a missing one is 1.
    Biases of lower rank gain leading dimensions of size 1, as in any broadcast.
    """
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        kinds = ", ".join(type(t).__name__ for t in (q, k, v))
        raise InvalidInputError(f"Q, K, V: expected a tensor for each, got {kinds}.")
    rank = q.dim()
    if rank < 3 or k.dim() != rank or v.dim() != rank:
        raise InvalidInputError(
            "Q, K, V: expected three tensors of one rank >= 3, [*, L, H, D]; "
            f"got Q {_shape(q)}, K {_shape(k)}, V {_shape(v)}."
        )
    if rank == 5 and _is_five(bias1) and _is_five(bias2):
        return q, k, v, bias1, bias2
    lead = tuple(q.shape[:-3])
    for name, tensor in (("K", k), ("V", v)):
        if tuple(tensor.shape[:-3]) != lead:
            raise InvalidInputError(
                f"{name}: expected the leading dimensions of Q, {list(lead)}; got {_shape(tensor)}."
            )
    return (
        _flatten_lead(q, lead),
        _flatten_lead(k, lead),
        _flatten_lead(v, lead),
        _canonical_bias("bias1", bias1, lead),
        _canonical_bias("bias2", bias2, lead),
    )


def canonicalise_row_mask(row_mask: Tensor, q: Tensor) -> Tensor:
    """A mask broadcastable to the leading dimensions of `q`, as `[B|1, N|1]`."""
    if not isinstance(row_mask, Tensor):
        raise InvalidInputError(
            f"row_mask: expected a tensor or None, got {type(row_mask).__name__}. {_ROW_MASK_HELP}."
        )
    lead = tuple(q.shape[:-3])
    if row_mask.dim() > len(lead):
        raise InvalidInputError(
            f"row_mask: expected at most the {len(lead)} leading dimensions of Q {_shape(q)}; got "
            f"{_shape(row_mask)}. {_ROW_MASK_HELP}."
        )
    row_mask = row_mask[(None,) * (max(len(lead), 2) - row_mask.dim())]
    return _flatten_batch("row_mask", row_mask, lead, _ROW_MASK_HELP)


def describe(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias1: Tensor | None,
    bias2: Tensor | None,
    row_mask: Tensor | None = None,
) -> Problem:
    """Check five-dimensional tensors (`row_mask`: two) against the contract; raises
    `InvalidInputError` or returns the description, in which `row_mask` has no part: it chooses no
    kernel.
    """
    if q.dim() != 5 or k.dim() != 5 or v.dim() != 5:
        raise InvalidInputError(
            f"Q, K, V: expected [B, N, L, H, D]; got Q {_shape(q)}, K {_shape(k)}, V {_shape(v)}."
        )
    B, N, Lq, H, D = q.shape
    Lk, Dv = k.shape[2], v.shape[4]
    dtype, device = q.dtype, q.device
    if k.shape != (B, N, Lk, H, D):
        raise InvalidInputError(
            f"K: expected [B, N, Lk, H, D] = [{B}, {N}, Lk, {H}, {D}] to match Q {_shape(q)}; got "
            f"{_shape(k)}."
        )
    if v.shape != (B, N, Lk, H, Dv):
        raise InvalidInputError(
            f"V: expected [B, N, Lk, H, Dv] = [{B}, {N}, {Lk}, {H}, Dv] to match K {_shape(k)}; "
            f"got {_shape(v)}."
        )
    if Lq < 1 or Lk < 1 or D < 1 or Dv < 1:
        raise InvalidInputError(
            "Q, K, V: expected L, D and Dv of at least 1 (attention over no keys has no value); "
            f"got Q {_shape(q)}, K {_shape(k)}, V {_shape(v)}."
        )
    if dtype not in SUPPORTED_DTYPES:
        raise InvalidInputError(
            f"Q: expected float32, bfloat16 or float16; got {dtype}. Cast it, or use "
            "deepspeed4science.reference.evoformer_attention for other dtypes."
        )
    if k.dtype != dtype or v.dtype != dtype:
        raise InvalidInputError(
            f"K, V: expected the dtype of Q, {dtype}; got K {k.dtype}, V {v.dtype}. "
            "Cast them to one dtype, or run under torch.autocast."
        )
    if k.device != device or v.device != device:
        raise InvalidInputError(
            f"K, V: expected the device of Q, {device}; got K on {k.device}, V on {v.device}. "
            "Move them there."
        )
    if bias1 is not None:
        _check_bias("bias1", bias1, (B, N, 1, 1, Lk), device)
    if bias2 is not None:
        _check_bias("bias2", bias2, (B, 1, H, Lq, Lk), device)
    if row_mask is not None:
        _check_row_mask(row_mask, B, N, device)
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
        bias1=None if bias1 is None else bias1.dtype,
        bias2=None if bias2 is None else bias2.dtype,
    )


def _check_bias(name: str, bias: Tensor, target: tuple[int, ...], device: torch.device) -> None:
    shape = bias.shape
    if shape != target and (
        len(shape) != 5
        or any(size != 1 and size != full for size, full in zip(shape, target, strict=True))
    ):
        names = "[B, N, 1, 1, Lk]" if name == "bias1" else "[B, 1, H, Lq, Lk]"
        raise InvalidInputError(
            f"{name}: expected a shape broadcastable to {names} = {list(target)}; got "
            f"{_shape(bias)}. {_BIAS_HELP}."
        )
    if bias.dtype not in SUPPORTED_DTYPES:
        raise InvalidInputError(
            f"{name}: expected float32, bfloat16 or float16, added to the scores; got "
            f"{bias.dtype}. "
            "A boolean mask becomes a bias by torch.where(mask, 0.0, -torch.inf)."
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
            f"{_shape(row_mask)}. {_ROW_MASK_HELP}."
        )
    if row_mask.device != device:
        raise InvalidInputError(
            f"row_mask: expected the device of Q, {device}; got {row_mask.device}. Move it there."
        )


def _is_five(bias: Tensor | None) -> bool:
    return bias is None or bias.dim() == 5


def _flatten_lead(tensor: Tensor, lead: tuple[int, ...]) -> Tensor:
    if len(lead) == 2:
        return tensor
    if len(lead) < 2:
        return tensor[(None,) * (2 - len(lead))]
    return tensor.flatten(0, len(lead) - 2)


def _canonical_bias(name: str, bias: Tensor | None, lead: tuple[int, ...]) -> Tensor | None:
    if bias is None:
        return None
    rank = len(lead) + 3
    if bias.dim() > rank:
        raise InvalidInputError(
            f"{name}: expected at most the {rank} dimensions of Q; got {_shape(bias)}. "
            f"{_BIAS_HELP}."
        )
    bias = bias[(None,) * (max(rank, 5) - bias.dim())]
    return _flatten_batch(name, bias, lead, _BIAS_HELP)


def _flatten_batch(name: str, tensor: Tensor, lead: tuple[int, ...], advice: str) -> Tensor:
    """Of several leading dimensions all but the last become B: what has some of them is broadcast
    among them first.
    """
    if len(lead) <= 2:
        return tensor
    batch = lead[:-1]
    own = tuple(tensor.shape[: len(batch)])
    if any(size != 1 and size != full for size, full in zip(own, batch, strict=True)):
        raise InvalidInputError(
            f"{name}: expected leading dimensions broadcastable to {list(batch)} of Q; got "
            f"{_shape(tensor)}. {advice}."
        )
    if any(size != 1 for size in own):
        tensor = tensor.expand(*batch, *tensor.shape[len(batch) :])
    return tensor.flatten(0, len(batch) - 1)


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))
