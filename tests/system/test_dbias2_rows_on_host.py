"""Rows of dbias2 add up to 0, compiled for the host with a warp of 32 threads: rounded and not, of
aligned rows and others, with NaN, with zeros; not of a part of the keys, nor of one row n.
"""

import random
import subprocess

from .host_programs import built_for_a_warp


def test_rows_add_up_to_zero(tmp_path):
    program = built_for_a_warp(tmp_path, "dbias2_rows")
    seed = random.randrange(2**31)
    printed = subprocess.run([program, str(seed)], capture_output=True, text=True, check=True)
    assert printed.stdout == "900 rows\n", f"seed {seed}"
