"""The op in children of a process that has imported it: data loaders and servers fork."""

import subprocess
import sys

from .toys import REPOSITORY

FORKED_OP = """\
import os, sys, torch
from deepspeed4science import DS4Sci_EvoformerAttention
def answer():
    torch.manual_seed(0)
    q = torch.randn(1, 2, 8, 2, 8, requires_grad=True)
    o = DS4Sci_EvoformerAttention(q, q, q, [None, None])
    o.sum().backward()
    return float(o.sum()), float(q.grad.abs().sum())
children = []
for _ in range(2):
    child = os.fork()
    if child == 0:
        os._exit(0 if answer() == answer() else 1)
    children.append(child)
assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
answer()
"""


def test_the_op_in_forked_children():
    """Forked after the import and before the first call: nothing was begun that a child lacks."""
    command = [sys.executable, "-c", FORKED_OP]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
