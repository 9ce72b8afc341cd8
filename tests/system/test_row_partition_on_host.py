"""How kernel_dbias2 on Hopper divides the rows n of its tiles, compiled for the host: each row n of
each tile once, and no cluster has far more than its share.
"""

import random
import subprocess

from .host_programs import built


def test_each_row_of_each_tile_once(tmp_path):
    program = built(tmp_path, "row_partition")
    seed = random.randrange(2**31)
    printed = subprocess.run([program, str(seed)], capture_output=True, text=True, check=True)
    first, *work, suits = printed.stdout.splitlines()
    assert first == "all right", f"seed {seed}: {printed.stdout}"
    # Equal shares are 139.6, 1117.1 and 62.1 rows n; slices need 168, 1176 and 72 with starts.
    assert suits == "101010"
    assert work == ["24 384 151", "96 768 1137", "16 256 72"], work
