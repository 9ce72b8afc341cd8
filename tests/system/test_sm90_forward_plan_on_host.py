"""Which kernel Hopper's forward runs (sm90/forward/plan.h), on the host: no GPU needed."""

import subprocess

import pytest

from tests.system.host_programs import built


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """plan(D, N, L, H, copied, blocks) -> text"""
    path = built(tmp_path_factory.mktemp("host"), "sm90_forward_plan")
    return lambda *numbers: subprocess.check_output(
        [str(path), *(str(int(number)) for number in numbers)], text=True
    ).strip()


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ((32, 384, 384, 4, False, 132), "kernel=many_rows workspace_bytes=0"),
        # 128 tiles of 64 queries
        ((24, 1, 512, 16, False, 132), "kernel=fewest_tiles workspace_bytes=0"),
        ((24, 1, 512, 16, False, 128), "kernel=few_tiles workspace_bytes=0"),
        ((24, 1, 768, 16, False, 132), "kernel=few_tiles workspace_bytes=0"),
        ((24, 1, 2048, 16, False, 132), "kernel=few_tiles workspace_bytes=0"),  # 256 of 128
        ((24, 1, 2176, 16, False, 132), "kernel=one_row workspace_bytes=0"),
        ((24, 1, 2176, 16, False, 137), "kernel=few_tiles workspace_bytes=0"),
        ((64, 1, 4096, 8, False, 132), "kernel=few_tiles workspace_bytes=0"),  # 512 of 64
        ((64, 1, 4352, 8, False, 132), "kernel=one_row workspace_bytes=0"),
        ((32, 2, 100, 3, True, 132), "kernel=many_rows bias2=copied workspace_bytes=62464"),
        ((128, 8, 64, 2, False, 132), "kernel=many_rows workspace_bytes=0"),
        ((32, 1536, 1536, 4, False, 132), "kernel=many_rows workspace_bytes=0"),
        (
            (32, 2048, 2048, 4, False, 132),
            "kernel=many_rows groups_of_band=12 workspace_bytes=0",
        ),
        (
            (32, 3072, 3072, 4, False, 132),
            "kernel=many_rows groups_of_band=12 parts_begun@0 workspace_bytes=256",
        ),
        ((32, 47, 2048, 4, False, 132), "kernel=many_rows workspace_bytes=0"),
        (
            (32, 48, 2048, 4, False, 132),
            "kernel=many_rows groups_of_band=12 workspace_bytes=0",
        ),
    ],
)
def test_plan_of(call, expected, plan):
    assert plan(*call) == expected
