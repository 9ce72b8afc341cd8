"""Every kernel of every family passes the compiler's front end: its templates instantiate for all
dtypes, head dimensions, biases and alignments. test_cuda_compile.py compiles some of them to
machine code, which takes ten times as long.
"""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from op_builder import paths
from op_builder.ops.instantiations import CUDA_DTYPES, DIRECTIONS, FAMILIES, has_row
from op_builder.toolchain import cutlass, nvcc_targets, toolkits
from op_builder.toolchain.nvcc import FLAGS
from tests.system.every_kernel import every_kernel

# Whichever this nvcc knows. Volta's templates are legal code for later GPUs.
ARCHS = {"sm70": ("7.0", "7.5"), "sm75": ("7.5",), "sm80": ("8.0",), "sm90": ("9.0a",)}
ROWS = [
    (family, direction, dtype)
    for family in FAMILIES
    for direction in DIRECTIONS
    for dtype in CUDA_DTYPES
    if has_row(family, direction, dtype)
]


@pytest.fixture(scope="module")
def command():
    """What checks a source for an architecture, without the source."""
    tool, headers = toolkits.find_nvcc(), cutlass.find_cutlass()
    if not tool.ok or not headers.ok:
        pytest.skip(f"nvcc: {tool.reason}; CUTLASS: {headers.reason}")
    only_check = "-fdevice-syntax-only"
    said = subprocess.run([tool.path, "--help"], capture_output=True, text=True).stdout
    if only_check not in said:
        pytest.skip(f"nvcc {tool.version} has no {only_check}")
    known = nvcc_targets.targets(tool).real
    includes = [f"-I{paths.csrc_root()}", f"-I{headers.include_dir}"]

    def of(archs):
        targets = [f"sm_{one.replace('.', '')}" for one in archs]
        target = next((one for one in targets if one in known), None)
        if target is None:
            pytest.skip(f"nvcc {tool.version} does not compile for {' or '.join(targets)}")
        arch = f"compute_{target[3:]}"
        return [
            tool.path,
            "-ptx",
            only_check,
            *FLAGS,
            f"-gencode=arch={arch},code={arch}",
            *includes,
        ]

    return of


def one_source(kernels):
    """The units of kernels in one source, each in a namespace of its own."""
    includes, bodies = set(), []
    for kernel in kernels:
        lines = kernel.source().splitlines(keepends=True)
        includes |= {line for line in lines if line.startswith("#include")}
        body = "".join(line for line in lines if not line.startswith("#"))
        bodies.append(f"namespace {kernel.name} {{\n{body}}}\n")
    exports = "#undef DS4S_EXPORT\n#define DS4S_EXPORT\n"  # no C names, which would all be one
    return "".join([*sorted(includes), exports, *bodies])


def complaints(source, command, folder):
    file = folder / "kernels.cu"
    file.write_text(source)
    done = subprocess.run(
        [*map(str, command), "-o", str(folder / "out.ptx"), str(file)],
        capture_output=True,
        text=True,
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


@pytest.fixture(scope="module")
def found(command, tmp_path_factory):
    """What the compiler says of each row, as a future: each core checks a row."""

    def check(family, direction, dtype):
        kernels = [
            one for one in every_kernel(family) if (one.direction, one.dtype) == (direction, dtype)
        ]
        assert kernels
        folder = tmp_path_factory.mktemp(f"{family}-{direction}-{dtype}")
        return complaints(one_source(kernels), command(ARCHS[family]), folder)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        yield {row: pool.submit(check, *row) for row in ROWS}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("row", ROWS, ids="-".join)
def test_kernels_instantiate(row, found):
    assert not found[row].result()


def test_a_kernel_that_does_not_instantiate_is_found(command, tmp_path):
    """D = 24 is no tier: products of 24 columns have no instruction in wgmma_atoms.h."""
    kernel = next(one for one in every_kernel("sm90") if one.direction == "bwd")
    source = one_source([kernel]).replace("cutlass::half_t, 16,", "cutlass::half_t, 24,")
    assert "24," in source
    assert "needs a line DS4S_WGMMA" in complaints(source, command(ARCHS["sm90"]), tmp_path)
