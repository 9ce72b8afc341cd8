"""`return_lse=True`: the logarithm of the sum of exponentials of the true scores, beside O."""

import math

import pytest
import torch

from deepspeed4science import DS4Sci_EvoformerAttention
from deepspeed4science.backends.kernels import Kernels
from deepspeed4science.reference import evoformer_attention
from tests.numeric.cases import DEVICES

pytestmark = pytest.mark.usefixtures("seed")


def reference_lse(q, k, bias1=None, bias2=None, scale=None):
    scores = torch.einsum("...qhd,...khd->...hqk", q.double(), k.double())
    scores = scores / math.sqrt(q.shape[-1]) if scale is None else scores * scale
    for bias in (bias1, bias2):
        scores = scores if bias is None else scores + bias.double()
    return scores.logsumexp(dim=-1)


def tensors(device, dtype=torch.float32, B=2, N=3, Lq=9, Lk=13, H=2, D=8):
    q = torch.randn(B, N, Lq, H, D, device=device).to(dtype).requires_grad_()
    k, v = (torch.randn(B, N, Lk, H, D, device=device).to(dtype) for _ in range(2))
    bias1 = torch.randn(B, N, 1, 1, Lk, device=device).to(dtype)
    return q, k, v, bias1, torch.randn(B, 1, H, Lq, Lk, device=device).to(dtype)


def check(lse, reference, dtype=torch.float32):
    assert lse.dtype == torch.float32 and not lse.requires_grad
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(lse.double(), reference, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("recorded", [False, True], ids=["plain", "recorded"])
def test_is_that_of_the_scores(device, dtype, recorded):
    q, k, v, bias1, bias2 = tensors(device, dtype)
    with torch.set_grad_enabled(recorded):
        o, lse = DS4Sci_EvoformerAttention(q, k, v, [bias1, bias2], scale=0.3, return_lse=True)
    check(lse, reference_lse(q, k, bias1, bias2, 0.3), dtype)
    assert o.requires_grad == recorded
    torch.testing.assert_close(o, DS4Sci_EvoformerAttention(q, k, v, [bias1, bias2], scale=0.3))


@pytest.mark.parametrize("device", DEVICES)
def test_a_large_bias1_is_in_it_and_hidden_keys_are_not(device):
    """The kernels' own is of scores from which the largest finite bias1 of the row is taken."""
    q, k, v, bias1, bias2 = tensors(device)
    bias1[0, 0] = 1000.0
    bias1[0, 1] -= 500.0
    bias1[1, 0, ..., ::2] = -math.inf
    bias1[1, 1] = -math.inf
    bias1[1, 2, ..., :-1] = -1e9
    _, lse = DS4Sci_EvoformerAttention(q, k, v, [bias1, bias2], return_lse=True)
    check(lse, reference_lse(q, k, bias1, bias2))
    assert (lse[1, 1] == -math.inf).all() and lse[1, 2].abs().max() < 100


@pytest.mark.parametrize("device", DEVICES)
def test_rows_nobody_reads(device):
    q, k, v, bias1, bias2 = tensors(device)
    row_mask = torch.tensor([[True, False, True], [False, True, True]], device=device)
    _, lse = DS4Sci_EvoformerAttention(q, k, v, [bias1, bias2], row_mask=row_mask, return_lse=True)
    assert (lse[~row_mask] == -math.inf).all()
    check(lse[row_mask], reference_lse(q, k, bias1, bias2)[row_mask])


@pytest.mark.parametrize("lead", [(), (3,), (2, 2, 3)], ids=lambda lead: f"rank{len(lead) + 3}")
def test_any_rank_and_a_broadcast_bias(lead):
    q, k, v = (torch.randn(*lead, 9, 2, 8) for _ in range(3))
    bias1 = torch.randn(*lead, 1, 1, 1)
    o, lse = DS4Sci_EvoformerAttention(q, k, v, [bias1], return_lse=True)
    assert o.shape == q.shape and lse.shape == (*lead, 2, 9)
    check(lse, reference_lse(q, k, bias1))


def test_gradients_are_those_without_it():
    q, k, v, bias1, bias2 = tensors("cpu")
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v, bias1, bias2)]
    o, lse = DS4Sci_EvoformerAttention(*leaves[:3], leaves[3:], return_lse=True)
    ours = torch.autograd.grad(o.sin().sum() + lse.sum(), leaves)
    o = DS4Sci_EvoformerAttention(*leaves[:3], leaves[3:])
    for mine, theirs in zip(ours, torch.autograd.grad(o.sin().sum(), leaves), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_alone_it_begins_to_compile_no_backward(monkeypatch):
    ahead = []
    monkeypatch.setattr(Kernels, "prefetch", lambda self, kernel: ahead.append(kernel.direction))
    q, k, v, bias1, bias2 = tensors("cpu")
    for _ in range(2):
        DS4Sci_EvoformerAttention(q.detach(), k, v, [bias1, bias2], return_lse=True)
        with torch.no_grad():
            DS4Sci_EvoformerAttention(q, k, v, [bias1, bias2], return_lse=True)
    assert ahead == []
    DS4Sci_EvoformerAttention(q, k, v, [bias1, bias2])
    assert ahead == ["bwd"]


def test_compiled_vmapped_and_under_autocast():
    q, k, v, bias1, bias2 = tensors("cpu")

    def call(q, k, v):
        return DS4Sci_EvoformerAttention(q, k, v, [bias1, bias2], return_lse=True)

    expected = reference_lse(q, k, bias1, bias2)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    o, lse = compiled(q, k, v)
    check(lse, expected)
    o.sum().backward()
    with torch.no_grad():
        check(compiled(q, k, v)[1], expected)
    o, lse = torch.func.vmap(call)(*(t.detach()[None] for t in (q, k, v)))
    check(lse[0], expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, lse = call(q, k, v)
    assert o.dtype == torch.bfloat16
    check(lse, expected, torch.bfloat16)
    torch.testing.assert_close(
        o.float(), evoformer_attention(q, k, v, bias1, bias2), rtol=0.05, atol=0.05
    )
