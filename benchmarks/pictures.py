"""The pictures of benchmarks/RESULTS.md, as SVG with the same bytes for the same figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.archive import Measurement, on_gpu_of_record
from benchmarks.limits import LIMITS
from benchmarks.results_padding import PADDED, SHARE_NAMES, padded_runs
from benchmarks.results_page import PICTURES
from benchmarks.results_tables import (
    DIRECTION_NAMES,
    PEERS,
    newest_errors,
    newest_runs,
    newest_shares,
)

matplotlib.rcParams.update({"svg.hashsalt": "deepspeed4science", "svg.fonttype": "none"})
LENGTHS = {f"tri{length}": length for length in (256, 384, 768, 1024, 1536, 2048)}
STYLES = {  # colour, marker; this op is drawn last, on top
    "cudnn": ("#9aa1a9", "x"),
    "deepspeed": ("#8a6fa8", "v"),
    "openfold3-triton": ("#b3697a", "<"),
    "turbopairformer": ("#7a5c3e", ">"),
    "cuequivariance": ("#c8553d", "s"),
    "cudnn-biased": ("#3f4650", "P"),
    "trifast": ("#5b8e7d", "^"),
    "flex": ("#e2ac42", "D"),
    "miniworld-engine": ("#3f9fb3", "*"),
    "ours": ("#1d4f91", "o"),
}


def draw(measurements: Sequence[Measurement], folder: Path) -> None:
    """Writes the pictures of `results_page.PICTURES` that have measurements."""
    folder.mkdir(exist_ok=True)
    here = on_gpu_of_record(measurements)
    cuda = [m for m in here if (m.family, m.dtype) == ("sm90", "bfloat16")]
    figures = {
        "time-by-length": _time,
        "memory-by-length": _memory,
        "time-by-padding": _padding,
        "error-by-peer": _errors,
        "share-of-limits": _limits,
    }
    for name in PICTURES:
        if figure := figures[name](cuda):
            # No date and no random identifiers, so that the same figures give the same file.
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})


def _two_panels(title: str) -> tuple[Figure, dict[str, Axes]]:
    """Forward left, backward right."""
    figure = Figure(figsize=(10.5, 4.2), layout="constrained")
    panels = dict(zip(("fwd", "bwd"), figure.subplots(1, 2), strict=True))
    for direction, axes in panels.items():
        axes.set_title(DIRECTION_NAMES[direction])
        axes.grid(alpha=0.3)
    figure.suptitle(title, fontsize=9)
    return figure, panels


def _legend(figure: Figure, axes: Axes) -> None:
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", fontsize=7)


def _time(measurements: Sequence[Measurement]) -> Figure:
    runs = newest_runs(measurements, tuple(LENGTHS), needs=("flex", "cudnn"))
    shown = [m for rows in runs.values() for m in rows]
    figure, panels = _two_panels(_caption(shown))
    shown += _of_others(measurements, {(m.peer, m.direction) for m in shown})
    for direction, axes in panels.items():
        _lines(axes, [m for m in shown if m.direction == direction], "ms")
        axes.set_ylabel("ms")
    _legend(figure, panels["fwd"])
    return figure


def _of_others(
    measurements: Sequence[Measurement], there: set[tuple[str, str]]
) -> list[Measurement]:
    """The newest calls of peers that the newest runs do not have in a direction."""
    newest = {
        (m.peer, m.direction, m.workload): m
        for m in measurements  # oldest first
        if (m.peer, m.direction) not in there and m.workload in LENGTHS and m.mask == "random"
    }
    return list(newest.values())


def _memory(measurements: Sequence[Measurement]) -> Figure:
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    runs = newest_runs(measurements, tuple(LENGTHS), needs=("flex",))
    shown = [m for key, rows in runs.items() if key[1] == "bwd" for m in rows]
    _lines(axes, shown, "MiB")
    axes.set_ylabel("MiB on top of the inputs, forward and backward")
    _legend(figure, axes)
    figure.suptitle(_caption(shown), fontsize=9)
    return figure


def _padding(measurements: Sequence[Measurement]) -> Figure | None:
    run = padded_runs(measurements)
    if not run:
        return None
    first = [m for by_mask in run.values() for m in by_mask.values()][:1]
    there = {mask for by_mask in run.values() for mask in by_mask}
    figure, panels = _two_panels(
        _caption(first) + ", (1, 768, 768, 4, 32), pair mask by -1e9 unless -inf is named"
    )
    for (name, direction), by_mask in run.items():
        peer = name.removesuffix(" by -inf")
        colour, marker = STYLES[peer]
        points = {**run[peer, direction], **by_mask}  # without padding both are the same
        shares = [share for share, mask in PADDED.items() if mask in points]
        panels[direction].plot(
            shares,
            [points[PADDED[share]].ms for share in shares],
            color=colour,
            marker=marker,
            markersize=4,
            linestyle="-" if name == peer else "--",
            label=PEERS[peer] + ("" if name == peer else ", -inf"),
        )
    for axes in panels.values():
        axes.set_xlabel("share of the tokens that is padding")
        shown = [share for share, mask in PADDED.items() if mask in there]
        axes.set_xticks(shown, [SHARE_NAMES[share] for share in shown])
        axes.set_ylim(bottom=0)
        axes.set_ylabel("ms")
    _legend(figure, panels["fwd"])
    return figure


def _errors(measurements: Sequence[Measurement]) -> Figure | None:
    newest = newest_errors(measurements)
    if not newest:
        return None
    figure = Figure(figsize=(10.5, 4.2), layout="constrained")
    axes = figure.subplots()
    names = list(newest[0].errors)
    for m in newest:
        colour, marker = STYLES.get(m.peer, ("#555555", "."))
        there = [(i, m.errors[name]) for i, name in enumerate(names) if name in m.errors]
        place = 0.7 * (newest.index(m) / max(1, len(newest) - 1) - 0.5)
        axes.plot(
            [i + place for i, _ in there],
            [value for _, value in there],
            color=colour,
            marker=marker,
            linestyle="none",
            label=PEERS[m.peer].removesuffix(", no bias1"),  # there is none
        )
    axes.set_xticks(range(len(names)), names)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("||x - float64|| / ||float64||")
    axes.grid(alpha=0.3, axis="y")
    _legend(figure, axes)
    figure.suptitle(_caption(newest), fontsize=9)
    return figure


def _limits(measurements: Sequence[Measurement]) -> Figure | None:
    found = newest_shares(measurements)
    if not found:
        return None
    figure, panels = _two_panels(_caption([m for m, _ in found.values()]))
    colours = ("#1d4f91", "#e2ac42", "#5b8e7d", "#c8553d", "#9aa1a9")
    for direction, axes in panels.items():
        lengths = {LENGTHS[w]: shares for (d, w), (_, shares) in found.items() if d == direction}
        for (limit, label), colour in zip(LIMITS.items(), colours, strict=True):
            points = [(length, 100 * lengths[length][limit]) for length in sorted(lengths)]
            x, y = zip(*points, strict=True)
            axes.plot(x, y, color=colour, marker="o", markersize=4, label=label)
        _length_axis(axes, sorted(lengths))
        axes.set_ylim(0, 100)
        axes.set_ylabel("% of the time of a call")
    _legend(figure, panels["fwd"])
    return figure


def _lines(axes: Axes, measurements: Sequence[Measurement], unit: str) -> None:
    newest = max((m.date[:10] for m in measurements), default="")
    for peer, (colour, marker) in STYLES.items():
        mine = [m for m in measurements if m.peer == peer]
        points = sorted(
            (LENGTHS[m.workload], m.ms if unit == "ms" else (m.extra_bytes or 0) / 2**20)
            for m in mine
        )
        if points:
            x, y = zip(*points, strict=True)
            day = max(m.date[:10] for m in mine)
            label = PEERS[peer] if day == newest else f"{PEERS[peer]} ({day})"
            axes.plot(x, y, color=colour, marker=marker, markersize=4, label=label)
    axes.set_yscale("log")
    axes.grid(alpha=0.3)
    _length_axis(axes, sorted({LENGTHS[m.workload] for m in measurements}))


def _length_axis(axes: Axes, lengths: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.minorticks_off()
    axes.set_xlabel("L of (1, L, L, 4, 32)")


def _caption(measurements: Sequence[Measurement]) -> str:
    dates = sorted({m.date[:10] for m in measurements})
    days = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"{measurements[0].machine}, {measurements[0].dtype}, both biases, {days}"
