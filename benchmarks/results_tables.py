"""The tables of benchmarks/RESULTS.md, one function for each question.

A row of a table that compares implementations comes from one file, the newest that has what the
table asks for: its figures were measured in one run on one machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks import limits, masks
from benchmarks.archive import Measurement, latest
from benchmarks.shapes import WORKLOADS

PEERS = {  # column heads, in this order
    "ours": "this op",
    "ours-deterministic": "deterministic",
    "flex": "FlexAttention",
    "cudnn-biased": "cuDNN, both biases",
    "cuequivariance": "cuEquivariance",
    "trifast": "trifast",
    "miniworld-engine": "miniworld-engine, no bias1",
    "turbopairformer": "turbopairformer",
    "openfold3-triton": "OpenFold 3, Triton",
    "deepspeed": "DeepSpeed",
    "sdpa": "SDPA with mask",
    "eager": "PyTorch eager",
    "cudnn": "cuDNN, no bias",
}
DIRECTION_NAMES = {"fwd": "forward", "bwd": "backward", "fwd+bwd": "forward and backward"}
CROPS = (
    *("tri256", "tri384", "tri768", "row128x256", "row512x384"),
    *("col256x512", "diff48x768", "trunk384", "trunk768", "wide64", "wide128"),
)
LONG = ("tri768", "tri1024", "tri1536", "tri2048")
LONG_AND_CROPS = ("tri256", "tri384", "tri768", "tri1024", "tri1536", "tri2048")
MASK_NAMES = {mask.id: mask.source for mask in masks.MASKS}
ODD = ("tri389", "tri392", "tri448", "tri1369", "tri1408")
SHAPE_OF = {
    w.id: ", ".join(map(str, w.shape)) + ("" if w.bias2 else " (bias1 only)") for w in WORKLOADS
}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: float | None) -> str:
    """Three significant digits; a dash where nothing was measured."""
    if value is None:
        return "-"
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2 if value >= 0.9995 else 3
    return f"{value:.{digits}f}"


def link(file: str, date: str) -> str:
    return f"[{date[:10]}](results/{file})"


def links(measurements: Iterable[Measurement]) -> str:
    """Of all files that a row is from, newest first."""
    newest = sorted(measurements, key=lambda m: m.date, reverse=True)
    return ", ".join(dict.fromkeys(link(m.file, m.date) for m in newest))


def newest_runs(
    measurements: Iterable[Measurement], workloads: Sequence[str], *, needs: Sequence[str]
) -> dict[tuple[str, str, str], list[Measurement]]:
    """For each (dtype, direction, workload), the rows of the newest file that has both this op and
    one of the peers `needs`.
    """
    by_file: dict[tuple[str, str, str], dict[str, list[Measurement]]] = {}
    for m in measurements:
        if m.workload in workloads and m.mask == "random":
            by_file.setdefault((m.dtype, m.direction, m.workload), {}).setdefault(
                m.file, []
            ).append(m)
    chosen = {}
    for key, files in by_file.items():
        for rows in files.values():  # oldest file first: the newest stays
            peers = {row.peer for row in rows}
            if "ours" in peers and peers & set(needs):
                chosen[key] = rows
    return chosen


def compared(
    measurements: Iterable[Measurement], workloads: Sequence[str], *, needs: Sequence[str]
) -> list[str]:
    runs = newest_runs(measurements, workloads, needs=needs)
    parts = []
    for dtype, direction in sorted(
        {key[:2] for key in runs}, key=lambda k: (k[0], list(DIRECTION_NAMES).index(k[1]))
    ):
        chosen = [runs[dtype, direction, w] for w in workloads if (dtype, direction, w) in runs]
        peers = [p for p in PEERS if any(p == m.peer for rows in chosen for m in rows)]
        rows = []
        for run in chosen:
            ms = {m.peer: m.ms for m in run}
            first = run[0]
            rows.append(
                [
                    SHAPE_OF[first.workload],
                    *(number(ms.get(p)) for p in peers),
                    link(first.file, first.date),
                ]
            )
        machine = chosen[0][0].machine
        parts.append(f"{DIRECTION_NAMES[direction].capitalize()}, {dtype}, {machine}:")
        parts.append(table(["B, N, L, H, D", *(PEERS[p] for p in peers), "run"], rows))
    return parts


def alone(measurements: Iterable[Measurement]) -> list[str]:
    """Device times of this op in bfloat16. Each workload and direction is from the newest file of
    replays that has one commit only; a file with several compares versions.
    """
    replays = [m for m in measurements if m.replayed]  # oldest first
    commits: dict[str, set[str | None]] = {}
    for m in replays:
        commits.setdefault(m.file, set()).add(m.commit)
    newest: dict[str, dict[str, Measurement]] = {}
    for m in replays:
        if len(commits[m.file]) == 1 and (m.mask, m.dtype) == ("none", "bfloat16"):
            newest.setdefault(m.workload, {})[m.direction] = m
    rows = []
    for workload in (w.id for w in WORKLOADS if w.id in newest):
        calls = newest[workload]
        ms = (number(calls[d].ms) if d in calls else "-" for d in ("fwd", "bwd"))
        rows.append([SHAPE_OF[workload], *ms, links(calls.values())])
    if not rows:
        return []
    return [
        "The device's time alone, by replays of CUDA graphs, no key hidden, caches not flushed:",
        table(["B, N, L, H, D", "forward", "backward", "run"], rows),
    ]


def memory(measurements: Iterable[Measurement]) -> list[str]:
    wanted = (*CROPS, *LONG[1:], "tri1024")
    runs = newest_runs(measurements, wanted, needs=("flex",))
    chosen = {key[2]: rows for key, rows in runs.items() if key[1] == "bwd"}
    peers = [
        p
        for p in PEERS
        if p != "ours-deterministic" and any(m.peer == p for r in chosen.values() for m in r)
    ]
    rows = []
    for workload in dict.fromkeys(wanted):
        if workload in chosen:
            run = chosen[workload]
            MiB = {m.peer: m.extra_bytes / 2**20 for m in run if m.extra_bytes is not None}
            cells = [number(MiB.get(p)) for p in peers]
            rows.append([SHAPE_OF[workload], *cells, link(run[0].file, run[0].date)])
    if not rows:
        return []
    return [
        "MiB at the peak of forward and backward, on top of the inputs:",
        table(["B, N, L, H, D", *(PEERS[p] for p in peers), "run"], rows),
    ]


def newest_errors(measurements: Iterable[Measurement]) -> list[Measurement]:
    """One row for each peer, of its largest workload, from the newest file that has errors of
    gradients for several peers.
    """
    files: dict[str, dict[str, Measurement]] = {}
    for m in measurements:
        if "dq" in m.errors:
            by_peer = files.setdefault(m.file, {})
            kept = by_peer.get(m.peer)
            if kept is None or m.shape >= kept.shape:
                by_peer[m.peer] = m
    several = [by_peer for by_peer in files.values() if len(by_peer) > 2]
    return [several[-1][p] for p in PEERS if p in several[-1]] if several else []


def errors(measurements: Iterable[Measurement]) -> list[str]:
    newest = newest_errors(measurements)
    if not newest:
        return []
    names = list(newest[0].errors)
    first = newest[0]
    rows = [
        [PEERS[m.peer], *(f"{m.errors[n]:.5f}" if n in m.errors else "-" for n in names)]
        for m in newest
    ]
    return [
        "||x - ref|| / ||ref|| against the same maths in float64, of standard normal inputs "
        f"{SHAPE_OF[first.workload]}, {first.dtype}, {MASK_NAMES[first.mask]}, {first.machine}, "
        f"{link(first.file, first.date)}:",
        table(["", *names], rows),
    ]


def newest_shares(
    measurements: Iterable[Measurement],
) -> dict[tuple[str, str], tuple[Measurement, dict[str, float]]]:
    """The share of each limit by direction and workload, from the newest calls and the newest
    ceilings.
    """
    newest = latest("ceilings", device="cuda")
    if newest is None:
        return {}
    runs = newest_runs(measurements, LONG_AND_CROPS, needs=("flex", "cudnn"))
    found = {}
    for (_, direction, workload), run in runs.items():
        mine = next(m for m in run if m.peer == "ours")
        shares = limits.shares(mine.shape, direction, mine.ms, newest[1]["per_second"])
        found[direction, workload] = (mine, shares)
    return found


def ceilings(measurements: Iterable[Measurement]) -> list[str]:
    newest = latest("ceilings", device="cuda")
    if newest is None:
        return []
    file, content = newest
    found = newest_shares(measurements)
    rows = [
        [
            SHAPE_OF[workload],
            DIRECTION_NAMES[direction],
            *(f"{100 * shares[name]:.0f} %" for name in limits.LIMITS),
            link(m.file, m.date),
        ]
        for direction in ("fwd", "bwd")
        for workload in LONG_AND_CROPS
        if (direction, workload) in found
        for m, shares in [found[direction, workload]]
    ]
    measured = [
        [name.replace("_", " "), f"{value / 1e12:.3g} T/s"]
        for name, value in content["per_second"].items()
    ]
    return [
        f"Measured alone, {content['environment']['gpu']}, "
        f"{link(file, content['environment']['date'])}"
        f"{' (' + content['note'] + ')' if 'note' in content else ''}:",
        table(["", "ceiling"], measured),
        "Share of a call's time that each alone would take, by what the Sm90 kernels do "
        "(limits.py):",
        table(["B, N, L, H, D", "", *limits.LIMITS.values(), "run"], rows),
    ]
