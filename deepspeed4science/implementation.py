"""The implementation of the operators: a call is described, dispatch chooses its kernel, gradients
get the shapes of their inputs. Beside each operator stands its fake version, for tracing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed4science import dispatch, few_scores
from deepspeed4science.call import BackwardCall, Call, ForwardCall, Gradients
from deepspeed4science.errors import NoBackendError
from deepspeed4science.prepared import PreparedBackward, PreparedForward
from deepspeed4science.problem import Problem, describe


def prepare_forward(
    call: ForwardCall, *, differentiable: bool
) -> Callable[[ForwardCall], tuple[Tensor, Tensor | None]]:
    """A function that computes O and, where it is wanted, lse of this call and of calls like it:
    with tensors of the same shapes, strides, dtypes, devices and alignment to 16 bytes.

    differentiable   the backward may be wanted: it is compiled beside the forward
    """
    problem = describe(call)
    if problem.is_empty:
        return _empty_results
    choice = dispatch.choose(problem, "fwd", call[:3])
    if few_scores.serves(problem):
        return functools.partial(few_scores.forward, problem)
    if call.with_lse and differentiable:
        _prefetch_backward(problem, call)
    return PreparedForward(choice, problem)


def forward(*arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
    """The forward operator; takes the fields of a `ForwardCall`."""
    call = ForwardCall(*arguments, **named)
    o, lse = prepare_forward(call, differentiable=True)(call)
    return o, call.q.new_empty(0, dtype=torch.float32) if lse is None else lse


def _prefetch_backward(problem: Problem, call: ForwardCall) -> None:
    try:
        ahead = dispatch.choose(problem, "bwd", call[:3])
    except NoBackendError:  # perhaps only lse is wanted; a backward would raise this itself
        return
    ahead.backend.kernels.prefetch(ahead.kernel)


def fake_forward(*arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
    call = ForwardCall(*arguments, **named)
    _check_what_is_known(call)
    return _empty_results(call)


def _empty_results(call: ForwardCall) -> tuple[Tensor, Tensor]:
    B, N, Lq, H, _ = call.q.shape
    o = call.q.new_empty((B, N, Lq, H, call.v.shape[4]))
    lse_shape = (B, N, H, Lq) if call.with_lse else (0,)
    return o, call.q.new_empty(lse_shape, dtype=torch.float32)


def prepare_backward(
    call: BackwardCall, *, rounds: bool = False
) -> Callable[[BackwardCall], Gradients]:
    """A function that computes the wanted gradients of this call and of calls like it.

    rounds   gradients of biases may have the dtype of the bias, where kernels round them
    """
    problem = describe(call)
    if problem.is_empty:
        return _zero_gradients
    choice = dispatch.choose(problem, "bwd", (call.q, call.k, call.v, call.o, call.do_))
    p, bias1, bias2 = problem, call.bias1, call.bias2
    is_broadcast = (bias1 is not None and bias1.shape != (p.B, p.N, 1, 1, p.Lk)) or (
        bias2 is not None and bias2.shape != (p.B, 1, p.H, p.Lq, p.Lk)
    )
    compute: Callable[[BackwardCall], Gradients]
    if few_scores.serves(problem):
        compute = functools.partial(few_scores.backward, problem)
    else:
        compute = PreparedBackward(choice, problem, rounds=rounds and not is_broadcast)
    if is_broadcast:
        return lambda call: _summed(call, compute(call))
    return compute


def prepare_backward_into(
    call: BackwardCall,
) -> Callable[[BackwardCall, Sequence[Tensor]], Gradients]:
    """As `prepare_backward`; the function's second argument are the tensors for dq, dk and dv,
    which have the strides of q, k and v.
    """
    compute = prepare_backward(call)
    prepared = compute if isinstance(compute, PreparedBackward) else None

    def compute_into(call: BackwardCall, into: Sequence[Tensor]) -> Gradients:
        gradients = compute(call) if prepared is None else prepared(call, into)
        for target, gradient in zip(into, gradients, strict=False):
            if gradient is not None and gradient is not target:
                target.copy_(gradient)
        return gradients

    return compute_into


def backward(*arguments: Any, **named: Any) -> tuple[Tensor, ...]:
    """The backward operator; takes the fields of a `BackwardCall`."""
    call = BackwardCall(*arguments, **named)
    inputs = (call.q, call.k, call.v, call.bias1, call.bias2)
    wanted = [w and one is not None for w, one in zip(call.wanted, inputs, strict=True)]
    call = call._replace(wanted=wanted)
    gradients = prepare_backward(call)(call)
    return tuple(call.q.new_empty(0) if one is None else one for one in gradients)


def fake_backward(*arguments: Any, **named: Any) -> tuple[Tensor, ...]:
    call = BackwardCall(*arguments, **named)
    _check_what_is_known(call)
    return tuple(_empty_gradient(like, call) for like in _gradient_likes(call))


def _summed(call: BackwardCall, gradients: Gradients) -> Gradients:
    """The gradients, those of broadcast biases summed to the biases' own shapes, math.md (15) and
    (16).
    """
    dq, dk, dv, dbias1, dbias2 = gradients
    return dq, dk, dv, _sum_to(dbias1, call.bias1), _sum_to(dbias2, call.bias2)


def _sum_to(gradient: Tensor | None, like: Tensor | None) -> Tensor | None:
    if gradient is None or like is None:
        return None
    total = gradient.sum_to_size(like.shape)
    if like.shape[-1] < gradient.shape[-1]:
        total = total * 0.0  # a bias that is equal for all keys changes nothing; NaN stays NaN
    return total


def _check_what_is_known(call: Call) -> None:
    """Checks as `describe` does, unless sizes depend on data: those are checked when the kernel
    runs.
    """
    tensors = [one for one in call if isinstance(one, Tensor)]
    if any(isinstance(size, torch.SymInt) for tensor in tensors for size in tensor.shape):
        from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols

        if any(has_free_unbacked_symbols(tensor) for tensor in tensors):
            return
    describe(call)


def _zero_gradients(call: BackwardCall) -> Gradients:
    """Zeros for each wanted gradient; None where it is not wanted."""
    dq, dk, dv, dbias1, dbias2 = (
        _empty_gradient(like, call).zero_() if wanted else None
        for like, wanted in zip(_gradient_likes(call), call.wanted, strict=True)
    )
    return dq, dk, dv, dbias1, dbias2


def _empty_gradient(like: Tensor, call: BackwardCall) -> Tensor:
    of_bias = like is call.bias1 or like is call.bias2
    return torch.empty_like(
        like,
        dtype=torch.float32 if of_bias else like.dtype,
        memory_format=torch.contiguous_format,
    )


def _gradient_likes(call: BackwardCall) -> list[Tensor]:
    """For each gradient a tensor of its shape: the input itself, or one without elements where the
    gradient is not wanted.
    """
    inputs = (call.q, call.k, call.v, call.bias1, call.bias2)
    return [
        tensor if want and tensor is not None else call.q.new_empty(0)
        for tensor, want in zip(inputs, call.wanted, strict=True)
    ]
