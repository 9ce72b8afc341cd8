"""Variables that point where this user may not go: what is there counts as absent."""

import pytest

from op_builder import env

# Everything that asks the file system for programs, headers and folders, then a kernel.
ASK = """
from op_builder import ALL_OPS
from op_builder.toolchain import cutlass, ninja, toolkits
from deepspeed4science import probes
obstacles = [[str(one) for one in op.obstacles()] for op in ALL_OPS.values()]
ninja.find_ninja(), toolkits.find_nvcc(), cutlass.find_cutlass()
report(**load())
"""
PLACES = [
    *("PATH", "HOME", "CC", "CXX", "CUDA_HOME", "CUDA_PATH", "CUTLASS_PATH", "CONDA_PREFIX"),
    *("DS4S_CACHE_DIR", "DS4S_CACHE_PATH", "TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME", "TMPDIR"),
]


def test_every_variable_is_known():
    assert set(PLACES) <= {variable.name for variable in env.VARIABLES}


@pytest.mark.parametrize("variable", PLACES)
def test_variable_that_points_below_a_forbidden_folder(his, forbidden, variable):
    changes = {variable: str(forbidden / "program")}
    if variable == "PATH":
        changes["PATH"] += ":/usr/local/bin:/usr/bin:/bin"
    if variable in ("HOME", "XDG_CACHE_HOME", "TORCH_EXTENSIONS_DIR"):
        changes["DS4S_CACHE_DIR"] = ""  # so that it counts
    outcome = his.run(ASK, **changes)
    assert outcome.report["answer"] == [42]


def test_current_folder_that_is_gone(his):
    """Relative places mean nothing then; the others still do."""
    script = f"gone = {str(his.root / 'gone')!r}\nos.mkdir(gone); os.chdir(gone); os.rmdir(gone)\n"
    outcome = his.run(script + ASK, PATH="bin:/usr/bin:/bin", DS4S_CACHE_PATH="kernels")
    assert outcome.report["answer"] == [42]
