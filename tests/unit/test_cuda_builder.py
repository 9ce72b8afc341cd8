"""CONTRACT section 2 for CUDA: family and kernels of a device, and reasons instead of guesses."""

import itertools
import os

import pytest

from op_builder import ALL_OPS, EvoformerAttnBuilder, gpu
from op_builder.errors import BuildError, ToolchainError
from op_builder.instantiations import (
    CUDA_BIASES,
    CUDA_DTYPES,
    CUDA_FAMILIES,
    DIRECTIONS,
    HEAD_DIM_TIERS,
    CudaKernel,
    head_dim_tier,
)

BUILDER = EvoformerAttnBuilder()


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(gpu, "detect", lambda: gpu.Gpus(reason="there is no driver"))


@pytest.mark.parametrize(
    ("device", "family"),
    [
        *(((7, 0), "sm70"), ((7, 2), "sm70"), ((7, 5), "sm75")),
        *((device, "sm80") for device in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))),
    ],
)
def test_family_of_a_device(device, family, monkeypatch):
    monkeypatch.delenv("DS4S_CUDA_FAMILY", raising=False)
    assert BUILDER.family(device) == family


def test_a_lower_family_can_be_forced_and_a_higher_one_cannot(monkeypatch):
    monkeypatch.setenv("DS4S_CUDA_FAMILY", "sm70")
    assert BUILDER.family((9, 0)) == "sm70"
    monkeypatch.setenv("DS4S_CUDA_FAMILY", "sm80")
    with pytest.raises(ToolchainError, match=r"one of sm70, sm75 on compute capability 7\.5"):
        BUILDER.family((7, 5))


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
        if direction == "fwd" or bias in ("none", "bias2")
    ]
    assert len({row.name for row in rows}) == len(rows)
    assert len({row.source() for row in rows}) == len(rows)


def test_tiers():
    assert [head_dim_tier(d) for d in (1, 16, 17, 48, 64, 65, 97, 128)] == (
        [16, 16, 32, 48, 64, 96, 128, 128]
    )
    with pytest.raises(ValueError, match="129"):
        head_dim_tier(129)


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
    (obstacle,) = [o for o in BUILDER.obstacles() if "GPU" in o.reason]
    assert "there is no driver" in obstacle.reason
    assert "TORCH_CUDA_ARCH_LIST" in obstacle.remedy
    with pytest.raises(BuildError, match="there is no driver"):
        BUILDER.builder()


def test_missing_cutlass_is_told_with_the_command_that_mends_it(no_gpu, monkeypatch, tmp_path):
    monkeypatch.setenv("CUTLASS_PATH", str(tmp_path))
    reasons = [str(o) for o in BUILDER.obstacles() if "CUTLASS" in o.reason]
    assert len(reasons) == 1 and "nvidia-cutlass" in reasons[0]
    (job,) = BUILDER.jobs([CudaKernel("sm80", "fwd", "bf16", 32, "both", True, "9.0")])
    assert job.compiler is None and "CUTLASS" in job.problem


def test_the_op_is_listed():
    assert ALL_OPS["evoformer_attn"].BUILD_VAR == "DS_BUILD_EVOFORMER_ATTN"


def test_prebuilt_rows_fit_their_architectures(no_gpu, monkeypatch):
    """bfloat16 only from 8.0 on; every family once for each architecture asked for."""
    targets = pytest.importorskip("op_builder.toolchain").targets
    if not targets(pytest.importorskip("op_builder.toolchain").find_nvcc()).real:
        pytest.skip("no nvcc to ask for its architectures")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.5;8.0;9.0")
    rows = BUILDER.prebuilt_kernels()
    assert {(row.family, row.arch) for row in rows} == {
        ("sm75", "7.5"),
        ("sm80", "8.0"),
        ("sm80", "9.0"),
    }
    assert all(row.dtype != "bf16" for row in rows if row.family == "sm75")
    assert len(set(rows)) == len(rows)
