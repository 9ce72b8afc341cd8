"""The error law is a check that can fail: implementations with one planted mistake each must break
it.
"""

import pytest
import torch

from deepspeed4science.reference import evoformer_attention
from tests.numeric.cases import DTYPES, Case
from tests.numeric.law import check, check_each_query, check_weights, ours

CASE = Case("wrong", B=2, N=3, Lq=40, H=2)


class _ScaledGradient(torch.autograd.Function):
    """Identity whose gradient is multiplied by `factor`."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


def scale_times_1_5(q, k, v, bias1, bias2):
    return evoformer_attention(q * 1.5, k, v, bias1, bias2)


def dbias1_halved(q, k, v, bias1, bias2):
    return evoformer_attention(q, k, v, _ScaledGradient.apply(bias1, 0.5), bias2)


def dbias2_halved(q, k, v, bias1, bias2):
    return evoformer_attention(q, k, v, bias1, _ScaledGradient.apply(bias2, 0.5))


def bias1_dropped(q, k, v, bias1, bias2):
    return evoformer_attention(q, k, v, bias1 * 0, bias2)


def bias2_dropped(q, k, v, bias1, bias2):
    return evoformer_attention(q, k, v, bias1, bias2 * 0)


def bias2_transposed(q, k, v, bias1, bias2):
    return evoformer_attention(q, k, v, bias1, bias2.transpose(-1, -2))


def keys_reversed_in_v(q, k, v, bias1, bias2):
    return evoformer_attention(q, k, v.flip(2), bias1, bias2)


def nan_in_one_place(q, k, v, bias1, bias2):
    o = evoformer_attention(q, k, v, bias1, bias2)
    poison = torch.zeros_like(o)
    poison[0, 0, 0, 0, 0] = torch.nan
    return o + poison


WRONG = (
    scale_times_1_5,
    dbias1_halved,
    dbias2_halved,
    bias1_dropped,
    bias2_dropped,
    bias2_transposed,
    keys_reversed_in_v,
    nan_in_one_place,
)


@pytest.mark.usefixtures("seed")
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_the_law_notices(wrong, dtype):
    with pytest.raises(AssertionError):
        check(CASE.inputs(dtype, "cpu"), wrong)


@pytest.mark.usefixtures("seed")
def test_an_unwritten_output_is_noticed():
    """What a kernel leaves out shows as NaN once memory is poisoned
    (`fill_uninitialized_memory`).
    """
    inputs = CASE.inputs(torch.float32, "cpu")

    def forgets_the_last_query(q, k, v, bias1, bias2):
        o = ours(q, k, v, bias1, bias2)
        empty = torch.full_like(o, torch.nan)
        return torch.cat((o[:, :, :-1], empty[:, :, -1:]), dim=2)

    with pytest.raises(AssertionError, match="NaN or infinities"):
        check(inputs, forgets_the_last_query)


class _SmallGradientsLost(torch.autograd.Function):
    """Identity; of its gradient what is small beside the largest is flushed to zero."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return torch.where(grad.abs() > 1e-3 * grad.abs().max(), grad, 0)


@pytest.mark.usefixtures("seed")
@pytest.mark.parametrize("place", ["q", "bias2"])
def test_small_rows_that_are_lost_are_noticed(place):
    def forgets_small_rows(q, k, v, bias1, bias2):
        if place == "q":
            return ours(_SmallGradientsLost.apply(q), k, v, bias1, bias2)
        return ours(q, k, v, bias1, _SmallGradientsLost.apply(bias2))

    inputs = CASE.inputs(torch.float32, "cpu")
    check_each_query(inputs)
    with pytest.raises(AssertionError, match={"q": "dQ", "bias2": "dbias2"}[place]):
        check_each_query(inputs, forgets_small_rows)


class _FromLse(torch.autograd.Function):
    """Attention whose backward takes exp(S - lse) for its weights, everything in float32."""

    @staticmethod
    def forward(ctx, q, k, v, bias1, bias2):
        scores = torch.einsum("...qhd,...khd->...hqk", q, k) / q.shape[-1] ** 0.5 + bias1 + bias2
        weights = (scores - scores.logsumexp(-1, keepdim=True)).exp()
        ctx.save_for_backward(q, k, v, weights)
        return torch.einsum("...hqk,...khd->...qhd", scores.softmax(-1), v)

    @staticmethod
    def backward(ctx, do):
        q, k, v, weights = ctx.saved_tensors
        dv = torch.einsum("...hqk,...qhd->...khd", weights, do)
        d_weights = torch.einsum("...qhd,...khd->...hqk", do, v)
        delta = (weights * d_weights).sum(-1, keepdim=True)
        d_scores = weights * (d_weights - delta)
        dq = torch.einsum("...hqk,...khd->...qhd", d_scores, k) / q.shape[-1] ** 0.5
        dk = torch.einsum("...hqk,...qhd->...khd", d_scores, q) / q.shape[-1] ** 0.5
        dbias1 = d_scores.sum((2, 3), keepdim=True)
        return dq, dk, dv, dbias1, d_scores.sum(1, keepdim=True)


@pytest.mark.usefixtures("seed")
def test_weights_rebuilt_from_a_rounded_lse_are_noticed():
    """Where -1e9 stands on all keys."""
    inputs = CASE.inputs(torch.float32, "cpu")
    inputs.bias1[:, 1] = -1e9
    check(inputs)
    with pytest.raises(AssertionError, match=r"dV: .*dbias1: .*dbias2: "):
        check(inputs, _FromLse.apply)


@pytest.mark.usefixtures("seed")
def test_weights_that_do_not_sum_to_one_are_noticed():
    """Where the law allows anything: the weights of eager, 2 % too large."""

    def with_large_weights(q, k, v, bias1, bias2):
        return evoformer_attention(q, k, _ScaledGradient.apply(v, 1.02), bias1, bias2)

    inputs = CASE.inputs(torch.bfloat16, "cpu")
    inputs.bias1.fill_(-1e9)
    check(inputs, with_large_weights)
    with pytest.raises(AssertionError, match="sum of dV"):
        check_weights(inputs, with_large_weights)
