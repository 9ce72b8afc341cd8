"""Evoformer attention as PyTorch operators: registration, derivatives, autocast, vmap. Nothing here
knows about hardware.

Two operators in `torch.ops.deepspeed4science`, both on five-dimensional tensors (row_mask [B, N])
and with a positive scale; their arguments are those of `call.py`:

    evoformer_attn: ForwardCall -> (o, lse)
    evoformer_attn_backward: BackwardCall -> (dq, dk, dv, dbias1, dbias2)

`Library.define/impl` (registration.py) is used rather than `custom_op`, whose wrapper costs 9 to 15
us a call. The autograd.Functions have all that torch.func needs: their rules are those of the
operators. Forward mode raises an error; without one, PyTorch would take tangents for 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import unwrap_dead_wrappers
from torch.autograd import forward_ad

from deepspeed4science import autocast, below_autograd, flops, implementation, registration
from deepspeed4science.call import BackwardCall, ForwardCall, schema
from deepspeed4science.dtensor import Placements, placements_of, summed
from deepspeed4science.errors import DoubleBackwardError, ForwardModeError
from deepspeed4science.replay import tensors_of
from deepspeed4science.vmap import map_backward, map_forward

_NUM_ARGUMENTS = len(ForwardCall._fields)


class Attention(torch.autograd.Function):
    """The forward operator, recorded by autograd. Its arguments are the fields of a `ForwardCall`
    and, where it is known, the function that computes the call.
    """

    @staticmethod
    def forward(*arguments: Any) -> Any:
        call, compute = ForwardCall(*arguments[:_NUM_ARGUMENTS]), arguments[_NUM_ARGUMENTS:]
        o, lse = compute[0](call) if compute else below_autograd.forward(call, differentiable=True)
        return o, call.q.new_empty(0, dtype=torch.float32) if lse is None else lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, bias1, bias2, ctx.with_lse, row_mask, ctx.scale = inputs[:_NUM_ARGUMENTS]
        o, lse = output
        ctx.save_for_backward(q, k, v, o, lse, bias1, bias2, row_mask)
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, do_: Tensor | None, _dlse: Tensor | None = None) -> Any:
        needed = ctx.needs_input_grad
        if do_ is None:
            return (None,) * len(needed)
        q, k, v, o, lse, bias1, bias2, row_mask = ctx.saved_tensors
        if not ctx.with_lse:  # the operator was called directly, without the lse for its backward
            o, lse = forward_op(q, k, v, bias1, bias2, True, row_mask, ctx.scale)
        inputs = (q, k, v, bias1, bias2)
        dtypes = [None if tensor is None else tensor.dtype for tensor in inputs]
        placements = _NO_PLACEMENTS if type(q) is Tensor else placements_of(inputs)
        wanted = needed[:5]
        call = BackwardCall(do_, q, k, v, o, lse, bias1, bias2, wanted, row_mask, ctx.scale)
        compiled = torch.compiler.is_compiling()
        if not compiled and torch._C._are_functorch_transforms_active():
            gradients = AttentionBackward.apply(*call)
        elif compiled or torch.is_grad_enabled():
            gradients = backward_op(*call)
        else:  # nothing to record
            gradients = below_autograd.backward(call)
            # Saved tensors are freed before bias gradients are copied to their own dtype, which
            # lowers peak memory. Compiled autograd frees them itself.
            del q, k, v, o, lse, bias1, bias2, inputs, call
            ctx.maybe_clear_saved_tensors()
            if placements is _NO_PLACEMENTS:  # autograd itself rounds them, in half of the time
                return (*gradients, *(None,) * (len(needed) - 5))
        own = zip(gradients, dtypes, placements, wanted, strict=True)
        rounded = [_in_dtype(*one) if want else None for *one, want in own]
        return (*rounded, *(None,) * (len(needed) - 5))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise ForwardModeError(_NO_FORWARD_MODE)

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[Any], *arguments: Any) -> Any:
        call, dims = arguments[:_NUM_ARGUMENTS], in_dims[:_NUM_ARGUMENTS]
        return map_forward(Attention.apply, info.batch_size, dims, *call)


class ReplayedAttention(torch.autograd.Function):
    """`Attention` where the function that computes the call is known and lse is not wanted, so that
    autograd has a result and two arguments less to handle.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias1: Tensor | None,
        bias2: Tensor | None,
        row_mask: Tensor | None,
        scale: float | None,
        compute: Callable[[ForwardCall], tuple[Tensor, Tensor | None]],
    ) -> Tensor:
        o, lse = compute(ForwardCall(q, k, v, bias1, bias2, True, row_mask, scale))
        ctx.save_for_backward(q, k, v, o, lse, bias1, bias2, row_mask)
        ctx.with_lse, ctx.scale = True, scale
        return o

    backward = Attention.backward


def replayed(call: ForwardCall) -> tuple[Tensor, Tensor | None] | None:
    """O, differentiable, and lse (which may be None where it is not wanted) of a call with the
    user's arguments; None where no call of its kind was made before. Only calls whose arguments
    need no change are kept.
    """
    q, k, v, bias1, bias2, with_lse, row_mask, scale = call
    if (
        torch.compiler.is_compiling()
        or torch._C._is_any_autocast_enabled()
        or forward_ad._current_level >= 0
        or not (scale is None or type(scale) is float)
    ):
        return None
    tensors, given = tensors_of(call)
    differentiable, grad = False, torch.is_grad_enabled()
    for tensor in tensors:
        if not isinstance(tensor, Tensor):  # refused later, with a message
            return None
        differentiable |= grad and tensor.requires_grad
    if not differentiable:
        compute = below_autograd.other_forwards.known(q, tensors, given, with_lse, scale)
        return None if compute is None else compute(call)
    compute = below_autograd.differentiable_forwards.known(q, tensors, given, True, scale)
    if compute is None:
        return None
    if not with_lse:
        return _record_replayed(q, k, v, bias1, bias2, row_mask, scale, compute), None
    o, lse = _record(q, k, v, bias1, bias2, True, row_mask, scale, compute)
    return o, lse


class AttentionBackward(torch.autograd.Function):
    """The backward operator, recorded by autograd only to refuse its own derivative."""

    @staticmethod
    def forward(*arguments: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return backward_op(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Saves nothing."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> None:
        raise DoubleBackwardError(
            "Evoformer attention has first derivatives only: its backward was differentiated again "
            "(create_graph=True, a gradient penalty or a Hessian). Use "
            "deepspeed4science.reference.evoformer_attention for those terms."
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise ForwardModeError(_NO_FORWARD_MODE)

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[Any], *arguments: Any) -> Any:
        return map_backward(AttentionBackward.apply, info.batch_size, in_dims, *arguments)


_NO_PLACEMENTS = (None,) * 5


def _in_dtype(gradient: Tensor, dtype: torch.dtype | None, placements: Placements) -> Tensor:
    if gradient.dtype == dtype:
        return gradient
    return (gradient if placements is None else summed(gradient, placements)).to(dtype)


_NO_FORWARD_MODE = (
    "Evoformer attention has reverse-mode derivatives only: jvp, jacfwd, hessian or a dual tensor "
    "asked for a forward-mode one. Use torch.func.vjp or jacrev, or "
    "deepspeed4science.reference.evoformer_attention."
)


def recorded_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias1: Tensor | None,
    bias2: Tensor | None,
    row_mask: Tensor | None,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """O, differentiable by autograd and at every active level of torch.func, and lse."""
    q, k, v = autocast.cast_inputs(q, k, v)
    arguments = (q, k, v, bias1, bias2, True, row_mask, scale)
    if not torch._C._are_functorch_transforms_active():
        o, lse = _record(*unwrap_dead_wrappers(arguments))
    elif _is_functionalized():
        o, lse = forward_op(*arguments)
    else:
        o, lse = Attention.apply(*arguments)
    return o, lse


# Attention.apply, but without inspecting the signature of `forward` for defaults, of which there
# are none: that takes 20 us.
_record = super(torch.autograd.Function, Attention).apply
_record_replayed = super(torch.autograd.Function, ReplayedAttention).apply


def is_transformed() -> bool:
    """Whether torch.func or forward mode, which have rules for operators alone, or torch.jit.trace,
    which saves operators alone, is active. Not asked of forward mode while torch.compile traces.
    """
    return (
        torch._C._are_functorch_transforms_active()
        or torch.jit.is_tracing()  # type: ignore[attr-defined]
        or (not torch.compiler.is_compiling() and forward_ad._current_level >= 0)
    )


def _is_functionalized() -> bool:
    """Whether functionalize is active at any level of torch.func: it accepts operators only."""
    functionalize = torch._C._functorch.TransformType.Functionalize
    return any(
        level.key() == functionalize for level in torch._C._functorch.get_interpreter_stack()
    )


def recorded(record: Callable[..., Any], operator: Any, arguments: Any) -> Any:
    """The operator's autograd implementation: `record` where a gradient is wanted."""
    tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
    if any(torch._VF._unpack_dual(tensor, level=0)[1] is not None for tensor in tensors):
        raise ForwardModeError(_NO_FORWARD_MODE)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return record(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*arguments)


def _autograd_forward(*arguments: Any, **named: Any) -> Any:
    return recorded(Attention.apply, forward_op, ForwardCall(*arguments, **named))


def _autograd_backward(*arguments: Any, **named: Any) -> Any:
    return recorded(AttentionBackward.apply, backward_op, BackwardCall(*arguments, **named))


def _below_autocast(*call: Any) -> Any:
    return forward_op(*call)


def _vmap_forward(info: Any, in_dims: Sequence[Any], *arguments: Any) -> Any:
    return map_forward(forward_op, info.batch_size, in_dims, *arguments)


def _vmap_backward(info: Any, in_dims: Sequence[Any], *arguments: Any) -> Any:
    return map_backward(backward_op, info.batch_size, in_dims, *arguments)


forward_op, backward_op = registration.register(
    registration.Operator(
        schema("evoformer_attn", ForwardCall, num_results=2),
        kernels={
            "CompositeExplicitAutograd": implementation.forward,
            "Autograd": _autograd_forward,
            "AutocastCPU": autocast.kernel("cpu", _below_autocast),
            "AutocastCUDA": autocast.kernel("cuda", _below_autocast),
        },
        fake=implementation.fake_forward,
        vmap=_vmap_forward,
    ),
    registration.Operator(
        schema("evoformer_attn_backward", BackwardCall, num_results=5),
        kernels={
            "CompositeExplicitAutograd": implementation.backward,
            "Autograd": _autograd_backward,
        },
        fake=implementation.fake_backward,
        vmap=_vmap_backward,
    ),
)
flops.register(forward_op, backward_op)
