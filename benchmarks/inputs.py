"""Random inputs of one workload, made once and the same for every peer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.shapes import Workload


@dataclass(frozen=True)
class Inputs:
    """Standard normal values in the contract's layout; no tensor requires a gradient yet."""

    q: torch.Tensor  # [B, N, L, H, D]
    k: torch.Tensor
    v: torch.Tensor
    bias1: torch.Tensor | None  # [B, N, 1, 1, L], 0 or the mask's number for hidden keys
    bias2: torch.Tensor | None  # [B, 1, H, L, L]
    grad_output: torch.Tensor  # [B, N, L, H, D]
    # [B, N, L] the keys that bias1 leaves, for peers that take a mask of booleans.
    visible: torch.Tensor
    row_mask: torch.Tensor | None = None  # [B, N], for peers that take one


def make_inputs(
    workload: Workload, *, dtype: torch.dtype, device: torch.device, seed: int
) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)
    B, N, L, H, _ = workload.shape
    mask = workload.mask
    bias_dtype = torch.float32 if mask.float32_biases else dtype

    def normal(*size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=dtype)

    visible = torch.rand(B, N, L, generator=generator, device=device) >= mask.random
    visible[..., 0] = True
    read = torch.ones(B, N, dtype=torch.bool, device=device)
    for b in range(B if mask.padding else 0):
        share = mask.padding[b % len(mask.padding)]
        visible[b, :, L - round(share * L) :] = False
        if mask.padded_rows:
            visible[b, N - round(share * N) :] = False
            read[b, N - round(share * N) :] = False
    if not workload.bias1:
        visible.fill_(True)
    hiding = mask.value
    if bias_dtype == torch.float16 and hiding != -torch.inf:
        hiding = max(hiding, -3e4)  # float16 ends at 65504
    bias1 = torch.where(visible, 0.0, hiding).to(bias_dtype)[:, :, None, None, :]
    bias2 = None
    if workload.bias2 and mask.permuted_bias2:
        bias2 = normal(B, L, L, H, dtype=bias_dtype).permute(0, 3, 1, 2)[:, None]
    elif workload.bias2:
        bias2 = normal(B, 1, H, L, L, dtype=bias_dtype)
    q, k, v, grad_output = (normal(*workload.shape) for _ in range(4))
    return Inputs(
        q,
        k,
        v,
        bias1 if workload.bias1 else None,
        bias2,
        grad_output,
        visible,
        read if mask.row_mask else None,
    )
