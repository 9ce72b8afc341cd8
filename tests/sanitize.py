"""Small calls of the CUDA op for compute-sanitizer: `compute-sanitizer --tool memcheck python
tests/sanitize.py`.

The calls cover every dtype of the family, aligned and unaligned lengths, the forward with and
without lse, the backward with and without deterministic sums, and masks that hide tiles of keys or
whole rows n. Run with PYTORCH_NO_CUDA_MEMORY_CACHING=1: each tensor is then an allocation of its
own, and reads past its end are detected.
"""

import math

import torch

from deepspeed4science import DS4Sci_EvoformerAttention
from op_builder import EvoformerAttnBuilder
from op_builder.ops.instantiations import has_row

# N, Lq, Lk, H, D
CALLS = ((2, 40, 40, 2, 32), (2, 37, 71, 1, 32), (1, 130, 130, 1, 16))
# Hopper's pipelines have up to eight stages for keys, queries or the operands of a product of one
# row n. A race is possible from the second use of a stage on. In bfloat16 only: float16 runs the
# same code, except in FLOAT16_CALLS.
SM90_CALLS = (
    (3, 65, 200, 1, 128),  # wide tiles are made of several boxes
    (2, 65, 330, 1, 32),  # stages of keys are used again
    (2, 330, 65, 1, 32),  # stages of queries are used again
    (18, 40, 72, 1, 32),  # stages of rows n are used again, in two slices that both add to dbias2
    (9, 100, 72, 1, 32),  # clusters of two blocks load K and V for each other
    (5, 200, 130, 1, 128),  # the same, with an odd number of stages
    (300, 200, 200, 2, 48),  # clusters divide the rows n of dbias2
    (280, 9, 9, 2, 32),  # blocks have a second tile
    (132, 100, 330, 2, 32),  # dk, dv and dq in one kernel; blocks compute two (n, h) each
    (132, 130, 230, 2, 32),  # the same, dq by a warpgroup of its own
    (131, 130, 260, 2, 32),  # the same, with a row n that has no partner for dbias2
    (132, 520, 200, 1, 32),  # the same, for more queries
    (132, 100, 202, 1, 32),  # with sums of dbias2 in rows of their own
    (132, 780, 70, 1, 32),  # the queries in two parts, or halves in the blocks of a cluster
    (78, 1540, 130, 1, 32),  # clusters of three
    (60, 2310, 130, 1, 32),  # clusters of four
    (1, 130, 520, 2, 32),  # clusters of five, each block with a part of the keys
    (132, 100, 200, 2, 48),  # dk, dv and dq in one kernel for wider heads
    (132, 400, 130, 1, 48),  # the same in clusters of two blocks
    (3, 70, 302, 40, 64),  # dq by additions to accumulators in L2
    (3, 60, 300, 40, 64),  # the same with two rows n in a cluster
    (2, 40, 301, 60, 128),
    (2, 60, 300, 60, 128),  # dbias2 by additions, too
    (2, 20, 1100, 8, 128),  # the same, with rows of dbias2 that order_dbias2 reads twice
    (1, 130, 130, 140, 32),  # N = 1: blocks have a second tile
    (1, 130, 450, 80, 32),  # N = 1: two warpgroups divide the keys of a tile, and of a second one
)
FLOAT16_CALLS = ((3, 70, 302, 40, 64), (2, 60, 300, 60, 128))  # dq is added up in float32
# padded: -inf, as for padded pair maps. stairs: other keys in each row n, and row n 0 left out by
# row_mask. queries: bias2 hides all keys of some queries, whose dO is NaN. one key: all but one.
MASKS = ("padded", "stairs", "queries", "one key")
# On 9.0, blocks of two rows n exchange dS for dbias2, those of the third row have no partner.
SM80_CALLS = ((3, 200, 300, 2, 32),)
MASKED_CALLS = (
    (9, 70, 330, 1, 32),
    (9, 100, 450, 2, 128),
    (132, 100, 330, 2, 32),  # dk, dv and dq in one kernel, with hidden tiles between visible ones
    (132, 130, 230, 2, 32),  # the same with two warpgroups
    (131, 100, 332, 2, 32),  # the same with two rows n in a cluster
    (131, 530, 140, 2, 32),  # the same for more queries
    (131, 780, 132, 1, 32),  # the same, the queries in two parts
    (3, 60, 300, 40, 64),
    (1, 130, 450, 80, 32),
)
DTYPES = {"fp16": torch.float16, "fp32": torch.float32, "bf16": torch.bfloat16}


def main():
    family = EvoformerAttnBuilder().family(torch.cuda.get_device_capability())
    dtypes = [dtype for name, dtype in DTYPES.items() if has_row(family, "fwd", name)]
    calls = [(dtype, shape, "") for dtype in dtypes for shape in CALLS]
    calls += [(dtypes[-1], shape, mask) for mask in MASKS for shape in MASKED_CALLS[:2]]
    if family == "sm90":
        calls += [(torch.bfloat16, shape, "") for shape in SM90_CALLS]
        calls += [(torch.float16, shape, "") for shape in FLOAT16_CALLS]
        calls += [(torch.bfloat16, shape, mask) for mask in MASKS[:3] for shape in MASKED_CALLS[2:]]
    if family == "sm80":
        calls += [(torch.bfloat16, shape, mask) for mask in ("", *MASKS) for shape in SM80_CALLS]
    for dtype, shape, mask in calls:
        run(dtype, *shape, mask)
    print(f"sanitize: {len(calls)} calls of {family} done")


def hide(bias1, mask):
    """Hides keys in bias1 `[1, N, 1, 1, Lk]`; returns the row_mask: all rows n, or all but the
    first.
    """
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
