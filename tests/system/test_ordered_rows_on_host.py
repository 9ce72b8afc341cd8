"""Rows of dbias2 in the order of accumulators become row-major and add up to 0, compiled for the
host with a block of 128 threads.
"""

import random
import subprocess

from .host_programs import built_for_a_warp


def test_elements_are_read_before_others_lie_in_their_place(tmp_path):
    program = built_for_a_warp(tmp_path, "ordered_rows")
    seed = random.randrange(2**31)
    printed = subprocess.run([program, str(seed)], capture_output=True, text=True, check=True)
    assert printed.stdout == "12 matrices\n", f"seed {seed}"
