"""CONTRACT, on a GPU: the older families' one kernel for all gradients, whose blocks share
accumulators of dq, where many rows n or blocks of keys are hidden.
"""

import math

import pytest
import torch

from deepspeed4science import DS4Sci_EvoformerAttention
from tests.numeric.cases import cuda_reason
from tests.numeric.law import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(cuda_reason() is not None, reason=cuda_reason() or ""),
    pytest.mark.usefixtures("seed"),
]
# B, N, L, H, D. Thousands of (b, n, h) use a hundred accumulators again and again; in the first
# some of these lie in dk and dv, at D = 64 bias2 is read transposed, L = 72 and 360 end in a tile.
# With an odd N, some rows n have no neighbour in their b for dbias2's common additions (D = 32).
SHAPES = [
    (1, 384, 384, 4, 32),
    (2, 150, 360, 4, 16),
    (1, 200, 512, 4, 64),
    (1, 700, 72, 3, 32),
    (3, 75, 200, 2, 32),
]


def hide_nothing(b):
    pass


def hide_every_other_row(b):
    b[:, ::2] = -math.inf


def hide_random_rows(b):
    b[torch.rand(b.shape[:2], device=b.device) < 0.8] = -math.inf


def hide_random_keys_by_32(b):
    by_32 = torch.rand(*b.shape[:4], -(-b.shape[4] // 32), device=b.device) < 0.7
    b[by_32.repeat_interleave(32, -1)[..., : b.shape[4]]] = -math.inf


def hide_after_random_lengths(b):
    lengths = torch.randint(0, b.shape[4] + 1, (*b.shape[:4], 1), device=b.device)
    b[torch.arange(b.shape[4], device=b.device) >= lengths] = -math.inf


def hide_a_pair_map_padded_by_half(b):
    b[:, b.shape[1] // 2 :] = -math.inf
    b[..., b.shape[4] // 2 :] = -math.inf


def hide_all(b):
    b[...] = -math.inf


HIDES = (
    hide_nothing,
    hide_every_other_row,
    hide_random_rows,
    hide_random_keys_by_32,
    hide_after_random_lengths,
    hide_a_pair_map_padded_by_half,
    hide_all,
)


@pytest.mark.parametrize("hide", HIDES, ids=lambda hide: hide.__name__)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_the_kernels_in_a_fixed_order(shape, hide, monkeypatch):
    """Deterministic mode runs others. Both round to bfloat16; here dbias2, before it is summed."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("additions of four floats need 9.0")
    monkeypatch.setenv("DS4S_CUDA_FAMILY", "sm80")
    B, N, L, H, D = shape
    q, k, v = (
        torch.randn(B, N, L, H, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    bias1 = torch.zeros(B, N, 1, 1, L, device="cuda", dtype=torch.bfloat16)
    bias2 = torch.randn(B, 1, H, L, L, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    hide(bias1)
    o = DS4Sci_EvoformerAttention(q, k, v, [bias1, bias2])
    do = torch.randn_like(o)
    gradients = []
    for deterministic in (False, True):
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(deterministic)
        try:
            gradients.append(torch.autograd.grad(o, (q, k, v, bias2), do, retain_graph=True))
        finally:
            torch.use_deterministic_algorithms(before)
    for name, ours, other in zip(("dq", "dk", "dv", "dbias2"), *gradients, strict=True):
        if other.count_nonzero() == 0:
            assert ours.count_nonzero() == 0, name
        else:
            assert ours.isfinite().all(), name
            assert relative_error(ours, other) < 1e-2, name
