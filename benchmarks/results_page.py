"""The text of benchmarks/RESULTS.md: one section for each question, from the result files alone."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence

from benchmarks import archive
from benchmarks import results_calls as calls
from benchmarks import results_padding as padding
from benchmarks import results_tables as tables
from benchmarks.archive import Measurement
from benchmarks.results_tables import CROPS, LONG, ODD, PEERS

PICTURES = {
    "time-by-length": "Time of triangle attention by length, for each implementation",
    "memory-by-length": "Memory of triangle attention by length, for each implementation",
    "time-by-padding": "Time by the share of padding, for each implementation",
    "error-by-peer": "Error of O and of each gradient against float64, for each implementation",
    "share-of-limits": "Share of a call's time that each of its limits alone would take",
}
INTRODUCTION = """\
# Results

Written by `python -m benchmarks results` from the files in [results/](results).
[README.md](README.md) says how each figure is measured.

Milliseconds, medians, bfloat16 and both biases unless a table says otherwise; the backward
computes dq, dk, dv and dbias2. Each row was measured in one run of all its peers; its file is
linked, and the last section has the command of each file. "cuDNN, no bias" and "miniworld-engine,
no bias1" do less work than the others."""


def page(measurements: Sequence[Measurement]) -> str:
    """The whole page; it shows the pictures that `pictures.py` draws."""
    of_record = archive.on_gpu_of_record(measurements)
    cuda = [m for m in of_record if m.family == "sm90"]
    sm80 = [m for m in of_record if m.family == "sm80" and m.direction != "fwd+bwd"]
    bf16, sm80_bf16 = ([m for m in every if m.dtype == "bfloat16"] for every in (cuda, sm80))
    others = [m for m in measurements if m.family != "cpu" and m.machine != archive.GPU_OF_RECORD]
    flex = ("flex", "cudnn")
    parts = [
        INTRODUCTION,
        _section(
            "Training crops",
            _pictured("time-by-length", tables.compared(cuda, CROPS, needs=flex)),
        ),
        _section("Long inference", tables.compared(cuda, LONG, needs=flex)),
        _section(
            "Lengths that are no multiple of 8, and their neighbours",
            tables.compared(cuda, ODD, needs=flex),
        ),
        *_on_other_gpus(others, needs=flex),
        _section("This op alone", tables.alone(cuda)),
        _section(
            "Beside DeepSpeed's kernel",
            tables.compared(
                [m for m in cuda if m.peer in ("ours", "deepspeed")],
                (*CROPS, "tri1536"),
                needs=("deepspeed",),
            ),
        ),
        _section(
            "Padded batches",
            _pictured("time-by-padding", padding.padded_shares(bf16)) + padding.padded(bf16),
        ),
        _section("Memory", _pictured("memory-by-length", tables.memory(bf16))),
        _section("Errors", _pictured("error-by-peer", tables.errors(bf16))),
        _section("Limits", _pictured("share-of-limits", tables.ceilings(bf16))),
        _section("What a peer could not run", _skipped(cuda)),
        _section(
            "Sm80 templates, forced on the same GPU",
            [
                "They serve compute capability 8.0 to 8.9 and everything above 9.0; here by "
                "`DS4S_CUDA_FAMILY=sm80`.",
                *tables.compared(sm80, CROPS, needs=(*flex, "deepspeed")),
                *tables.alone(sm80),
                *padding.padded(sm80_bf16),
            ],
        ),
        _section("Whole layers", calls.layers()),
        _section("OpenFold 3's PairFormer block", calls.blocks()),
        _section("The host's part of a call", calls.host()),
        _section("First call", calls.startup()),
        _section(
            "CPU",
            tables.compared(
                [m for m in measurements if m.family == "cpu"], ("cpu64x384",), needs=("eager",)
            ),
        ),
    ]
    text = "\n\n".join(part for part in parts if part)
    return f"{text}\n\n{_files(text)}\n"


def _on_other_gpus(measurements: Sequence[Measurement], *, needs: Sequence[str]) -> list[str]:
    """A section for each GPU and family of kernels: that of the device, or one that was forced."""
    return [
        _section(
            f"Crops on one {machine}, {family.capitalize()} kernels",
            tables.compared(
                [m for m in measurements if (m.machine, m.family) == (machine, family)],
                (*CROPS, *ODD),
                needs=needs,
            ),
        )
        for machine, family in sorted({(m.machine, m.family) for m in measurements})
    ]


def _files(text: str) -> str:
    """The files that the page links, each with the command that wrote it."""
    files = sorted(set(re.findall(r"\(results/([^)]+)\)", text)))
    rows = []
    for file in files:
        environment = archive.environment(file)
        rows.append(
            [
                f"[{file}](results/{file})",
                str(environment["gpu"] or environment.get("cpu")),
                str(environment.get("torch", "-")),
                str(environment.get("commit") or "-"),
                f"`{archive.command(file)}`",
            ]
        )
    return _section(
        "Files", [tables.table(["file", "machine", "torch", "commit", "command"], rows)]
    )


def _pictured(name: str, blocks: list[str]) -> list[str]:
    """The blocks behind their picture; nothing if the blocks are empty."""
    return [f"![{PICTURES[name]}](pictures/{name}.svg)", *blocks] if blocks else []


def _section(title: str, blocks: Iterable[str]) -> str:
    content = [block for block in blocks if block]
    return "\n\n".join([f"## {title}", *content]) if content else ""


def _skipped(measurements: Sequence[Measurement]) -> list[str]:
    """The peers that could not run, and why, from the newest run with most peers."""
    runs: dict[str, set[str]] = {}
    for m in measurements:
        runs.setdefault(m.file, set()).add(m.peer)
    if not runs:
        return []
    most = max(len(peers) for peers in runs.values())
    file = [name for name, peers in runs.items() if len(peers) == most][-1]
    if not (archive.RESULTS / file).exists():
        return []
    rows = [
        [PEERS.get(peer, peer), textwrap.shorten(reason, 200, placeholder=" ...")]
        for peer, reasons in archive.skipped(file).items()
        for reason in reasons
    ]
    head = f"In the run of {tables.link(file, file)}:"
    return [head, tables.table(["", "reason"], rows)] if rows else []
