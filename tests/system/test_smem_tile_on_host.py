"""Tiles of Sm70 to Sm80 in shared memory: places, sums of offsets, banks, sectors."""

import subprocess

from .host_programs import built_for_a_warp


def test_tiles_have_no_bank_conflicts(tmp_path):
    program = built_for_a_warp(tmp_path, "smem_tile")
    printed = subprocess.run([program], capture_output=True, text=True)
    assert (printed.returncode, printed.stdout) == (0, "81566 places\n")
