"""The error law is a check that can fail: implementations with one planted mistake each must break
it.
"""

import pytest
import torch

from deepspeed4science.reference import evoformer_attention
from tests.numeric.cases import DTYPES, Case
from tests.numeric.law import check, ours

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
