"""Biases of shapes that do not fit: the message says what to pass, and that is taken."""

import re

import pytest
import torch

from deepspeed4science import DS4Sci_EvoformerAttention
from deepspeed4science.bias_advice import advice
from deepspeed4science.errors import InvalidInputError

LOOKS = {
    "mask of rows and keys": (1, (2, 3, 9), "passed as mask[:, :, None, None, :]"),
    "mask of keys": (1, (2, 9), "passed as mask[:, None, None, None, :]"),
    "pair bias without N": (2, (2, 4, 9, 9), "passed as bias2.unsqueeze(1)"),
    "pair bias, heads last": (2, (2, 9, 9, 4), "passed as bias2.permute(0, 3, 1, 2).unsqueeze(1)"),
    "a pair bias of each row n": (2, (2, 3, 4, 9, 9), "make each n a batch"),
    "one that looks like nothing": (2, (5, 9), "bias2 (second) is the pair bias"),
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_bias_of_another_shape_is_told_what_to_pass(look):
    number, shape, told = LOOKS[look]
    B, N, H, L = 2, 3, 4, 9
    q = torch.randn(B, N, L, H, 8)
    biases = [None, torch.randn(shape)] if number == 2 else [torch.randn(shape)]
    with pytest.raises(InvalidInputError, match=re.escape(told)):
        DS4Sci_EvoformerAttention(q, q, q, biases)
    advised = told.removeprefix("passed as ")
    if advised != told:  # then it is taken
        given = {"mask": biases[-1], "bias2": biases[-1]}
        biases[-1] = eval(advised, given)
        assert DS4Sci_EvoformerAttention(q, q, q, biases).shape == q.shape


@pytest.mark.parametrize("name", ["bias1", "bias2"])
def test_heads_before_lengths_are_told(name):
    """OpenFold's layout of Q, K and V, with biases that have this package's."""
    q = torch.randn(2, 3, 4, 9, 8)
    of_keys, of_pairs = torch.zeros(2, 3, 1, 1, 9), torch.randn(2, 1, 4, 9, 9)
    biases = [of_keys, None] if name == "bias1" else [None, of_pairs]
    with pytest.raises(InvalidInputError, match=rf"{name}: .* heads before lengths: pass q\.tr"):
        DS4Sci_EvoformerAttention(q, q, q, biases)


@pytest.mark.parametrize(
    ("name", "shape", "sizes", "told"),
    [
        ("bias1", (5, 1, 1, 1, 9), (2, 3, 9, 9, 9), "bias1 (first) is the key mask"),
        ("bias2", (1, 3, 4, 9, 9), (3, 3, 4, 9, 9), "make each n a batch"),
    ],
    ids=["as many heads as keys", "as many batches as rows n"],
)
def test_a_size_that_may_be_either_is_no_sign(name, shape, sizes, told):
    assert told in advice(name, shape, *sizes)
