"""Sm80's 16-byte stores of gradients, compiled for the host with a warp of 32 threads."""

import subprocess

from .host_programs import built_for_a_warp


def test_every_word_reaches_its_place(tmp_path):
    program = built_for_a_warp(tmp_path, "gradient_rows")
    printed = subprocess.run([program], capture_output=True, text=True)
    assert (printed.returncode, printed.stdout) == (0, "216 matrices\n")
