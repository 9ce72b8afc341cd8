"""A process that dies ends the others with an error, and not with a hang."""

import time

import pytest

pytest.importorskip("torch")

from . import world


@pytest.mark.parametrize("cases", ["of_rules", "of_ring"])
def test_the_others_end(cases, session_seed):
    begin = time.monotonic()
    found, output = world.launch("gloo", 2, session_seed, f"tests.distributed.lost_process:{cases}")
    assert "RuntimeError" in found["end"] and "did not end it" in found["end"], output
    assert "nobody missed it" not in found["end"]
    assert time.monotonic() - begin < world.PATIENCE
