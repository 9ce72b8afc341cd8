"""Which tiles of keys and rows n the older families go through, compiled for the host: all visible
one, once and in order, and no other. How wide tiles are that are cut evenly.
"""

import random
import subprocess
from pathlib import Path

import pytest

from op_builder.toolchain import host_compiler

from .stubs import with_stubs

HOST = Path(__file__).resolve().parents[1] / "cpp" / "host"


def test_walks_over_what_is_visible(tmp_path):
    host = host_compiler.find_host_compiler()
    if not host.ok:
        pytest.skip(f"{host.reason}; {host.remedy}")
    path = tmp_path / "visible_keys"
    headers = with_stubs(tmp_path / "headers", HOST)
    command = [host.path, "-std=c++17", "-O1", "-pthread", f"-I{headers}"]
    command += [HOST / "visible_keys.cpp", "-o", path]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    seed = random.randrange(2**31)
    printed = subprocess.run([path, str(seed)], capture_output=True, text=True, check=True)
    assert printed.stdout == "9475 cases\n", f"seed {seed}"
