"""The older families' online softmax, compiled for the host: masks of every size need no GPU."""

import random
import subprocess
from pathlib import Path

import pytest

from op_builder.toolchain import cutlass, host_compiler, toolkits
from op_builder.toolchain.nvcc import include_folders

from .stubs import with_stubs

HOST = Path(__file__).resolve().parents[1] / "cpp" / "host"


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    host, nvcc, headers = (
        host_compiler.find_host_compiler(),
        toolkits.find_nvcc(),
        cutlass.find_cutlass(),
    )
    for part in (host, nvcc, headers):
        if not part.ok:
            pytest.skip(f"{part.reason}; {part.remedy}")
    folder = tmp_path_factory.mktemp("host")
    path = folder / "softmax"
    ours = with_stubs(folder / "headers", HOST)
    folders = (headers.include_dir, *include_folders(nvcc))
    includes = [word for folder in folders for word in ("-isystem", folder)]
    command = [host.path, "-std=c++17", "-O1", f"-I{ours}", *includes]
    command += [HOST / "softmax.cpp", "-o", path]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return path


def test_weights_and_lse_are_those_of_double(program):
    seed = random.randrange(2**31)
    printed = subprocess.run([program, str(seed)], capture_output=True, text=True, check=True)
    errors = dict(reversed(line.split(" ", 1)) for line in printed.stdout.splitlines())
    assert len(errors) == 10
    # Scores of that size have 0.06 for their last digit, and less is left of a reference in base 2.
    allowed = {"-1e6 everywhere": 0.1}
    wrong = {
        kind: error for kind, error in errors.items() if not float(error) <= allowed.get(kind, 4e-6)
    }
    assert not wrong, f"seed {seed}"
