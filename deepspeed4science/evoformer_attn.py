"""The functions that users call. `arguments` brings the caller's arguments into the form that the
operators in `operators` take.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from deepspeed4science import autocast, below_autograd
from deepspeed4science.arguments import (
    canonicalise,
    canonicalise_row_mask,
    canonicalise_scale,
    largest_finite,
    split_biases,
)
from deepspeed4science.call import ForwardCall
from deepspeed4science.dtensor import is_dtensor, require_sharding_rules
from deepspeed4science.operators import forward_op, recorded_attention, replayed
from deepspeed4science.problem import describe
from op_builder.system import process_exit


@overload
def DS4Sci_EvoformerAttention(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    biases: Sequence[Tensor | None] = ...,
    *,
    scale: float | None = ...,
    row_mask: Tensor | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...


@overload
def DS4Sci_EvoformerAttention(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    biases: Sequence[Tensor | None] = ...,
    *,
    scale: float | None = ...,
    row_mask: Tensor | None = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def DS4Sci_EvoformerAttention(  # noqa: N802 (the name users of DeepSpeed know)
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    biases: Sequence[Tensor | None] = (),
    *,
    scale: float | None = None,
    row_mask: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Evoformer attention of AlphaFold-type models, with all gradients:
    `softmax(scale Q K^T + bias1 + bias2) V`, equations (1) to (5) of docs/math.md.

    B is the batch; N the rows that share a pair bias (sequences of an MSA, rows of a pair
    representation); Lq and Lk the numbers of queries and keys; H the heads; D and Dv the channels
    of a head. Scores, softmax and sums are computed in float32 whatever the dtype. Memory is linear
    in L, but for bias2 and its gradient.

    Args:
        Q: `[B, N, Lq, H, D]`, or `[*, Lq, H, D]` of any rank >= 3; float32, bfloat16 or float16;
            any strides (channels that do not lie side by side are copied). Different dtypes of Q,
            K and V are promoted as PyTorch promotes them.
        K: `[B, N, Lk, H, D]`.
        V: `[B, N, Lk, H, Dv]`; Dv may differ from D.
        biases: at most two entries, each a tensor of any of these dtypes or None; never changed.
            bias1, broadcastable to `[B, N, 1, 1, Lk]`, is the key mask: `-inf` or a large negative
            number hides a key. In a mask of booleans or integers, True or 1 is a key that is seen.
            bias2, broadcastable to `[B, 1, H, Lq, Lk]`, is the pair bias, shared by all N rows; it
            may also be expanded to `[B, N, H, Lq, Lk]` (stride 0).
        scale: any finite number of float32. Default: 1 / sqrt(D).
        row_mask: bool, broadcastable to `[B, N]` (to `[*]`). A row n that is False gives 0 with
            zero gradients, whatever it holds, and costs nothing. Default: all rows are computed.
        return_lse: whether to return `(O, lse)`. Default: O alone.

    Returns:
        O, `[B, N, Lq, H, Dv]`, on the device of Q, in the dtype of Q, K and V, promoted, or in
        autocast's. A query whose keys are all `-inf` gives 0 and has zero gradients. Each input
        that requires a gradient gets one in its own dtype; gradients of biases are summed in
        float32.
        lse, with `return_lse`: `[B, N, H, Lq]` (`[*, H, Lq]`), float32, the natural logarithm of
        the sum over keys of the exponentials of the scores, (6); `-inf` where a query sees no key.
        It has no gradient.

    Raises:
        InvalidInputError: shapes, dtypes or devices do not fit; the message says what was expected.
        NoBackendError: no kernel takes this call on this machine; the message lists the reasons.
        BuildError: the kernel could not be compiled or loaded.
        KernelError: the kernel reported a failure.
        DoubleBackwardError: the gradient was differentiated again.
        ForwardModeError: a derivative by forward mode was requested.

    Source: Jumper et al. 2021 (doi:10.1038/s41586-021-03819-2), supplementary algorithms 7, 8, 13
        and 14.
    """
    process_exit.stop_daemon_if_ending()
    bias1, bias2 = split_biases(biases)
    known = replayed(ForwardCall(Q, K, V, bias1, bias2, return_lse, row_mask, scale))
    if known is not None:
        o, lse = known
    else:
        o, lse, bias1 = _first_of_its_kind(Q, K, V, bias1, bias2, scale, row_mask, return_lse)
    result: Tensor = o if Q.dim() == 5 else o.reshape(*Q.shape[:-1], V.shape[-1])
    if not return_lse:
        return result
    assert lse is not None  # it was asked for
    if bias1 is not None:  # kernels return the lse of shifted scores, math.md (1a)
        lse = lse + largest_finite(bias1)[..., 0].float()
    return result, lse.reshape(*Q.shape[:-3], Q.shape[-2], Q.shape[-3])


def _first_of_its_kind(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    bias1: Tensor | None,
    bias2: Tensor | None,
    scale: float | None,
    row_mask: Tensor | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """A call unlike all earlier ones: O in five dimensions, lse in four, and bias1 as a tensor of
    numbers.
    """
    if type(Q) is not Tensor:
        require_sharding_rules(Q)
    q, k, v, bias1, bias2 = canonicalise(Q, K, V, bias1, bias2)
    if row_mask is not None:
        row_mask = canonicalise_row_mask(row_mask, Q)
    if scale is not None:
        q, scale = canonicalise_scale(q, scale)
    if is_dtensor(q) and not torch.compiler.is_compiling():
        # Refused here, as DTensor would make a RuntimeError of the operator's InvalidInputError.
        describe(ForwardCall(q, k, v, bias1, bias2, return_lse, row_mask, scale))
    recorded = torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (bias1 is not None and bias1.requires_grad)
        or (bias2 is not None and bias2.requires_grad)
    )
    if torch.jit.is_tracing():  # type: ignore[attr-defined]
        # Operators alone can be saved. With lse always: the trace is compared with one without
        # gradients.
        o, lse = forward_op(q, k, v, bias1, bias2, True, row_mask, scale)
    elif torch.compiler.is_compiling():
        with_lse = recorded or return_lse
        o, lse = forward_op(q, k, v, bias1, bias2, with_lse, row_mask, scale)
    elif recorded or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        o, lse = recorded_attention(q, k, v, bias1, bias2, row_mask, scale)
    else:  # autograd has nothing to record
        q, k, v = autocast.cast_inputs(q, k, v)
        call = ForwardCall(q, k, v, bias1, bias2, return_lse, row_mask, scale)
        o, lse = below_autograd.forward(call, differentiable=False)
    return o, lse, bias1


class EvoformerFusedAttention:
    """DeepSpeed's second name for the op; `apply` takes the biases one by one."""

    @staticmethod
    def apply(
        q: Tensor, k: Tensor, v: Tensor, bias1: Tensor | None = None, bias2: Tensor | None = None
    ) -> Tensor:
        """`DS4Sci_EvoformerAttention(q, k, v, [bias1, bias2])`."""
        return DS4Sci_EvoformerAttention(q, k, v, (bias1, bias2))
