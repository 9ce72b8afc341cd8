"""CONTRACT section 2 for CUDA: family and kernels of a device, and reasons instead of guesses."""

import itertools
import os
import re
from pathlib import Path

import pytest

from op_builder import ALL_OPS, EvoformerAttnBuilder, paths
from op_builder.errors import BuildError, ToolchainError
from op_builder.ops import presets
from op_builder.ops.cuda_builder import CUDAOpBuilder
from op_builder.ops.instantiations import (
    CUDA_BIASES,
    CUDA_DTYPES,
    CUDA_FAMILIES,
    DIRECTIONS,
    HEAD_DIM_TIERS,
    CudaKernel,
    has_row,
    head_dim_tier,
)
from op_builder.ops.presets import Row
from op_builder.toolchain import arch, cutlass, gpu, host_compiler, nvcc_targets, toolkits
from op_builder.toolchain.nvcc_targets import Targets
from op_builder.toolchain.tool import Tool

BUILDER = EvoformerAttnBuilder()


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(gpu, "detect", lambda: gpu.Gpus(reason="there is no driver"))


@pytest.fixture
def nvcc(monkeypatch):
    """A compiler for everything but Volta, and nothing that was asked for."""
    for name in ("DS4S_CUDA_FAMILY", "TORCH_CUDA_ARCH_LIST"):
        monkeypatch.delenv(name, raising=False)
    set_nvcc(monkeypatch, "sm_75", "sm_80", "sm_90", "sm_90a", "sm_100", "sm_120")


def set_nvcc(monkeypatch, *real):
    tool = Tool("nvcc", Path("/nvcc"), "13.0.88", ok=True)
    monkeypatch.setattr(toolkits, "nvccs", lambda **_: iter((tool,)))
    monkeypatch.setattr(nvcc_targets, "targets", lambda tool: Targets(real))


@pytest.mark.parametrize(
    ("device", "family"),
    [
        *(((7, 0), "sm70"), ((7, 2), "sm70"), ((7, 5), "sm75")),
        *((device, "sm80") for device in ((8, 0), (8, 9), (10, 0), (12, 0))),
        ((9, 0), "sm90"),
    ],
)
def test_family_of_a_device(device, family, nvcc):
    assert BUILDER.family(device) == family
    deputy = ("sm80",) if family == "sm90" else ()
    assert BUILDER.families(device) == (family, *deputy)


def test_a_lower_family_can_be_forced_and_a_higher_one_cannot(nvcc, monkeypatch):
    monkeypatch.setenv("DS4S_CUDA_FAMILY", "sm70")
    assert BUILDER.families((9, 0)) == ("sm70",)
    monkeypatch.setenv("DS4S_CUDA_FAMILY", "sm80")
    assert BUILDER.families((9, 0)) == ("sm80",)
    with pytest.raises(ToolchainError, match=r"one of sm70, sm75 on compute capability 7\.5"):
        BUILDER.family((7, 5))
    monkeypatch.setenv("DS4S_CUDA_FAMILY", "sm90")
    assert BUILDER.families((9, 0)) == ("sm90", "sm80")
    with pytest.raises(ToolchainError, match=r"one of sm70, sm75, sm80 on .* 10\.0; got sm90"):
        BUILDER.family((10, 0))


def test_without_sm_90a_sm80_serves_hopper_and_says_why(nvcc, monkeypatch):
    """nvcc before CUDA 12.1 knows sm_90 but not what Sm90 needs; nor does a list without 9.0."""
    set_nvcc(monkeypatch, "sm_80", "sm_90")
    assert BUILDER.families((9, 0)) == ("sm80",)
    assert BUILDER.family_note((9, 0)).startswith("not sm90: this nvcc does not compile for sm_90a")
    monkeypatch.setenv("DS4S_CUDA_FAMILY", "sm90")
    with pytest.raises(ToolchainError, match=r"got sm90.*not sm90: this nvcc"):
        BUILDER.family((9, 0))
    monkeypatch.delenv("DS4S_CUDA_FAMILY")
    set_nvcc(monkeypatch, "sm_80", "sm_90", "sm_90a")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0+PTX")
    assert BUILDER.families((9, 0)) == ("sm80",)
    assert "neither 9.0 nor 9.0a" in BUILDER.family_note((9, 0))


def test_without_nvcc_hopper_takes_what_was_compiled_beforehand(nvcc, monkeypatch, tmp_path):
    """A wheel for 8.0+PTX runs on 9.0; one that holds Sm90 kernels has them used."""
    monkeypatch.setattr(toolkits, "find_nvcc", lambda *rest, **more: Tool("nvcc", reason="none"))
    monkeypatch.setattr(toolkits, "nvccs", lambda *rest, **more: [])
    monkeypatch.setattr(paths, "prebuilt_root", lambda: tmp_path)
    monkeypatch.setenv("DS4S_CACHE_DIR", str(tmp_path / "own"))
    assert BUILDER.families((9, 0)) == ("sm80",)
    assert "there is no nvcc for sm_90a here" in BUILDER.family_note((9, 0))
    (tmp_path / "units" / "sm90_fwd_bf16_d32_both-0123").mkdir(parents=True)
    assert BUILDER.families((9, 0)) == ("sm90", "sm80")


@pytest.mark.parametrize(
    ("requested", "device", "families", "target"),
    [
        ("7.5+PTX", (8, 0), ("sm75",), "7.5+PTX"),
        ("7.5+PTX", (9, 0), ("sm75",), "7.5+PTX"),
        ("6.1+PTX 7.5+PTX", (12, 0), ("sm75",), "7.5+PTX"),
        ("7.0+PTX", (7, 5), ("sm70",), "7.0+PTX"),
        ("7.5+PTX 8.0", (8, 6), ("sm80",), "8.0"),
        ("8.0+PTX", (12, 0), ("sm80",), "8.0+PTX"),
    ],
)
def test_a_list_below_a_device_chooses_the_templates_of_its_target(
    requested, device, families, target, nvcc, monkeypatch
):
    """Sm80's source compiled for 7.5 has no matrix instructions: it would stop the GPU."""
    set_nvcc(monkeypatch, "sm_61", "sm_70", "sm_75", "sm_80", "sm_90", "sm_90a", "sm_120")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", requested)
    assert BUILDER.families(device) == families
    assert str(BUILDER.compiled_for(families[0], device)) == target
    if families == ("sm75",):
        told = r"TORCH_CUDA_ARCH_LIST asks for 7\.5\+PTX, below 8\.0"
        note = BUILDER.family_note(device)
        assert note.startswith("not sm") and "TORCH_CUDA_ARCH_LIST asks for 7.5+PTX" in note
        monkeypatch.setenv("DS4S_CUDA_FAMILY", "sm80")
        with pytest.raises(ToolchainError, match=rf"one of sm70, sm75 on .*got sm80.*{told}"):
            BUILDER.families(device)


def test_a_family_above_the_target_cannot_be_forced(nvcc, monkeypatch):
    set_nvcc(monkeypatch, "sm_70", "sm_75", "sm_80")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.0+PTX")
    monkeypatch.setenv("DS4S_CUDA_FAMILY", "sm75")
    with pytest.raises(ToolchainError, match=r"one of sm70 on .*got sm75.*asks for 7\.0\+PTX"):
        BUILDER.families((8, 0))
    monkeypatch.setenv("DS4S_CUDA_FAMILY", "sm70")
    assert BUILDER.families((8, 0)) == ("sm70",)


def test_a_list_below_all_templates_is_refused(no_gpu, nvcc, monkeypatch):
    """Another toolkit would be no remedy, although nvcc 13 does not know 6.1."""
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "6.1+PTX")
    for known in ((), ("sm_61",)):
        set_nvcc(monkeypatch, "sm_80", *known)
        told = r"asks for 6\.1\+PTX, and the templates begin at 7\.0; add 8\.0 to it, or unset it"
        assert re.search(told, BUILDER.refusal((8, 0)))
        with pytest.raises(ToolchainError, match=r"begin at 7\.0; name newer ones, or unset it"):
            BUILDER.target_archs()


@pytest.mark.parametrize(
    ("requested", "target"),
    [
        ("", "8.0"),
        ("8.0", "8.0"),
        ("8.0;9.0", "8.0"),
        ("7.5+PTX", "7.5+PTX"),
        ("7.0+PTX;7.5+PTX", "8.0"),  # the device's own where several would run
        ("9.0", ""),
    ],
)
def test_without_nvcc_a_list_that_a_device_cannot_run_is_refused(
    requested, target, nvcc, monkeypatch
):
    monkeypatch.setattr(toolkits, "nvccs", lambda **_: iter(()))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", requested)
    if target:
        assert str(BUILDER.arch_for((8, 0))) == target
    else:
        with pytest.raises(ToolchainError, match=r"add 8\.0 to TORCH_CUDA_ARCH_LIST, or unset it"):
            BUILDER.arch_for((8, 0))


def test_what_decides_the_code_of_a_kernel_is_in_its_key(nvcc, monkeypatch):
    """Both compilers, and the variables that they read by themselves."""
    tools = [Tool(name, Path("/x"), ok=True, identity=f"{name} 1") for name in ("nvcc", "c++")]
    monkeypatch.setattr(toolkits, "find_nvcc", lambda *_, **__: tools[0])
    monkeypatch.setattr(host_compiler, "find_host_compiler", lambda: tools[1])
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "--use_fast_math")
    (job,) = BUILDER.jobs([CudaKernel("sm80", "fwd", "bf16", 32, "both", True, "8.0")])
    assert {
        ("compiler", "nvcc 1"),
        ("host compiler", "c++ 1"),
        ("NVCC_APPEND_FLAGS", "--use_fast_math"),
    } <= set(job.identity)


def test_a_gpu_that_no_kernel_serves_leaves_the_others_theirs(nvcc):
    gpus = gpu.Gpus((gpu.Gpu("old", (6, 1)), gpu.Gpu("new", (8, 0)), gpu.Gpu("same", (8, 0))))
    assert [str(one) for one in EvoformerAttnBuilder(gpus).archs_here()] == ["8.0"]
    with pytest.raises(ToolchainError, match=r"6\.1"):
        EvoformerAttnBuilder(gpu.Gpus(gpus.found[:1])).archs_here()


def test_no_code_of_a_lower_family_stands_in(nvcc):
    """A library of Sm80's source for 7.5+PTX, which earlier versions made, is not taken."""
    (job,) = BUILDER.jobs([CudaKernel("sm80", "fwd", "bf16", 32, "both", True, "8.6")])
    targets = {flag for flags in job.stand_ins for flag in flags if "gencode" in flag}
    assert "-gencode=arch=compute_80,code=sm_80" in targets
    assert not [target for target in targets if "compute_7" in target]


def test_units_know_that_they_have_ptx(nvcc):
    """Later GPUs, which have less shared memory, may run them."""
    call = ("sm80", "fwd", "bf16", 128, "both", True)
    with_ptx, without = BUILDER.jobs([CudaKernel(*call, "9.0+PTX"), CudaKernel(*call, "12.0")])
    for flags in (with_ptx.flags, without.flags, *without.stand_ins):
        has_ptx = any("code=compute_" in flag for flag in flags)
        assert ("-DDS4S_HAS_PTX" in flags) == has_ptx
    assert "-DDS4S_HAS_PTX" in with_ptx.flags


def test_the_note_tells_who_does_the_rest(nvcc):
    assert BUILDER.family_note((9, 0)) == "sm80 for float32 and what TMA cannot read"
    assert BUILDER.family_note((8, 0)) == ""


@pytest.mark.parametrize("requested", ["", "9.0", "9.0a", "9.0+PTX"])
def test_sm90_is_compiled_for_9_0a_whatever_9_0_is_called(requested, nvcc, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", requested)
    row = BUILDER.kernel(
        family="sm90",
        direction="fwd",
        dtype="bf16",
        head_dim=24,
        bias="both",
        aligned=True,
        device=(9, 0),
    )
    assert row == CudaKernel("sm90", "fwd", "bf16", 32, "both", True, "9.0a")
    assert row.name == "sm90_fwd_bf16_d32_both"
    source = row.source()
    assert '#include "sm90/forward/launch.h"' in source
    launch = (
        "ds4s::sm90::Sm90Forward<cutlass::bfloat16_t, 32, /*kHasBias1=*/true, /*kHasBias2=*/true>"
    )
    assert f"return {launch}::run(" in source and f"return {launch}::workspace_bytes(" in source
    (job,) = BUILDER.jobs([row])
    assert "-gencode=arch=compute_90a,code=sm_90a" in job.flags


@pytest.mark.parametrize(
    ("bias", "compiled"), [("none", "none"), ("bias1", "none"), ("both", "bias2")]
)
def test_an_sm90_backward_reads_bias1_at_run_time(bias, compiled, nvcc):
    row = BUILDER.kernel(
        family="sm90",
        direction="bwd",
        dtype="fp16",
        head_dim=64,
        bias=bias,
        aligned=True,
        device=(9, 0),
    )
    assert row.name == f"sm90_bwd_fp16_d64_{compiled}"
    source = row.source()
    assert '#include "sm90/backward/launch.h"' in source
    bias2 = f"/*kHasBias2=*/{str(compiled == 'bias2').lower()}"
    launch = f"ds4s::RoundedDbias<ds4s::sm90::Sm90Backward<cutlass::half_t, 64, {bias2}>>"
    assert f"return {launch}::run(" in source and f"return {launch}::workspace_bytes(" in source
    assert "const ds4s::BwdParams* params" in source


def test_before_volta_there_is_none():
    with pytest.raises(ToolchainError, match=r"6\.1 is below 7\.0"):
        BUILDER.family((6, 1))


def test_names_and_sources_are_different_for_different_kernels():
    """Two rows with one name would share a library."""
    rows = [
        CudaKernel(family, direction, dtype, tier, bias, aligned, "9.0")
        for family, direction, dtype, tier, bias, aligned in itertools.product(
            CUDA_FAMILIES, DIRECTIONS, CUDA_DTYPES, HEAD_DIM_TIERS, CUDA_BIASES, (True, False)
        )
        if (direction == "fwd" or bias in ("none", "bias2"))
        and has_row(family, direction, dtype)
        and (aligned or family != "sm90")
    ]
    assert len({row.name for row in rows}) == len(rows)
    assert len({row.source() for row in rows}) == len(rows)


def test_tiers():
    assert [head_dim_tier(d) for d in (1, 16, 17, 48, 64, 65, 97, 128, 129, 256)] == (
        [16, 16, 32, 48, 64, 96, 128, 128, 256, 256]
    )
    with pytest.raises(ValueError, match="257"):
        head_dim_tier(257)


def test_the_architecture_is_part_of_the_job(monkeypatch):
    """Two GPU types that share a home folder never share a library."""
    jobs = [
        BUILDER.jobs([CudaKernel("sm80", "fwd", "bf16", 32, "both", True, arch)])[0]
        for arch in ("8.0", "9.0")
    ]
    assert jobs[0].asked != jobs[1].asked
    assert any("sm_90" in flag for flag in jobs[1].flags)


def test_architectures_never_leak_into_the_environment(monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0a")
    before = dict(os.environ)
    BUILDER.obstacles()
    BUILDER.requested_archs()
    assert dict(os.environ) == before


def test_without_a_gpu_the_reason_and_the_remedy(no_gpu, monkeypatch):
    monkeypatch.delenv("DS_IGNORE_CUDA_DETECTION", raising=False)
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    (obstacle,) = [o for o in BUILDER.obstacles() if "GPU" in o.reason]
    assert "there is no driver" in obstacle.reason
    assert "TORCH_CUDA_ARCH_LIST" in obstacle.remedy
    with pytest.raises(BuildError, match="there is no driver"):
        BUILDER.builder()
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0a")
    assert not [o for o in BUILDER.obstacles() if "GPU" in o.reason], "a list says for what"


def test_without_a_gpu_a_flag_that_cannot_be_read_is_the_reason(no_gpu, monkeypatch):
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    for value, reasons in (("maybe", 1), ("1", 0), ("0", 0)):
        monkeypatch.setenv("DS_IGNORE_CUDA_DETECTION", value)
        found = [o.reason for o in BUILDER.obstacles()]
        assert sum("DS_IGNORE_CUDA_DETECTION: expected 1 or 0" in one for one in found) == reasons
        assert sum("no GPU" in one for one in found) == (value == "0")


def test_an_install_compiles_for_all_that_is_asked_for_or_says_why_not(no_gpu, nvcc, monkeypatch):
    set_nvcc(monkeypatch, "sm_80", "sm_90")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "Volta;8.0;9.0")
    monkeypatch.setattr(CUDAOpBuilder, "tool_obstacles", lambda self: [])
    told = r"for 7\.0\+PTX: .* can do 8\.0, 9\.0; ask for 8\.0;9\.0,"  # as lists are written
    with pytest.raises(ToolchainError, match=told):
        BUILDER.builder()


def test_kernels_of_a_list_of_calls(nvcc):
    """Each once; before 8.0 bfloat16 is float32's; a suffix changes no kernel."""
    wanted = presets.calls(
        [Row("one", 24, "both"), Row("two", 32, "both"), Row("three", 32, "bias2")],
        dtypes=("bf16", "fp16"),
    )
    rows = BUILDER.kernels_for(wanted, arch.parse("7.5;8.0;6.1"))
    assert sorted((row.arch, row.name) for row in rows) == [
        ("7.5", "sm75_bwd_fp16_d32_bias2_aligned"),
        ("7.5", "sm75_bwd_fp32_d32_bias2_aligned"),
        ("7.5", "sm75_fwd_fp16_d32_bias2_aligned"),
        ("7.5", "sm75_fwd_fp16_d32_both_aligned"),
        ("7.5", "sm75_fwd_fp32_d32_bias2_aligned"),
        ("7.5", "sm75_fwd_fp32_d32_both_aligned"),
        ("8.0", "sm80_bwd_bf16_d32_bias2_aligned"),
        ("8.0", "sm80_bwd_fp16_d32_bias2_aligned"),
        ("8.0", "sm80_fwd_bf16_d32_bias2_aligned"),
        ("8.0", "sm80_fwd_bf16_d32_both_aligned"),
        ("8.0", "sm80_fwd_fp16_d32_bias2_aligned"),
        ("8.0", "sm80_fwd_fp16_d32_both_aligned"),
    ]
    hopper = BUILDER.kernels_for(wanted, arch.parse("9.0a"))
    assert {row.arch for row in hopper if row.family == "sm80"} <= {"9.0"}
    unaligned = BUILDER.kernels_for(wanted, arch.parse("9.0a"), aligned=False)
    assert {row.family for row in unaligned} == {"sm80"}, "TMA reads aligned rows only"


def test_kernels_of_a_list_of_calls_for_a_forced_family(nvcc, monkeypatch):
    """What is compiled beforehand is what a call with the same variable looks for."""
    wanted = presets.calls([Row("one", 32, "both")], dtypes=("bf16",))
    monkeypatch.setenv("DS4S_CUDA_FAMILY", "sm80")
    names = [row.name for row in BUILDER.kernels_for(wanted, arch.parse("9.0a;6.1"))]
    assert names == ["sm80_fwd_bf16_d32_both_aligned", "sm80_bwd_bf16_d32_bias2_aligned"]
    with pytest.raises(ToolchainError, match=r"one of sm70, sm75 on compute capability 7\.5"):
        BUILDER.kernels_for(wanted, arch.parse("7.5"))


def test_missing_cutlass_is_told_with_the_command_that_mends_it(no_gpu, monkeypatch):
    monkeypatch.delenv("CUTLASS_PATH", raising=False)
    monkeypatch.setattr(cutlass, "_places", tuple)
    reasons = [str(o) for o in BUILDER.obstacles() if "CUTLASS" in o.reason]
    assert len(reasons) == 1 and "nvidia-cutlass" in reasons[0]
    (job,) = BUILDER.jobs([CudaKernel("sm80", "fwd", "bf16", 32, "both", True, "9.0")])
    assert job.compiler is None and "CUTLASS" in job.problem


def test_the_op_is_listed():
    assert ALL_OPS["evoformer_attn"].BUILD_VAR == "DS_BUILD_EVOFORMER_ATTN"


def prebuilt(monkeypatch, requested):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", requested)
    rows = BUILDER.prebuilt_kernels()
    assert len(set(rows)) == len(rows)
    return rows


def test_prebuilt_rows_fit_their_architectures(no_gpu, nvcc, monkeypatch):
    """bfloat16 only from 8.0 on; every family once for each architecture asked for."""
    rows = prebuilt(monkeypatch, "7.5;8.0;9.0")
    assert {(row.family, row.arch) for row in rows} == {
        ("sm75", "7.5"),
        ("sm80", "8.0"),
        ("sm80", "9.0"),
        ("sm90", "9.0a"),
    }
    assert all(row.dtype != "bf16" for row in rows if row.family == "sm75")


def test_prebuilt_for_hopper_is_what_a_call_there_asks_for(no_gpu, nvcc, monkeypatch):
    """Sm90 where it has rows, Sm80 for the rest; for a list without 9.0a, too."""
    rows = prebuilt(monkeypatch, "9.0")
    for row in rows:
        expected = "sm90" if has_row("sm90", row.direction, row.dtype) else "sm80"
        assert row.family == expected, row
    assert prebuilt(monkeypatch, "9.0;9.0a")[: len(rows)] == rows


def test_prebuilt_ptx_keeps_the_forward_of_later_gpus(no_gpu, nvcc, monkeypatch):
    rows = prebuilt(monkeypatch, "9.0+PTX")
    assert CudaKernel("sm80", "fwd", "bf16", 32, "both", True, "9.0+PTX") in rows
    assert CudaKernel("sm90", "fwd", "bf16", 32, "both", True, "9.0a") in rows


def test_prebuilt_without_sm_90a(no_gpu, nvcc, monkeypatch):
    set_nvcc(monkeypatch, "sm_80", "sm_90")
    assert {row.family for row in prebuilt(monkeypatch, "9.0")} == {"sm80"}
