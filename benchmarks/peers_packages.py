"""Peers that are one part of a larger package. Written for these versions: openfold3 0.5.0,
miniworld-engine 2.3.12, turbopairformer 0.1.3.post1.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from benchmarks.inputs import Inputs
from benchmarks.peers import Leaves, Peer, Setting, _contract_leaves, _qkv, _to_heads_first
from benchmarks.peers_cuda import _missing, _not_on_gpu
from benchmarks.shapes import Workload


def _not_hopper(setting: Setting) -> str | None:
    reason = _not_on_gpu(setting)
    if reason is None and torch.cuda.get_device_capability(setting.device) != (9, 0):
        reason = "compute capability 9.0 only"
    return reason


class OpenFold3Triton(Peer):
    """OpenFold 3's own Triton kernel, loaded from its file: importing the package imports the
    whole model.
    """

    name = "openfold3-triton"

    def not_available(self, setting: Setting) -> str | None:
        if setting.workload.L <= 16:
            return "length must be over 16"
        if reason := _not_on_gpu(setting) or _missing("triton"):
            return reason
        try:
            found = self._op is not None
        except Exception as error:  # a package may fail in any way
            return f"openfold3: {type(error).__name__}: {error}"
        return None if found else "openfold3: its kernel is disabled"

    @cached_property
    def _op(self) -> Callable[..., torch.Tensor]:
        return _load_file("openfold3", "core/kernels/triton/evoformer.py").TritonEvoformer  # type: ignore[no-any-return]

    def adapt(self, inputs: Inputs) -> Leaves:
        leaves = dict(_contract_leaves(inputs))
        for name in ("q", "k", "v"):  # the memory that it would otherwise copy to
            leaves[name] = getattr(inputs, name).transpose(2, 3).contiguous().transpose(2, 3)
        batch, rows, length = inputs.q.shape[:3]
        if leaves["bias1"] is None:
            leaves["bias1"] = inputs.q.new_zeros(batch, rows, 1, 1, length)
        return leaves

    def forward(self, leaves: Leaves) -> torch.Tensor:
        q, k, v = _qkv(leaves)
        bias2 = leaves["bias2"]
        with_bias2 = bias2 is not None
        if bias2 is None:  # never read
            batch, _, length, heads, _ = q.shape
            bias2 = q.new_zeros(1, 1, 1, 1, 1).expand(batch, 1, heads, length, length)
        with warnings.catch_warnings():  # that it is tuned for AMD
            warnings.simplefilter("ignore")
            return self._op(q, k, v, leaves["bias1"], bias2, with_bias2)


def _load_file(package: str, path: str) -> ModuleType:
    """A module of a package, without the package's own imports."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError(f"No module named '{package}'")
    file = Path(found.submodule_search_locations[0]) / path
    spec = importlib.util.spec_from_file_location(f"{package}_{file.stem}", file)
    assert spec is not None and spec.loader is not None  # a file that ends in .py has both
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class MiniWorld(Peer):
    """miniworld-engine's attention core, called as its layers call it.

    It knows bias2 only, where its layers write -inf for a key that is hidden in every row n. Under
    any other mask it computes the call without bias1, which is less work.
    """

    name = "miniworld-engine"

    def computes(self, workload: Workload) -> bool:
        return not workload.bias1 or not (workload.mask.random or workload.mask.hides_rows)

    def not_available(self, setting: Setting) -> str | None:
        workload = setting.workload
        if setting.dtype != torch.bfloat16:
            return "bfloat16 only"
        if workload.D != 32 or workload.L % 128 or not workload.bias2:
            return "D = 32, L a multiple of 128, bias2"
        return _not_hopper(setting) or _missing(
            "miniworld_engine.kernels.triangle_attention.cuda.h100_sm90"
        )

    def adapt(self, inputs: Inputs) -> Leaves:
        leaves = dict(_contract_leaves(inputs))
        assert inputs.bias2 is not None  # not_available has seen to it
        scaled = inputs.bias2.detach().float() * inputs.q.shape[-1] ** 0.5
        everywhere = inputs.visible[:, :1]
        if (inputs.visible == everywhere).all():
            scaled = scaled.masked_fill(~everywhere[:, :, None, None, :], -torch.inf)
        leaves["scaled"] = scaled.to(inputs.q.dtype).squeeze(1).contiguous()
        return leaves

    @cached_property
    def _core(self) -> ModuleType:
        from miniworld_engine.kernels.triangle_attention.cuda import h100_sm90

        return h100_sm90  # type: ignore[no-any-return]

    def forward(self, leaves: Leaves) -> torch.Tensor:
        q, k, v = _qkv(leaves)
        scaled = leaves["scaled"]
        if torch.is_grad_enabled() and q.requires_grad:
            return _MiniWorldCore.apply(q, k, v, leaves["bias2"], scaled, self._core)  # type: ignore[no-any-return]
        scale = q.shape[-1] ** -0.5
        return self._core._core().triattn_fwd(q, k, v, scaled, scale, False)[0]  # type: ignore[no-any-return]


class _MiniWorldCore(torch.autograd.Function):
    """The calls of the core in its package's train_forward and train_backward."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, bias2: Any, scaled: Any, core: Any) -> Any:  # type: ignore[override]
        ctx.core = core
        scale = q.shape[-1] ** -0.5
        o, lse, _, _ = core._core().triattn_fwd(q, k, v, scaled, scale, True)
        ctx.save_for_backward(q, k, v, scaled, o, lse)
        return o

    @staticmethod
    def backward(ctx: Any, do: Any) -> Any:  # type: ignore[override]
        q, k, v, scaled, o, lse = ctx.saved_tensors
        kernels = ctx.core._bwd()
        scale = q.shape[-1] ** -0.5
        do = do.contiguous()
        dbias2 = torch.zeros(scaled.shape, device=q.device, dtype=torch.float32)
        delta = kernels.triattn_delta(do, o)
        dk, dv = kernels.triattn_bwd_kv(q, k, v, scaled, do, lse, delta, scale)
        dq = ctx.core.bwd_q(kernels, q, k, v, scaled, do, lse, delta, scale, dbias2)
        return dq, dk, dv, dbias2[:, None].to(q.dtype), None, None


class TurboPairFormer(Peer):
    """turbopairformer: its wheel is for Python 3.14 with torch 2.10; elsewhere its loader compiles
    its sources where it is told that it may. Deterministic.
    """

    name = "turbopairformer"

    def not_available(self, setting: Setting) -> str | None:
        if setting.dtype != torch.bfloat16:
            return "bfloat16 only"
        if setting.workload.D > 64 or not setting.workload.bias2:
            return "D up to 64, bias2"
        if reason := _not_hopper(setting) or _missing("turbopairformer._triangle_attention"):
            return reason
        os.environ.setdefault("TURBOPAIRFORMER_ALLOW_JIT", "1")
        return None

    def adapt(self, inputs: Inputs) -> Leaves:
        leaves = dict(_contract_leaves(inputs))
        rows = inputs.q.shape[:2]
        for name in ("q", "k", "v"):
            leaves[name] = _to_heads_first(getattr(inputs, name)).unflatten(0, rows)
        return leaves

    @cached_property
    def _op(self) -> Callable[..., torch.Tensor]:
        from turbopairformer import turbo_attention

        return turbo_attention  # type: ignore[no-any-return]

    def forward(self, leaves: Leaves) -> torch.Tensor:
        return self._op(*_qkv(leaves), leaves["bias1"], leaves["bias2"])


PEERS: tuple[type[Peer], ...] = (OpenFold3Triton, MiniWorld, TurboPairFormer)
