"""Random calls keep the error law (fuzz.py); what it says of one that does not repeats it."""

import math
import random
import re
from functools import partial

import pytest
import torch

from deepspeed4science.reference import evoformer_attention
from tests.numeric import fuzz
from tests.numeric.cases import DEVICES, cuda_reason
from tests.numeric.law import check
from tests.numeric.random_calls import MOST_ELEMENTS, MOST_SCORES, Call, draw, draw_large, smaller

pytestmark = pytest.mark.usefixtures("seed", "one_thread")

# On a GPU; otherwise nearly every call would compile a kernel of its own.
KINDS = (("bf16", 32), ("fp32", 16))
LARGE_KINDS = (("bf16", 32), ("bf16", 64), ("bf16", 128), ("fp16", 32))


@pytest.mark.parametrize("device", DEVICES)
def test_random_calls_keep_the_law(device, session_seed):
    kinds = () if device == "cpu" else KINDS
    if kinds:
        fuzz.compile_kinds(kinds)
    _, failing = fuzz.fuzz(40, session_seed, device, kinds=kinds, least=60)
    assert failing is None, fuzz.report(session_seed, failing, device)


@pytest.mark.gpu
@pytest.mark.skipif(cuda_reason() is not None, reason=cuda_reason() or "")
def test_large_random_calls_keep_the_law(session_seed):
    """Many tiles for each block, and rows compared one by one."""
    fuzz.compile_kinds(LARGE_KINDS, alignments=(True,))
    broken = partial(fuzz.is_broken, rows=True)
    _, failing = fuzz.fuzz(40, session_seed, "cuda", broken, LARGE_KINDS, draw_large, least=60)
    assert failing is None, fuzz.report(session_seed, failing, "cuda", rows=True)


def transposed_pair_bias(q, k, v, bias1, bias2, row_mask=None, scale=None):
    """Wrong where the pair bias is square and not symmetric."""
    if bias2 is not None and bias2.shape[-1] == bias2.shape[-2]:
        bias2 = bias2.transpose(-1, -2)
    return evoformer_attention(q, k, v, bias1, bias2, row_mask=row_mask, scale=scale)


def last_of_many_keys_forgotten(q, k, v, bias1, bias2, row_mask=None, scale=None):
    """Wrong from 33 keys on."""
    last = torch.zeros(k.shape[2], dtype=torch.bool)
    last[32:] = k.shape[2] > 32
    if bias1 is None:
        bias1 = torch.zeros(1, 1, 1, 1, k.shape[2])
    bias1 = bias1.masked_fill(last, 0 if bias1.dtype == torch.bool else -torch.inf)
    return evoformer_attention(q, k, v, bias1, bias2, row_mask=row_mask, scale=scale)


def without_pair_gradient(q, k, v, bias1, bias2, **options):
    return evoformer_attention(q, k, v, bias1, bias2.detach() + 0 * bias2, **options)


@pytest.mark.parametrize(
    ("wrong", "sizes"),
    [
        (transposed_pair_bias, {"Lq": 2, "Lk": 2, "bias1": "none"}),
        (last_of_many_keys_forgotten, {"Lq": 1, "Lk": 33, "bias2": "none"}),
    ],
    ids=["transposed", "forgotten"],
)
def test_a_wrong_implementation_is_found_and_made_small(wrong, sizes, session_seed):
    _, failing = fuzz.fuzz(60, session_seed, "cpu", partial(fuzz.is_broken, function=wrong))
    assert failing is not None
    call = failing.smallest
    found = {name: getattr(call, name) for name in sizes}
    assert found == sizes and call.B == call.N == call.H == call.D == 1
    assert call.layout == call.do == "contiguous" and not call.row_mask
    lines = fuzz.report(session_seed, failing, "cpu", wrong)
    again = [Call.parse(line) for line in re.findall(r'--call "(.*)"', lines)]
    assert again == [failing.smallest, failing.drawn]
    assert all(fuzz.failure(call, "cpu", wrong) for call in again)


@pytest.mark.parametrize(
    ("length", "error", "always", "broken"),
    [
        (8, 5e-7, False, False),
        (8, 5e-7, True, True),
        (8, 2e-6, False, True),
        (8, 1e-3, False, True),
        (8, math.nan, False, True),
        (64, 3e-7, False, False),
        (64, 8e-7, False, True),
    ],
    ids=["few-once", "few-always", "few-large", "few-huge", "nan", "many-once", "many-large"],
)
def test_chance_is_no_mistake(length, error, always, broken):
    """An error past the law in one draw; only a large one, or NaN, tells of a mistake. Of many
    elements, no large one is chance.
    """
    call = Call(seed=7, Lq=length // 2, Lk=length, D=8, Dv=8)
    first = call.inputs().q

    def wrong(q, *others, **options):
        here = error if always or torch.equal(q, first) else 0.0
        return evoformer_attention(q, *others, **options) * (1 + here)

    assert fuzz.failure(call, "cpu", wrong)
    assert fuzz.is_broken(call, "cpu", wrong) == broken


def test_what_may_be_chance():
    inputs = Call(
        seed=7, Lq=40, Lk=2, D=8, Dv=8
    ).inputs()  # of K and V few elements, of Q and O many
    assert fuzz.may_be_chance("AssertionError: dK: 15 > 1; dQ: 1.9 > 1", inputs)
    for wrong in ("dK: 16.5 > 1", "dQ: 2.1 > 1", "dK: nan > 1", "dV: NaN in other places"):
        assert not fuzz.may_be_chance(f"AssertionError: dK: 1.5 > 1; {wrong}", inputs)
    assert not fuzz.may_be_chance("RuntimeError: 3 > 2", inputs)


def test_one_wrong_row_of_many_is_found():
    """Of 3,000 rows, one is wrong by a tenth, which the norm of all does not show."""
    call = Call(seed=7, dtype="bf16", N=10, Lq=75, Lk=20, H=4, D=8, Dv=8)

    def wrong(*tensors, **options):
        out = evoformer_attention(*tensors, **options)
        factor = torch.ones_like(out)
        factor[-1, -1, -1, -1] += 0.1
        return out * factor

    assert not fuzz.failure(call, "cpu", evoformer_attention, rows=True)
    assert not fuzz.failure(call, "cpu", wrong)
    said = fuzz.failure(call, "cpu", wrong, rows=True)
    assert said.startswith("AssertionError: O, row [0, 9, 74, 3]: ") and fuzz.is_broken(
        call, "cpu", wrong, rows=True
    )


def test_large_calls():
    for seed in range(50):
        call = draw_large(random.Random(seed))
        assert call.D % 8 == call.Dv % 8 == 0
        heads = call.B * call.N * call.H
        assert call.N == 1 or heads * call.Lq * call.Lk <= MOST_SCORES
        assert call.N == 1 or heads * (call.Lq + 2 * call.Lk) * 128 <= MOST_ELEMENTS


def test_a_gradient_that_underflows_keeps_the_law():
    """Gradients of 1e-9 are 0 in float16, whoever computes them."""
    inputs = Call(seed=7, Lq=4, Lk=8, D=8, Dv=8, bias2="normal", bias2_dtype="fp16").inputs()
    inputs.do = torch.full_like(inputs.q, 1e-8) * torch.randn_like(inputs.q)
    check(inputs, without_pair_gradient)
    inputs.do *= 1e5
    with pytest.raises(AssertionError, match="dbias2: 1 > "):
        check(inputs, without_pair_gradient)


def test_a_call_is_the_same_whoever_reads_it():
    for _ in range(50):
        call = draw(random.Random())
        assert Call.parse(str(call)) == call
        assert all(step != call for step in smaller(call))
        first, second = call.inputs(), call.inputs()
        for a, b in zip(first.tensors(), second.tensors(), strict=True):
            assert (a is None) == (b is None) and (a is None or torch.equal(a, b))


def test_the_command(capsys):
    assert fuzz.main(["--seconds", "0.2", "--seed", "3"]) == 0
    assert "seed 3: " in capsys.readouterr().out
    assert fuzz.kinds_of("bf16:32,fp16:64") == (("bf16", 32), ("fp16", 64))
    assert fuzz.main(["--call", "seed=3 Lq=2 Lk=2"]) == 0
    assert "keeps the law" in capsys.readouterr().out
    assert fuzz.main(["--call", "seed=3 Lq=0"]) == 1
    assert "at least 1" in capsys.readouterr().out
