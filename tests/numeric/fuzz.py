"""Random calls under the error law, until the time is over or one breaks it.

    python -m tests.numeric.fuzz --seconds 60 --seed 1 [--device cuda]
    python -m tests.numeric.fuzz --call "seed=5 dtype=bf16 Lq=2 ..."

A call that breaks the law is made as small as it goes on breaking it, and printed as a line that
repeats it.
"""

import argparse
import random
import sys
import time

import torch

from tests.numeric.law import check
from tests.numeric.poison import poisoning
from tests.numeric.random_calls import Call, draw, smaller


def failure(call, device, checked=check):
    """What is wrong with a call; empty when it keeps the law. Any exception is wrong."""
    try:
        checked(call.inputs(device))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def smallest(call, device, checked=check, seconds=60.0):
    """The plainest call found that still fails."""
    end = time.monotonic() + seconds
    moved = True
    while moved:
        moved = False
        for candidate in smaller(call):
            if time.monotonic() > end:
                return call
            if failure(candidate, device, checked):
                call, moved = candidate, True
                break
    return call


def fuzz(seconds, seed, device="cpu", checked=check):
    """The number of calls that kept the law, and the smallest failing call or None."""
    generator = random.Random(seed)
    end = time.monotonic() + seconds
    done = 0
    while time.monotonic() < end:
        call = draw(generator)
        if failure(call, device, checked):
            return done, smallest(call, device, checked)
        done += 1
    return done, None


def report(seed, call, device, checked=check):
    """What to print of a failing call."""
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
    torch.empty = poisoning(torch.empty)
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
