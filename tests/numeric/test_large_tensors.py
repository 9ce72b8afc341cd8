"""Tensors of more than 2^31 elements on a GPU, forward and backward: offsets need 64 bits.

dO is 0 but for some rows n, queries and heads: the first and last ones, and those at 2^31 elements.
So the reference needs these alone, and all other gradients are 0.
"""

from dataclasses import dataclass

import pytest
import torch

from deepspeed4science.reference import evoformer_attention
from tests.numeric.cases import DTYPES, cuda_reason
from tests.numeric.law import Inputs, determinism, ours, run, run_in_dtypes, ulps, violations

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(cuda_reason() is not None, reason=cuda_reason() or ""),
    pytest.mark.usefixtures("seed"),
]


@dataclass(frozen=True)
class Large:
    """A call with a tensor of more than 2^31 elements."""

    id: str
    N: int
    L: int
    H: int
    D: int
    dtype: str = "bf16"
    pair_bias: bool = True
    deterministic: bool = False
    heads_first: bool = False  # in memory

    def needed_bytes(self):
        """Of Q, K, V, O, dO and gradients; bias2, its gradient in float32 and rounded."""
        size = DTYPES[self.dtype].itemsize
        scores = self.H * self.L**2 if self.pair_bias else 0
        return 9 * size * self.N * self.L * self.H * self.D + (2 * size + 4) * scores + 2**34

    def tensor(self):
        shape = (1, self.N, self.L, self.H, self.D)
        if self.heads_first:
            return self._normal(*(shape[i] for i in (0, 1, 3, 2, 4))).transpose(2, 3)
        return self._normal(*shape)

    def bias2(self):
        return self._normal(1, 1, self.H, self.L, self.L) if self.pair_bias else None

    def bias1(self):
        return self._normal(1, self.N, 1, 1, self.L)

    def _normal(self, *shape):
        return torch.zeros(*shape, dtype=DTYPES[self.dtype], device="cuda").normal_()

    def places(self):
        """Rows n, queries and heads whose dO is not 0."""
        row = self.L * self.H * self.D
        n = {0, self.N - 1, min(2**31 // row, self.N - 1)}
        query = {0, 1, self.L // 2, self.L - 2, self.L - 1}
        h = {0, self.H - 1}
        if self.pair_bias:
            h.add(min(2**31 // self.L**2, self.H - 1))
        return tuple(torch.tensor(sorted(places), device="cuda") for places in (n, query, h))


CALLS = (
    Large("column", 17_000, 512, 8, 32, "fp16", pair_bias=False),
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


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.id)
def test_offsets_past_two_to_the_31(call):
    if torch.cuda.mem_get_info()[0] < call.needed_bytes():
        pytest.skip(f"needs {call.needed_bytes() / 2**30:.0f} GiB of free GPU memory")
    n, query, h = call.places()
    keys = torch.arange(call.L, device="cuda")
    q, k, v, bias1, bias2 = call.tensor(), call.tensor(), call.tensor(), call.bias1(), call.bias2()
    assert max(q.numel(), 0 if bias2 is None else bias2.numel()) > 2**31
    do = torch.zeros_like(q)
    for i in n.tolist():
        for head in h.tolist():
            do[:, i, query, head] = torch.randn_like(do[:, i, query, head])
    with determinism(call.deterministic):
        result = run_in_dtypes(ours, Inputs(q, k, v, bias1, bias2, do))

    some_bias2 = None if bias2 is None else bias2[:, :, h][:, :, :, query]
    part = Inputs(
        only(q, n, query, h),
        only(k, n, keys, h),
        only(v, n, keys, h),
        bias1[:, n],
        some_bias2,
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
        None if dbias2 is None else dbias2[:, :, h][:, :, :, query],
    )
    broken = violations(of_part, eager, reference, ulps(of_part))
    assert not broken, "; ".join(broken)
    assert is_finite(o)
    for gradient, found in zip(result[1:], of_part[1:], strict=True):
        if gradient is not None:
            assert count_nonzero(gradient) == count_nonzero(found)


def is_finite(x):
    """By rows n, since a mask of a whole tensor has gigabytes."""
    return all(bool(row.isfinite().all()) for row in x.split(64, dim=1))


def count_nonzero(x):
    return sum(int(row.count_nonzero()) for row in x.split(64, dim=1))
