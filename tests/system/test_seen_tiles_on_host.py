"""The tiles of keys that Hopper's backward computes where blocks take tiles from a counter, found
and numbered by code compiled for the host.
"""

import random
import subprocess

from .host_programs import built_for_a_warp


def test_each_seen_tile_once(tmp_path):
    program = built_for_a_warp(tmp_path, "seen_tiles")
    seed = random.randrange(2**31)
    printed = subprocess.run([program, str(seed)], capture_output=True, text=True, check=True)
    assert printed.stdout == "done\n", f"seed {seed}: {printed.stdout}"
