"""Whole layers of `deepspeed4science.nn` with their residual, forward and backward, under bfloat16
autocast: eager and compiled, and the kernels in which the compiled layers spend their time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.timing import measure
from deepspeed4science import nn

CHANNELS, HEADS, HEAD_DIM = 128, 4, 32  # of the pair representation in AlphaFold 2 and 3
LAYERS = {
    "starting": nn.TriangleAttentionStartingNode,
    "ending": nn.TriangleAttentionEndingNode,
}
_NUM_PROFILED = 3


@dataclass(frozen=True)
class LayerRow:
    """Milliseconds of forward and backward together."""

    layer: str
    mode: str
    length: int
    median_ms: float
    p20_ms: float
    p80_ms: float
    num_runs: int
    kernels: tuple[tuple[str, int, float], ...]  # name, calls and ms of one step; longest first


def measure_layers(
    lengths: Sequence[int],
    *,
    modes: Sequence[str],
    device: torch.device,
    budget_s: float,
    max_runs: int,
    num_kernels: int = 20,
) -> list[LayerRow]:
    """Every layer and mode at one length in one run."""
    rows = []
    for length in lengths:
        torch._dynamo.reset()  # otherwise this length would be compiled for lengths of any size
        x = torch.randn(1, length, length, CHANNELS, device=device, requires_grad=True)
        gradient = torch.randn_like(x)
        steps = {
            (layer, mode): _step(layer, mode, x, gradient) for layer in LAYERS for mode in modes
        }
        named = {f"{layer} {mode}": step for (layer, mode), step in steps.items()}
        timings = measure(named, device, budget_s=budget_s, max_runs=max_runs)
        for (layer, mode), step in steps.items():
            timing = timings[f"{layer} {mode}"]
            kernels = _kernels(step)[:num_kernels] if device.type == "cuda" else ()
            rows.append(
                LayerRow(
                    layer,
                    mode,
                    length,
                    timing.median_ms,
                    timing.p20_ms,
                    timing.p80_ms,
                    timing.num_runs,
                    tuple(kernels),
                )
            )
    return rows


def _step(layer: str, mode: str, x: Tensor, gradient: Tensor) -> Callable[[], object]:
    module = LAYERS[layer](CHANNELS, HEAD_DIM, HEADS, bias=False).to(x.device)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.05)

    def with_residual(x: Tensor) -> Tensor:
        result: Tensor = module(x, residual=True)
        return result

    function: Callable[[Tensor], Tensor] = with_residual
    if mode == "compiled":
        function = torch.compile(with_residual, fullgraph=True)
    wanted = [x, *module.parameters()]

    def step() -> object:
        with torch.autocast(x.device.type, torch.bfloat16):
            y = function(x)
        return torch.autograd.grad(y, wanted, gradient)

    return step


def _kernels(step: Callable[[], object]) -> list[tuple[str, int, float]]:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(_NUM_PROFILED):
            step()
        torch.cuda.synchronize()
    entries = [
        (
            entry.key,
            entry.count // _NUM_PROFILED,
            entry.self_device_time_total / 1e3 / _NUM_PROFILED,
        )
        for entry in profiled.key_averages()
        if entry.self_device_time_total > 0
    ]
    return sorted(entries, key=lambda entry: -entry[2])
