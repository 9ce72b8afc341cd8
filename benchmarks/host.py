"""Host time of a call, with inputs so small that no call waits for the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.inputs import Inputs, make_inputs
from benchmarks.peers import Eager, Leaves, Ours, Peer, Sdpa, Setting
from benchmarks.shapes import Workload
from deepspeed4science.demo.measure import synchronize

TINY = Workload("tiny", 1, 1, 8, 1, 16, "next to no arithmetic")
SMALL = Workload("small", 1, 1, 72, 1, 16, "as little as has a kernel on a GPU, rows of 16 bytes")
# PyTorch runs a GPU's backward in a thread of its own. Waking that thread, and then the caller,
# takes longer the longer they have slept: up to 50 us each on a virtual machine. "in one thread"
# is measured without it (torch.autograd.set_multithreading_enabled).
CALLS = ("fwd", "fwd recorded", "fwd+bwd", "fwd+bwd in one thread")
CALLS_PER_SAMPLE = 100  # few enough that a GPU's launch queue does not fill
NUM_SAMPLES = 30


@dataclass(frozen=True)
class Overhead:
    """Host time of one call with both biases. "fwd recorded": all five inputs need a gradient."""

    peer: str
    call: str
    median_us: float
    p20_us: float
    p80_us: float


class Autograd(Peer):
    """The cost of autograd itself: an autograd.Function that computes nothing."""

    name = "autograd"

    def computes(self, workload: Workload) -> bool:
        return False

    def not_available(self, setting: Setting) -> str | None:
        return None

    def adapt(self, inputs: Inputs) -> Leaves:
        return Ours().adapt(inputs)

    def forward(self, leaves: Leaves) -> torch.Tensor:
        names = ("q", "k", "v", "bias1", "bias2")
        o: torch.Tensor = _Nothing.apply(*(leaves[name] for name in names))  # type: ignore[no-untyped-call]
        return o


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*inputs)
        return torch.empty_like(inputs[0])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.saved_tensors


def measure_overhead(*, dtype: torch.dtype, device: torch.device) -> list[Overhead]:
    """Times all peers in turn, round after round. On a CPU it uses one thread: with so little work,
    a call of several threads would mostly wait for them.
    """
    if device.type == "cpu":
        torch.set_num_threads(1)
    workload = TINY if device.type == "cpu" else SMALL
    inputs = make_inputs(workload, dtype=dtype, device=device, seed=0)
    peers: tuple[Peer, ...] = (Ours(), Eager(), Sdpa(), Autograd())
    calls = {
        (peer.name, call): _call(peer, call, inputs)
        for call in CALLS
        for peer in peers
        if call != "fwd" or not isinstance(peer, Autograd)
    }
    samples: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    for sample in range(NUM_SAMPLES + 2):
        for key, call in calls.items():
            synchronize(device)
            start = time.perf_counter()
            for _ in range(CALLS_PER_SAMPLE):
                call()
            elapsed = time.perf_counter() - start
            if sample >= 2:
                samples[key].append(1e6 * elapsed / CALLS_PER_SAMPLE)
    return [_overhead(*key, sorted(values)) for key, values in samples.items()]


def _call(peer: Peer, call: str, inputs: Inputs) -> Callable[[], object]:
    leaves = peer.adapt(inputs)
    if call == "fwd":
        return torch.no_grad()(lambda: peer.forward(leaves))
    wanted = [leaves[name].requires_grad_() for name in ("q", "k", "v", "bias1", "bias2")]
    if call == "fwd recorded":
        return lambda: peer.forward(leaves)
    gradient = torch.ones_like(peer.forward(leaves))

    def both() -> object:
        return torch.autograd.grad(peer.forward(leaves), wanted, gradient)

    def in_one_thread() -> object:
        with torch.autograd.set_multithreading_enabled(False):
            return both()

    return both if call == "fwd+bwd" else in_one_thread


def _overhead(peer: str, call: str, ordered: list[float]) -> Overhead:
    last = len(ordered) - 1
    return Overhead(
        *(peer, call, statistics.median(ordered)),
        *(ordered[round(0.2 * last)], ordered[round(0.8 * last)]),
    )
