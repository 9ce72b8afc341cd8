"""Which block and warp of the Hopper backward computes which piece of delta, in `preprocess` and
beside the kernel that needs it, compiled for the host with blocks of 128 and 768 threads.
"""

import random
import subprocess

from .host_programs import built_for_a_warp


def test_each_piece_once_and_complete_after_all(tmp_path):
    program = built_for_a_warp(tmp_path, "delta_pieces")
    seed = random.randrange(2**31)
    printed = subprocess.run([program, str(seed)], capture_output=True, text=True, check=True)
    assert printed.stdout == "15 calls\n", f"seed {seed}"
