"""Hopper's backward above D = 32 where no row n sees some tiles of 128 keys. kernel_dq_dkdv leaves
them out (sm90/backward/seen_tiles.h), unless rows n are paired.
"""

import pytest
import torch

from tests.numeric.cases import LATER_DELTA, Case, sm90_marks
from tests.numeric.law import NAMES, check

pytestmark = [*sm90_marks(), pytest.mark.usefixtures("only_sm90_runs")]

CASES = [
    Case("pairs-of-48", N=33, Lq=448, Lk=900, H=24, D=48),
    Case("pairs-of-64-odd", B=2, N=19, Lq=330, Lk=515, H=16, D=64, Dv=56),
    Case("sections", N=80, Lq=1000, Lk=900, H=1, D=64),
    Case("dbias2-added", N=9, Lq=203, Lk=900, H=20, D=128),
    Case("dbias2-apart", B=2, N=5, Lq=300, Lk=901, H=16, D=72, Dv=104),
    LATER_DELTA,
]
# The keys that some row n sees, of Lk, and whether each row n sees all of them.
VISIBLE = {
    "all": (0.0, 1.0, True),
    "first-half": (0.0, 0.5, True),
    "last-quarter": (0.75, 1.0, True),
    "a-tile": (0.5, 0.51, True),
    "some-of-others": (0.2, 0.8, False),
    "none": (0.0, 0.0, True),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("visible", VISIBLE)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_tiles_of_keys_that_no_row_sees(case, visible, dtype, plans):
    inputs = case.inputs(dtype, "cuda")
    Lk = inputs.k.shape[2]
    begin, end, everywhere = VISIBLE[visible]
    begin, end = int(begin * Lk), int(end * Lk)
    hidden = torch.ones(Lk, dtype=torch.bool, device="cuda")
    hidden[begin:end] = False
    inputs.bias1[..., hidden] = -torch.inf
    if not everywhere:
        inputs.bias1[:, ::3, ..., : (begin + end) // 2] = -torch.inf
        inputs.bias1[:, 1::3, ..., (begin + end) // 2 :] = -torch.inf
        inputs.bias1[:, 4] = -torch.inf
    for _ in range(2):
        gradients = check(inputs)
        for name in ("dK", "dV"):
            assert (gradients[NAMES.index(name)][:, :, hidden] == 0).all()
    # In float16 there is no memory for the sections of a single head.
    has_memory = dtype == torch.bfloat16 or case.id != "sections"
    assert plans[-1]["dkdv"].startswith("dq_global") == has_memory
