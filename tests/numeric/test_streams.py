"""CONTRACT, on a GPU: backwards on several streams at once end, whatever the streams' priorities.
Blocks of some kernels wait for other blocks of the same kernel (docs/kernels/dq-accumulators.md).
If some have begun and wait, a kernel on a stream of higher priority must not keep the others out.
"""

import subprocess
import sys

import pytest

from tests.numeric.cases import cuda_reason

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(cuda_reason() is not None, reason=cuda_reason() or ""),
]

# Runs in a process of its own: one that waits forever can only be killed.
CODE = """
import sys
import torch
from deepspeed4science import DS4Sci_EvoformerAttention

B, N, L, H, D, num_backwards = map(int, sys.argv[1:])


def random(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)


calls = []
for priority in (0, -1):
    stream = torch.cuda.Stream(priority=priority)
    with torch.cuda.stream(stream):
        q, k, v = (random(B, N, L, H, D) for _ in range(3))
        bias1, bias2 = random(B, N, 1, 1, L), random(B, 1, H, L, L)
        o = DS4Sci_EvoformerAttention(q, k, v, [bias1, bias2])
        calls.append((stream, o, (q, k, v, bias1, bias2), torch.randn_like(o)))
torch.cuda.synchronize()
for i in range(num_backwards):
    for stream, o, inputs, do in calls:
        with torch.cuda.stream(stream):
            found = torch.autograd.grad(o, inputs, do, retain_graph=True)
    if i % 10 == 9:
        torch.cuda.synchronize()
print("done", all(x.isfinite().all().item() for x in found))
"""
TIMEOUT = 150  # seconds; the backwards take two, compiling the kernels up to sixty


# On Hopper: pairs of rows n with sections of dq, without, accumulators alone, and no accumulators.
@pytest.mark.parametrize(
    "shape",
    [(1, 256, 1024, 4, 64), (1, 48, 768, 16, 48), (1, 64, 512, 8, 128), (1, 256, 256, 4, 32)],
    ids=str,
)
def test_backwards_on_streams_of_two_priorities(shape):
    command = [sys.executable, "-c", CODE, *map(str, (*shape, 200))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.stdout.split() == ["done", "True"], done.stderr
