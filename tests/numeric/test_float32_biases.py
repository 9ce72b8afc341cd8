"""Biases in float32 beside Q, K and V in 16 bits, on a CPU: they keep their digits, which the error
law does not see in O; on GPUs they are rounded to Q's dtype (docs/limits.md).
"""

import pytest
import torch

from deepspeed4science import DS4Sci_EvoformerAttention
from deepspeed4science.reference import evoformer_attention
from tests.numeric.law import relative_error

pytestmark = pytest.mark.usefixtures("seed")


def rounded(tensor, dtype):
    return tensor.to(dtype).float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("L", [9, 200])  # in double, and by the kernels
def test_they_are_not_rounded(dtype, L):
    """By lse, which is in float32; rounded biases are far from it."""
    q, k, v = (torch.randn(2, 3, L, 2, 32).to(dtype) for _ in range(3))
    biases = [3 * torch.randn(2, 3, 1, 1, L), 3 * torch.randn(2, 1, 2, L, L)]

    scores = torch.einsum("bnqhd,bnkhd->bnhqk", q.double(), k.double()) / 32**0.5
    expected = (scores + biases[0].double() + biases[1].double()).logsumexp(-1)

    def error(biases):
        _, lse = DS4Sci_EvoformerAttention(q, k, v, biases, return_lse=True)
        return relative_error(lse, expected)

    assert 10 * error(biases) < error([rounded(one, dtype) for one in biases])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("L", [9, 200])
def test_nor_are_their_gradients(dtype, L):
    """Nearly no element is a number of Q's dtype, and most digits of one are right."""
    q, k, v = (torch.randn(2, 3, L, 2, 32).to(dtype) for _ in range(3))
    biases = [torch.randn(2, 3, 1, 1, L), torch.randn(2, 1, 2, L, L)]
    leaves = [bias.requires_grad_() for bias in biases]
    do_ = torch.randn(q.shape).to(dtype)
    found = torch.autograd.grad(DS4Sci_EvoformerAttention(q, k, v, leaves), leaves, do_)
    doubles = [bias.detach().double().requires_grad_() for bias in biases]
    o = evoformer_attention(q.double(), k.double(), v.double(), *doubles)
    for x, expected in zip(found, torch.autograd.grad(o, doubles, do_.double()), strict=True):
        assert x.dtype == torch.float32
        assert (x == rounded(x, dtype)).double().mean() < 0.1
        assert relative_error(x, expected) < 2 * torch.finfo(dtype).eps
