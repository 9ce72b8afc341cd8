"""Tensors of more than 2^31 elements, forward and backward: offsets need 64 bits.

A CPU gets tensors of few elements that lie so far apart. On a GPU dO is 0 but for some rows n,
queries and heads, but for one test: the first and last ones, and those at 2^31 elements. So the
reference needs these alone, and all other gradients are 0.
"""

import copy
from dataclasses import dataclass
from unittest import mock

import pytest
import torch

from deepspeed4science import DS4Sci_EvoformerAttention, nn
from deepspeed4science.reference import evoformer_attention
from tests.numeric.cases import DTYPES, Case, cuda_reason
from tests.numeric.law import (
    Inputs,
    check,
    determinism,
    ours,
    plain,
    relative_error,
    run,
    run_in_dtypes,
    ulps,
    violations,
    with_do,
)

pytestmark = pytest.mark.usefixtures("seed")
NEEDS_GPU = pytest.mark.skipif(cuda_reason() is not None, reason=cuda_reason() or "")


@pytest.mark.parametrize("name", ["q", "k", "v", "bias1", "bias2", "do"])
def test_elements_that_are_2_to_the_31_apart(name):
    """The rows n of one tensor, of bias2 the heads."""
    inputs = with_do(Case("far", N=3, Lq=20, H=2, D=16).inputs(torch.bfloat16, "cpu"))
    setattr(inputs, name, far_apart(getattr(inputs, name), dim=2 if name == "bias2" else 1))
    check(inputs)


def far_apart(tensor, dim):
    """The same numbers, 2^31 elements apart along one dimension. The memory between them is never
    touched.
    """
    strides = list(torch.empty(tensor.shape, device="meta").stride())
    strides[dim] = 2**31 + 64
    elements = strides[dim] * (tensor.shape[dim] - 1) + tensor.numel()
    try:
        memory = torch.UntypedStorage(elements * tensor.itemsize)
    except RuntimeError as error:
        pytest.skip(f"no such address space: {error}")
    far = torch.tensor([], dtype=tensor.dtype).set_(memory, 0, tensor.shape, strides)
    return far.copy_(tensor)


@pytest.mark.gpu
@NEEDS_GPU
def test_last_rows_of_a_large_msa_column():
    """All queries and heads of the last rows n, where every element of dO counts."""
    N, L, H, D = 17_000, 512, 8, 32
    if torch.cuda.mem_get_info()[0] < 60 * 2**30:
        pytest.skip("needs 60 GB of free GPU memory")
    q = torch.randn(1, N, L, H, D, dtype=torch.float16, device="cuda")
    assert q.numel() > 2**31
    bias1 = torch.randn(1, N, 1, 1, L, dtype=torch.float16, device="cuda")
    q.requires_grad_()
    o = DS4Sci_EvoformerAttention(q, q, q, [bias1])
    (dq,) = torch.autograd.grad(o, q, torch.ones_like(o))
    last = q.detach()[:, -2:].double().requires_grad_()
    reference = evoformer_attention(last, last, last, bias1[:, -2:].double())
    (reference_dq,) = torch.autograd.grad(reference.sum(), last)
    assert relative_error(o[:, -2:], reference) < 2e-3
    assert relative_error(dq[:, -2:], reference_dq) < 4e-3


@dataclass(frozen=True)
class Large:
    """A call with a tensor of more than 2^31 elements."""

    id: str
    N: int
    L: int
    H: int
    D: int
    dtype: str = "bf16"
    deterministic: bool = False
    heads_first: bool = False  # in memory

    def needed_bytes(self):
        """Of Q, K, V, O, dO and gradients; bias2, its gradient in float32 and rounded."""
        size = DTYPES[self.dtype].itemsize
        scores = self.H * self.L**2
        return 9 * size * self.N * self.L * self.H * self.D + (2 * size + 4) * scores + 2**34

    def tensor(self):
        shape = (1, self.N, self.L, self.H, self.D)
        if self.heads_first:
            return self._normal(*(shape[i] for i in (0, 1, 3, 2, 4))).transpose(2, 3)
        return self._normal(*shape)

    def bias2(self):
        return self._normal(1, 1, self.H, self.L, self.L)

    def bias1(self):
        return self._normal(1, self.N, 1, 1, self.L)

    def _normal(self, *shape):
        return torch.zeros(*shape, dtype=DTYPES[self.dtype], device="cuda").normal_()

    def places(self):
        """Rows n, queries and heads whose dO is not 0."""
        row = self.L * self.H * self.D
        n = {0, self.N - 1, min(2**31 // row, self.N - 1)}
        query = {0, 1, self.L // 2, self.L - 2, self.L - 1}
        h = {0, self.H - 1, min(2**31 // self.L**2, self.H - 1)}
        return tuple(torch.tensor(sorted(places), device="cuda") for places in (n, query, h))


CALLS = (
    Large("triangle", 4200, 4200, 4, 32),
    Large("triangle-heads-first", 4200, 4200, 4, 32, heads_first=True),
    Large("triangle-fixed-order", 4200, 4200, 4, 32, deterministic=True),
    Large("many-rows", 17_000, 512, 8, 32),
    Large("many-rows-fp32", 17_000, 512, 8, 32, "fp32"),
    Large("wide", 400, 4096, 24, 64),
    Large("widest", 2200, 1024, 8, 128),
    Large("pair-bias", 2, 16_500, 8, 16),
    Large("pair-bias-of-one-row", 1, 16_500, 8, 24),
    Large("pair-bias-of-wide-heads", 2, 16_500, 8, 128),
)


def only(x, n, query, h):
    """The part of a tensor `[1, N, L, H, D]`."""
    return x[:, n][:, :, query][:, :, :, h]


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.id)
def test_offsets_past_two_to_the_31(call):
    if torch.cuda.mem_get_info()[0] < call.needed_bytes():
        pytest.skip(f"needs {call.needed_bytes() / 2**30:.0f} GiB of free GPU memory")
    n, query, h = call.places()
    keys = torch.arange(call.L, device="cuda")
    q, k, v, bias1, bias2 = call.tensor(), call.tensor(), call.tensor(), call.bias1(), call.bias2()
    assert max(q.numel(), bias2.numel()) > 2**31
    do = torch.zeros_like(q)
    for i in n.tolist():
        for head in h.tolist():
            do[:, i, query, head] = torch.randn_like(do[:, i, query, head])
    with determinism(call.deterministic):
        result = run_in_dtypes(ours, Inputs(q, k, v, bias1, bias2, do))

    part = Inputs(
        only(q, n, query, h),
        only(k, n, keys, h),
        only(v, n, keys, h),
        bias1[:, n],
        bias2[:, :, h][:, :, :, query],
        only(do, n, query, h),
    )
    eager = run(evoformer_attention, part, part.q.dtype)
    reference = run(evoformer_attention, part, torch.float64)
    o, dq, dk, dv, dbias1, dbias2 = result
    of_part = (
        only(o, n, query, h),
        only(dq, n, query, h),
        only(dk, n, keys, h),
        only(dv, n, keys, h),
        dbias1[:, n],
        dbias2[:, :, h][:, :, :, query],
    )
    broken = violations(of_part, eager, reference, ulps(of_part))
    assert not broken, "; ".join(broken)
    assert is_finite(o)
    for gradient, found in zip(result[1:], of_part[1:], strict=True):
        assert count_nonzero(gradient) == count_nonzero(found)


def is_finite(x):
    """By rows n, since a mask of a whole tensor has gigabytes."""
    return all(bool(row.isfinite().all()) for row in x.split(64, dim=1))


def count_nonzero(x):
    return sum(int(row.count_nonzero()) for row in x.split(64, dim=1))


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("ending", [False, True], ids=["starting", "ending"])
def test_triangle_layers_of_more_than_two_to_the_31_elements(ending):
    L, C = 4200, 128
    needed = 2 * 17 * L * L * C + 2**33  # the product of the projections has four times x's size
    if torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"needs {needed / 2**30:.0f} GiB of free GPU memory")
    compare_layer(ending, L, C, "cuda")


def compare_layer(ending, L, C, device):
    """The gradient of y is 0 but for some pairs (i, j), which depend on x of i and of j alone (of
    the ending node in the second dimension).
    """
    kind = nn.TriangleAttentionEndingNode if ending else nn.TriangleAttentionStartingNode
    layer = kind(C, C // 4, 4).to(device, torch.bfloat16)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    x = torch.zeros(L, L, C, dtype=torch.bfloat16, device=device).normal_().requires_grad_()
    at_the_limit = min(2**31 // (L * C), L - 2)
    rows = [0, at_the_limit, L - 1]  # i
    queries = [1, L // 2, L - 1]  # j
    some = sorted({*rows, *queries})

    def along(tensor, places, dim):
        return tensor.index_select(1 - dim if ending else dim, torch.tensor(places, device=device))

    dy = torch.zeros_like(x)
    pairs = torch.cartesian_prod(torch.tensor(rows), torch.tensor(queries)).to(device).unbind(1)
    part_dy = torch.randn(len(rows) * len(queries), C, device=device).to(x.dtype)
    dy[pairs[::-1] if ending else pairs] = part_dy
    y = layer(x, residual=True)
    dx, *dparameters = torch.autograd.grad(y, [x, *layer.parameters()], dy)
    found = along(along(y.detach(), rows, 0), queries, 1), along(dx, some, 0)
    if ending:
        found = tuple(one.transpose(0, 1) for one in found)

    def of_part(dtype):
        own = copy.deepcopy(layer).to(dtype)
        part = along(x.detach(), some, 0).to(dtype)
        part = (part.transpose(0, 1) if ending else part).contiguous().requires_grad_()
        normed = own.layer_norm(part)
        z = own.linear_z(normed[[some.index(j) for j in queries]]).movedim(-1, 0)[None]
        of_rows = normed[[some.index(i) for i in rows]]
        o = own.mha(of_rows[:, queries], of_rows, biases=(None, z))
        result = part[[some.index(i) for i in rows]][:, queries] + o
        gradients = torch.autograd.grad(
            result, [part, *own.parameters()], part_dy.to(dtype).view_as(result)
        )
        return (result.detach(), *gradients)

    with mock.patch("deepspeed4science.nn.attention.DS4Sci_EvoformerAttention", plain):
        eager, exact = of_part(x.dtype), of_part(torch.float64)
    broken = violations(found, eager[:2], exact[:2], ulps(found), names=("y", "dx"))
    assert not broken, "; ".join(broken)
    assert is_finite(y) and count_nonzero(dx) == count_nonzero(found[1])
    for gradient, expected in zip(dparameters, exact[2:], strict=True):
        assert relative_error(gradient, expected) < 0.05  # a wrong offset is no rounding error
