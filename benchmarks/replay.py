"""Device time of the op alone, without the host's, by replay of a CUDA graph: for comparisons of
one kernel under several masks, or of two versions of this package.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from benchmarks.inputs import make_inputs
from benchmarks.peers import Ours
from benchmarks.shapes import Workload

METHOD = (
    "a CUDA graph of several calls, replayed for 0.02 s after a pause of 0.05 s, seven times; the "
    "median of the seven medians, for one call, for each process; caches are not flushed"
)
# Under load an H200 lowers its clocks from 1,980 to 1,500 to 1,800 MHz, now more and now less, so
# that figures of one kernel differ by 5 %. After pauses the clocks are steady: 0.3 %.
PAUSE_SECONDS = 0.05
BURST_SECONDS = 0.02
NUM_BURSTS = 7
SCORES_IN_A_GRAPH = 1e9  # enough that launching the graph is nothing beside it
RowKey = tuple[str, str | None, tuple[int, ...], str, str]


@dataclass(frozen=True)
class ReplayRow:
    """One workload and direction; `median_us` has an entry for each process that measured it."""

    family: str
    commit: str | None
    shape: tuple[int, ...]
    direction: str
    mask: str
    median_us: tuple[float, ...]

    @property
    def key(self) -> RowKey:
        """Identifies the measurement, without its figures."""
        return (self.family, self.commit, self.shape, self.direction, self.mask)

    def joined(self, earlier: ReplayRow | None) -> ReplayRow:
        """The row with the figures of earlier processes before this one's."""
        return replace(self, median_us=(*(earlier.median_us if earlier else ()), *self.median_us))


def read_rows(content: dict[str, Any]) -> dict[RowKey, ReplayRow]:
    """The rows of a result file."""
    rows = [
        ReplayRow(**{**row, "shape": tuple(row["shape"]), "median_us": tuple(row["median_us"])})
        for row in content["results"]
    ]
    return {row.key: row for row in rows}


def measure_replays(
    workloads: Sequence[Workload],
    *,
    directions: Sequence[str],
    dtype: torch.dtype,
    family: str,
    commit: str | None,
) -> Iterator[ReplayRow]:
    """One row after another; `bwd` computes dq, dk, dv and dbias2."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    for workload in workloads:
        with torch.cuda.stream(stream):
            made = calls(workload, dtype, torch.device("cuda"))
            us = {d: _microseconds(made[d], workload, d, stream) for d in directions}
        for direction in directions:
            yield ReplayRow(
                family,
                commit,
                workload.shape,
                direction,
                workload.mask.id,
                (round(us[direction], 1),),
            )


def calls(
    workload: Workload, dtype: torch.dtype, device: torch.device
) -> dict[str, Callable[[], object]]:
    """A call by direction; `bwd` computes dq, dk, dv and dbias2."""
    inputs = make_inputs(workload, dtype=dtype, device=device, seed=0)
    peer = Ours()
    leaves = peer.adapt(inputs)
    trained = [tensor.requires_grad_() for name in "qkv" if (tensor := leaves[name]) is not None]
    if (bias2 := leaves["bias2"]) is not None:
        trained.append(bias2.requires_grad_())
    o = peer.forward(leaves)

    def forward() -> object:
        with torch.no_grad():
            return peer.forward(leaves)

    def backward() -> object:
        return torch.autograd.grad(o, trained, inputs.grad_output, retain_graph=True)

    return {"fwd": forward, "bwd": backward}


def _microseconds(
    call: Callable[[], object], workload: Workload, direction: str, stream: torch.cuda.Stream
) -> float:
    num_calls = int(SCORES_IN_A_GRAPH / workload.num_scores)
    num_calls = max(2, min(50, num_calls if direction == "fwd" else num_calls // 3))
    return _steady_ms(capture(call, stream, num_calls)) * 1e3 / num_calls


def capture(
    call: Callable[[], object], stream: torch.cuda.Stream, num_calls: int
) -> torch.cuda.CUDAGraph:
    """A graph of so many calls, on the current stream. A backward runs on the stream of its
    forward, and a graph holds what one stream does: the call's tensors were made on it, too.
    """
    for _ in range(3):
        call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(num_calls):
            call()
    return graph


def _steady_ms(graph: torch.cuda.CUDAGraph) -> float:
    """The median of several bursts, each after a pause. A burst's first replay does not count."""
    medians = []
    for _ in range(NUM_BURSTS):
        time.sleep(PAUSE_SECONDS)
        replay_ms(graph)
        times, end = [replay_ms(graph)], time.perf_counter() + BURST_SECONDS
        while time.perf_counter() < end:
            times.append(replay_ms(graph))
        medians.append(median(times))
    return median(medians)


def replay_ms(graph: torch.cuda.CUDAGraph, num_replays: int = 1) -> float:
    """Milliseconds of so many replays."""
    start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(num_replays):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))
