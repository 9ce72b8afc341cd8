"""A process of `benchmarks beside`, for one version: prepares the calls that it is asked for, one
after another, and times them. Questions and answers are lines of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

import torch

from benchmarks.replay import calls
from benchmarks.shapes import select


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever else is printed
    timed: Callable[[int], float] | None = None
    for line in sys.stdin:
        question = json.loads(line)
        if "num_calls" in question:
            assert timed is not None, "no call has been prepared"
            answers.write(f"{timed(question['num_calls'])}\n")
        else:
            timed = None  # its memory is free before the next one's is taken
            timed = prepare(**question)
            answers.write("0\n")


def prepare(workload: str, direction: str, dtype: str, device: str) -> Callable[[int], float]:
    """A function that makes so many calls and returns the seconds of one."""
    [chosen] = select([workload])
    kind = getattr(torch, dtype)
    if device == "cuda":
        return on_gpu(lambda: calls(chosen, kind, torch.device("cuda"))[direction])
    call = calls(chosen, kind, torch.device(device))[direction]

    def timed(num_calls: int) -> float:
        begin = time.perf_counter()
        for _ in range(num_calls):
            call()
        return (time.perf_counter() - begin) / num_calls

    timed(2)
    return timed


def on_gpu(make: Callable[[], Callable[[], object]]) -> Callable[[int], float]:
    """A backward runs on the stream of its forward, and a graph holds what one stream does: all is
    made on that stream.
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        call = make()
        for _ in range(2):
            call()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            results = call()
    torch.cuda.synchronize()

    def timed(num_calls: int, results: object = results) -> float:  # results stay in memory
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(num_calls):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3 / num_calls

    return timed


if __name__ == "__main__":
    main()
