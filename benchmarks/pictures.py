"""The pictures of benchmarks/RESULTS.md, as SVG with the same bytes for the same figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.archive import Measurement
from benchmarks.results_page import DIRECTION_NAMES, PEERS, PICTURES, newest_runs

matplotlib.rcParams.update({"svg.hashsalt": "deepspeed4science", "svg.fonttype": "none"})
LENGTHS = {f"tri{length}": length for length in (256, 384, 768, 1536, 2048)}
STYLES = {  # colour, marker; this op is drawn last, on top
    "cudnn": ("#9aa1a9", "x"),
    "deepspeed": ("#8a6fa8", "v"),
    "cuequivariance": ("#c8553d", "s"),
    "trifast": ("#5b8e7d", "^"),
    "flex": ("#e2ac42", "D"),
    "ours": ("#1d4f91", "o"),
}


def draw(measurements: Sequence[Measurement], folder: Path) -> None:
    """Writes every picture of `results_page.PICTURES` into the folder."""
    folder.mkdir(exist_ok=True)
    cuda = [m for m in measurements if m.family == "sm90"]
    figures = {"time-by-length": _time, "memory-by-length": _memory}
    for name in PICTURES:
        # Neither the day of drawing nor a random mark: the same figures give the same file.
        figures[name](cuda).savefig(folder / f"{name}.svg", metadata={"Date": None})


def _time(measurements: Sequence[Measurement]) -> Figure:
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, direction in ((left, "fwd"), (right, "bwd")):
        runs = newest_runs(measurements, tuple(LENGTHS), needs=("flex", "cudnn"))
        _lines(axes, [m for key, rows in runs.items() if key[1] == direction for m in rows], "ms")
        axes.set_title(DIRECTION_NAMES[direction])
        axes.set_ylabel("ms")
    figure.suptitle(_caption(measurements), fontsize=9)
    return figure


def _memory(measurements: Sequence[Measurement]) -> Figure:
    figure = Figure(figsize=(5.2, 3.8), layout="constrained")
    axes = figure.subplots()
    runs = newest_runs(measurements, tuple(LENGTHS), needs=("flex",))
    _lines(axes, [m for key, rows in runs.items() if key[1] == "bwd" for m in rows], "MiB")
    axes.set_ylabel("MiB on top of the inputs, forward and backward")
    figure.suptitle(_caption(measurements), fontsize=9)
    return figure


def _lines(axes: Axes, measurements: Sequence[Measurement], unit: str) -> None:
    for peer, (colour, marker) in STYLES.items():
        points = sorted(
            (LENGTHS[m.workload], m.ms if unit == "ms" else (m.extra_bytes or 0) / 2**20)
            for m in measurements
            if m.peer == peer
        )
        if points:
            x, y = zip(*points, strict=True)
            axes.plot(x, y, color=colour, marker=marker, markersize=4, label=PEERS[peer])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({LENGTHS[m.workload] for m in measurements})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("L of (1, L, L, 4, 32)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)


def _caption(measurements: Sequence[Measurement]) -> str:
    machine = measurements[0].machine
    dates = sorted({m.date[:10] for m in measurements if m.workload in LENGTHS})
    return f"{machine}, bfloat16, both biases, {dates[0]} to {dates[-1]}"
