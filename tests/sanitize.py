"""Small calls of the CUDA op for compute-sanitizer: `compute-sanitizer --tool memcheck python
tests/sanitize.py`.

Every dtype that the family has, aligned and ragged, forward and backward, the backward in both its
variants; without gradients too, since a forward for nobody's backward writes no lse. Memory comes
straight from CUDA so that a read past a tensor's end is seen.
"""

import torch

from deepspeed4science import DS4Sci_EvoformerAttention
from op_builder import EvoformerAttnBuilder
from op_builder.instantiations import has_row

# N, Lq, Lk, H, D
CALLS = ((2, 40, 40, 2, 32), (2, 37, 71, 1, 32), (1, 130, 130, 1, 16))
# Hopper's pipelines have up to eight places for keys, queries or an operand of one n, and are raced
# for from the second time round; in bfloat16 only, of which float16 is a copy.
SM90_CALLS = (
    (3, 65, 200, 1, 128),  # wide tiles are made of several boxes
    (2, 65, 330, 1, 32),  # keys come round
    (2, 330, 65, 1, 32),  # queries come round
    (18, 40, 72, 1, 32),  # rows n come round, in two slices that meet in dbias2
    (9, 100, 72, 1, 32),  # clusters of two blocks bring each other K and V
    (5, 200, 130, 1, 128),  # the same, with an odd number of places
    (280, 9, 9, 2, 32),  # blocks come to a second tile
    (132, 100, 330, 2, 32),  # one pass for dk, dv and dq, twice over the keys of a second head
    (132, 780, 70, 1, 32),  # clusters of two blocks, each with half of the queries
    (132, 100, 200, 2, 48),  # both again for wider heads
    (132, 400, 130, 1, 48),
    (3, 70, 300, 40, 64),  # dq by additions to slots in L2
    (2, 40, 301, 60, 128),
    (2, 60, 300, 60, 128),  # dbias2 by additions as well
    (1, 130, 130, 50, 32),  # blocks of several tiles for one n
)
DTYPES = {"fp16": torch.float16, "fp32": torch.float32, "bf16": torch.bfloat16}


def main():
    family = EvoformerAttnBuilder().family(torch.cuda.get_device_capability())
    dtypes = [dtype for name, dtype in DTYPES.items() if has_row(family, "fwd", name)]
    calls = [(dtype, shape) for dtype in dtypes for shape in CALLS]
    if family == "sm90":
        calls += [(torch.bfloat16, shape) for shape in SM90_CALLS]
    for dtype, shape in calls:
        run(dtype, *shape)
    print(f"sanitize: {len(calls)} calls of {family} done")


def run(dtype, N, Lq, Lk, H, D):
    q, k, v, bias1, bias2 = tensors = [
        torch.randn(*shape, device="cuda").to(dtype).requires_grad_()
        for shape in (
            (1, N, Lq, H, D),
            (1, N, Lk, H, D),
            (1, N, Lk, H, D),
            (1, N, 1, 1, Lk),
            (1, 1, H, Lq, Lk),
        )
    ]
    o = DS4Sci_EvoformerAttention(q, k, v, [bias1, bias2])
    with torch.no_grad():
        assert torch.equal(DS4Sci_EvoformerAttention(q, k, v, [bias1, bias2]), o)
    do = torch.randn_like(o)
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        gradients = torch.autograd.grad(o, tensors, do, retain_graph=True)
        torch.use_deterministic_algorithms(False)
        torch.cuda.synchronize()
        assert all(gradient.isfinite().all() for gradient in gradients)


if __name__ == "__main__":
    main()
