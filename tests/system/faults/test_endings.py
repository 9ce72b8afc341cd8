"""A process that ends beside a thread in its first call."""

import os
import subprocess
import sys

import pytest

from ..toys import REPOSITORY

SCRIPT = """
import sys, threading, time, torch
from deepspeed4science import DS4Sci_EvoformerAttention as attention
q = torch.randn(1, 1, 4, 1, 8, requires_grad=True)
threading.Thread(target=lambda: attention(q, q, q), daemon=True).start()
time.sleep({seconds})
sys.exit(3)
"""


@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.3, 1.0, 1.5])
def test_exit_beside_a_daemon_thread(tmp_path, seconds):
    """PyTorch's dispatcher is below the call: a thread that Python unwinds there aborts."""
    environment = {"PYTHONPATH": str(REPOSITORY), "DS4S_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(seconds=seconds)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, "terminate called" in done.stderr) == (3, False), done.stderr
