"""A result file as a table and as a picture (SVG text, no library)."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any

RowData = dict[str, Any]  # one entry of "results" in a result file

BAR, GAP, LABEL, WIDTH = 16, 14, 150, 560
COLOURS = ("#1d4f91", "#c8553d", "#e2ac42", "#5b8e7d", "#8a6fa8", "#7a8290", "#b3697a", "#3f7f93")


def group(rows: Iterable[RowData]) -> dict[tuple[str, str, str], list[RowData]]:
    """Rows of one workload, dtype and direction together, in file order."""
    groups: dict[tuple[str, str, str], list[RowData]] = {}
    for row in rows:
        groups.setdefault((row["workload"], row["dtype"], row["direction"]), []).append(row)
    return groups


def as_text(result: dict[str, Any]) -> str:
    """One line for each measurement. "vs ours" is how many times longer a peer takes than ours;
    "vs none", where a workload was measured under several masks, how many times longer a score
    takes than the same peer's without a mask.
    """
    shown = [row["workload"] for row in (*result["results"], *result["skipped"])]
    width = max([14, *(len(name) + 2 for name in shown)])
    lines = [
        f"{'workload':<{width}}{'dtype':<10}{'direction':<10}{'peer':<18}"
        f"{'median':>10}{'p20':>10}{'p80':>10}  "
    ]
    lines[0] += f"{'TFLOP/s':>8}{'extra MiB':>11}{'error of O':>12}{'vs ours':>9}"
    unmasked = _unmasked(result["results"])
    lines[0] += f"{'vs none':>9}" if unmasked else ""
    for (workload, dtype, direction), rows in group(result["results"]).items():
        ours = next((r["timing"]["median_ms"] for r in rows if r["peer"] == "ours"), None)
        for row in rows:
            time = row["timing"]
            memory, error = row["peak_extra_bytes"], row["errors"].get("O")
            plain = unmasked.get(_unmasked_key(row))
            lines.append(
                f"{workload:<{width}}{dtype:<10}{direction:<10}{row['peer']:<18}"
                f"{time['median_ms']:>10.3f}{time['p20_ms']:>10.3f}{time['p80_ms']:>10.3f}  "
                f"{row['tflops']:>8.3g}"
                f"{'' if memory is None else format(memory / 2**20, '.1f'):>11}"
                f"{'' if error is None else format(error, '.1e'):>12}"
                f"{'' if ours is None else format(time['median_ms'] / ours, '.2f') + 'x':>9}"
                f"{'' if plain is None else format(_ms_per_score(row) / plain, '.3f') + 'x':>9}"
            )
    for skipped in result["skipped"]:
        where = f"{skipped['workload']:<{width}}{skipped['dtype']:<10}{'-':<10}"
        lines.append(f"{where}{skipped['peer']:<18}{skipped['reason']}")
    return "\n".join(line.rstrip() for line in lines)


def _unmasked_key(row: RowData) -> tuple[str, str, str, str]:
    return (row["workload"].partition("/")[0], row["dtype"], row["direction"], row["peer"])


def _ms_per_score(row: RowData) -> float:
    B, N, L, H, _ = row["shape"]
    return float(row["timing"]["median_ms"] / (B * N * L * L * H))


def _unmasked(rows: Iterable[RowData]) -> dict[tuple[str, str, str, str], float]:
    """Milliseconds for each score of the calls under the mask `none`."""
    return {
        _unmasked_key(row): _ms_per_score(row)
        for row in rows
        if row["workload"].partition("/")[2] == "none"
    }


def as_svg(result: dict[str, Any]) -> str:
    """Bars of milliseconds, each group on its own scale, shorter is better."""
    peers = list(dict.fromkeys(row["peer"] for row in result["results"]))
    environment = result["environment"]
    parts, y = [], 64
    for key, rows in group(result["results"]).items():
        parts.append(_text(12, y, "  ".join(key), bold=True))
        y += 8
        longest = max(row["timing"]["median_ms"] for row in rows)
        for row in rows:
            median = row["timing"]["median_ms"]
            length = max(1.0, WIDTH * median / longest)
            colour = COLOURS[peers.index(row["peer"]) % len(COLOURS)]
            parts.append(_text(LABEL - 8, y + 12, row["peer"], anchor="end"))
            parts.append(
                f'<rect x="{LABEL}" y="{y}" width="{length:.1f}" height="{BAR - 3}" '
                f'fill="{colour}"/>'
            )
            parts.append(
                _text(
                    LABEL + length + 6,
                    y + 12,
                    f"{median:.0f} ms" if median >= 100 else f"{median:.3g} ms",
                )
            )
            y += BAR
        y += GAP + 12
    machine = environment["gpu"] or environment["cpu"]
    title = f"{machine}, torch {environment['torch']}, {environment['date'][:10]}"
    total = LABEL + WIDTH + 110
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total}" height="{y}" '
        'font-family="sans-serif" font-size="12">'
    )
    paper = f'<rect width="{total}" height="{y}" fill="white"/>'
    return "\n".join([head, paper, _text(12, 26, title, bold=True), *parts, "</svg>", ""])


def _text(x: float, y: float, text: str, *, anchor: str = "start", bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}"{weight}>{escape(text)}</text>'
