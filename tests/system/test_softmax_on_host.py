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


# Kinds whose rows do not fit the reference of their first scores: the block repeats itself.
UNFIT = {
    "-1e6 everywhere",
    "-1e9 everywhere",
    "-3e38 everywhere",
    "-3.3e38 and -2.5e38",
    "one part hidden",
    "all hidden",
    "-1e6 and -3e38 in parts",
    "-3e38, one block 300",
    "95 more from the second block on",  # p fits a float, p V exceeds its range
}


def test_weights_and_lse_are_those_of_double(program):
    """With either kind of reference, and rows that one does not fit are found."""
    seed = random.randrange(2**31)
    printed = subprocess.run([program, str(seed)], capture_output=True, text=True, check=True)
    lines = [line.split(" ", 3) for line in printed.stdout.splitlines()]
    assert len(lines) == 15
    # Scores of that size have 0.06 for their last digit, and less is left of a reference in base 2.
    allowed = {"-1e6 everywhere": 0.1}
    wrong = {
        kind: (error, fixed)
        for error, fixed, _, kind in lines
        if not max(float(error), float(fixed)) <= allowed.get(kind, 4e-6)
    }
    assert not wrong, f"seed {seed}"
    unfit = {kind: int(count) for *_, count, kind in lines if int(count) > 0}
    assert unfit == dict.fromkeys(UNFIT, 100), f"seed {seed}"
