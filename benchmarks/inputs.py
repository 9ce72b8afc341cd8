"""Random inputs of one workload, made once and handed to every peer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.shapes import Workload

MASKED_SHARE = 0.1  # of the keys; column 0 is never masked, so that every row sees a key


@dataclass(frozen=True)
class Inputs:
    """Standard normal values in the contract's layout; no tensor requires a gradient yet."""

    q: torch.Tensor  # [B, N, L, H, D]
    k: torch.Tensor
    v: torch.Tensor
    bias1: torch.Tensor | None  # [B, N, 1, 1, L], 0 or a large negative number
    bias2: torch.Tensor | None  # [B, 1, H, L, L]
    grad_output: torch.Tensor  # [B, N, L, H, D]
    visible: (
        torch.Tensor
    )  # [B, N, L] the keys that bias1 leaves, for peers that take a mask of booleans


def make_inputs(
    workload: Workload, *, dtype: torch.dtype, device: torch.device, seed: int
) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)
    B, N, L, H, _ = workload.shape

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=dtype)

    visible = torch.rand(B, N, L, generator=generator, device=device) >= MASKED_SHARE
    visible[..., 0] = True
    if not workload.bias1:
        visible.fill_(True)
    masked = -3e4 if dtype == torch.float16 else -1e9  # float16 ends at 65504
    bias1 = (
        torch.where(visible, 0.0, masked).to(dtype)[:, :, None, None, :] if workload.bias1 else None
    )
    bias2 = normal(B, 1, H, L, L) if workload.bias2 else None
    q, k, v, grad_output = (normal(*workload.shape) for _ in range(4))
    return Inputs(q, k, v, bias1, bias2, grad_output, visible)
