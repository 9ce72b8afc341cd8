"""docs/math.md, "Where the law depends on chance": float32 with large scores and few keys keeps the
law, where another implementation in float32, as exact as eager, does not.
"""

import math
import random
from dataclasses import fields

import pytest
import torch

from deepspeed4science import few_scores
from deepspeed4science.call import BackwardCall, ForwardCall
from deepspeed4science.problem import describe
from deepspeed4science.reference import evoformer_attention
from tests.numeric.cases import DEVICES, DTYPES, Case
from tests.numeric.law import Inputs, check, ours, run
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


def on(device, inputs):
    values = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    return Inputs(**{name: x.to(device) if torch.is_tensor(x) else x for name, x in values.items()})


def num_broken(session_seed, function, device="cpu"):
    count = 0
    for call in calls(session_seed, 60):
        try:
            check(on(device, call.inputs()), function)
        except AssertionError:
            count += 1
    return count


@pytest.mark.parametrize("device", DEVICES)
def test_large_scores_and_few_keys(device, session_seed):
    assert num_broken(session_seed, ours, device) == 0


def other_roundings(q, k, v, bias1, bias2):
    """The definition with channels and keys in another order."""
    bias1, bias2 = bias1.flip(-1), bias2.flip(-1)
    return evoformer_attention(q.flip(-1), k.flip((2, -1)), v.flip(2), bias1, bias2)


def test_float32_with_other_roundings_breaks_the_law(session_seed):
    assert num_broken(session_seed, other_roundings) >= 3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("Lk", [63, 64, 65])
def test_both_sides_of_the_limit(device, Lk):
    """4,096 scores; the same inputs, and results that differ by roundings only."""
    call = Call(seed=5, Lq=64, Lk=Lk, D=32, Dv=16, bias1="inf", bias2="normal")
    inputs = on(device, call.inputs())
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


# In float64, as GPUs do it; on any device.


class InDouble(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, bias1, bias2, row_mask, scale):
        call = ForwardCall(q, k, v, bias1, bias2, True, row_mask, scale)
        ctx.problem = describe(call)
        o, lse = few_scores.forward(ctx.problem, call)
        ctx.save_for_backward(q, k, v, o, lse, bias1, bias2, row_mask)
        return o

    @staticmethod
    def backward(ctx, do_):
        *tensors, row_mask = ctx.saved_tensors
        call = BackwardCall(do_, *tensors, ctx.needs_input_grad[:5], row_mask)
        return (*few_scores.backward(ctx.problem, call), None, None)


def in_double(q, k, v, bias1, bias2, row_mask=None, scale=None):
    return InDouble.apply(q, k, v, bias1, bias2, row_mask, scale)


def test_in_double(session_seed):
    assert num_broken(session_seed, in_double) == 0


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("Lk", [1, 2, 3, 30])
def test_each_dtype_in_double(dtype, Lk):
    """Also a single query and channel, where one rounding is the whole error."""
    for sizes in ({}, {"B": 2, "N": 3, "Lq": 5, "H": 2, "D": 16}):
        check(
            Case("double", **{"N": 1, "Lq": 1, "H": 1, "D": 1, **sizes}, Lk=Lk).inputs(
                dtype, "cpu"
            ),
            in_double,
        )


def masked_inputs():
    inputs = Case("masked", B=2, N=3, Lq=7, Lk=12, H=2, D=16, Dv=24).inputs(torch.float32, "cpu")
    inputs.bias1[:, 0, ..., 5:] = -math.inf
    inputs.bias1[0, 1] = -math.inf  # a row n that sees nothing
    inputs.bias1[1, 1] = -1e9  # and one that sees all of its keys
    inputs.bias1[:, 2, ..., 3] = -1e9
    inputs.bias2[:, :, :, 4] = -math.inf  # a query
    inputs.do = torch.randn(2, 3, 7, 2, 24)
    inputs.scale = 0.7
    return inputs


def test_masks_in_double():
    inputs = masked_inputs()
    check(inputs, in_double)
    inputs.row_mask = torch.tensor([[True, False, True], [False, True, True]])
    check(inputs, in_double)


def test_what_nobody_sees_in_double():
    """The same results whatever hidden keys, rows n and queries hold."""
    inputs = masked_inputs()
    inputs.row_mask = torch.tensor([[True, True, True], [False, True, True]])
    clean = run(in_double, inputs)
    for x in (inputs.q, inputs.k, inputs.v, inputs.do):
        x[0, 1] = x[1, 0] = math.nan
    inputs.k[:, 2, 3] = inputs.v[:, 2, 3] = math.inf
    inputs.do[:, :, 4] = math.nan
    for x, expected in zip(run(in_double, inputs), clean, strict=True):
        assert torch.equal(x, expected)


@pytest.mark.parametrize(("dtype", "below"), [(torch.float16, 1e4), (torch.float32, 1e8)], ids=str)
def test_which_keys_are_hidden_in_double(dtype, below):
    """(6a): those so far below the largest of their row, but not the largest itself."""
    inputs = Case("hidden", N=2, Lq=3, Lk=5, D=8).inputs(torch.float32, "cpu")
    inputs.bias1 = torch.zeros(1, 2, 1, 1, 5, dtype=dtype)
    expected = run(in_double, inputs)[0]
    inputs.bias1[:, 1] = torch.finfo(dtype).min
    torch.testing.assert_close(run(in_double, inputs)[0], expected)
    inputs.bias1[:, 0, ..., 3] = -below
    inputs.k[:, 0, 3] = inputs.v[:, 0, 3] = math.nan
    assert run(in_double, inputs)[0].isfinite().all()


def test_lse_in_double():
    inputs = masked_inputs()
    call = ForwardCall(*inputs.tensors(), True, None, inputs.scale)
    lse = few_scores.forward(describe(call), call)[1]
    q, k, _, bias1, bias2 = (x.double() for x in inputs.tensors())
    shift = bias1.masked_fill(bias1 == -math.inf, -1e30).amax(-1, keepdim=True)
    shift = shift.masked_fill(shift == -1e30, 0.0)
    scores = torch.einsum("bnqhd,bnkhd->bnhqk", q, k) * inputs.scale + (bias1 - shift) + bias2
    torch.testing.assert_close(lse, scores.logsumexp(-1).float())


def test_wrong_gradients_in_double_are_noticed(monkeypatch):
    inputs = masked_inputs()
    weights = few_scores._weights

    def wrong(*arguments):
        P, *others = weights(*arguments)
        return (P * 1.001, *others)

    monkeypatch.setattr(few_scores, "_weights", wrong)
    with pytest.raises(AssertionError, match="dK"):
        check(inputs, in_double)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_few_scores_in_a_graph_and_deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        compare_with_graph(on("cuda", masked_inputs()))
    finally:
        torch.use_deterministic_algorithms(False)


def compare_with_graph(inputs):
    expected = run(in_double, inputs)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(ours, inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            results = run(ours, inputs)
        graph.replay()
    torch.cuda.synchronize()
    for x, y in zip(results, expected, strict=True):
        assert torch.equal(x, y)
