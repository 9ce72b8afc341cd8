"""A picture of one attention map, in two sizes: residues along both sides, labelled with their
letters. Needs Pillow.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from deepspeed4science.demo.checks import Attention
from deepspeed4science.demo.embedding import AttentionCase

# The picture is drawn large and then reduced: Pillow puts the letters of a small font on whole
# pixels, so that spaces between words disappear.
DRAWN, LARGE = 4, 2
CELL = 11  # pixels of one residue pair; all lengths are those of the small picture
LEFT, TOP, RIGHT, BOTTOM = 74, 118, 132, 64
Colour = tuple[int, int, int]
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


KINDS: dict[str, tuple[Colour, int]] = {  # colour, rounding of the corners
    "strand": ((226, 172, 66), 0),
    "helix": ((196, 84, 76), 5),
}


@dataclass(frozen=True)
class Strip:
    """A stretch of secondary structure drawn beside the axes, residues counted from 1, both ends
    included.
    """

    kind: str  # of KINDS
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


class _Canvas:
    """Draws at `DRAWN` times the size; places are those of the small picture, ends included."""

    def __init__(self, width: int, height: int) -> None:
        from PIL import Image, ImageDraw

        self.image = Image.new("RGB", (width * DRAWN, height * DRAWN), PAPER)
        self._draw = ImageDraw.Draw(self.image)

    def bar(
        self, left: float, top: float, right: float, bottom: float, fill: Colour, radius: float = 0
    ) -> None:
        """Filled from the first to the last pixel of the small picture."""
        place = (left * DRAWN, top * DRAWN, (right + 1) * DRAWN - 1, (bottom + 1) * DRAWN - 1)
        self._draw.rounded_rectangle(place, radius * DRAWN, fill=fill)

    def frame(self, left: float, top: float, right: float, bottom: float) -> None:
        """A line one pixel wide, on the pixels named."""
        place = (left * DRAWN, top * DRAWN, (right + 1) * DRAWN - 1, (bottom + 1) * DRAWN - 1)
        self._draw.rectangle(place, outline=FAINT, width=DRAWN)

    def text(
        self,
        place: tuple[float, float],
        text: str,
        size: int,
        *,
        anchor: str = "mm",
        fill: Colour = INK,
    ) -> None:
        from PIL import ImageFont

        font = ImageFont.load_default(size * DRAWN)
        self._draw.text((place[0] * DRAWN, place[1] * DRAWN), text, fill, font, anchor)

    def save(self, path: Path, scale: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.image.reduce(DRAWN // scale).save(path)


def draw_attention(
    attention: torch.Tensor,
    letters: str,
    path: Path,
    *,
    title: str,
    subtitle: str,
    structure: tuple[Strip, ...] = (),
) -> tuple[Path, Path]:
    """Write `attention` [L, L] (row: the residue that looks, column: the one it looks at) as a PNG,
    and once more `LARGE` times as large, for slides, as NAME_large.png.

    Returns:
        both paths.

    Raises:
        ImportError: Pillow is not installed.
    """
    length = len(letters)
    size = length * CELL
    canvas = _Canvas(LEFT + size + RIGHT, TOP + size + BOTTOM)
    # Most pairs have little weight, so colours follow the square root; the strongest 1 % share the
    # darkest colour. The diagonal (a residue's attention to itself) does not set the scale.
    strength = attention.clamp(min=0).sqrt()
    between = strength[~torch.eye(length, dtype=torch.bool)]
    top = torch.quantile(between, 0.99).item() or 1.0
    for i, row in enumerate((strength / top).clamp(max=1).tolist()):
        for j, value in enumerate(row):
            x, y = LEFT + j * CELL, TOP + i * CELL
            canvas.bar(x, y, x + CELL - 1, y + CELL - 1, _colour(value))
    canvas.frame(LEFT - 1, TOP - 1, LEFT + size, TOP + size)
    canvas.text((LEFT, 28), title, 21, anchor="lm")
    canvas.text((LEFT, 53), subtitle, 13, anchor="lm", fill=FAINT)
    _draw_axes(canvas, letters, structure)
    _draw_scale(canvas, size, top)
    large = path.with_name(f"{path.stem}_large{path.suffix}")
    canvas.save(path, 1)
    canvas.save(large, LARGE)
    return path, large


def _colour(value: float) -> Colour:
    place = min(max(value, 0.0), 1.0) * (len(COLOURS) - 1)
    low = min(int(place), len(COLOURS) - 2)
    part = place - low
    red, green, blue = (
        round(a + (b - a) * part) for a, b in zip(COLOURS[low], COLOURS[low + 1], strict=True)
    )
    return red, green, blue


def _draw_axes(canvas: _Canvas, letters: str, structure: tuple[Strip, ...]) -> None:
    size = len(letters) * CELL
    for index, letter in enumerate(letters):
        middle = index * CELL + CELL // 2
        canvas.text((LEFT + middle, TOP - 8), letter, 9)
        canvas.text((LEFT - 8, TOP + middle), letter, 9)
        if index == 0 or (index + 1) % 10 == 0:
            number = str(index + 1)
            canvas.text((LEFT + middle, TOP - 36), number, 11, fill=FAINT)
            canvas.text((LEFT - 36, TOP + middle), number, 11, anchor="rm", fill=FAINT)
    for strip in structure:
        first, last = (strip.first - 1) * CELL + 1, strip.last * CELL - 2
        far, near = (26, 17) if strip.kind == "helix" else (24, 19)
        colour, radius = KINDS[strip.kind]
        canvas.bar(LEFT + first, TOP - far, LEFT + last, TOP - near, colour, radius)
        canvas.bar(LEFT - far, TOP + first, LEFT - near, TOP + last, colour, radius)
    below = TOP + size + 20
    canvas.text((LEFT, below), "down: the residue that looks", 12, anchor="lm")
    canvas.text((LEFT + 190, below), "across: the residue it looks at", 12, anchor="lm")
    if structure:
        canvas.bar(LEFT, below + 18, LEFT + 22, below + 23, *KINDS["strand"])
        canvas.text((LEFT + 30, below + 21), "strand", 12, anchor="lm", fill=FAINT)
        canvas.bar(LEFT + 190, below + 16, LEFT + 212, below + 25, *KINDS["helix"])
        source = "helix (crystal structure 1UBQ)"
        canvas.text((LEFT + 220, below + 21), source, 12, anchor="lm", fill=FAINT)


def _draw_scale(canvas: _Canvas, size: int, top: float) -> None:
    x, height = LEFT + size + 26, 260
    for step in range(height):
        y = TOP + height - step
        canvas.bar(x, y, x + 16, y, _colour(step / height))
    canvas.frame(x - 1, TOP, x + 17, TOP + height + 1)
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        weight = 100 * (share * top) ** 2
        label = f"{weight:.1f} %" if share < 1 else f"{weight:.1f} % or more"
        canvas.text((x + 24, TOP + height * (1 - share)), label, 11, anchor="lm")
    canvas.text((x, TOP + height + 20), "share of the", 11, anchor="lm", fill=FAINT)
    canvas.text((x, TOP + height + 36), "row\u2019s attention", 11, anchor="lm", fill=FAINT)
