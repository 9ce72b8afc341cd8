"""The tables of benchmarks/RESULTS.md about masks: this op under each mask, and several
implementations by the share of padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks import masks
from benchmarks.archive import Measurement
from benchmarks.results_tables import DIRECTION_NAMES, PEERS, link, links, number, table

PADDED = {0.0: "none", 1 / 8: "pair-1/8", 1 / 4: "pair-1/4", 1 / 2: "pair-1/2"}  # share: mask

SHARE_NAMES = {0.0: "no padding", 1 / 8: "1/8", 1 / 4: "1/4", 1 / 2: "1/2"}


def padded(measurements: Sequence[Measurement]) -> list[str]:
    """Time of a batch item under each mask beside that without one, from the newest file with both.
    Masks of four lengths have four batch items.
    """
    runs: dict[tuple[str, str], dict[tuple[str, str | None], dict[str, Measurement]]] = {}
    for m in measurements:
        if m.workload in ("tri384", "tri768") and m.peer == "ours":
            run = runs.setdefault((m.workload, m.direction), {}).setdefault((m.file, m.commit), {})
            run[m.mask] = m
    shares: dict[str, dict[tuple[str, str], tuple[float, Measurement]]] = {}
    for column, files in runs.items():
        for by_mask in files.values():  # oldest first: the newest stays
            for mask, m in by_mask.items() if "none" in by_mask else ():
                share = _ms_of_item(m) / _ms_of_item(by_mask["none"])
                shares.setdefault(mask, {})[column] = (share, m)
    columns = [(w, d) for w in ("tri384", "tri768") for d in ("fwd", "bwd")]
    rows = []
    for entry in masks.MASKS:
        cells = shares.get(entry.id, {})
        shown = [m for column, (_, m) in cells.items() if column in columns]
        if entry.id == "none" or not shown:
            continue
        values = [f"{cells[c][0]:.2f}" if c in cells else "-" for c in columns]
        rows.append([entry.source, *values, links(shown)])
    if not rows:
        return []
    heads = [f"L = {w[3:]}, {DIRECTION_NAMES[d]}" for w, d in columns]
    return [
        "Time of a batch item under a mask beside the same call without one, (B, L, L, 4, 32):",
        table(["mask", *heads, "run"], rows),
    ]


def _ms_of_item(m: Measurement) -> float:
    return m.ms / m.shape[0]


def padded_runs(
    measurements: Iterable[Measurement],
) -> dict[tuple[str, str], dict[str, Measurement]]:
    """Measurements of the newest file that has several shares of padding and several
    implementations, by peer and direction, then by mask. This op with masks of -inf counts as a
    peer of its own, "ours by -inf".
    """
    files: dict[str, dict[tuple[str, str], dict[str, Measurement]]] = {}
    for m in measurements:
        base = m.mask.removesuffix("-inf")
        peer = m.peer if base == m.mask else f"{m.peer} by -inf"
        if base != m.mask and m.peer != "ours":
            continue  # -inf is one more large number to them
        if m.workload == "tri768" and base in PADDED.values():
            files.setdefault(m.file, {}).setdefault((peer, m.direction), {})[base] = m
    whole = [
        run
        for run in files.values()
        if {peer for peer, _ in run} - {"ours", "ours by -inf"}
        and len(run.get(("ours", "fwd"), {})) > 2
    ]
    return whole[-1] if whole else {}


def padded_shares(measurements: Sequence[Measurement]) -> list[str]:
    run = padded_runs(measurements)
    if not run:
        return []
    there = {mask for by_mask in run.values() for mask in by_mask}
    shares = {share: mask for share, mask in PADDED.items() if mask in there}
    rows = []
    for (peer, direction), by_mask in sorted(run.items(), key=lambda item: item[0][1] != "fwd"):
        plain = run[peer.removesuffix(" by -inf"), direction]["none"]
        values = [
            number(m.ms) if (m := by_mask.get(mask) or (plain if mask == "none" else None)) else "-"
            for mask in shares.values()
        ]
        name = PEERS[peer.removesuffix(" by -inf")] + (", -inf" if peer.endswith("inf") else "")
        rows.append([name, DIRECTION_NAMES[direction], *values])
    first = next(iter(next(iter(run.values())).values()))
    return [
        "Milliseconds of (1, 768, 768, 4, 32) under the pair mask of one token mask, by the share "
        f"of the tokens that is padding, hidden by -1e9 or by -inf, {first.machine}, "
        f"{link(first.file, first.date)}:",
        table(["", "", *(SHARE_NAMES[share] for share in shares)], rows),
    ]
