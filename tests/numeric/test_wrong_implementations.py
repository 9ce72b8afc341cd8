"""The error law is a check that can fail: implementations with one planted mistake each must break
it.
"""

import pytest
import torch

from deepspeed4science import DS4Sci_EvoformerAttention
from deepspeed4science.backends.cpu import CpuBackend
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
    """What a kernel leaves out shows as NaN, since memory is poisoned (`poisoned_memory`)."""
    inputs = CASE.inputs(torch.float32, "cpu")

    def forgets_the_last_query(q, k, v, bias1, bias2):
        o = ours(q, k, v, bias1, bias2)
        empty = torch.full_like(o, torch.nan)
        return torch.cat((o[:, :, :-1], empty[:, :, -1:]), dim=2)

    with pytest.raises(AssertionError, match="NaN or infinities"):
        check(inputs, forgets_the_last_query)


def test_all_results_are_poisoned(monkeypatch):
    """What kernels are given to write into."""
    monkeypatch.setattr(CpuBackend, "launch", lambda *_: 0)
    for dtype in (torch.float32, torch.bfloat16):
        for Dv in (16, 24):
            x = CASE.inputs(dtype, "cpu")
            v = torch.randn(*x.v.shape[:-1], Dv, dtype=dtype)
            leaves = [one.requires_grad_() for one in (x.q, x.k, v, x.bias1, x.bias2)]
            o, lse = DS4Sci_EvoformerAttention(*leaves[:3], leaves[3:], return_lse=True)
            gradients = torch.autograd.grad(o, leaves, torch.ones_like(o))
            assert all(result.isnan().all() for result in (o, lse, *gradients))


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
    """Where the law allows anything: the weights of eager, 2 % too large. In bias2, since the
    definition takes bias1's largest number from its row first.
    """

    def with_large_weights(q, k, v, bias1, bias2):
        return evoformer_attention(q, k, _ScaledGradient.apply(v, 1.02), bias1, bias2)

    inputs = CASE.inputs(torch.bfloat16, "cpu")
    inputs.bias2.fill_(-1e9)
    check(inputs, with_large_weights)
    with pytest.raises(AssertionError, match="sum of dV"):
        check_weights(inputs, with_large_weights)


def unshifted(q, k, v, bias1, bias2):
    """The formula as it stands: beside -1e9 scores have no digits."""
    scores = torch.einsum("...qhd,...khd->...hqk", q, k) / q.shape[-1] ** 0.5 + bias1 + bias2
    return torch.einsum("...hqk,...khd->...qhd", scores.softmax(-1), v)


def one_shift_for_all_rows(q, k, v, bias1, bias2):
    return unshifted(q, k, v, bias1 - bias1.detach().amax(), bias2)


def finite_rows_become_zero(q, k, v, bias1, bias2):
    """Takes a row that -1e9 hides whole for one without a visible key."""
    hidden = bias1.detach().amax(-1, keepdim=True) < -1e8
    return evoformer_attention(q, k, v, bias1, bias2).masked_fill(hidden, 0.0)


def shifted_in_the_forward_only(q, k, v, bias1, bias2):
    shifted = evoformer_attention(q, k, v, bias1, bias2)
    raw = unshifted(q, k, v, bias1, bias2)
    return raw + (shifted - raw).detach()


@pytest.mark.usefixtures("seed")
@pytest.mark.parametrize(
    "wrong",
    [unshifted, one_shift_for_all_rows, finite_rows_become_zero, shifted_in_the_forward_only],
    ids=lambda wrong: wrong.__name__,
)
@pytest.mark.parametrize("value", [-1e9, -3e38])
def test_rows_that_one_number_hides_lose_no_digits_unnoticed(value, wrong):
    inputs = CASE.inputs(torch.float32, "cpu")
    inputs.bias1[:, 1] = value
    check(inputs)
    with pytest.raises(AssertionError):
        check(inputs, wrong)


@pytest.mark.usefixtures("seed")
def test_a_threshold_that_hides_too_much_is_noticed():
    def hides_at_8(q, k, v, bias1, bias2):
        lowest = bias1.detach().amax(-1, keepdim=True) - 8
        return evoformer_attention(q, k, v, bias1.masked_fill(bias1 < lowest, -torch.inf), bias2)

    inputs = Case("threshold", B=1, N=2, Lq=40, Lk=300).inputs(torch.float32, "cpu")
    inputs.bias1[..., 100:] -= 10
    check(inputs)
    with pytest.raises(AssertionError):
        check(inputs, hides_at_8)


def row_mask_ignored(q, k, v, bias1, bias2, row_mask):
    return evoformer_attention(q, k, v, bias1, bias2)


def row_mask_multiplies(q, k, v, bias1, bias2, row_mask):
    return evoformer_attention(q, k, v, bias1, bias2) * row_mask[..., None, None, None]


@pytest.mark.usefixtures("seed")
@pytest.mark.parametrize("poison", [False, True])
@pytest.mark.parametrize("wrong", [row_mask_ignored, row_mask_multiplies])
def test_a_wrong_row_mask_is_noticed(wrong, poison):
    """0 times NaN is NaN."""
    inputs = CASE.inputs(torch.float32, "cpu")
    inputs.row_mask = torch.tensor([[True, False, True], [False, True, True]])
    if poison:
        inputs.v[~inputs.row_mask] = torch.nan
    elif wrong is row_mask_multiplies:
        pytest.skip("right as long as all numbers are finite")
    check(inputs)
    with pytest.raises(AssertionError):
        check(inputs, wrong)
