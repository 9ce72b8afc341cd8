"""The functions on what `load()` returns, with DeepSpeed's C++ signatures, called as DeepSpeed's
Python calls them.
"""

import pytest
import torch

from deepspeed4science.errors import InvalidInputError
from op_builder import EvoformerAttnCPUBuilder
from tests.numeric import law
from tests.numeric.cases import Case

pytestmark = pytest.mark.usefixtures("seed")


class Caller(torch.autograd.Function):
    """As in DeepSpeed: lse padded to a multiple of 32, empty tensors for what is not there."""

    @staticmethod
    def forward(ctx, q, k, v, bias1, bias2):
        q, k, v = (tensor.contiguous() for tensor in (q, k, v))
        bias1, bias2 = (torch.tensor([]) if bias is None else bias for bias in (bias1, bias2))
        rows, Lq, H = q.shape[:-3].numel(), q.shape[-3], q.shape[-2]
        o, lse = torch.empty_like(q), torch.empty(rows, H, (Lq + 31) // 32 * 32)
        EvoformerAttnCPUBuilder().load(kernels=[]).attention(q, k, v, bias1, bias2, o, lse)
        ctx.save_for_backward(q, k, v, o, lse, bias1, bias2)
        return o

    @staticmethod
    def backward(ctx, do_):
        q, k, v, o, lse, *biases = ctx.saved_tensors
        gradients = [torch.empty_like(tensor) for tensor in (q, k, v)]
        for bias, needed in zip(biases, ctx.needs_input_grad[3:], strict=True):
            gradients.append(torch.zeros_like(bias) if needed else torch.tensor([]))
        loaded = EvoformerAttnCPUBuilder().load(kernels=[])
        loaded.attention_bwd(do_, q, k, v, o, lse, torch.empty_like(lse), *biases, *gradients)
        return tuple(g if g.numel() else None for g in gradients)


def test_keeps_the_error_law():
    case = Case("binding", B=2, N=3, Lq=40, H=2, D=8)
    inputs = case.inputs(torch.float32, "cpu")
    inputs.bias1 = torch.randn(2, 3, 1, 1, 40)
    inputs.bias1[0, 1] = -1e9  # its lse is that of shifted scores
    law.check(inputs, lambda *tensors: Caller.apply(*tensors))


@pytest.mark.parametrize("lead", [(), (3,), (2, 2, 3)], ids=lambda lead: f"rank{len(lead) + 3}")
def test_any_rank_and_no_bias(lead):
    q, k, v = (torch.randn(*lead, 9, 2, 8, requires_grad=True) for _ in range(3))
    o = Caller.apply(q, k, v, None, None)
    inputs = law.Inputs(*(tensor.detach() for tensor in (q, k, v)))
    torch.testing.assert_close(o, law.evoformer_attention(*inputs.tensors()))
    ours = torch.autograd.grad(o.sin().sum(), (q, k, v))
    expected = torch.autograd.grad(law.evoformer_attention(q, k, v).sin().sum(), (q, k, v))
    torch.testing.assert_close(ours, expected)


def test_gradients_of_biases_are_added():
    q = torch.randn(1, 2, 9, 2, 8)
    bias2, empty = torch.randn(1, 1, 2, 9, 9), torch.tensor([])
    o, lse, g = torch.empty_like(q), torch.empty(2, 2, 9), torch.empty_like(q)
    loaded = EvoformerAttnCPUBuilder().load(kernels=[])
    loaded.attention(q, q, q, empty, bias2, o, lse)
    once = torch.zeros_like(bias2)
    call = (q, q, q, q, o, lse, empty, empty, bias2, g, g.clone(), g.clone(), empty)
    loaded.attention_bwd(*call, once)
    twice = once.clone()
    loaded.attention_bwd(*call, twice)
    assert once.abs().max() > 0
    torch.testing.assert_close(twice, 2 * once)
    with pytest.raises(InvalidInputError, match="K: expected"):
        loaded.attention(q, q[..., :4], q, empty, bias2, o, lse)
