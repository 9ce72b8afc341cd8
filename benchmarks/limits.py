"""The work of the Sm90 kernels at a head dimension of 32 in bfloat16, where the backward takes two
rows n together, beside the ceilings of a GPU (ceilings.py): for each kind of work the share of a
call's time that it would take alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

FORWARD_QUERIES = 128  # that share keys and values, in each of two rows n that share bias2
# Bytes out of L2 for each score of a backward (docs/kernels/sm90.md): each block of a pair of rows
# n reads Q, dO and half of bias2, 16 KiB for 64 x 128 scores.
BACKWARD_BYTES = 16 * 1024 / (64 * 128)
LIMITS = {
    "exponentials": "exponentials",
    "tensor_flop": "tensor cores",
    "l2_shared_bytes": "reads out of L2",
    "l2_sums": "sums into L2",
    "dram_bytes": "DRAM",
}


def work(shape: Sequence[int], direction: str) -> dict[str, float]:
    """The work of a call with both biases, by the names of `LIMITS`; DRAM: every tensor once."""
    B, N, L, H, D = shape
    scores, tensor, bias = B * N * H * L * L, 2 * B * N * L * H * D, 2 * B * H * L * L
    if direction == "fwd":
        return {
            "exponentials": scores,
            "tensor_flop": 4 * scores * D,
            "l2_shared_bytes": scores * (1 + 4 * D / FORWARD_QUERIES),
            "l2_sums": 0,
            "dram_bytes": 4 * tensor + bias,
        }
    return {
        "exponentials": scores,
        "tensor_flop": 10 * scores * D,
        "l2_shared_bytes": scores * BACKWARD_BYTES,
        "l2_sums": scores / 2,
        "dram_bytes": 8 * tensor + 2 * bias,
    }


def shares(
    shape: Sequence[int], direction: str, ms: float, per_second: Mapping[str, float]
) -> dict[str, float]:
    """The shares of a call's time, by the names of `LIMITS`."""
    done = work(shape, direction)
    return {name: 1e3 * done[name] / per_second[name] / ms for name in LIMITS}
