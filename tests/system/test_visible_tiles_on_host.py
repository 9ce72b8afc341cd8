"""The tiles of keys in which a row n sees something, and the last of them, whose block writes dq in
the older families' one kernel for all gradients, compiled for the host.
"""

import random
import subprocess

from .host_programs import built_for_a_warp


def test_their_number_and_the_last_one(tmp_path):
    program = built_for_a_warp(tmp_path, "visible_tiles")
    seed = random.randrange(2**31)
    printed = subprocess.run([program, str(seed)], capture_output=True, text=True, check=True)
    assert printed.stdout == "2000 cases\n", f"seed {seed}"
