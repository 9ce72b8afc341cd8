"""Small calls of the CUDA op for compute-sanitizer: `compute-sanitizer --tool memcheck python
tests/sanitize.py`.

Every dtype that the family has, aligned and ragged, forward and backward, the backward in both its
variants; without gradients too, since a forward for nobody's backward writes no lse; masks that
leave tiles of keys and whole rows n out. Memory comes straight from CUDA so that a read past a
tensor's end is seen.
"""

import math

import torch

from deepspeed4science import DS4Sci_EvoformerAttention
from op_builder import EvoformerAttnBuilder
from op_builder.ops.instantiations import has_row

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
# What is hidden: a padded pair map, by -inf; every row n other keys; all keys of some queries,
# whose dO is NaN; all but a key in the middle.
MASKS = ("padded", "stairs", "queries", "one key")
MASKED_CALLS = (
    (9, 70, 330, 1, 32),
    (9, 100, 450, 2, 128),
    (132, 100, 330, 2, 32),  # tiles of one pass without a visible key between others
    (3, 70, 300, 40, 64),
    (1, 130, 130, 50, 32),
)
DTYPES = {"fp16": torch.float16, "fp32": torch.float32, "bf16": torch.bfloat16}


def main():
    family = EvoformerAttnBuilder().family(torch.cuda.get_device_capability())
    dtypes = [dtype for name, dtype in DTYPES.items() if has_row(family, "fwd", name)]
    calls = [(dtype, shape, "") for dtype in dtypes for shape in CALLS]
    calls += [(dtypes[-1], shape, mask) for mask in MASKS for shape in MASKED_CALLS[:2]]
    if family == "sm90":
        calls += [(torch.bfloat16, shape, "") for shape in SM90_CALLS]
        calls += [(torch.bfloat16, shape, mask) for mask in MASKS[:3] for shape in MASKED_CALLS[2:]]
    for dtype, shape, mask in calls:
        run(dtype, *shape, mask)
    print(f"sanitize: {len(calls)} calls of {family} done")


def hide(bias1, mask):
    """Hides keys of `[1, N, 1, 1, Lk]`, and says which rows n are read: all, or not the first."""
    N, Lk = bias1.shape[1], bias1.shape[-1]
    if mask == "padded":
        bias1[..., Lk // 2 :] = -math.inf
        bias1[:, N - N // 3 :] = -math.inf
    elif mask == "stairs":
        for n in range(N):
            bias1[:, n, ..., : 70 * n % Lk] = -math.inf
            bias1[:, n, ..., 70 * n % Lk + 90 :] = -1e9 if bias1.dtype != torch.float16 else -6e4
    elif mask == "one key":
        bias1[..., : Lk // 2] = -math.inf
        bias1[..., Lk // 2 + 1 :] = -math.inf
    read = torch.ones(1, N, dtype=torch.bool, device="cuda")
    if mask == "stairs":
        read[:, 0] = False
    return read


def run(dtype, N, Lq, Lk, H, D, mask):
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
    with torch.no_grad():
        row_mask = hide(bias1, mask) if mask else None
        unseen = slice(Lq // 3, Lq // 2 if mask == "queries" else Lq // 3)
        bias2[..., unseen, :] = -math.inf
    o = DS4Sci_EvoformerAttention(q, k, v, [bias1, bias2], row_mask=row_mask)
    with torch.no_grad():
        again = DS4Sci_EvoformerAttention(q, k, v, [bias1, bias2], row_mask=row_mask)
        assert torch.equal(again, o)
    do = torch.randn_like(o)
    do[:, :, unseen] = math.nan
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        gradients = torch.autograd.grad(o, tensors, do, retain_graph=True)
        torch.use_deterministic_algorithms(False)
        torch.cuda.synchronize()
        assert all(gradient.isfinite().all() for gradient in gradients)


if __name__ == "__main__":
    main()
