"""docs/math.md, "Where the law is a draw": float32 with large scores and few keys keeps the law on
a CPU, where another implementation in float32, as exact as eager, does not.
"""

import random

import pytest
import torch

from deepspeed4science.reference import evoformer_attention
from tests.numeric.cases import Case
from tests.numeric.law import check, ours
from tests.numeric.random_calls import Call

pytestmark = pytest.mark.usefixtures("seed", "one_thread")


def calls(seed, count):
    """4 to 11 keys, B N H of at most 4, scores of a standard deviation of 10."""
    generator = random.Random(seed)
    for _ in range(count):
        B, N, H = generator.choice([(1, 1, 1), (1, 2, 2), (1, 1, 4), (2, 2, 1), (1, 3, 1)])
        yield Call(
            seed=generator.randrange(2**31),
            B=B,
            N=N,
            H=H,
            Lq=generator.randint(4, 11),
            Lk=generator.randint(4, 11),
            D=generator.choice((8, 32, 64)),
            Dv=32,
            spread=10.0,
            bias1="normal",
            bias2="normal",
        )


def num_broken(session_seed, function):
    count = 0
    for call in calls(session_seed, 60):
        try:
            check(call.inputs(), function)
        except AssertionError:
            count += 1
    return count


def test_large_scores_and_few_keys(session_seed):
    assert num_broken(session_seed, ours) == 0


def other_roundings(q, k, v, bias1, bias2):
    """The definition with channels and keys in another order."""
    bias1, bias2 = bias1.flip(-1), bias2.flip(-1)
    return evoformer_attention(q.flip(-1), k.flip((2, -1)), v.flip(2), bias1, bias2)


def test_float32_with_other_roundings_breaks_the_law(session_seed):
    assert num_broken(session_seed, other_roundings) >= 3


@pytest.mark.parametrize("Lk", [63, 64, 65])
def test_both_sides_of_the_limit(Lk):
    """4,096 scores; the same inputs, and results that differ by roundings only."""
    call = Call(seed=5, Lq=64, Lk=Lk, D=32, Dv=16, bias1="inf", bias2="normal")
    inputs = call.inputs()
    check(inputs)
    torch.testing.assert_close(
        ours(*inputs.tensors()), evoformer_attention(*inputs.tensors()), rtol=1e-4, atol=1e-5
    )


def test_equal_scores_of_few_queries():
    """A rounding of their sum is the same for all keys of a query; eager sums ones, exactly."""
    inputs = Case("equal", N=2, Lq=3, Lk=249, H=3, D=16).inputs(torch.float32, "cpu")
    inputs.q.zero_()
    inputs.bias1 = inputs.bias2 = None
    inputs.needs = (True, True, True, False, False)
    check(inputs)
