"""Advice about a bias whose shape does not fit a call, by what it looks like."""

from __future__ import annotations

from collections.abc import Sequence

BIAS_HELP = (
    "bias1 (first) is the key mask, broadcastable to [B, N, 1, 1, Lk]; "
    "bias2 (second) is the pair bias, broadcastable to [B, 1, H, Lq, Lk]; "
    "either may be None, so a pair bias alone is passed as [None, bias2]"
)
_NOT_SHARED = (
    "Kernels read one pair bias for all N, and take one that is expanded over N; where each row n "
    "has its own, make each n a batch: Q, K, V as [B * N, 1, L, H, D], bias2 as "
    "[B * N, 1, H, Lq, Lk]"
)
_HEADS_FIRST = (
    "Q looks like [B, N, H, L, D], with heads before lengths: pass q.transpose(-2, -3), and k and "
    "v likewise"
)


def advice(name: str, shape: Sequence[int], B: int, N: int, H: int, Lq: int, Lk: int) -> str:
    """
    Args:
        name: "bias1" or "bias2".
        shape: five dimensions; those that the caller's tensor did not have lead, of size 1.
        B, N, H, Lq, Lk: sizes, as the call reads Q and K.
    """
    if len(shape) != 5:
        return BIAS_HELP
    lead, last = list(shape[:2]), list(shape[2:])
    if name == "bias1":
        if last[2] == H != Lk:
            return _HEADS_FIRST
        if last == [B, N, Lk]:
            return "A mask [B, N, L] is passed as mask[:, :, None, None, :]"
        if lead == [1, 1] and last == [1, B, Lk]:
            return "A mask [B, L] is passed as mask[:, None, None, None, :]"
        return BIAS_HELP
    if last == [Lq, H, H] and Lq != H:
        return _HEADS_FIRST
    if last == [Lq, Lk, H] and last != [H, Lq, Lk]:
        return "A pair bias [B, L, L, H] is passed as bias2.permute(0, 3, 1, 2).unsqueeze(1)"
    fits = all(size in (1, full) for size, full in zip(last, (H, Lq, Lk), strict=True))
    if fits and lead == [1, B] and B not in (1, N):
        return "A pair bias [B, H, Lq, Lk] is passed as bias2.unsqueeze(1)"
    return _NOT_SHARED if lead[1] > 1 else BIAS_HELP
