"""Random calls keep the error law (fuzz.py); what it says of one that does not repeats it."""

import random
import re

import pytest
import torch

from deepspeed4science.reference import evoformer_attention
from tests.numeric import fuzz
from tests.numeric.cases import DEVICES
from tests.numeric.law import check
from tests.numeric.random_calls import Call, draw, smaller

pytestmark = pytest.mark.usefixtures("seed", "one_thread")

# On a GPU; otherwise nearly every call would compile a kernel of its own.
KINDS = (("bf16", 32), ("fp32", 16))


@pytest.mark.parametrize("device", DEVICES)
def test_random_calls_keep_the_law(device, session_seed):
    kinds = () if device == "cpu" else KINDS
    if kinds:
        fuzz.compile_kinds(kinds)
    done, call = fuzz.fuzz(60, session_seed, device, kinds=kinds)
    assert call is None, fuzz.report(session_seed, call, device)
    assert done > 50, f"{done} calls in a minute say little"


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


def compared(function):
    """Raises where `function` breaks the law and the implementation without its mistake does not:
    a gradient that underflows in float16 breaks it in both.
    """

    def checked(inputs):
        try:
            check(inputs, function)
        except AssertionError:
            if keeps_the_law(inputs):
                raise

    return checked


def keeps_the_law(inputs):
    try:
        check(inputs, evoformer_attention)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize(
    ("wrong", "sizes"),
    [
        (transposed_pair_bias, {"Lq": 2, "Lk": 2, "bias1": "none"}),
        (last_of_many_keys_forgotten, {"Lq": 1, "Lk": 33, "bias2": "none"}),
    ],
    ids=["transposed", "forgotten"],
)
def test_a_wrong_implementation_is_found_and_made_small(wrong, sizes, session_seed):
    checked = compared(wrong)
    _, call = fuzz.fuzz(60, session_seed, "cpu", checked)
    assert call is not None
    found = {name: getattr(call, name) for name in sizes}
    assert found == sizes and call.B == call.N == call.H == call.D == 1
    assert call.layout == call.do == "contiguous" and not call.row_mask
    line = fuzz.report(session_seed, call, "cpu", checked)
    again = Call.parse(re.search(r'--call "(.*)"', line)[1])
    assert again == call and fuzz.failure(again, "cpu", checked)


def test_figures_a_little_past_the_law_are_drawn_again():
    call = Call(seed=7)
    seeds = []

    def past(allowed, wrong_seeds):
        def checked(inputs):
            seeds.append(inputs)
            if len(seeds) in wrong_seeds:
                raise AssertionError(f"dK: {1.5 * allowed:.3g} > 1; dV: 1.2 > 1")

        return checked

    assert fuzz.excess("AssertionError: dK: 1.5 > 1; dV: 1.2 > 1") == 1.5
    assert fuzz.excess("AssertionError: dK: 1.5 > 1; dV: NaN or infinities in other places") > 1e9
    assert fuzz.excess("RuntimeError: 3 > 2") > 1e9
    draws = set(range(1, fuzz.DRAWS + 1))
    for allowed, wrong_seeds, broken in (
        (1, draws - {fuzz.DRAWS}, False),
        (1, draws, True),
        (2, {1}, True),
    ):
        seeds.clear()
        assert fuzz.is_broken(call, "cpu", past(allowed, wrong_seeds)) == broken


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
    assert fuzz.main(["--call", "seed=3 Lq=2 Lk=2"]) == 0
    assert "keeps the law" in capsys.readouterr().out
    assert fuzz.main(["--call", "seed=3 Lq=0"]) == 1
    assert "at least 1" in capsys.readouterr().out
