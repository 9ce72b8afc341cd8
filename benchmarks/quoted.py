"""Tables of other documents that quote RESULTS.md; `python -m benchmarks results` writes them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHAPES = ("1, 384, 384, 4, 32", "1, 768, 768, 4, 32", "1, 512, 384, 8, 32")
COLUMNS = ("this op", "FlexAttention", "cuEquivariance", "cuDNN, no bias")
CPU_SHAPE, CPU_COLUMNS = "1, 64, 384, 4, 32", ("this op", "SDPA with mask", "PyTorch eager")


def readme(results: str) -> str:
    """README's table: forward / backward of training crops on a GPU."""
    section = _section(results, "Training crops")
    forward, backward = (_table(section, f"{name}, ") for name in ("Forward", "Backward"))
    return _markdown(
        ("B, N, L, H, D", *COLUMNS),
        [
            (shape, *(f"{forward[shape][name]} / {backward[shape][name]}" for name in COLUMNS))
            for shape in SHAPES
        ],
    )


def cpu(results: str) -> str:
    section = _section(results, "CPU")
    rows = []
    for dtype in ("bfloat16", "float32"):
        for direction in ("Forward", "Forward and backward"):
            figures = _table(section, f"{direction}, {dtype}, ")[CPU_SHAPE]
            what = f"{direction.lower()}, {dtype}"
            rows.append((what, *(figures[name] for name in CPU_COLUMNS)))
    return _markdown(("", *CPU_COLUMNS), rows)


def sm90(results: str) -> str:
    return _both_directions(_section(results, "Training crops"))


def sm80(results: str) -> str:
    """Of the shapes that are compared with peers, the newest times alone: these are measured more
    often than peers.
    """
    section = _section(results, "Sm80 templates, forced on the same GPU")
    alone, compared = (_table(section, name) for name in ("The device's time alone, ", "Forward, "))
    return _markdown(
        ("B, N, L, H, D", "forward", "backward", "measured"),
        [
            (shape, times["forward"], times["backward"], times["run"][1:].partition("]")[0])
            for shape, times in alone.items()
            if shape in compared
        ],
    )


QUOTING: dict[str, Callable[[str], str]] = {
    "README.md": readme,
    "docs/kernels/cpu.md": cpu,
    "docs/kernels/sm90.md": sm90,
    "docs/kernels/sm80.md": sm80,
}


def _both_directions(section: str) -> str:
    """A kernel page's table: this op's forward and backward for every shape."""
    forward, backward = (_table(section, f"{name}, ") for name in ("Forward", "Backward"))
    return _markdown(
        ("B, N, L, H, D", "forward", "backward"),
        [
            (shape, forward[shape]["this op"], backward[shape]["this op"])
            for shape in forward
            if shape in backward
        ],
    )


def updated(page: str, table: str) -> str:
    """The page with `table` in place of its table of the same head."""
    head = table.partition("\n")[0]
    before, found, rest = page.partition(f"\n{head}\n")
    if not found:
        raise ValueError(f"no table with the head {head}")
    return f"{before}\n{table}\n{rest.partition(chr(10) * 2)[2]}"


def pages() -> dict[Path, str]:
    """The text of every page that quotes tables, with the current ones."""
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    return {
        ROOT / name: updated((ROOT / name).read_text(), table(results))
        for name, table in QUOTING.items()
    }


def _section(results: str, title: str) -> str:
    return results.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def _table(section: str, start: str) -> dict[str, dict[str, str]]:
    """The first table after the line that begins with `start`: shape -> column -> milliseconds."""
    text = section.partition(f"\n{start}")[2]
    lines = re.match(r"[^\n]*\n\n((?:\|[^\n]*\n)+)", f"{text}\n")
    if not lines:
        raise ValueError(f"no table behind {start!r}")
    head, _, *rows = [
        [cell.strip() for cell in line[1:-1].split("|")] for line in lines[1].splitlines()
    ]
    return {row[0]: dict(zip(head, row, strict=True)) for row in rows}


def _markdown(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, *rows]
    text = [f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in lines]
    return "\n".join([text[0], "|---" * len(head) + "|", *text[1:]]) + "\n"
