"""The implementations that are timed, each behind the same methods.

A peer gets its tensors in the layout it likes best; making that layout is not timed. `forward` is
timed and holds everything a model has to do for each call, such as adding two biases into the one
mask that SDPA accepts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch

from benchmarks.inputs import Inputs
from benchmarks.shapes import Workload
from deepspeed4science.reference import evoformer_attention

Leaves = dict[str, torch.Tensor | None]


@dataclass(frozen=True)
class Setting:
    """The workload, dtype and device that a peer is asked to run."""

    workload: Workload
    dtype: torch.dtype
    device: torch.device
    free_bytes: int  # memory the peer may fill


class Peer(ABC):
    """One implementation of biased attention."""

    name: str

    @abstractmethod
    def not_available(self, setting: Setting) -> str | None:
        """Why the peer cannot run this, or None. Imports its package, compiles nothing."""

    @abstractmethod
    def adapt(self, inputs: Inputs) -> Leaves:
        """The peer's own tensors: "q", "k", "v", "bias1", "bias2" in its layout, detached."""

    @abstractmethod
    def forward(self, leaves: Leaves) -> torch.Tensor:
        """The timed call."""

    def computes(self, workload: Workload) -> bool:
        """Whether the peer computes the whole formula, so that its results can be compared."""
        return True

    def mode(self) -> AbstractContextManager[None]:
        """PyTorch's settings during every call of this peer, forward and backward."""
        return nullcontext()

    def restore(self, o: torch.Tensor, workload: Workload) -> torch.Tensor:
        """The output as [B, N, L, H, D]."""
        return o.reshape(workload.shape)


def _to_heads_first(x: torch.Tensor) -> torch.Tensor:
    """[B, N, L, H, D] -> contiguous [B*N, H, L, D]."""
    return x.flatten(0, 1).transpose(1, 2).contiguous()


def _from_heads_first(o: torch.Tensor, workload: Workload) -> torch.Tensor:
    return o.transpose(1, 2).reshape(workload.shape)


def _too_large(setting: Setting, copies: float) -> str | None:
    """Peers that store every score: `copies` tensors of B*N*H*L*L live at the worst moment of the
    backward.
    """
    need = int(copies * setting.workload.num_scores * setting.dtype.itemsize)
    if need <= setting.free_bytes:
        return None
    free = setting.free_bytes / 2**30
    return f"needs about {need / 2**30:.0f} GiB for its scores, {free:.0f} GiB are free"


class Ours(Peer):
    name = "ours"

    def not_available(self, setting: Setting) -> str | None:
        return None  # if the op refuses a call, the error is recorded as its result

    def adapt(self, inputs: Inputs) -> Leaves:
        return {**_contract_leaves(inputs), "row_mask": inputs.row_mask}

    @cached_property
    def _op(self) -> Callable[..., torch.Tensor]:
        from deepspeed4science import DS4Sci_EvoformerAttention

        return DS4Sci_EvoformerAttention

    def forward(self, leaves: Leaves) -> torch.Tensor:
        biases = [leaves["bias1"], leaves["bias2"]]
        row_mask = leaves["row_mask"]
        if row_mask is None:  # as a caller does who knows of none
            return self._op(*_qkv(leaves), biases)
        return self._op(*_qkv(leaves), biases, row_mask=row_mask)


class OursHeadsFirst(Ours):
    """Ours on tensors that lie in memory as SDPA's do, [B, N, H, L, D], seen transposed without a
    copy: as in models whose attention is written for SDPA.
    """

    name = "ours-heads-first"

    def adapt(self, inputs: Inputs) -> Leaves:
        leaves = super().adapt(inputs)
        for name in ("q", "k", "v"):
            leaves[name] = getattr(inputs, name).transpose(2, 3).contiguous().transpose(2, 3)
        return leaves


class OursDeterministic(Ours):
    """Ours under torch.use_deterministic_algorithms(True): bit-identical gradients from run to run.

    PyTorch then also fills every new tensor with NaN; users wait for that too.
    """

    name = "ours-deterministic"

    @contextmanager
    def mode(self) -> Iterator[None]:
        before = torch.are_deterministic_algorithms_enabled()
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before, warn_only=warn_only)


class Eager(Peer):
    """The definition in plain PyTorch, in the inputs' dtype."""

    name = "eager"

    def not_available(self, setting: Setting) -> str | None:
        return _too_large(setting, 5)

    def adapt(self, inputs: Inputs) -> Leaves:
        return _contract_leaves(inputs)

    def forward(self, leaves: Leaves) -> torch.Tensor:
        return evoformer_attention(*_qkv(leaves), leaves["bias1"], leaves["bias2"])


class Sdpa(Peer):
    """torch's scaled_dot_product_attention; its one mask is the sum of the biases, one copy for
    each of the N rows.
    """

    name = "sdpa"

    def not_available(self, setting: Setting) -> str | None:
        return _too_large(setting, 2.5)  # the mask and its gradient

    def adapt(self, inputs: Inputs) -> Leaves:
        heads_first = {name: _to_heads_first(getattr(inputs, name)) for name in ("q", "k", "v")}
        return {**heads_first, "bias1": inputs.bias1, "bias2": inputs.bias2}

    def forward(self, leaves: Leaves) -> torch.Tensor:
        q, k, v = _qkv(leaves)
        biases = [bias for bias in (leaves["bias1"], leaves["bias2"]) if bias is not None]
        mask = None
        if biases:
            mask = sum(biases[1:], start=biases[0]).flatten(0, 1)  # [B*N, 1 or H, 1 or L, L]
            mask = mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def restore(self, o: torch.Tensor, workload: Workload) -> torch.Tensor:
        return _from_heads_first(o, workload)


def _contract_leaves(inputs: Inputs) -> Leaves:
    return {name: getattr(inputs, name) for name in ("q", "k", "v", "bias1", "bias2")}


def _qkv(leaves: Leaves) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return leaves["q"], leaves["k"], leaves["v"]  # type: ignore[return-value]  # never absent


# Names that stand for several peers.
PEER_GROUPS: dict[str, tuple[str, ...]] = {
    "cpu": ("ours", "ours-heads-first", "eager", "sdpa"),
    "gpu": (
        "ours",
        "ours-deterministic",
        "flex",
        "cudnn",
        "cudnn-biased",
        "cuequivariance",
        "trifast",
        "miniworld-engine",
        "turbopairformer",
        "openfold3-triton",
        "deepspeed",
    ),
}


def peer_names(text: str) -> list[str]:
    """Peers of a list with commas, group names replaced by their members, each once."""
    names = [name for part in text.split(",") for name in PEER_GROUPS.get(part, (part,))]
    return list(dict.fromkeys(names))


def all_peers() -> dict[str, type[Peer]]:
    """Every peer by name."""
    from benchmarks import peers_cuda, peers_cudnn, peers_packages  # which build on this module

    classes: tuple[type[Peer], ...] = (
        Ours,
        OursHeadsFirst,
        OursDeterministic,
        Eager,
        Sdpa,
        *peers_cuda.PEERS,
        *peers_cudnn.PEERS,
        *peers_packages.PEERS,
    )
    return {cls.name: cls for cls in classes}
