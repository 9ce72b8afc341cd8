"""A picture of one attention map: residues along both sides, labelled with their letters. Needs
Pillow.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from deepspeed4science.demo.checks import Attention
from deepspeed4science.demo.embedding import AttentionCase

if TYPE_CHECKING:
    from PIL import ImageDraw

CELL = 11  # pixels of one residue pair
LEFT, TOP, RIGHT, BOTTOM = 74, 118, 132, 64
PAPER, INK, FAINT = (255, 255, 255), (32, 36, 44), (128, 134, 145)
# Light to dark through one hue family and readable in grey; sampled between these colours.
COLOURS = (
    (252, 253, 254),
    (198, 222, 236),
    (107, 174, 206),
    (43, 112, 170),
    (20, 58, 117),
    (9, 22, 58),
)


@dataclass(frozen=True)
class Strip:
    """A stretch of secondary structure drawn beside the axes, residues counted from 1, both ends
    included.
    """

    kind: str  # "strand" | "helix"
    first: int
    last: int


# Human ubiquitin, crystal structure 1UBQ (Vijay-Kumar, Bugg and Cook 1987, J. Mol. Biol. 194, 531).
UBIQUITIN_STRUCTURE = (
    Strip("strand", 1, 7),
    Strip("strand", 10, 17),
    Strip("helix", 23, 34),
    Strip("strand", 40, 45),
    Strip("strand", 48, 49),
    Strip("helix", 56, 59),
    Strip("strand", 66, 72),
)


def query_attention(op: Attention, case: AttentionCase) -> torch.Tensor:
    """Attention of the first row, averaged over heads, [L, L], read through the op itself.

    O = P V, so with columns of the identity as V the output is P; D columns fit in one call.
    """
    q, k = (t.detach()[:, :1] for t in (case.q, case.k))
    bias1 = case.bias1.detach()[:, :1]
    bias2 = None if case.bias2 is None else case.bias2.detach()
    _, _, length, heads, width = q.shape
    identity = torch.eye(length, -(-length // width) * width, dtype=q.dtype, device=q.device)
    parts = []
    for columns in torch.split(identity, width, dim=1):
        v = columns[None, None, :, None, :].expand(1, 1, length, heads, width)
        with torch.no_grad():
            parts.append(op(q, k, v, [bias1, bias2])[0, 0].float().mean(dim=1))
    return torch.cat(parts, dim=1)[:, :length].cpu()


def draw_attention(
    attention: torch.Tensor,
    letters: str,
    path: Path,
    *,
    title: str,
    subtitle: str,
    structure: tuple[Strip, ...] = (),
) -> None:
    """Write `attention` [L, L] (row: the residue that looks, column: the one it looks at) as a PNG.

    Raises:
        ImportError: Pillow is not installed.
    """
    from PIL import Image, ImageDraw

    length = len(letters)
    size = length * CELL
    # Most pairs have little weight: a square root spreads them, and the strongest 1 % share the
    # darkest colour. The diagonal, where a residue looks at itself, does not set the scale.
    strength = attention.clamp(min=0).sqrt()
    between = strength[~torch.eye(length, dtype=torch.bool)]
    top = torch.quantile(between, 0.99).item() or 1.0
    image = Image.new("RGB", (LEFT + size + RIGHT, TOP + size + BOTTOM), PAPER)
    draw = ImageDraw.Draw(image)
    for i, row in enumerate((strength / top).clamp(max=1).tolist()):
        for j, value in enumerate(row):
            x, y = LEFT + j * CELL, TOP + i * CELL
            draw.rectangle((x, y, x + CELL - 1, y + CELL - 1), fill=_colour(value))
    draw.rectangle((LEFT - 1, TOP - 1, LEFT + size, TOP + size), outline=FAINT)
    _draw_titles(draw, title, subtitle)
    _draw_axes(draw, letters, structure)
    _draw_scale(draw, size, top)
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, optimize=True)


def _colour(value: float) -> tuple[int, int, int]:
    place = min(max(value, 0.0), 1.0) * (len(COLOURS) - 1)
    low = min(int(place), len(COLOURS) - 2)
    part = place - low
    red, green, blue = (
        round(a + (b - a) * part) for a, b in zip(COLOURS[low], COLOURS[low + 1], strict=True)
    )
    return red, green, blue


def _text(
    draw: ImageDraw.ImageDraw,
    place: tuple[float, float],
    text: str,
    size: int,
    *,
    anchor: str = "mm",
    fill: tuple[int, int, int] = INK,
) -> None:
    from PIL import ImageFont

    draw.text(place, text, font=ImageFont.load_default(size), anchor=anchor, fill=fill)


def _draw_titles(draw: ImageDraw.ImageDraw, title: str, subtitle: str) -> None:
    _text(draw, (LEFT, 28), title, 21, anchor="lm")
    _text(draw, (LEFT, 53), subtitle, 13, anchor="lm", fill=FAINT)


def _draw_axes(draw: ImageDraw.ImageDraw, letters: str, structure: tuple[Strip, ...]) -> None:
    size = len(letters) * CELL
    for index, letter in enumerate(letters):
        middle = index * CELL + CELL // 2
        _text(draw, (LEFT + middle, TOP - 8), letter, 9)
        _text(draw, (LEFT - 8, TOP + middle), letter, 9)
        if index == 0 or (index + 1) % 10 == 0:
            _text(draw, (LEFT + middle, TOP - 36), str(index + 1), 11, fill=FAINT)
            _text(draw, (LEFT - 36, TOP + middle), str(index + 1), 11, anchor="rm", fill=FAINT)
    for strip in structure:
        first, last = (strip.first - 1) * CELL + 1, strip.last * CELL - 2
        if strip.kind == "helix":
            draw.rounded_rectangle(
                (LEFT + first, TOP - 26, LEFT + last, TOP - 17), 5, fill=(196, 84, 76)
            )
            draw.rounded_rectangle(
                (LEFT - 26, TOP + first, LEFT - 17, TOP + last), 5, fill=(196, 84, 76)
            )
        else:
            draw.rectangle((LEFT + first, TOP - 24, LEFT + last, TOP - 19), fill=(226, 172, 66))
            draw.rectangle((LEFT - 24, TOP + first, LEFT - 19, TOP + last), fill=(226, 172, 66))
    below = TOP + size + 20
    _text(
        draw,
        (LEFT, below),
        "down: the residue that looks     across: the residue it looks at",
        12,
        anchor="lm",
    )
    if structure:
        draw.rectangle((LEFT, below + 18, LEFT + 22, below + 23), fill=(226, 172, 66))
        _text(draw, (LEFT + 30, below + 20), "strand", 12, anchor="lm", fill=FAINT)
        draw.rounded_rectangle(
            (LEFT + 90, below + 16, LEFT + 112, below + 25), 5, fill=(196, 84, 76)
        )
        _text(
            draw,
            (LEFT + 120, below + 20),
            "helix (crystal structure 1UBQ)",
            12,
            anchor="lm",
            fill=FAINT,
        )


def _draw_scale(draw: ImageDraw.ImageDraw, size: int, top: float) -> None:
    x, height = LEFT + size + 26, 260
    for step in range(height):
        draw.line(
            (x, TOP + height - step, x + 16, TOP + height - step), fill=_colour(step / height)
        )
    draw.rectangle((x - 1, TOP, x + 17, TOP + height + 1), outline=FAINT)
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        weight = 100 * (share * top) ** 2
        label = f"{weight:.1f} %" if share < 1 else f"{weight:.1f} % or more"
        _text(draw, (x + 24, TOP + height * (1 - share)), label, 11, anchor="lm")
    _text(draw, (x, TOP + height + 20), "share of the", 11, anchor="lm", fill=FAINT)
    _text(draw, (x, TOP + height + 34), "row\u2019s attention", 11, anchor="lm", fill=FAINT)
