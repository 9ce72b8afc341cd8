"""Random calls under the error law, until the time is over or one breaks it.

    python -m tests.numeric.fuzz --seconds 60 --seed 1 [--device cuda]
    python -m tests.numeric.fuzz --call "seed=5 dtype=bf16 Lq=2 ..."

A call that breaks the law is made smaller as long as it still breaks it, and printed as a line that
repeats it. The law compares one draw of roundings with another (docs/math.md): where few elements
count, a correct call exceeds it by some percent once in a thousand. An excess of less than a factor
of two therefore counts only if further draws of the same call exceed the law too.
"""

import argparse
import itertools
import math
import random
import re
import sys
import time
from dataclasses import replace

import torch

from tests.numeric.law import check
from tests.numeric.poison import poison_memory
from tests.numeric.random_calls import Call, draw, of_kind, smaller, within_limits

# Tensors expanded over N exceed the law in up to every second draw (docs/math.md).
DRAWS = 8


def failure(call, device, checked=check):
    """The failure of a call; empty where it keeps the law. Any exception is a failure."""
    try:
        checked(call.inputs(device))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def excess(wrong):
    """The error divided by what the law allows; infinite for other failures."""
    parts = wrong.removeprefix("AssertionError: ").split("; ")
    figures = [re.fullmatch(r"(?:O|d\w+): (\S+) > (\S+)", part) for part in parts]
    return max(float(found[1]) / float(found[2]) if found else math.inf for found in figures)


def is_broken(call, device, checked=check):
    wrong = failure(call, device, checked)
    if not wrong or excess(wrong) > 2:
        return bool(wrong)
    others = (replace(call, seed=call.seed + step) for step in range(1, DRAWS))
    return all(failure(other, device, checked) for other in others)


def smallest(call, device, checked=check, seconds=60.0):
    """The simplest call found that still breaks the law."""
    end = time.monotonic() + seconds
    moved = True
    while moved:
        moved = False
        steps = itertools.product(
            smaller(call), range(4)
        )  # with other sizes the numbers differ, too
        for candidate in (replace(step, seed=step.seed + i) for step, i in steps):
            if time.monotonic() > end:
                return call
            if is_broken(candidate, device, checked):
                call, moved = candidate, True
                break
    return call


def compile_kinds(kinds):
    """All GPU kernels of these dtypes and tiers of head dimensions, at once."""
    from op_builder import EvoformerAttnBuilder
    from op_builder.ops.instantiations import CUDA_BIASES
    from op_builder.ops.presets import Row, calls

    builder = EvoformerAttnBuilder()
    wanted = [
        call
        for dtype, tier in kinds
        for call in calls([Row("", tier, bias) for bias in CUDA_BIASES], dtypes=[dtype])
    ]
    targets = builder.archs_here()
    kernels = [
        kernel
        for aligned in (True, False)
        for kernel in builder.kernels_for(wanted, targets, aligned=aligned)
    ]
    builder.load(verbose=False, kernels=list(dict.fromkeys(kernels)))


def fuzz(seconds, seed, device="cpu", checked=check, kinds=()):
    """The number of calls that kept the law, and the smallest failing call or None; only calls of
    these dtypes and tiers of head dimensions, if any are given.
    """
    generator = random.Random(seed)
    end = time.monotonic() + seconds
    done = 0
    while time.monotonic() < end:
        call = draw(generator)
        if kinds:
            call = of_kind(call, *generator.choice(kinds))
        if device != "cpu":
            call = within_limits(call)
        if is_broken(call, device, checked):
            return done, smallest(call, device, checked)
        done += 1
    return done, None


def report(seed, call, device, checked=check):
    """The lines to print for a failing call."""
    return (
        f"seed {seed}: {failure(call, device, checked)}\n"
        f'repeat: python -m tests.numeric.fuzz --device {device} --call "{call}"'
    )


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--call", help="one line that an earlier run printed")
    options = parser.parse_args(arguments)
    poison_memory()
    torch.set_num_threads(1)  # most calls are small
    if options.call is not None:
        wrong = failure(Call.parse(options.call), options.device)
        print(wrong or "keeps the law")
        return 1 if wrong else 0
    done, call = fuzz(options.seconds, options.seed, options.device)
    print(f"seed {options.seed}: {done} calls keep the law")
    if call is not None:
        print(report(options.seed, call, options.device))
    return 0 if call is None else 1


if __name__ == "__main__":
    sys.exit(main())
