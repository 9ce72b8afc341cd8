"""What Hopper's forward leaves out, compiled for the host with a warp of 32 threads: steps of keys
by the rule of params.h, in rows on 16 bytes, in others, and longer than one word.
"""

import random
import subprocess

from .host_programs import built_for_a_warp


def test_steps_that_a_tile_sees(tmp_path):
    program = built_for_a_warp(tmp_path, "forward_mask")
    seed = random.randrange(2**31)
    printed = subprocess.run([program, str(seed)], capture_output=True, text=True, check=True)
    assert printed.stdout == "960 rows\n", f"seed {seed}"
