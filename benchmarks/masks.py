"""Masks of real batches, by name. A workload with a mask keeps its shape.

OpenFold, OpenFold 3, Boltz and Protenix pad a batch to one length and build the mask of pair maps
from one token mask. A padded token is then a hidden key of every row n, and its own row n has only
hidden keys. These models hide keys by -1e9 or a number near it; others do it by -inf.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

HIDING = -1e9


@dataclass(frozen=True)
class Mask:
    """`padding` has one share of L for each batch item, or one for all of them."""

    id: str
    source: str
    random: float = 0.0  # share of the keys that are hidden anywhere; never key 0
    padding: tuple[float, ...] = ()  # share of the keys that are hidden at the end
    padded_rows: bool = False  # the last rows n as well: N = L
    value: float = HIDING  # bias1 of a hidden key
    row_mask: bool = False  # the caller passes a row_mask: the padded rows are not read
    permuted_bias2: bool = False  # a [B, L, L, H] tensor, permuted
    float32_biases: bool = False  # whatever q is

    @property
    def hides_rows(self) -> bool:
        return self.padded_rows and any(self.padding)


def _hiding(name: str, source: str, padding: tuple[float, ...], *, rows: bool) -> tuple[Mask, ...]:
    by_number = Mask(name, f"{source}, by -1e9", padding=padding, padded_rows=rows)
    by_inf = Mask(
        f"{name}-inf", f"{source}, by -inf", padding=padding, padded_rows=rows, value=-math.inf
    )
    if not rows:
        return by_number, by_inf
    unread = Mask(
        f"{name}-rows",
        f"{source}, by -1e9, and row_mask",
        padding=padding,
        padded_rows=True,
        row_mask=True,
    )
    return by_number, by_inf, unread


MASKS: tuple[Mask, ...] = (
    Mask("none", "every key is visible"),
    Mask("random", "a tenth of the keys, anywhere, by -1e9", random=0.1),
    *_hiding("keys-14", "the last 14 % of the keys", (0.14,), rows=False),
    *_hiding("half", "the last half of the keys", (0.5,), rows=False),
    *_hiding("pair-1/9", "pair mask, a ninth is padding", (1 / 9,), rows=True),
    *_hiding("pair-1/8", "pair mask, an eighth is padding", (1 / 8,), rows=True),
    *_hiding("pair-1/4", "pair mask, a quarter is padding", (1 / 4,), rows=True),
    *_hiding("pair-1/2", "pair mask, half is padding", (1 / 2,), rows=True),
    *_hiding(
        "ragged",
        "pair masks of four lengths, 1, 0.8, 0.6 and 0.4 of L",
        (0.0, 0.2, 0.4, 0.6),
        rows=True,
    ),
    Mask("permuted", "nothing hidden, bias2 a permuted [B, L, L, H]", permuted_bias2=True),
    Mask("fp32-biases", "a tenth of the keys, biases in float32", random=0.1, float32_biases=True),
)
BY_ID = {mask.id: mask for mask in MASKS}
DEFAULT = BY_ID["random"]


def named(names: Iterable[str]) -> tuple[Mask, ...]:
    """Masks by id, each once; `all` is all of them.

    Raises:
        ValueError: no mask has one of the names.
    """
    chosen: dict[str, Mask] = {}
    for name in names:
        if name != "all" and name not in BY_ID:
            raise ValueError(f"no mask is called {name!r}; there are: all, {', '.join(BY_ID)}")
        for mask_id in BY_ID if name == "all" else (name,):
            chosen[mask_id] = BY_ID[mask_id]
    return tuple(chosen.values())
