"""clang instead of gcc: the CPU op's kernels compile, load, and are right on several threads."""

import shutil
import subprocess
import sys

import pytest

from .toys import REPOSITORY

# Everything in one process: what clang makes must live with the OpenMP runtime that torch brings.
SCRIPT = """
import torch
from deepspeed4science import dispatch
from deepspeed4science.backends.cpu import CpuBackend
from op_builder.build import jit
from op_builder.toolchain import openmp
from tests.numeric.cases import Case
from tests.numeric.law import check
dispatch.BACKENDS = (CpuBackend(),)
torch.set_num_threads(2)
before = openmp.present()
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    check(Case("typical", B=2, N=5, Lq=130, H=3).inputs(dtype, "cpu"))
assert openmp.present() == before and len(before) == 1, openmp.present()
for kernel in jit.loaded_kernels():
    data = kernel.path.read_bytes()
    assert kernel.origin == "built" and b"clang" in data, kernel
    assert b"GOMP_parallel" in data and b"__kmpc" not in data, kernel
    print(kernel.name)
"""


@pytest.mark.parametrize("isa", ["", "portable"])
def test_the_op_keeps_the_law(isa, tmp_path):
    """libgomp, which torch brings, has none of the names that clang's OpenMP asks for."""
    clang = shutil.which("clang++")
    if clang is None:
        pytest.skip("needs clang++ (apt-get install clang)")
    pytest.importorskip("torch")
    place = {"DS4S_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(REPOSITORY), "CXX": clang}
    changes = [f"{name}={value}" for name, value in (place | {"DS4S_CPU_ISA": isa}).items()]
    done = subprocess.run(
        ["env", *changes, sys.executable, "-c", SCRIPT],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.split()) == 6, done.stdout
    assert all(name.endswith(isa) for name in done.stdout.split())
