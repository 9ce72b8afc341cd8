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


LOOPS = """
import sys, threading, time, torch
from deepspeed4science import DS4Sci_EvoformerAttention as attention
q = torch.randn(33)[{first}:][:32].view(1, 1, 4, 1, 8)
attention(q, q, q)
def loop():
    while True:
        attention(q, q, q)
for _ in range(3):
    threading.Thread(target=loop, daemon=True).start()
time.sleep(0.1)
sys.exit(3)
"""


@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.3, 1.0, 1.5])
def test_exit_beside_a_daemon_thread(tmp_path, seconds):
    """PyTorch's dispatcher is below the call: a thread that Python unwinds there aborts."""
    ends_quietly(SCRIPT.format(seconds=seconds), tmp_path)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """A cache for processes whose subject is what comes after the first call."""
    return tmp_path_factory.mktemp("kernels")


@pytest.mark.parametrize("first", [0, 1], ids=["replayed", "through the operator"])
def test_exit_beside_daemon_threads_that_call_on_and_on(kernels, first):
    """They stop at the door."""
    ends_quietly(LOOPS.format(first=first), kernels)


BETWEEN_CALLS = """
import atexit, sys
def stopped():  # called after the package's own functions, which are registered later
    print(len(sys.modules["op_builder.system.process_exit"]._stopped))
atexit.register(stopped)
import threading, time, torch
from deepspeed4science import DS4Sci_EvoformerAttention as attention
q = torch.randn(1, 1, 4, 1, 8)
both_called = threading.Barrier(3)
def loop():
    attention(q, q, q)
    both_called.wait()
    while True:
        attention(q, q, q)
        time.sleep(0.02)
def wait():
    attention(q, q, q)
    both_called.wait()
    threading.Event().wait()
for target in loop, wait:
    threading.Thread(target=target, daemon=True).start()
both_called.wait()
sys.exit(3)
"""


def test_a_daemon_thread_between_two_calls_is_stopped(kernels):
    """PyTorch frees results without Python's lock: a thread unwound there aborts."""
    assert ends_quietly(BETWEEN_CALLS, kernels) == "1\n"


def ends_quietly(script, cache):
    environment = {"PYTHONPATH": str(REPOSITORY), "DS4S_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, "terminate called" in done.stderr) == (3, False), done.stderr
    return done.stdout
