"""What is loaded, and what is said where it cannot be."""

import subprocess
import sys

import pytest

from .world import REPOSITORY

pytest.importorskip("torch")

UNUSED = """
import sys, torch
from deepspeed4science import DS4Sci_EvoformerAttention
x = torch.nn.Parameter(torch.randn(1, 1, 8, 1, 8))
DS4Sci_EvoformerAttention(x, x, x).sum().backward()
wrong = ("deepspeed4science.distributed", "torch.distributed.tensor")
assert not [name for name in sys.modules if name.startswith(wrong)]
"""
MISSING = """
import sys, torch
sys.modules["torch.distributed.tensor.experimental"] = None
try:
    import deepspeed4science.distributed.sharding
except ImportError as error:
    assert "expected PyTorch 2.10 or newer" in str(error), error
else:
    raise AssertionError("nothing was said")
"""


@pytest.mark.parametrize("program", [UNUSED, MISSING], ids=["unused", "missing"])
def test_program(program):
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
