"""examples/axial_parallel.py: over two processes it learns what it learns in one."""

import os
import re
import subprocess
import sys

import pytest

from .world import REPOSITORY

torch = pytest.importorskip("torch")


def test_losses_are_those_of_one_process():
    """On a length that two processes do not share evenly."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["examples/axial_parallel.py", "--length=21", "--steps=4", "--blocks=1"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}  # also where it is not installed
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    losses = re.findall(r"^ *\d+ +(\d+\.\d+) +(\d+\.\d+)$", done.stdout, re.M)
    assert len(losses) == 4, done.stdout + done.stderr
    for many, one in losses:
        assert float(many) == pytest.approx(float(one), rel=1e-3)
    assert float(losses[-1][0]) < 0.7 * float(losses[0][0])
    assert "time of a step" in done.stdout and "peak memory" in done.stdout
