"""The workloads that are measured, each with the place it comes from.

AlphaFold 2: Jumper et al. 2021, supplementary information, section 1.6 and table 4 (channels,
heads, crop sizes, number of sequences). AlphaFold 3: Abramson et al. 2024, supplementary methods,
section 3 and table 6.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from benchmarks import masks
from benchmarks.masks import Mask

AF2_TRIANGLE = "AlphaFold 2 triangle attention: 4 heads of 32"
AF2_ROW = "AlphaFold 2 MSA row attention with pair bias: 8 heads of 32"
AF2_COLUMN = "AlphaFold 2 MSA column attention: 8 heads of 32, no pair bias"
AF2_EXTRA = "AlphaFold 2 extra MSA stack: 8 heads of 8"
AF2_TEMPLATE = "AlphaFold 2 template pair stack: 4 heads of 16"
AF3_DIFFUSION = (
    "AlphaFold 3 diffusion transformer: 16 heads of 48, one row for each diffusion sample"
)
AF3_TRUNK = "AlphaFold 3 trunk, attention with pair bias on single tokens: 16 heads of 24"


@dataclass(frozen=True)
class Workload:
    """One call: q, k, v are [B, N, L, H, D]; bias1 [B, N, 1, 1, L] and bias2 [B, 1, H, L, L] where
    present.
    """

    id: str
    B: int
    N: int
    L: int
    H: int
    D: int
    source: str
    bias1: bool = True
    bias2: bool = True
    mask: Mask = masks.DEFAULT

    def with_mask(self, mask: Mask) -> Workload:
        """The same call with another mask, called `id/mask`; B is 4 for four lengths.

        Raises:
            ValueError: the mask pads rows n, and the workload is no pair map.
        """
        if mask.hides_rows and self.N != self.L:
            raise ValueError(
                f"{self.id}: the mask {mask.id} is of pair maps, N = L; got {self.shape}"
            )
        B = max(self.B, len(mask.padding))
        return replace(self, id=f"{self.id}/{mask.id}", B=B, mask=mask)

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        return (self.B, self.N, self.L, self.H, self.D)

    @property
    def num_scores(self) -> int:
        return self.B * self.N * self.H * self.L * self.L

    @property
    def forward_flop(self) -> int:
        """Two matrix products, two operations for each multiply-add."""
        return 4 * self.num_scores * self.D

    @property
    def backward_flop(self) -> int:
        """Five matrix products; the forward has two (docs/math.md, "Cost")."""
        return 10 * self.num_scores * self.D


def _triangle(length: int, stage: str, *, dim: int = 32, suffix: str = "") -> Workload:
    source = AF2_TRIANGLE if dim == 32 else AF2_TEMPLATE
    return Workload(f"tri{length}{suffix}", 1, length, length, 4, dim, f"{source}; {stage}")


WORKLOADS: tuple[Workload, ...] = (
    Workload(
        "cpu64x384",
        1,
        64,
        384,
        4,
        32,
        f"{AF2_TRIANGLE}; 64 rows of a 384-residue crop: the CPU target of record",
    ),
    _triangle(256, "AlphaFold 2 initial training crop"),
    _triangle(384, "AlphaFold 2 fine-tuning crop"),
    _triangle(389, "a real length is rarely a multiple of 8: the neighbour of 392"),
    _triangle(392, "the aligned neighbour of 389"),
    _triangle(448, "the multiple of 64 that follows 389"),
    _triangle(512, "training crop of 512 residues"),
    _triangle(640, "AlphaFold 3 fine-tuning crop"),
    _triangle(701, "an odd length between training crops"),
    _triangle(768, "AlphaFold 3 fine-tuning crop"),
    _triangle(1024, "inference"),
    _triangle(1369, "an odd length in inference"),
    _triangle(1408, "the multiple of 64 that follows 1369"),
    _triangle(1536, "inference"),
    _triangle(2048, "inference"),
    _triangle(3072, "inference"),
    _triangle(4096, "inference"),
    _triangle(5120, "inference, the largest complexes"),
    Workload(
        "tri384h8", 1, 384, 384, 8, 32, "triangle attention: 8 heads of 32, as in some models"
    ),
    _triangle(384, "template embedding", dim=16, suffix="d16"),
    Workload("row128x256", 1, 128, 256, 8, 32, f"{AF2_ROW}; initial training"),
    Workload("row512x384", 1, 512, 384, 8, 32, f"{AF2_ROW}; fine-tuning"),
    Workload("row512x389", 1, 512, 389, 8, 32, f"{AF2_ROW}; an odd length"),
    Workload("col256x128", 1, 256, 128, 8, 32, f"{AF2_COLUMN}; initial training", bias2=False),
    Workload("col384x512", 1, 384, 512, 8, 32, f"{AF2_COLUMN}; fine-tuning", bias2=False),
    Workload(
        "col256x512",
        1,
        256,
        512,
        8,
        32,
        f"{AF2_COLUMN}; 512 sequences of 256 residues",
        bias2=False,
    ),
    Workload("extra1024x256", 1, 1024, 256, 8, 8, f"{AF2_EXTRA}; initial training"),
    Workload("extra5120x384", 1, 5120, 384, 8, 8, f"{AF2_EXTRA}; fine-tuning"),
    Workload("diff48x384", 1, 48, 384, 16, 48, f"{AF3_DIFFUSION}; crop 384"),
    Workload("diff48x768", 1, 48, 768, 16, 48, f"{AF3_DIFFUSION}; crop 768"),
    Workload("diff32x768", 1, 32, 768, 16, 48, f"{AF3_DIFFUSION}; crop 768, 32 samples"),
    Workload("trunk384", 1, 1, 384, 16, 24, f"{AF3_TRUNK}; crop 384"),
    Workload("trunk768", 1, 1, 768, 16, 24, f"{AF3_TRUNK}; crop 768"),
    Workload("wide64", 1, 256, 1024, 4, 64, "heads of 64, where other kernels change their path"),
    Workload("wide128", 1, 64, 1024, 8, 128, "heads of 128, the widest of Hopper's own kernels"),
    Workload("wide160", 1, 64, 1024, 8, 160, "heads of 160"),
    Workload("wide256", 1, 64, 1024, 8, 256, "heads of 256, the widest that is supported"),
)

GROUPS: dict[str, tuple[str, ...]] = {
    "cpu": ("cpu64x384",),
    "cpu-more": ("cpu64x384", "tri256", "row128x256", "col256x128", "trunk384"),
    "core": (
        "tri256",
        "tri384",
        "tri768",
        "row512x384",
        "col256x512",
        "diff48x768",
        "wide64",
        "wide128",
    ),
    "odd": ("tri389", "tri392", "tri448", "tri701", "row512x389", "tri1369", "tri1408"),
    "hopper": (  # what the Sm90 kernels are measured against
        "tri256",
        "tri384",
        "tri768",
        "tri1536",
        "row128x256",
        "row512x384",
        "trunk384",
        "trunk768",
        "col256x512",
        "diff48x768",
        "wide64",
        "wide128",
    ),
    "large": ("tri1536", "tri2048"),
    "masks": tuple(f"{shape}/{mask.id}" for shape in ("tri384", "tri768") for mask in masks.MASKS),
    "all": tuple(w.id for w in WORKLOADS),
}


def select(names: Iterable[str]) -> tuple[Workload, ...]:
    """Workloads by id, id/mask or group name, each once, in the given order.

    Raises:
        ValueError: a name is none of them.
    """
    by_id = {workload.id: workload for workload in WORKLOADS}
    chosen: dict[str, Workload] = {}
    for name in names:
        for one in GROUPS.get(name, (name,)):
            workload_id, slash, mask = one.partition("/")
            if workload_id not in by_id:
                known = ", ".join([*GROUPS, *by_id])
                raise ValueError(f"no workload or group is called {one!r}; there are: {known}")
            workload = by_id[workload_id]
            chosen[one] = workload.with_mask(masks.named([mask])[0]) if slash else workload
    return tuple(chosen.values())
