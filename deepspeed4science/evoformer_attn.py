"""Evoformer attention as PyTorch operators: registration, autograd, autocast. Nothing here knows
about hardware.

Two operators in `torch.ops.deepspeed4science`, both on five-dimensional tensors (row_mask [B, N]):

    evoformer_attn(q, k, v, bias1?, bias2?, with_lse, row_mask?) -> (o, lse)
    evoformer_attn_backward(do_, q, k, v, o, lse, bias1?, bias2?, wanted[5], row_mask?)
        -> (dq, dk, dv, dbias1, dbias2)    bias gradients in float32

`Library.define/impl` (registration.py) rather than `custom_op`: the wrapper of the latter costs 9
to 15 us a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed4science import backends, registration
from deepspeed4science.errors import DoubleBackwardError
from deepspeed4science.problem import (
    canonicalise,
    canonicalise_row_mask,
    describe,
    split_biases,
)


def DS4Sci_EvoformerAttention(  # noqa: N802 (the name users of DeepSpeed know)
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    biases: Sequence[Tensor | None] = (),
    *,
    row_mask: Tensor | None = None,
) -> Tensor:
    """Biased attention of AlphaFold-type models, `softmax(Q K^T / sqrt(D) + bias1 + bias2) V`,
    with its gradients.

    Scores, softmax and biases are computed in float32 whatever the dtype. Memory is linear in L.

    Args:
        Q: `[B, N, Lq, H, D]`, or `[*, Lq, H, D]` of any rank >= 3; float32, bfloat16 or float16;
            any strides.
        K: `[B, N, Lk, H, D]`.
        V: `[B, N, Lk, H, Dv]`; Dv may differ from D.
        biases: at most two entries, each a tensor or None; never changed.
            bias1, broadcastable to `[B, N, 1, 1, Lk]`: the key mask (`-inf` or a large negative
            number hides a key).
            bias2, broadcastable to `[B, 1, H, Lq, Lk]`: the pair bias, shared by all N rows.
        row_mask: bool, broadcastable to `[B, N]` (to `[*]`): a row n that is False is 0 with zero
            gradients, whatever it holds, and costs nothing. Default: all are computed.

    Returns:
        `[B, N, Lq, H, Dv]` in the dtype and on the device of Q. A row whose keys are all `-inf` is
        0 and has zero gradients. Each input that requires a gradient gets one in its own dtype;
        bias gradients are summed in float32.

    Raises:
        InvalidInputError: shapes, dtypes or devices do not fit; the message says what was expected.
        NoBackendError: no kernel takes this call on this machine; the message lists the reasons.
        BuildError: the kernel could not be compiled or loaded.

    Source: Jumper et al. 2021 (doi:10.1038/s41586-021-03819-2), supplementary algorithms 7, 8, 13
        and 14.
    """
    bias1, bias2 = split_biases(biases)
    q, k, v, bias1, bias2 = canonicalise(Q, K, V, bias1, bias2)
    if row_mask is not None:
        row_mask = canonicalise_row_mask(row_mask, Q)
    with_lse = torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (bias1 is not None and bias1.requires_grad)
        or (bias2 is not None and bias2.requires_grad)
    )
    if with_lse or torch.compiler.is_compiling():
        o, _ = _FORWARD_OP(q, k, v, bias1, bias2, with_lse, row_mask)
    else:  # autograd has nothing to record: 4 us less
        with torch._C._AutoDispatchBelowAutograd():
            o, _ = _FORWARD_OP(q, k, v, bias1, bias2, False, row_mask)
    result: Tensor = o if Q.dim() == 5 else o.reshape(*Q.shape[:-1], V.shape[-1])
    return result


class EvoformerFusedAttention:
    """The second name under which DeepSpeed offers the op; `apply` takes the biases one by one."""

    @staticmethod
    def apply(
        q: Tensor, k: Tensor, v: Tensor, bias1: Tensor | None = None, bias2: Tensor | None = None
    ) -> Tensor:
        """`DS4Sci_EvoformerAttention(q, k, v, [bias1, bias2])`."""
        return DS4Sci_EvoformerAttention(q, k, v, (bias1, bias2))


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias1: Tensor | None,
    bias2: Tensor | None,
    with_lse: bool,
    row_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    problem = describe(q, k, v, bias1, bias2, row_mask)
    if problem.is_empty:
        return _fake_forward(q, k, v, bias1, bias2, with_lse, row_mask)
    backend = backends.select(problem)
    return backend.forward(problem, q, k, v, bias1, bias2, row_mask, with_lse=with_lse)


def _fake_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias1: Tensor | None,
    bias2: Tensor | None,
    with_lse: bool,
    row_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    p = describe(q, k, v, bias1, bias2, row_mask)
    o = q.new_empty((p.B, p.N, p.Lq, p.H, p.Dv))
    return o, q.new_empty((p.B, p.N, p.H, p.Lq) if with_lse else (0,), dtype=torch.float32)


def _backward(
    do_: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    bias1: Tensor | None,
    bias2: Tensor | None,
    wanted: list[bool],
    row_mask: Tensor | None = None,
) -> tuple[Tensor, ...]:
    problem = describe(q, k, v, bias1, bias2, row_mask)
    shapes = _gradient_likes(q, k, v, bias1, bias2, wanted)
    if problem.is_empty:
        return tuple(_empty_gradient(like, bias1, bias2).zero_() for like in shapes)
    backend = backends.select(problem)
    gradients = backend.backward(
        problem, do_, q, k, v, o, lse, bias1, bias2, row_mask, wanted=wanted
    )
    return tuple(
        like if gradient is None else _sum_to(gradient, like)
        for gradient, like in zip(gradients, shapes, strict=True)
    )


def _sum_to(gradient: Tensor, like: Tensor) -> Tensor:
    """The gradient of what was broadcast, in its own shape (docs/math.md, 15 and 16)."""
    if gradient.shape == like.shape:  # nearly always: 2 us less for each
        return gradient
    total = gradient.sum_to_size(like.shape)
    if like.shape[-1] < gradient.shape[-1]:
        total = total * 0.0  # the same for all keys changes nothing; NaN stays NaN
    return total


def _fake_backward(
    do_: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    bias1: Tensor | None,
    bias2: Tensor | None,
    wanted: list[bool],
    row_mask: Tensor | None = None,
) -> tuple[Tensor, ...]:
    describe(q, k, v, bias1, bias2, row_mask)
    return tuple(
        _empty_gradient(like, bias1, bias2)
        for like in _gradient_likes(q, k, v, bias1, bias2, wanted)
    )


def _empty_gradient(like: Tensor, bias1: Tensor | None, bias2: Tensor | None) -> Tensor:
    of_bias = like is bias1 or like is bias2
    return torch.empty_like(
        like,
        dtype=torch.float32 if of_bias else like.dtype,
        memory_format=torch.contiguous_format,
    )


def _gradient_likes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias1: Tensor | None,
    bias2: Tensor | None,
    wanted: Sequence[bool],
) -> list[Tensor]:
    """What each gradient looks like: the input itself, or no elements where none is wanted."""
    return [
        tensor if want and tensor is not None else q.new_empty(0)
        for tensor, want in zip((q, k, v, bias1, bias2), wanted, strict=True)
    ]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, bias1, bias2, _, row_mask = inputs
    o, lse = output
    ctx.save_for_backward(q, k, v, o, lse, bias1, bias2, row_mask)
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)


def _autograd(ctx: Any, do_: Tensor | None, _dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    if do_ is None:
        return (None,) * 7
    q, k, v, o, lse, bias1, bias2, row_mask = ctx.saved_tensors
    if lse.numel() == 0:  # the operator was called directly, without what its backward needs
        o, lse = _FORWARD_OP(q, k, v, bias1, bias2, True, row_mask)
    wanted = list(ctx.needs_input_grad[:5])
    dtypes = [None if tensor is None else tensor.dtype for tensor in (q, k, v, bias1, bias2)]
    arguments = (do_, q, k, v, o, lse, bias1, bias2, wanted, row_mask)
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        gradients = _BACKWARD_OP(*arguments)
    else:  # as in the forward: nothing to record
        with torch._C._AutoDispatchBelowAutograd():
            gradients = _BACKWARD_OP(*arguments)
    # What was saved goes before bias gradients get a copy in their own dtype: less memory at once.
    del q, k, v, o, lse, bias1, bias2, arguments
    if not torch.compiler.is_compiling():  # compiled autograd, which frees what it can itself
        ctx.maybe_clear_saved_tensors()
    return (
        *(
            gradient.to(dtype) if want else None
            for gradient, dtype, want in zip(gradients, dtypes, wanted, strict=True)
        ),
        None,
        None,
    )


def _no_double_backward(ctx: Any, *gradients: Tensor | None) -> None:
    raise DoubleBackwardError(
        "Evoformer attention has first derivatives only: its backward was differentiated again "
        "(create_graph=True, a gradient penalty or a Hessian). Use "
        "deepspeed4science.reference.evoformer_attention for those terms."
    )


def _autocast(device_type: str) -> Any:
    """Q, K and V in autocast's dtype; biases stay as they are (they are added in float32)."""
    key = getattr(torch._C.DispatchKey, f"Autocast{device_type.upper()}")
    keyset = torch._C.DispatchKeySet(key)

    def call(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias1: Tensor | None,
        bias2: Tensor | None,
        with_lse: bool,
        row_mask: Tensor | None = None,
    ) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keyset):
            dtype = torch.get_autocast_dtype(device_type)
            q, k, v = (t.to(dtype) if t.is_floating_point() else t for t in (q, k, v))
            return _FORWARD_OP(q, k, v, bias1, bias2, with_lse, row_mask)

    return call


_FORWARD_OP, _BACKWARD_OP = registration.register(
    registration.Operator(
        "evoformer_attn(Tensor q, Tensor k, Tensor v, Tensor? bias1, Tensor? bias2, bool with_lse, "
        "Tensor? row_mask=None) -> (Tensor, Tensor)",
        kernels={
            "CompositeExplicitAutograd": _forward,
            "AutocastCPU": _autocast("cpu"),
            "AutocastCUDA": _autocast("cuda"),
        },
        fake=_fake_forward,
        backward=_autograd,
        setup_context=_setup_context,
    ),
    registration.Operator(
        "evoformer_attn_backward(Tensor do_, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, "
        "Tensor? bias1, Tensor? bias2, bool[5] wanted, Tensor? row_mask=None) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        kernels={"CompositeExplicitAutograd": _backward},
        fake=_fake_backward,
        backward=_no_double_backward,
    ),
)
