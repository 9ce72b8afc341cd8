"""Which (b, n, h) has which accumulator of dq in the older families' one kernel for all gradients,
compiled for the host: nobody adds to memory that another one has or writes.
"""

import random
import subprocess
from pathlib import Path

import pytest

from op_builder import paths
from op_builder.toolchain import cutlass, host_compiler

HOST = Path(__file__).resolve().parents[1] / "cpp" / "host"


def test_who_had_an_accumulator_before(tmp_path):
    host, headers = host_compiler.find_host_compiler(), cutlass.find_cutlass()
    for part in (host, headers):
        if not part.ok:
            pytest.skip(f"{part.reason}; {part.remedy}")
    path = tmp_path / "pool"
    command = [host.path, "-std=c++17", "-O1", "-Wall", "-Werror", f"-I{paths.csrc_root()}"]
    command += ["-isystem", headers.include_dir, HOST / "dq_accumulator_pool.cpp", "-o", path]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    seed = random.randrange(2**31)
    printed = subprocess.run([path, str(seed)], capture_output=True, text=True, check=True)
    *wrong, hosted = printed.stdout.splitlines()
    assert not wrong, f"seed {seed}: {wrong}"
    assert int(hosted.split()[0]) > 20, seed  # about 90
