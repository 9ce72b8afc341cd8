"""Peers that need a GPU. Versions they were read at: torch 2.11, deepspeed 0.19.8, cuequivariance
0.13, trifast 0.1.13.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cached_property

import torch

from benchmarks.inputs import Inputs
from benchmarks.peers import Leaves, Peer, Setting, _from_heads_first, _qkv, _to_heads_first
from benchmarks.shapes import Workload

HALF = (torch.float16, torch.bfloat16)


def _missing(module: str) -> str | None:
    """Why `module` cannot be imported, in one line. Broken installations count as missing."""
    try:
        importlib.import_module(module)
    except Exception as error:  # an import may fail in any way; the reason goes into the result
        first_line = (str(error).splitlines() or [""])[0]
        return f"import {module}: {type(error).__name__}: {first_line}"
    return None


def _not_on_gpu(setting: Setting) -> str | None:
    return None if setting.device.type == "cuda" else "runs on CUDA only"


class Flex(Peer):
    """FlexAttention, compiled, the biases read in score_mod; the gradient of a captured bias comes
    from autograd.
    """

    name = "flex"

    def not_available(self, setting: Setting) -> str | None:
        return _not_on_gpu(setting) or _missing("torch.nn.attention.flex_attention")

    def adapt(self, inputs: Inputs) -> Leaves:
        # [B*N, L]
        bias1 = None if inputs.bias1 is None else inputs.bias1.flatten(2).flatten(0, 1).contiguous()
        bias2 = None if inputs.bias2 is None else inputs.bias2.squeeze(1)  # [B, H, L, L]
        heads_first = {name: _to_heads_first(getattr(inputs, name)) for name in ("q", "k", "v")}
        return {**heads_first, "bias1": bias1, "bias2": bias2}

    @cached_property
    def _op(self) -> Callable[..., torch.Tensor]:
        # Each length is a recompilation; at the default limit of 8 it would fall back to eager
        # without a word.
        torch._dynamo.config.recompile_limit = 1000
        return torch.compile(_flex_attention, dynamic=False)

    def forward(self, leaves: Leaves) -> torch.Tensor:
        return self._op(*_qkv(leaves), leaves["bias1"], leaves["bias2"])

    def restore(self, o: torch.Tensor, workload: Workload) -> torch.Tensor:
        return _from_heads_first(o, workload)


def _flex_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias1: torch.Tensor | None,
    bias2: torch.Tensor | None,
) -> torch.Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    rows_per_batch = q.shape[0] if bias2 is None else q.shape[0] // bias2.shape[0]

    def score_mod(
        score: torch.Tensor, row: torch.Tensor, head: torch.Tensor, i: torch.Tensor, j: torch.Tensor
    ) -> torch.Tensor:
        if bias1 is not None:
            score = score + bias1[row, j]
        if bias2 is not None:
            score = score + bias2[row // rows_per_batch, head, i, j]
        return score

    return flex_attention(q, k, v, score_mod=score_mod)


class CudnnFloor(Peer):
    """cuDNN's attention with no bias at all: not the same work, a floor for it."""

    name = "cudnn"

    def computes(self, workload: Workload) -> bool:
        return not workload.bias1 and not workload.bias2

    def not_available(self, setting: Setting) -> str | None:
        if setting.dtype not in HALF:
            return "float16 and bfloat16 only"
        return _not_on_gpu(setting)

    def adapt(self, inputs: Inputs) -> Leaves:
        heads_first = {name: _to_heads_first(getattr(inputs, name)) for name in ("q", "k", "v")}
        return {**heads_first, "bias1": None, "bias2": None}

    def forward(self, leaves: Leaves) -> torch.Tensor:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(*_qkv(leaves))

    def restore(self, o: torch.Tensor, workload: Workload) -> torch.Tensor:
        return _from_heads_first(o, workload)


class DeepSpeed(Peer):
    """DeepSpeed's op; compiles for minutes at its first call (CUTLASS_PATH must be set), before
    anything is timed.
    """

    name = "deepspeed"

    def not_available(self, setting: Setting) -> str | None:
        if setting.dtype not in HALF:
            return "float16 and bfloat16 only"
        if setting.workload.D > 64 or setting.workload.D % 8:
            return "head dim must be a multiple of 8, at most 64"
        if setting.workload.L <= 16:
            return "length must be over 16"
        if setting.workload.B * setting.workload.N > 65535:
            return "B*N over 65,535 returns garbage"
        return _not_on_gpu(setting) or _missing("deepspeed.ops.deepspeed4science.evoformer_attn")

    def adapt(self, inputs: Inputs) -> Leaves:
        return {name: getattr(inputs, name) for name in ("q", "k", "v", "bias1", "bias2")}

    @cached_property
    def _op(self) -> Callable[..., torch.Tensor]:
        from deepspeed.ops.deepspeed4science.evoformer_attn import DS4Sci_EvoformerAttention

        return DS4Sci_EvoformerAttention  # type: ignore[no-any-return]

    def forward(self, leaves: Leaves) -> torch.Tensor:
        return self._op(*_qkv(leaves), [leaves["bias1"], leaves["bias2"]])


class CuEquivariance(Peer):
    """NVIDIA cuEquivariance's triangle attention: a boolean mask (no gradient of bias1) and a bias
    in float32.
    """

    name = "cuequivariance"

    def not_available(self, setting: Setting) -> str | None:
        reason = _not_on_gpu(setting) or _missing("cuequivariance_ops_torch")
        if reason is None:
            # Below this length it would run plain PyTorch. The package's attribute of this name is
            # the function.
            module = importlib.import_module("cuequivariance_ops_torch.triangle_attention")
            module.CUEQ_TRIATTN_FALLBACK_THRESHOLD = 0  # type: ignore[attr-defined]
        return reason

    def adapt(self, inputs: Inputs) -> Leaves:
        leaves: Leaves = {
            name: getattr(inputs, name).transpose(2, 3).contiguous() for name in ("q", "k", "v")
        }
        batch, _, length, heads, _ = inputs.q.shape
        # A bias is not optional: without one it gets zeros that need no gradient.
        zeros = torch.zeros(batch, 1, heads, length, length, device=inputs.q.device)
        leaves["bias2"] = zeros if inputs.bias2 is None else inputs.bias2.float()
        leaves["mask"] = (
            None if inputs.bias1 is None else inputs.visible[:, :, None, None, :].contiguous()
        )
        return leaves

    @cached_property
    def _op(self) -> Callable[..., torch.Tensor]:
        from cuequivariance_ops_torch import triangle_attention

        return triangle_attention  # type: ignore[no-any-return]

    def forward(self, leaves: Leaves) -> torch.Tensor:
        return self._op(*_qkv(leaves), leaves["bias2"], mask=leaves["mask"])

    def restore(self, o: torch.Tensor, workload: Workload) -> torch.Tensor:
        return o.transpose(2, 3)


class Trifast(Peer):
    """trifast: square pair maps only (N = L); its mask is True where a key is hidden."""

    name = "trifast"

    def not_available(self, setting: Setting) -> str | None:
        workload = setting.workload
        if workload.N != workload.L or not (workload.bias1 and workload.bias2):
            return "triangle attention only: N = L and both biases"
        return _not_on_gpu(setting) or _missing("trifast")

    def adapt(self, inputs: Inputs) -> Leaves:
        leaves: Leaves = {  # [B, N, L, H, D] -> [B, H, N, L, D]
            name: getattr(inputs, name).permute(0, 3, 1, 2, 4).contiguous()
            for name in ("q", "k", "v")
        }
        assert inputs.bias2 is not None  # not_available has seen to it
        leaves["bias2"] = inputs.bias2.squeeze(1)
        leaves["mask"] = ~inputs.visible
        return leaves

    @cached_property
    def _op(self) -> Callable[..., torch.Tensor]:
        from trifast import triangle_attention

        return triangle_attention  # type: ignore[no-any-return]

    def forward(self, leaves: Leaves) -> torch.Tensor:
        return self._op(*_qkv(leaves), leaves["bias2"], leaves["mask"])

    def restore(self, o: torch.Tensor, workload: Workload) -> torch.Tensor:
        return o.permute(0, 2, 3, 1, 4)


PEERS: tuple[type[Peer], ...] = (Flex, CudnnFloor, DeepSpeed, CuEquivariance, Trifast)
