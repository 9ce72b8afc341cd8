"""Turn an alignment into the inputs of the four Evoformer attentions, with fixed random weights.

The weights are not trained: the point is real data of real shape, value range and masks, the same
on every machine. Channels and heads are those of AlphaFold 2 (Jumper et al. 2021, supplementary
algorithms 7, 8, 10, 13, 14), the channel widths c_m and c_z are a quarter of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from deepspeed4science.demo.alignment import ALPHABET, GAP, Alignment

MSA_CHANNELS = 64
PAIR_CHANNELS = 32
OUTER_CHANNELS = 16
MSA_HEADS = 8
PAIR_HEADS = 4
HEAD_DIM = 32
MAX_RELATIVE_POSITION = 32
MASKED = -1e9  # what the published models add to the score of a masked key


@dataclass(frozen=True)
class AttentionCase:
    """Inputs of one attention: q k v [B, N, L, H, D], bias1 [B, N, 1, 1, L], bias2 [B, 1, H, L, L]
    or None.
    """

    name: str
    explanation: str
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    bias1: torch.Tensor
    bias2: torch.Tensor | None

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        """The tensors by the contract's names, without the absent ones."""
        named = {"q": self.q, "k": self.k, "v": self.v, "bias1": self.bias1, "bias2": self.bias2}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @property
    def shape(self) -> str:
        return "x".join(str(size) for size in self.q.shape)


@dataclass(frozen=True)
class Representations:
    """What an Evoformer block carries: one vector for each residue of each sequence, one for each
    pair of residues.
    """

    msa: torch.Tensor  # [N, L, c_m]
    pair: torch.Tensor  # [L, L, c_z]
    coupling: torch.Tensor  # [L, L] how strongly two columns vary together, in standard deviations
    present: torch.Tensor  # [N, L] False at gaps


class _Weights:
    """Random projections from one seed, drawn in the order of the calls."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=self._generator) / math.sqrt(rows)


def _normalise(x: torch.Tensor) -> torch.Tensor:
    normal: torch.Tensor = torch.nn.functional.layer_norm(x, x.shape[-1:])
    return normal


def embed(alignment: Alignment, *, seed: int = 0) -> Representations:
    """Embed letters and positions, then the pairs from the outer product mean and the distance
    along the chain.
    """
    weights = _Weights(seed)
    tokens = torch.tensor(alignment.tokens)
    present = tokens != GAP
    letters = torch.nn.functional.one_hot(tokens, len(ALPHABET)).float()
    length = tokens.shape[1]

    position = torch.arange(length).float()
    angles = position[:, None] / 100.0 ** (torch.arange(8) / 8)
    waves = torch.cat([angles.sin(), angles.cos()], dim=-1)  # [L, 16]
    msa = letters @ weights(len(ALPHABET), MSA_CHANNELS) + 0.5 * waves @ weights(16, MSA_CHANNELS)
    msa = _normalise(msa)

    # Outer product mean of deviations from the column's average: large where two columns change
    # together.
    left = msa @ weights(MSA_CHANNELS, OUTER_CHANNELS)
    left = (left - left.mean(dim=0)) * present[..., None]
    outer = torch.einsum("sic,sjd->ijcd", left, left) / tokens.shape[0]
    coupling = _standardise(outer.flatten(2).norm(dim=-1)).fill_diagonal_(0.0)

    offset = (position[:, None] - position[None, :]).long()
    offset = offset.clamp(-MAX_RELATIVE_POSITION, MAX_RELATIVE_POSITION) + MAX_RELATIVE_POSITION
    near = torch.nn.functional.one_hot(offset, 2 * MAX_RELATIVE_POSITION + 1).float()
    pair = _normalise(outer.flatten(2) @ weights(OUTER_CHANNELS**2, PAIR_CHANNELS))
    pair = _normalise(pair + near @ weights(near.shape[-1], PAIR_CHANNELS))
    return Representations(msa, pair, coupling, present)


def _standardise(strength: torch.Tensor) -> torch.Tensor:
    """Average product correction (Dunn et al. 2008), which removes how variable each column is,
    then mean 0, std 1.
    """
    corrected = (
        strength - strength.mean(0, keepdim=True) * strength.mean(1, keepdim=True) / strength.mean()
    )
    return (corrected - corrected.mean()) / corrected.std()


def attention_cases(
    reps: Representations,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 1,
) -> Iterator[AttentionCase]:
    """The four attentions of one Evoformer block on these representations, in the block's order."""
    weights = _Weights(seed)

    def finish(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device=device, dtype=dtype).requires_grad_()

    def heads(x: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[N, L, c] -> q, k, v [1, N, L, H, D]."""
        width = count * HEAD_DIM
        query, key, value = (weights(x.shape[-1], width) for _ in range(3))
        # Half alike: residues lean towards their like, as in trained heads.
        key = (query + 3**0.5 * key) / 2
        q, k, v = (x @ w for w in (query, key, value))
        q, k, v = (t.view(1, *t.shape[:-1], count, HEAD_DIM) for t in (q, k, v))
        return finish(q), finish(k), finish(v)

    def mask(present: torch.Tensor) -> torch.Tensor:
        """[N, L] -> [1, N, 1, 1, L]."""
        return finish(torch.where(present, 0.0, MASKED)[None, :, None, None, :])

    def pair_bias(pair: torch.Tensor, count: int) -> torch.Tensor:
        """[L, L, c_z] -> [1, 1, H, L, L]."""
        bias = pair @ weights(PAIR_CHANNELS, count) + reps.coupling[..., None]
        return finish(bias.permute(2, 0, 1)[None, None])

    yield AttentionCase(
        "MSA row",
        "each sequence compares its own residues; the pair map says which of them belong together",
        *heads(reps.msa, MSA_HEADS),
        mask(reps.present),
        pair_bias(reps.pair, MSA_HEADS),
    )
    yield AttentionCase(
        "MSA column",
        "each position compares the sequences: which relatives carry alike residues there",
        *heads(reps.msa.transpose(0, 1), MSA_HEADS),
        mask(reps.present.T),
        None,
    )
    everywhere = torch.ones(reps.pair.shape[:2], dtype=torch.bool)  # the query has no gap
    for name, pair, explanation in (
        (
            "Triangle, starting node",
            reps.pair,
            "the pair (i, j) looks at all pairs (i, k) that start at i",
        ),
        (
            "Triangle, ending node",
            reps.pair.transpose(0, 1),
            "the pair (i, j) looks at all pairs (k, j) that end at j",
        ),
    ):
        yield AttentionCase(
            name,
            explanation,
            *heads(pair, PAIR_HEADS),
            mask(everywhere),
            pair_bias(pair, PAIR_HEADS),
        )
