"""Random calls under the error law, until the time is over or one breaks it.

    python -m tests.numeric.fuzz --seconds 60 --seed 1
    python -m tests.numeric.fuzz --device cuda --kinds bf16:32,fp16:64 [--large]
    python -m tests.numeric.fuzz --call "seed=5 dtype=bf16 Lq=2 ..."

A call that breaks the law is made smaller as long as it still breaks it, and both are printed as
lines that repeat them. The law compares one draw of roundings with another (docs/math.md), so a
correct call exceeds it now and then: by some percent, and where a result has few elements by more.
Such an excess counts only if the stacked results of this call and of further draws exceed the law,
too.

`--kinds` compiles the GPU kernels of these dtypes and tiers of head dimensions at once and draws
their calls only. `--large` draws calls of up to 4e7 scores and compares their rows one by one, too.
"""

import argparse
import itertools
import random
import re
import sys
import time
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from tests.numeric.law import MANY, NAMES, check, check_calls, ours
from tests.numeric.poison import poison_memory
from tests.numeric.random_calls import Call, draw, draw_large, of_kind, smaller, within_limits

DRAWS = 16  # at least; as many as give each result law.MANY elements
# An excess of one draw that may be chance. Of few elements, a larger one than the second would be
# one of law.MANY draws together, too.
MOST_OF_MANY_ELEMENTS, MOST_OF_FEW_ELEMENTS = 2, 16


class Failing(NamedTuple):
    drawn: Call
    smallest: Call


def failure(call, device, function=ours, rows=False):
    """The failure of a call; empty where it keeps the law. Any exception is a failure."""
    return said(partial(check, rows=rows), call.inputs(device), function)


def said(checked, *arguments):
    try:
        checked(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def may_be_chance(wrong, inputs):
    """Whether errors are somewhat too large and nothing else is wrong: no shape, NaN, exception."""
    tensors = dict(zip(NAMES, (inputs.do, *inputs.tensors()), strict=True))
    for part in wrong.removeprefix("AssertionError: ").split("; "):
        found = re.fullmatch(r"(O|d\w+): (\S+) > (\S+)", part)
        if not found:
            return False
        few = tensors[found[1]].numel() < MANY
        most = MOST_OF_FEW_ELEMENTS if few else MOST_OF_MANY_ELEMENTS
        if not float(found[2]) < most * float(found[3]):
            return False
    return True


def is_broken(call, device, function=ours, rows=False):
    wrong = failure(call, device, function, rows)
    if not wrong or not may_be_chance(wrong, call.inputs()):
        return bool(wrong)
    draws = (replace(call, seed=call.seed + step).inputs(device) for step in itertools.count())
    return bool(said(check_calls, lambda: next(draws), DRAWS, function))


def smallest(call, device, broken=is_broken, seconds=600.0):
    """The simplest call found that still breaks the law."""
    end = time.monotonic() + seconds
    moved = True
    while moved:
        moved = False
        # With other sizes the numbers differ, too.
        steps = itertools.product(smaller(call), range(4))
        for candidate in (replace(step, seed=step.seed + i) for step, i in steps):
            if time.monotonic() > end:
                return call
            if broken(candidate, device):
                call, moved = candidate, True
                break
    return call


def kinds_of(text):
    """((dtype, tier), ...) of a text like bf16:32,fp16:64."""
    pairs = (kind.split(":") for kind in text.split(","))
    return tuple((dtype, int(tier)) for dtype, tier in pairs)


def compile_kinds(kinds, alignments=(True, False)):
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
        for aligned in alignments
        for kernel in builder.kernels_for(wanted, targets, aligned=aligned)
    ]
    builder.load(verbose=False, kernels=list(dict.fromkeys(kernels)))


def fuzz(seconds, seed, device="cpu", broken=is_broken, kinds=(), drawn=draw, least=0):
    """The number of calls that kept the law, and a `Failing` or None; only calls of these dtypes
    and tiers of head dimensions, if any are given. `least`: so many calls at least, however long
    they take.
    """
    generator = random.Random(seed)
    end = time.monotonic() + seconds
    done = 0
    while time.monotonic() < end or done < least:
        call = drawn(generator)
        if kinds:
            call = of_kind(call, *generator.choice(kinds))
        if device != "cpu":
            call = within_limits(call)
        if broken(call, device):
            return done, Failing(call, smallest(call, device, broken))
        done += 1
    return done, None


def report(seed, failing, device, function=ours, rows=False):
    """The lines to print for a `Failing`: the smallest call may fail by chance, or for another
    reason, so the one that was drawn is there, too.
    """
    command = f"python -m tests.numeric.fuzz --device {device}{' --large' * rows}"
    return (
        f"seed {seed}: {failure(failing.smallest, device, function, rows)}\n"
        f'repeat: {command} --call "{failing.smallest}"\n'
        f'found as: {command} --call "{failing.drawn}"'
    )


def command_parser():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kinds", type=kinds_of, default=(), help="as in bf16:32,fp16:64")
    parser.add_argument("--large", action="store_true", help="long calls, compared row by row too")
    parser.add_argument("--call", help="one line that an earlier run printed")
    return parser


def main(arguments=None):
    options = command_parser().parse_args(arguments)
    poison_memory()
    torch.set_num_threads(1)  # most calls are small
    if options.call is not None:
        wrong = failure(Call.parse(options.call), options.device, rows=options.large)
        print(wrong or "keeps the law")
        return 1 if wrong else 0
    if options.kinds:
        compile_kinds(options.kinds, (True,) if options.large else (True, False))
    done, failing = fuzz(
        options.seconds,
        options.seed,
        options.device,
        partial(is_broken, rows=options.large),
        options.kinds,
        draw_large if options.large else draw,
    )
    print(f"seed {options.seed}: {done} calls keep the law")
    if failing is not None:
        print(report(options.seed, failing, options.device, rows=options.large))
    return 0 if failing is None else 1


if __name__ == "__main__":
    sys.exit(main())
