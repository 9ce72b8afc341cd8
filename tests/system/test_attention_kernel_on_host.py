"""The published template of the forward, compiled for the host with a warp of 32 threads."""

import subprocess

from .host_programs import built_for_a_warp


def test_scales_of_both_signs(tmp_path):
    program = built_for_a_warp(tmp_path, "attention_kernel")
    printed = subprocess.run([program], capture_output=True, text=True)
    assert (printed.returncode, printed.stdout) == (0, "3 calls\n")
