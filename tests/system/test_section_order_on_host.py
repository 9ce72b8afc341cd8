"""The order in which Hopper's backward gives accumulators of dq to sections of the queries,
compiled for the host: no block waits forever (docs/kernels/dq-accumulators.md, H5).
"""

import random
import subprocess

from .host_programs import built


def test_no_section_waits_for_one_that_comes_later(tmp_path):
    program = built(tmp_path, "section_order")
    seed = random.randrange(2**31)
    printed = subprocess.run([program, str(seed)], capture_output=True, text=True, check=True)
    assert printed.stdout == "done\n", f"seed {seed}: {printed.stdout}"
