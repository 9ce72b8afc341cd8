"""benchmarks/RESULTS.md: one table for each question, written from the result files alone.

A row of a table that compares implementations comes from one file, the newest that has what the
table asks for: its figures were measured in one run on one machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks import masks
from benchmarks.archive import Measurement, latest
from benchmarks.shapes import WORKLOADS

PEERS = {  # column heads, in this order
    "ours": "this op",
    "ours-deterministic": "deterministic",
    "flex": "FlexAttention",
    "cuequivariance": "cuEquivariance",
    "trifast": "trifast",
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
LONG = ("tri768", "tri1536", "tri2048")
ODD = ("tri389", "tri392", "tri448", "tri1369", "tri1408")
SHAPE_OF = {
    w.id: ", ".join(map(str, w.shape)) + ("" if w.bias2 else " (bias1 only)") for w in WORKLOADS
}
PICTURES = {
    "time-by-length": "Time of triangle attention by length, for each implementation",
    "memory-by-length": "Memory of triangle attention by length, for each implementation",
}
INTRODUCTION = """\
# Results

Written by `python -m benchmarks results` from the files in [results/](results).
[README.md](README.md) says how each figure is measured.

Milliseconds, medians, bfloat16 and both biases unless a table says otherwise; the backward computes
dq, dk, dv and dbias2. Each row was measured in one run with everybody in it; its file is linked.
cuDNN's attention is called without any bias here and stands for a floor."""


def page(measurements: Sequence[Measurement]) -> str:
    """The whole page, which shows the pictures that `pictures.py` draws."""
    cuda = [m for m in measurements if m.family == "sm90"]
    sm80 = [m for m in measurements if m.family == "sm80" and m.direction != "fwd+bwd"]
    flex = ("flex", "cudnn")
    parts = [
        INTRODUCTION,
        *(f"![{title}](pictures/{name}.svg)" for name, title in PICTURES.items()),
        _section("Training crops", _compared(cuda, CROPS, needs=flex)),
        _section("Long inference", _compared(cuda, LONG, needs=flex)),
        _section(
            "Lengths that are no multiple of 8, and their neighbours",
            _compared(cuda, ODD, needs=flex),
        ),
        _section(
            "Beside DeepSpeed's kernel",
            _compared(
                [m for m in cuda if m.peer in ("ours", "deepspeed")],
                (*CROPS, "tri1536"),
                needs=("deepspeed",),
            ),
        ),
        _section("Padded batches", _padded(cuda)),
        _section("Memory", _memory(cuda)),
        _section(
            "Sm80 templates, forced on the same GPU",
            [
                "They serve compute capability 8.0 to 8.9 and everything above 9.0.",
                *_compared(sm80, CROPS, needs=(*flex, "deepspeed")),
                *_padded(sm80),
            ],
        ),
        _section("Whole layers", _layers()),
        _section("OpenFold 3's PairFormer block", _blocks()),
        _section("The host's part of a call", _host()),
        _section("First call", _startup()),
        _section(
            "CPU",
            _compared(
                [m for m in measurements if m.family == "cpu"], ("cpu64x384",), needs=("eager",)
            ),
        ),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _section(title: str, blocks: Iterable[str]) -> str:
    content = [block for block in blocks if block]
    return "\n\n".join([f"## {title}", *content]) if content else ""


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


def newest_runs(
    measurements: Iterable[Measurement], workloads: Sequence[str], *, needs: Sequence[str]
) -> dict[tuple[str, str, str], list[Measurement]]:
    """For each (dtype, direction, workload) the rows of the newest file that has this op and one of
    the peers that are needed.
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


def _compared(
    measurements: Iterable[Measurement], workloads: Sequence[str], *, needs: Sequence[str]
) -> list[str]:
    runs = newest_runs(measurements, workloads, needs=needs)
    blocks = []
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
        blocks.append(f"{DIRECTION_NAMES[direction].capitalize()}, {dtype}, {machine}:")
        blocks.append(table(["B, N, L, H, D", *(PEERS[p] for p in peers), "run"], rows))
    return blocks


def _padded(measurements: Sequence[Measurement]) -> list[str]:
    """Time under each mask beside the same call without one, from the newest file with both."""
    runs: dict[tuple[str, str], dict[tuple[str, str | None], dict[str, Measurement]]] = {}
    for m in measurements:
        if m.workload in ("tri384", "tri768") and m.peer == "ours":
            run = runs.setdefault((m.workload, m.direction), {}).setdefault((m.file, m.commit), {})
            run[m.mask] = m
    shares: dict[str, dict[tuple[str, str], tuple[float, Measurement]]] = {}
    for column, files in runs.items():
        for by_mask in files.values():  # oldest first: the newest stays
            for mask, m in by_mask.items() if "none" in by_mask else ():
                shares.setdefault(mask, {})[column] = (m.ms / by_mask["none"].ms, m)
    columns = [(w, d) for w in ("tri384", "tri768") for d in ("fwd", "bwd")]
    rows = []
    for entry in masks.MASKS:
        cells = shares.get(entry.id, {})
        if entry.id == "none" or not cells:
            continue
        newest = max((m for _, m in cells.values()), key=lambda m: m.date)
        values = [f"{cells[c][0]:.2f}" if c in cells else "-" for c in columns]
        rows.append([entry.source, *values, link(newest.file, newest.date)])
    if not rows:
        return []
    heads = [f"L = {w[3:]}, {DIRECTION_NAMES[d]}" for w, d in columns]
    return [
        "Time under a mask beside the same call without one, (1, L, L, 4, 32), "
        "by replay of a CUDA graph:",
        table(["mask", *heads, "run"], rows),
    ]


def _memory(measurements: Iterable[Measurement]) -> list[str]:
    runs = newest_runs(measurements, (*CROPS, "tri1536"), needs=("flex",))
    chosen = {key[2]: rows for key, rows in runs.items() if key[1] == "bwd"}
    peers = [
        p
        for p in PEERS
        if p != "ours-deterministic" and any(m.peer == p for r in chosen.values() for m in r)
    ]
    rows = []
    for workload in (*CROPS, "tri1536"):
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


def _layers() -> list[str]:
    newest = latest("layers", device="cuda")
    if newest is None:
        return []
    file, content = newest
    rows = [
        [str(r["length"]), r["layer"], r["mode"], number(r["median_ms"])] for r in content["rows"]
    ]
    return [
        "Triangle attention with its residual, 128 channels, 4 heads of 32, "
        "forward and backward under bfloat16 autocast, "
        f"{content['environment']['gpu']}, {link(file, content['environment']['date'])}:",
        table(["L", "node", "", "ms"], rows),
    ]


def _blocks() -> list[str]:
    newest = latest("blocks", device="cuda")
    if newest is None:
        return []
    file, content = newest
    times = {(r["path"], r["crop"]): number(r["median_ms"]) for r in content["rows"]}
    paths, crops = (list(dict.fromkeys(key)) for key in zip(*times, strict=True))
    rows = [[path, *(times.get((path, crop), "-") for crop in crops)] for path in paths]
    return [
        "Forward and backward, milliseconds, in training mode under bfloat16 autocast, "
        f"{content['environment']['gpu']}, {link(file, content['environment']['date'])}. "
        '"This op" is the package\'s own block with `drop_in.switch("openfold3")`; "our layers" '
        "replace its three attention layers:",
        table(["kernels", *(f"{crop} tokens" for crop in crops)], rows),
        *(f"Left out: {path}: {why}." for path, why in content["skipped"].items()),
    ]


def _newest(kind: str) -> list[tuple[str, dict[str, Any]]]:
    """The newest file of a GPU, and of a CPU."""
    found = [latest(kind, device=device) for device in ("cuda", "cpu")]
    return [file for file in found if file is not None]


def _startup() -> list[str]:
    blocks = []
    for file, content in _newest("startup"):
        environment, seconds = content["environment"], dict(content["startup"])
        compiled = seconds.pop("compile_s", {})
        machine = f"{environment['gpu'] or environment['cpu']}, {environment['num_cores']} cores"
        blocks.append(
            f"{machine}, {link(file, environment['date'])}; seconds beyond `import torch`, "
            "and of each kernel's compilation:"
        )
        rows = [
            [name.removesuffix("_s").replace("_", " "), number(value)]
            for name, value in seconds.items()
        ]
        rows += [[f"`{name}`", number(value)] for name, value in compiled.items()]
        blocks.append(table(["", "s"], rows))
    return blocks


def _host() -> list[str]:
    blocks = []
    for file, content in _newest("host"):
        environment, dtype = content["environment"], content["settings"]["dtype"]
        peers = list(dict.fromkeys(row["peer"] for row in content["rows"]))
        times = {(row["call"], row["peer"]): number(row["median_us"]) for row in content["rows"]}
        rows = [
            [call, *(times.get((call, peer), "") for peer in peers)]
            for call in dict.fromkeys(row["call"] for row in content["rows"])
        ]
        machine = environment["gpu"] or environment["cpu"]
        blocks.append(
            f"{machine}, {dtype}, both biases, {link(file, environment['date'])}; microseconds of "
            "the host for one call, of inputs that a device is done with at once. autograd: a "
            "function that computes nothing:"
        )
        blocks.append(table(["", *(PEERS.get(peer, peer) for peer in peers)], rows))
    return blocks
