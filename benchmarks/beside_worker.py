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

from benchmarks.replay import calls, capture, replay_ms
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
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            call = calls(chosen, kind, torch.device(device))[direction]
            graph = capture(call, stream, num_calls=1)
        return lambda num_calls: replay_ms(graph, num_calls) * 1e-3 / num_calls
    call = calls(chosen, kind, torch.device(device))[direction]
    call()  # compiles

    def timed(num_calls: int) -> float:
        begin = time.perf_counter()
        for _ in range(num_calls):
            call()
        return (time.perf_counter() - begin) / num_calls

    return timed


if __name__ == "__main__":
    main()
