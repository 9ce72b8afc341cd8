"""Run peers on workloads and collect one row for each peer, workload and direction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from benchmarks.errors import errors_of, reference
from benchmarks.inputs import Inputs, make_inputs
from benchmarks.peers import Leaves, Peer, Setting
from benchmarks.shapes import Workload
from benchmarks.timing import MAX_RUNS, CallError, measure
from deepspeed4science.demo.measure import Timing, peak_extra_bytes

DIRECTIONS = ("fwd", "bwd", "fwd+bwd")


@dataclass(frozen=True)
class Row:
    """One measurement."""

    workload: str
    shape: tuple[int, ...]  # B, N, L, H, D
    dtype: str
    direction: str
    peer: str
    timing: Timing
    tflops: float
    peak_extra_bytes: int | None  # of the forward, or of forward and backward together
    errors: dict[str, float] = field(default_factory=dict)  # "O", "dq": relative, against float64


@dataclass(frozen=True)
class Skipped:
    """A peer that could not run a workload, and why."""

    workload: str
    dtype: str
    peer: str
    reason: str


@dataclass(frozen=True)
class Options:
    """How to measure."""

    directions: Sequence[str]
    budget_s: float = 10.0
    max_runs: int = MAX_RUNS
    with_bias1_gradient: bool = False
    with_errors: bool = False
    seed: int = 0

    @property
    def forward_only(self) -> bool:
        """Whether nothing is differentiated; peers with a compiler then compile a forward only."""
        return list(self.directions) == ["fwd"]


class _Ready:
    """A peer with its tensors in place."""

    def __init__(self, peer: Peer, inputs: Inputs, workload: Workload, options: Options) -> None:
        self.peer = peer
        self._workload = workload
        self.leaves: Leaves = peer.adapt(inputs)
        wanted = ["q", "k", "v"] + ["bias2"] * (inputs.bias2 is not None)
        wanted += ["bias1"] * (options.with_bias1_gradient and inputs.bias1 is not None)
        self.trained: dict[str, torch.Tensor] = {}
        for name in () if options.forward_only else wanted:
            tensor = self.leaves.get(name)
            if tensor is not None:
                self.leaves[name] = self.trained[name] = tensor.detach().requires_grad_()
        # Compiles what has to be compiled, and shows the layout of the output's gradient.
        with torch.set_grad_enabled(not options.forward_only), peer.mode():
            self._o: torch.Tensor | None = peer.forward(self.leaves)
        self._grad_output = torch.empty_like(self._o).normal_()
        self.backward_failure = self._try_backward(options)
        if "bwd" not in options.directions or self.backward_failure:
            self.drop_graph()

    def _try_backward(self, options: Options) -> str | None:
        """The error of the backward, or None; a peer whose backward fails still has a forward."""
        if options.forward_only:
            return None
        try:
            self.gradients()
        except Exception as error:  # a peer may fail in any way
            return _in_one_line(error)
        return None

    def gradients(self) -> tuple[torch.Tensor, ...]:
        assert self._o is not None  # drop_graph comes after the last backward
        with self.peer.mode():
            return torch.autograd.grad(
                self._o, list(self.trained.values()), self._grad_output, retain_graph=True
            )

    def call(self, direction: str) -> Callable[[], object]:
        if direction == "fwd":
            return self._forward
        return self.gradients if direction == "bwd" else self._both

    def drop_graph(self) -> None:
        """Forget the forward pass that `bwd` reuses; its saved tensors would count as memory in
        use.
        """
        self._o = None

    def _forward(self) -> torch.Tensor:
        with torch.no_grad(), self.peer.mode():
            return self.peer.forward(self.leaves)

    def _both(self) -> tuple[torch.Tensor, ...]:
        with self.peer.mode():
            o = self.peer.forward(self.leaves)
            return torch.autograd.grad(o, list(self.trained.values()), self._grad_output)


def run_workload(
    workload: Workload,
    peers: Iterable[Peer],
    *,
    dtype: torch.dtype,
    device: torch.device,
    options: Options,
) -> tuple[list[Row], list[Skipped]]:
    """Time every peer that can, interleaved, in every direction."""
    inputs = make_inputs(workload, dtype=dtype, device=device, seed=options.seed)
    dtype_name = str(dtype).removeprefix("torch.")
    ready: dict[str, _Ready] = {}
    skipped: list[Skipped] = []
    for peer in peers:
        reason = peer.not_available(Setting(workload, dtype, device, _free_bytes(device)))
        if reason is None:
            try:
                ready[peer.name] = _Ready(peer, inputs, workload, options)
                continue
            except Exception as error:  # a peer may fail in any way; the others still run
                reason = _in_one_line(error)
        skipped.append(Skipped(workload.id, dtype_name, peer.name, reason))
    for name, entry in ready.items():
        if entry.backward_failure:
            reason = f"no backward: {entry.backward_failure}"
            skipped.append(Skipped(workload.id, dtype_name, name, reason))

    errors = _errors(workload, inputs, ready, options) if options.with_errors else {}
    timings = {}
    for direction in options.directions:
        calls = {
            name: entry.call(direction)
            for name, entry in ready.items()
            if direction == "fwd" or not entry.backward_failure
        }
        while calls:
            try:
                timings[direction] = measure(
                    calls, device, budget_s=options.budget_s, max_runs=options.max_runs
                )
                break
            except CallError as failed:  # such as memory that is short; the others are timed anew
                del calls[failed.name]
                reason = f"{direction}: {_in_one_line(failed.__cause__)}"
                skipped.append(Skipped(workload.id, dtype_name, failed.name, reason))
    for entry in ready.values():
        entry.drop_graph()
    rows = []
    for direction, by_peer in timings.items():
        flop = _flop(workload, direction)
        for name, timing in by_peer.items():
            # What a backward needs shows only together with its forward, which saves for it.
            call = ready[name].call("fwd" if direction == "fwd" else "fwd+bwd")
            rows.append(
                Row(
                    workload=workload.id,
                    shape=workload.shape,
                    dtype=dtype_name,
                    direction=direction,
                    peer=name,
                    timing=timing,
                    tflops=flop / timing.median_ms / 1e9,
                    peak_extra_bytes=peak_extra_bytes(call, device),
                    errors=errors.get(name, {}),
                )
            )
    return rows, skipped


def _in_one_line(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _flop(workload: Workload, direction: str) -> int:
    forward, backward = workload.forward_flop, workload.backward_flop
    return {"fwd": forward, "bwd": backward, "fwd+bwd": forward + backward}[direction]


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    with open("/proc/meminfo") as lines:
        available = next(line for line in lines if line.startswith("MemAvailable"))
    return int(available.split()[1]) * 1024


def _errors(
    workload: Workload, inputs: Inputs, ready: dict[str, _Ready], options: Options
) -> dict[str, dict[str, float]]:
    """Errors of every peer that computes the whole formula, against float64 on the same inputs."""
    compared = {name: entry for name, entry in ready.items() if entry.peer.computes(workload)}
    if not compared:
        return {}
    trained = list(dict.fromkeys(name for entry in compared.values() for name in entry.trained))
    wanted = reference(inputs, trained)
    return {
        name: errors_of(
            entry.peer,
            entry.leaves,
            {} if entry.backward_failure else entry.trained,
            inputs=inputs,
            workload=workload,
            wanted=wanted,
        )
        for name, entry in compared.items()
    }
