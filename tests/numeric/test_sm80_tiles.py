"""CONTRACT, on a GPU: the older families copy bias2 into tiles where a call is long
(sm80/forward/plan.h). The copy changes no bit, whatever is hidden and wherever the tiles end.
"""

import math

import pytest
import torch

from deepspeed4science import DS4Sci_EvoformerAttention
from tests.numeric.cases import cuda_reason
from tests.numeric.test_sm80_fused import HIDES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(cuda_reason() is not None, reason=cuda_reason() or ""),
    pytest.mark.usefixtures("seed"),
]
# B, N, Lq, Lk, H, D. Blocks of 128 queries end in a part of a tile, a warp of 32 queries, or none;
# keys end in a part of a tile.
SHAPES = [
    (1, 320, 320, 320, 4, 32),
    (2, 300, 136, 344, 3, 24),
    (1, 1400, 72, 104, 4, 16),
    (1, 260, 257 * 8, 40, 3, 32),
    (1, 100, 384, 384, 4, 96),
]


BF16, FP16 = torch.bfloat16, torch.float16


def hide_parts_that_begin_within_a_tile(b):
    """Keys are skipped 16 at a time."""
    b[..., :16] = -math.inf
    b[:, ::2, ..., 112:208] = -math.inf


@pytest.mark.parametrize(
    ("family", "dtype"), [("sm80", BF16), ("sm80", FP16), ("sm75", FP16)], ids=str
)
@pytest.mark.parametrize(
    "hide",
    [None, *HIDES, hide_parts_that_begin_within_a_tile],
    ids=lambda hide: hide and hide.__name__,
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tiles_change_no_bit(shape, hide, family, dtype, monkeypatch, plans):
    """A part of the rows n is too little for a copy, and reads bias2 as it lies. hide = None: no
    bias1, so that keys past the end are masked by the kernel. NaN in bias2 stays in its query,
    though a stripe of keys that begins within a tile ends in one of other queries.
    """
    monkeypatch.setenv("DS4S_CUDA_FAMILY", family)
    B, N, Lq, Lk, H, D = shape
    q, k, v = (torch.randn(B, N, L, H, D, device="cuda", dtype=dtype) for L in (Lq, Lk, Lk))
    bias2 = torch.randn(B, 1, H, Lq, Lk, device="cuda", dtype=dtype)
    if hide is hide_parts_that_begin_within_a_tile:
        bias2[:, :, :, -1] = math.nan
    biases = [None, bias2]
    if hide:
        biases[0] = torch.randn(B, N, 1, 1, Lk, device="cuda").to(dtype)
        hide(biases[0])

    def call(rows):
        return DS4Sci_EvoformerAttention(
            *(x[:, rows] for x in (q, k, v)), [hide and biases[0][:, rows], bias2]
        )

    whole = call(slice(None))
    step = max(1, 2**25 // (B * H * Lq * Lk) - 1)
    parts = torch.cat([call(slice(n, n + step)) for n in range(0, N, step)], dim=1)
    assert plans[0].get("bias2_copy") == "tiles"
    assert all("bias2" not in plan for plan in plans[1:])
    assert torch.equal(whole.isnan(), parts.isnan())
    assert torch.equal(whole.nan_to_num(), parts.nan_to_num())
    assert whole[:, :, :-1].isfinite().all()
