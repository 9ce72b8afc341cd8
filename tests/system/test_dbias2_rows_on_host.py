"""Rows of dbias2 add up to 0, compiled for the host with a warp of 32 threads: rounded and not, of
aligned rows and others, with NaN, with zeros; not of a part of the keys, nor of one row n.
"""

import random
import subprocess
from pathlib import Path

import pytest

from op_builder.toolchain import cutlass, host_compiler, toolkits
from op_builder.toolchain.nvcc import include_folders

from .stubs import with_stubs

HOST = Path(__file__).resolve().parents[1] / "cpp" / "host"


def test_rows_add_up_to_zero(tmp_path):
    host, nvcc = host_compiler.find_host_compiler(), toolkits.find_nvcc()
    headers = cutlass.find_cutlass()
    for part in (host, nvcc, headers):
        if not part.ok:
            pytest.skip(f"{part.reason}; {part.remedy}")
    path = tmp_path / "dbias2_rows"
    cuda = include_folders(nvcc)
    folders = [headers.include_dir, *cuda, *(folder / "cccl" for folder in cuda)]
    command = [host.path, "-std=c++17", "-O1", "-pthread", "-o", path, HOST / "dbias2_rows.cpp"]
    command += [f"-I{with_stubs(tmp_path / 'headers', HOST / 'warp')}"]
    command += [word for folder in folders for word in ("-isystem", folder)]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    seed = random.randrange(2**31)
    printed = subprocess.run([path, str(seed)], capture_output=True, text=True, check=True)
    assert printed.stdout == "900 rows\n", f"seed {seed}"
