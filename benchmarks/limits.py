"""The work of the Sm90 kernels' passes at a head dimension of 32, beside the ceilings of a GPU
(ceilings.py): for each kind of work the share of a call's time that it would take alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

FORWARD_QUERIES = 128  # that share keys and values, in each of two rows n that share bias2
# Bytes out of L2 for each score (docs/kernels/sm90.md): the fused pass over queries and keys reads
# 20 KiB for 64 x 192 scores; the pass of dbias2 reads Q, K, V and dO of 64 queries and 64 keys.
FUSED_BYTES, DBIAS2_BYTES = 20 * 1024 / (64 * 192), 4 * 64 * 32 * 2 / 64**2
LIMITS = {
    "exponentials": "exponentials",
    "tensor_flop": "tensor cores",
    "l2_shared_bytes": "reads out of L2",
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
            "dram_bytes": 4 * tensor + bias,
        }
    return {  # scores are computed twice, once more for dbias2
        "exponentials": 2 * scores,
        "tensor_flop": 14 * scores * D,
        "l2_shared_bytes": scores * (FUSED_BYTES + DBIAS2_BYTES),
        "dram_bytes": 8 * tensor + 2 * bias,
    }


def shares(
    shape: Sequence[int], direction: str, ms: float, per_second: Mapping[str, float]
) -> dict[str, float]:
    """The shares of a call's time, by the names of `LIMITS`."""
    done = work(shape, direction)
    return {name: 1e3 * done[name] / per_second[name] / ms for name in LIMITS}
