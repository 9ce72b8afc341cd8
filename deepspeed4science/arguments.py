"""From the caller's arguments to those of the operators: five dimensions, one dtype, biases that
are numbers, a positive scale. All by PyTorch operations that autograd and torch.compile see.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from deepspeed4science.bias_advice import BIAS_HELP
from deepspeed4science.errors import InvalidInputError
from deepspeed4science.problem import ROW_MASK_HELP, SUPPORTED_DTYPES, shape_of

_PROMOTED = (*SUPPORTED_DTYPES, torch.float64)  # others have no common dtype, or an integer


def split_biases(biases: Sequence[Tensor | None] | None) -> tuple[Tensor | None, Tensor | None]:
    """The caller's sequence of 0, 1 or 2 biases as a pair; the sequence itself is not changed."""
    if biases is None:
        return None, None
    if not isinstance(biases, (list, tuple)):
        raise InvalidInputError(
            f"biases: expected a list or tuple of 0, 1 or 2 entries, each a tensor or None; got "
            f"{type(biases).__name__}. Write [bias1, bias2]: {BIAS_HELP}."
        )
    if len(biases) > 2:
        raise InvalidInputError(
            f"biases: expected at most 2 entries, got {len(biases)}. Add further terms to one of "
            f"the two: {BIAS_HELP}."
        )
    first = biases[0] if len(biases) > 0 else None
    second = biases[1] if len(biases) > 1 else None
    for name, bias in (("bias1", first), ("bias2", second)):
        if bias is not None and not isinstance(bias, Tensor):
            raise InvalidInputError(
                f"{name}: expected a tensor or None, got {type(bias).__name__}. {BIAS_HELP}."
            )
    return first, second


def canonicalise(
    q: Tensor, k: Tensor, v: Tensor, bias1: Tensor | None, bias2: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """`[*, L, H, D]` of any rank >= 3 as `[B, N, L, H, D]`: views wherever strides allow.

    The last dimension of `*` is N, the ones before it are flattened into B; a missing one is 1.
    Biases of lower rank gain leading dimensions of size 1, as in any broadcast. Q, K and V get one
    dtype, a mask becomes a bias, and a pair bias that was expanded over N loses that expansion.
    """
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        kinds = ", ".join(type(t).__name__ for t in (q, k, v))
        raise InvalidInputError(f"Q, K, V: expected a tensor for each, got {kinds}.")
    for name, tensor in (("Q", q), ("K", k), ("V", v), ("bias1", bias1), ("bias2", bias2)):
        if tensor is not None and (tensor.layout is not torch.strided or tensor.is_nested):
            raise _not_strided(name, tensor)
    rank = q.dim()
    if rank < 3 or k.dim() != rank or v.dim() != rank:
        raise InvalidInputError(
            "Q, K, V: expected three tensors of one rank >= 3, [*, L, H, D]; "
            f"got Q {shape_of(q)}, K {shape_of(k)}, V {shape_of(v)}."
        )
    if not q.dtype == k.dtype == v.dtype:
        q, k, v = _promoted(q, k, v)
    if bias1 is not None and not bias1.is_floating_point():
        bias1 = _bias_of_mask(bias1, q)
    bias2 = None if bias2 is None else without_rows(bias2, q)
    if rank == 5 and _is_five(bias1) and _is_five(bias2):
        return q, k, v, bias1, bias2
    lead = tuple(q.shape[:-3])
    for name, tensor in (("K", k), ("V", v)):
        if tuple(tensor.shape[:-3]) != lead:
            raise InvalidInputError(
                f"{name}: expected the leading dimensions of Q, {list(lead)}; got "
                f"{shape_of(tensor)}."
            )
    q, k, v = _flatten_lead(q, lead), _flatten_lead(k, lead), _flatten_lead(v, lead)
    return q, k, v, canonical_bias("bias1", bias1, lead), canonical_bias("bias2", bias2, lead)


def canonicalise_scale(q: Tensor, scale: Any) -> tuple[Tensor, float]:
    """Q and a positive scale that give the same scores. Q is multiplied by the sign, or the zero,
    of the scale, which is exact. Kernels need a positive one: they take the maximum of the unscaled
    scores, and divide biases by the scale. Subnormal numbers of float32 are 0.
    """
    is_traced = torch.compiler.is_compiling() and type(scale).__name__ == "ndarray"
    others = (Real, torch.SymFloat, torch.SymInt)
    if is_traced or (isinstance(scale, others) and not isinstance(scale, (int, float))):
        # NumPy's numbers, which torch.compile takes for arrays; those of symbolic sizes, which
        # become constants of the traced program, as in PyTorch's own attention.
        scale = float(scale)
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise InvalidInputError(
            f"scale: expected a number or None; got {type(scale).__name__}. A tensor, which may "
            "need a gradient, multiplies Q: pass Q * scale * D ** 0.5."
        )
    # Numbers of a module, its finfo's included (PyTorch 2.14), would be symbols to torch.compile.
    float32 = torch.finfo(torch.float32)
    if not -float32.max <= scale <= float32.max:
        raise InvalidInputError(
            f"scale: expected a finite number of float32; got {scale}. Check its source."
        )
    if -float32.tiny < scale < float32.tiny:
        return q * 0.0, 1.0
    return (q, float(scale)) if scale > 0 else (-q, -float(scale))


def largest_finite(bias1: Tensor) -> Tensor:
    """The shift, math.md (1a): the largest finite number of each row of `bias1`, `[..., 1]`; 0
    where there is none.
    """
    bias1 = bias1.detach()
    largest = bias1.masked_fill(~bias1.isfinite(), -math.inf).amax(dim=-1, keepdim=True)
    return largest.masked_fill(largest == -math.inf, 0.0)


def canonicalise_row_mask(row_mask: Tensor, q: Tensor) -> Tensor:
    """A mask broadcastable to the leading dimensions of `q`, as `[B|1, N|1]`."""
    if not isinstance(row_mask, Tensor):
        raise InvalidInputError(
            f"row_mask: expected a tensor or None, got {type(row_mask).__name__}. {ROW_MASK_HELP}."
        )
    if row_mask.layout is not torch.strided or row_mask.is_nested:
        raise _not_strided("row_mask", row_mask)
    lead = tuple(q.shape[:-3])
    if row_mask.dim() > len(lead):
        raise InvalidInputError(
            f"row_mask: expected at most the {len(lead)} leading dimensions of Q {shape_of(q)}; "
            f"got {shape_of(row_mask)}. {ROW_MASK_HELP}."
        )
    row_mask = row_mask[(None,) * (max(len(lead), 2) - row_mask.dim())]
    return _flatten_batch("row_mask", row_mask, lead, ROW_MASK_HELP)


def _not_strided(name: str, tensor: Tensor) -> InvalidInputError:
    kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.").lstrip("_")
    advice = "pad it (torch.nested.to_padded_tensor)" if tensor.is_nested else "use to_dense()"
    return InvalidInputError(
        f"{name}: expected a dense tensor with strides (torch.strided); got a {kind} one. To make "
        f"one of it, {advice}."
    )


def _promoted(*tensors: Tensor) -> list[Tensor]:
    """The tensors in the one dtype that PyTorch's own operators would choose."""
    if not all(tensor.dtype in _PROMOTED for tensor in tensors):
        return list(tensors)  # `describe` refuses them
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return [tensor.to(dtype) for tensor in tensors]


def _bias_of_mask(mask: Tensor, q: Tensor) -> Tensor:
    """0 where a boolean or integer mask is not 0, `-inf` elsewhere."""
    if mask.is_complex():
        return mask  # `describe` refuses it
    dtype = q.dtype if q.is_floating_point() else torch.float32
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask == 0, -math.inf)


def without_rows(bias2: Tensor, q: Tensor) -> Tensor:
    """A pair bias without its expansion over N, which models make that compute in chunks."""
    if min(bias2.dim(), q.dim()) < 4 or _is_known(bias2.shape[-4] == 1):
        return bias2
    if _is_known(bias2.shape[-4] == 0) and _is_known(q.shape[-4] == 0):
        return bias2.sum(-4, keepdim=True)  # of no rows n there is no first one
    if _is_known(bias2.stride(-4) == 0) and _is_known(bias2.shape[-4] == q.shape[-4]):
        return bias2.narrow(-4, 0, 1)  # slicing would give the dimension a new symbolic size
    return bias2


def _is_known(condition: bool) -> bool:
    """Whether a condition on sizes is known to hold while the program is traced."""
    if not torch.compiler.is_compiling():
        return bool(condition)
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    known: bool = guard_or_false(condition)
    return known


def _is_five(bias: Tensor | None) -> bool:
    return bias is None or bias.dim() == 5


def _flatten_lead(tensor: Tensor, lead: tuple[int, ...]) -> Tensor:
    if len(lead) == 2:
        return tensor
    if len(lead) < 2:
        return tensor[(None,) * (2 - len(lead))]
    return tensor.flatten(0, len(lead) - 2)


def canonical_bias(name: str, bias: Tensor | None, lead: tuple[int, ...]) -> Tensor | None:
    """The bias of tensors with leading dimensions `lead` in five dimensions."""
    if bias is None:
        return None
    rank = len(lead) + 3
    if bias.dim() > rank:
        raise InvalidInputError(
            f"{name}: expected at most the {rank} dimensions of Q; got {shape_of(bias)}. "
            f"{BIAS_HELP}."
        )
    bias = bias[(None,) * (max(rank, 5) - bias.dim())]
    return _flatten_batch(name, bias, lead, BIAS_HELP)


def _flatten_batch(name: str, tensor: Tensor, lead: tuple[int, ...], advice: str) -> Tensor:
    """Flattens all leading dimensions but the last into B. A tensor that has size 1 in some of them
    is broadcast over these first.
    """
    if len(lead) <= 2:
        return tensor
    batch = lead[:-1]
    own = tuple(tensor.shape[: len(batch)])
    if any(size != 1 and size != full for size, full in zip(own, batch, strict=True)):
        raise InvalidInputError(
            f"{name}: expected leading dimensions broadcastable to {list(batch)} of Q; got "
            f"{shape_of(tensor)}. {advice}."
        )
    if any(size != 1 for size in own):
        tensor = tensor.expand(*batch, *tensor.shape[len(batch) :])
    return tensor.flatten(0, len(batch) - 1)
