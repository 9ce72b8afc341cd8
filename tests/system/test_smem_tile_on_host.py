"""Tiles of Sm70 to Sm80 in shared memory: places, sums of offsets, banks, sectors, copies."""

import subprocess

from .host_programs import built_for_a_warp


def test_tiles_have_no_bank_conflicts(tmp_path):
    program = built_for_a_warp(tmp_path, "smem_tile")
    printed = subprocess.run([program], capture_output=True, text=True)
    assert (printed.returncode, printed.stdout) == (0, "81566 places\n")


def test_matrices_go_into_tiles_and_out_again(tmp_path):
    program = built_for_a_warp(tmp_path, "tile_loader")
    printed = subprocess.run([program], capture_output=True, text=True)
    assert (printed.returncode, printed.stdout) == (0, "735 matrices\n")
