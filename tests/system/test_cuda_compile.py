"""The CUDA units of every family compile, and their machine code is what it should be: matrix
instructions there, no spills where the inner loop must not have them. Needs nvcc and no GPU.
"""

import operator
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from op_builder.ops.instantiations import CudaKernel
from op_builder.toolchain import nvcc_targets
from op_builder.toolchain.nvcc import FLAGS
from tests.system.machine_code import (
    arrivals_before_reads,
    branches_before_their_condition,
    compiled,
    consumers_that_spill,
    disassembler,
    instructions_by_kernel,
    loads_before_wait,
    loads_behind_additions,
    loops_without_uniform_registers,
    newer_instructions,
    overwritten_operands,
    reads_behind_remote_stores,
    spills_in_steps,
)

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Unit:
    kernel: CudaKernel
    instruction: str  # in PTX: what its products are made of
    machine: tuple[str, ...]  # the same in machine code, and what else has to be there
    spill_bytes: int = 0  # the most that one kernel of the unit may store

    @property
    def id(self) -> str:
        return f"{self.kernel.name}-sm_{self.kernel.arch.replace('.', '')}"


# Hopper's loading warps keep 32 registers; what they do not need for every step goes to local
# memory: of the forward what two warps know of a tile while they read its masks, of the bias pass
# most, where a thread brings tiles of four tensors, and warps the statistics of 256 rows and
# columns with 32 registers each. The computing warps must have none of it (`consumers_that_spill`).
PRODUCER_SPILL_BYTES = {"fwd": 192, "bwd": 384}


def sm90_unit(direction, dtype, head_dim, bias, in_and_out=True):
    """Products by wgmma, tiles by TMA, in either direction or inwards only."""
    kernel = CudaKernel("sm90", direction, dtype, head_dim, bias, True, "9.0a")
    machine = (r"\bHGMMA\.", r"\bUTMALDG\.", *([r"\bUTMASTG\."] if in_and_out else []))
    instruction = r"wgmma\.mma_async\.sync\.aligned\."
    return Unit(kernel, instruction, machine, PRODUCER_SPILL_BYTES[direction])


def unit(family, direction, dtype, head_dim, bias, arch, spill_bytes=0):
    shape = {"sm70": "m8n8k4", "sm75": "m16n8k8", "sm80": "m16n8k16"}[family]
    instruction = rf"mma\.sync\.aligned\.{shape}\."
    # Volta's products are the tensor cores' on Volta alone: later GPUs emulate m8n8k4.
    machine = r"\bHMMA\." if family != "sm70" else r"\bFFMA\b"
    if dtype == "tf32":
        instruction, machine = r"mma\.sync\.aligned\.m16n8k8\.\S*tf32", r"\bHMMA\.\S*TF32"
    elif dtype == "fp32":
        instruction, machine = r"fma\.rn\.f32", r"\bFFMA\b"
    kernel = CudaKernel(family, direction, dtype, head_dim, bias, True, arch)
    return Unit(kernel, instruction, (machine,), spill_bytes)


# The backward holds a score tile of S and one of dP and is compiled for 168 registers; what it
# spills are values of its prologue, used again after the loop (docs/history/sm80-backward.md).
BACKWARD_SPILL_BYTES = 256
# Where the scores, O and two biases fill the registers, or before 9.0 with its fewer uniform ones,
# some constants of the loop move to local memory (docs/history/sm80-forward-design.md, Spills).
CONSTANTS_SPILL_BYTES = 32
# Stores of 64 channels, nearly all in the loop of the repetition, which rarely runs and has too few
# registers for O, the scores and a moving reference. The loops before it read one spilled constant
# for each 32 keys.
REPETITION_SPILL_BYTES = 152
UNITS = (
    unit("sm75", "fwd", "fp16", 32, "both", "7.5", CONSTANTS_SPILL_BYTES),
    unit("sm80", "fwd", "bf16", 32, "both", "8.0", CONSTANTS_SPILL_BYTES),
    unit("sm80", "fwd", "bf16", 64, "both", "8.0"),
    unit("sm80", "fwd", "bf16", 32, "both", "9.0"),
    unit("sm80", "fwd", "bf16", 48, "both", "9.0"),
    unit("sm80", "fwd", "bf16", 64, "both", "9.0", REPETITION_SPILL_BYTES),
    unit("sm80", "fwd", "bf16", 128, "both", "9.0", CONSTANTS_SPILL_BYTES),
    unit("sm80", "fwd", "bf16", 256, "both", "9.0"),
    unit("sm80", "fwd", "fp16", 64, "bias1", "9.0"),
    unit("sm80", "fwd", "tf32", 32, "both", "9.0"),
    unit("sm80", "fwd", "fp32", 32, "none", "9.0"),
    unit("sm80", "fwd", "fp32", 64, "both", "9.0"),
    unit("sm70", "fwd", "fp16", 32, "both", "9.0"),
    sm90_unit("fwd", "bf16", 32, "both"),
    sm90_unit("fwd", "fp16", 64, "bias2"),
    sm90_unit("fwd", "bf16", 128, "none"),
    sm90_unit("bwd", "bf16", 32, "bias2"),
    sm90_unit("bwd", "fp16", 64, "none"),
    sm90_unit("bwd", "bf16", 64, "bias2"),
    sm90_unit("bwd", "bf16", 128, "bias2", in_and_out=False),
    unit("sm75", "bwd", "fp16", 32, "bias2", "7.5", BACKWARD_SPILL_BYTES),
    unit("sm80", "bwd", "bf16", 32, "bias2", "8.0", BACKWARD_SPILL_BYTES),
    unit("sm80", "bwd", "bf16", 32, "bias2", "9.0", BACKWARD_SPILL_BYTES),
    unit("sm80", "bwd", "bf16", 16, "bias2", "9.0"),
    unit("sm80", "bwd", "bf16", 64, "bias2", "9.0", BACKWARD_SPILL_BYTES),
    unit("sm80", "bwd", "bf16", 256, "bias2", "9.0", BACKWARD_SPILL_BYTES),
    unit("sm80", "bwd", "fp32", 32, "bias2", "9.0"),
    # The other GPUs that Sm80 serves; nobody has timed it there.
    *(unit("sm80", "fwd", "bf16", 32, "both", x, 128) for x in ("8.6", "8.9", "10.0", "12.0")),
    unit("sm80", "bwd", "bf16", 32, "bias2", "8.6", BACKWARD_SPILL_BYTES),
    unit("sm80", "bwd", "bf16", 32, "bias2", "12.0", BACKWARD_SPILL_BYTES),
)


def spilled_bytes(log):
    return max(int(n) for n in re.findall(r"(\d+) bytes spill stores", log))


def compile_unit(unit, nvcc, includes, folder):
    """The compiler's log; PTX and machine code are kept in the folder."""
    arch = unit.kernel.arch.replace(".", "")
    source = folder / "unit.cu"
    source.write_text(unit.kernel.source())
    flags = [*FLAGS, f"-gencode=arch=compute_{arch},code=sm_{arch}", "-Xptxas=-v"]
    kept = ["-keep", "-keep-dir", folder]
    return compiled(
        [nvcc.path, "-c", *flags, *kept, *includes, "-o", source.with_suffix(".o"), source]
    )


@pytest.fixture(scope="module")
def compilations(request, nvcc, includes, tmp_path_factory):
    """By unit: its folder and the log, as a future. Each core compiles units of the tests to come,
    in their order.
    """
    known = nvcc_targets.targets(nvcc).real
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        begun = {}
        for item in request.session.items:
            unit = getattr(item, "callspec", None) and item.callspec.params.get("unit")
            if not isinstance(unit, Unit) or unit in begun:  # several tests have the same
                continue
            if f"sm_{unit.kernel.arch.replace('.', '')}" in known:
                folder = tmp_path_factory.mktemp(unit.id)
                begun[unit] = folder, pool.submit(compile_unit, unit, nvcc, includes, folder)
        yield begun
        pool.shutdown(cancel_futures=True)


def machine_code(unit, compilations):
    """The disassembly of a unit's kernels."""
    folder, log = compilations[unit]
    log.result()
    if not (tool := disassembler()):
        pytest.skip("no nvdisasm")
    [cubin] = folder.glob("*.cubin")
    return compiled([tool, "-c", cubin])


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.id)
def test_unit(unit, nvcc, compilations):
    """It compiles with the builder's flags, the host's part too; ptxas finds registers; the
    products are matrix ones.
    """
    if unit not in compilations:
        pytest.skip(f"nvcc {nvcc.version} does not compile for {unit.kernel.arch}")
    folder, log = compilations[unit]
    log = log.result()
    [ptx], [cubin] = folder.glob("*.ptx"), folder.glob("*.cubin")
    assert re.search(unit.instruction, ptx.read_text())
    assert spilled_bytes(log) <= unit.spill_bytes, log
    assert "wgmma.mma_async instructions are serialized" not in log, log
    if tool := disassembler():
        code = compiled([tool, "-c", "-hex", cubin])
        missing = [wanted for wanted in unit.machine if not re.search(wanted, code)]
        assert not missing
        assert not consumers_that_spill(code)
        assert not overwritten_operands(code)
        assert not loops_without_uniform_registers(code)
        assert not loads_before_wait(code)
        assert not reads_behind_remote_stores(code)
        assert not arrivals_before_reads(code)
        if unit.kernel.arch != "7.5":  # where the assembler counts fewer cycles
            assert not branches_before_their_condition(code)


@pytest.mark.parametrize(
    "unit",
    [
        unit("sm80", "fwd", "bf16", 32, "both", "8.0", CONSTANTS_SPILL_BYTES),
        unit("sm80", "fwd", "bf16", 32, "both", "9.0"),
        unit("sm80", "fwd", "fp16", 32, "both", "8.0"),
        unit("sm80", "fwd", "fp16", 32, "both", "9.0"),
    ],
    ids=lambda unit: unit.id,
)
def test_exponentials_do_not_wait(unit, compilations):
    """In the usual loops of the forward. ptxas may compute the exponents of 32 scores one after the
    other in one register, which each of them then waits for. The third loop, which repeats a block
    whose reference was too small, runs rarely.
    """
    repeated = []  # by block of 32 exponentials: how many read the register of the one before
    for block in re.split(r"\bBRA\b", machine_code(unit, compilations)):
        sources = re.findall(r"\bMUFU\.EX2 R\d+, \S*?(R\d+)", block)
        if len(sources) == 32:
            repeated.append(sum(map(operator.eq, sources, sources[1:])))
    assert repeated.count(0) >= 2, repeated


@pytest.mark.parametrize(
    "unit",
    [unit("sm80", "bwd", "bf16", 32, "bias2", "9.0", BACKWARD_SPILL_BYTES)],
    ids=lambda unit: unit.id,
)
def test_one_kernel_for_all_gradients_spills_nothing(unit, compilations):
    """Loads of spilled values would wait for the additions to dq and dbias2 that are under way."""
    log = compilations[unit][1].result()
    spills = re.findall(
        r"properties for \S*backward_fused\S*\s.*?(\d+) bytes spill stores", log, re.DOTALL
    )
    assert len(spills) == 2 and set(spills) == {"0"}, log


@pytest.mark.parametrize(
    "unit", [unit("sm80", "bwd", "bf16", 16, "bias2", "9.0")], ids=lambda unit: unit.id
)
def test_three_blocks_of_heads_of_16_share_a_multiprocessor(unit, compilations):
    """Of four warps each, by their registers, without a gradient of bias1: the one kernel for all
    gradients. Their shared memory leaves room for three.
    """
    log = compilations[unit][1].result()
    counts = re.findall(
        r"properties for \S*backward_fused\S*\s.*?Used (\d+) registers", log, re.DOTALL
    )
    assert len(counts) == 2 and min(map(int, counts)) <= 65536 // (3 * 128) // 8 * 8, counts


@pytest.mark.parametrize(
    ("unit", "num_kernels", "num_loads"),
    [
        (sm90_unit("bwd", "bf16", 32, "bias2"), 3, 0),
        (sm90_unit("bwd", "bf16", 64, "bias2"), 1, 4),  # of the second of a lane's two queries
    ],
    ids=lambda value: getattr(value, "id", ""),
)
def test_steps_of_pairs_wait_for_no_additions(unit, num_kernels, num_loads, compilations):
    """A load of a warp that adds dbias2 waits for the additions before it: 7 % of the time of a
    backward of 384 residues where each step loads eight spilled values. ptxas moves loads from
    shared memory behind additions, unless something holds them.
    """
    kernels = machine_code(unit, compilations).split("\n.text.")
    paired = [kernel for kernel in kernels if "WithRowPairs" in kernel.partition(":")[0]]
    assert len(paired) == num_kernels and all(".F32x4" in kernel for kernel in paired)
    assert [spills_in_steps(kernel) for kernel in paired] == [[]] * num_kernels
    assert [len(loads_behind_additions(kernel)) for kernel in paired] == [num_loads] * num_kernels


@pytest.mark.parametrize("unit", [sm90_unit("bwd", "bf16", 32, "bias2")], ids=lambda unit: unit.id)
def test_pairs_of_rows_have_little_code(unit, compilations):
    """650 instructions more, of which few were executed, cost 6 % of a backward of 256 residues:
    presumably, rounds of keys begin and end with instructions that are not in the cache.
    """
    kernels = instructions_by_kernel(machine_code(unit, compilations))
    counts = [len(lines) for name, lines in kernels.items() if "WithRowPairs" in name]
    assert len(counts) == 3 and all(1000 < count < 4500 for count in counts), counts


@pytest.mark.parametrize(
    "unit",
    [
        unit("sm80", "bwd", "bf16", 32, "bias2", "8.0", BACKWARD_SPILL_BYTES),
        unit("sm80", "bwd", "bf16", 32, "bias2", "9.0", BACKWARD_SPILL_BYTES),
    ],
    ids=lambda unit: unit.id,
)
def test_gradients_fill_sectors(unit, compilations):
    """dq, dk and dv are stored 16 bytes a lane. Stores of 4 bytes are those of dbias1: of a lane's
    four keys, and of hidden ones.
    """
    kernels = instructions_by_kernel(machine_code(unit, compilations))
    kernels = [
        lines for name, lines in kernels.items() if re.search("backward_(fused|dq_dkdv)", name)
    ]
    assert len(kernels) >= 3
    for lines in kernels:
        assert sum(bool(re.search(r"\bSTG\.E\.128\b", line)) for line in lines) >= 4
        assert sum(bool(re.search(r"\bSTG\.E\s", line)) for line in lines) <= 5


@pytest.mark.parametrize("unit", [sm90_unit("bwd", "bf16", 32, "bias2")], ids=lambda unit: unit.id)
def test_cuda_12_1_compiles_for_hopper(unit, nvcc, compilations):
    """It knows all instructions but those which cluster_barrier.h replaces for older compilers."""
    folder, log = compilations[unit]
    log.result()
    [ptx] = folder.glob("*.ptx")
    newer = newer_instructions(ptx, "8.1", "sm_90a", nvcc.path.parent / "ptxas")
    assert all("Modifier '.relaxed' on 'mbarrier." in one for one in newer), newer


OLDER = """\
#include "common/atomic_add.h"
#include "sm90/backward/cluster_barrier.h"
static_assert(ds4s::has_vector_atomics() == (DS4S_CUDA_VERSION >= 12010), "");
__global__ void instructions(ds4s::sm90::EmptyBarrier& barrier, float* x) {
  ds4s::atomic_add_vector(x, x);
  if (DS4S_CUDA_VERSION < 12010) return;
  ds4s::sm90::arrive_relaxed(barrier, 1);
  ds4s::sm90::wait_relaxed(barrier, 0);
}
"""


@pytest.mark.parametrize(("cuda", "isa"), [(11080, "7.8"), (12010, "8.1"), (12090, "8.8")])
def test_instructions_for_older_compilers(cuda, isa, nvcc, includes, tmp_path):
    """CUDA 11.8 compiles the Sm80 templates for Hopper, 12.1 its own."""
    source, ptx = tmp_path / "older.cu", tmp_path / "unit.ptx"
    source.write_text(OLDER)
    flags = [*FLAGS, f"-DDS4S_CUDA_VERSION={cuda}", "-arch=sm_90", "-ptx"]
    compiled([nvcc.path, *flags, *includes, "-o", ptx, source])
    assert not newer_instructions(ptx, isa, "sm_90", nvcc.path.parent / "ptxas")


def test_each_instruction_has_a_line(nvcc, includes):
    """scripts/instructions: with all lines and calls told apart, counts add up to the whole."""
    if not disassembler():
        pytest.skip("no nvdisasm")
    script, name = REPOSITORY / "scripts" / "instructions", "sm90_fwd_fp16_d64_none"
    printed = compiled([sys.executable, script, name, "--depth", 99, "--lines", 99999])
    _, *kernels = re.split(r"^(?=\d+ instructions: )", printed, flags=re.MULTILINE)
    assert any("forward" in kernel for kernel in kernels)
    for kernel in kernels:
        total, *counts = (int(line.split()[0]) for line in kernel.splitlines())
        assert total == sum(counts) > 100
    assert "mainloop.h:" in printed
