"""Hopper's online softmax, compiled for the host with a warp of 32 threads: masks of every size
need no GPU.
"""

import random
import subprocess

from .host_programs import built_for_a_warp

# The most that P loses by rounding to bfloat16, and to float16, where small weights lose more.
ROUNDED = 2**-8, 2**-10.5


def test_weights_and_lse_are_those_of_double(tmp_path):
    program = built_for_a_warp(tmp_path, "sm90_softmax")
    seed = random.randrange(2**31)
    printed = subprocess.run([program, str(seed)], capture_output=True, text=True, check=True)
    lines = [line.split(" ", 3) for line in printed.stdout.splitlines()]
    assert len(lines) == 10
    wrong = {
        kind: figures
        for *figures, kind in lines
        if not all(float(x) <= most for x, most in zip(figures, (*ROUNDED, 4e-6), strict=True))
    }
    assert not wrong, f"seed {seed}"
