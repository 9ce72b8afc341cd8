"""The list of kernels: names that are unique, sources that name what exists."""

import re
from pathlib import Path

import pytest

from op_builder.cache.loaded_kernel import ABI_VERSION, EXPORTS
from op_builder.ops.instantiations import CPU_KERNELS, CpuKernel
from op_builder.paths import csrc_root


def test_abi_version_is_the_headers():
    (number,) = re.findall(
        r"#define DS4S_ABI_VERSION (\d+)", (csrc_root() / "params.h").read_text()
    )
    assert int(number) == ABI_VERSION


def test_names_are_unique_and_fit_for_files():
    names = [kernel.name for kernel in CPU_KERNELS]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z0-9_]+", name) for name in names)


@pytest.mark.parametrize("kernel", CPU_KERNELS, ids=lambda kernel: kernel.name)
def test_source_has_the_five_exports_and_existing_headers(kernel):
    source = kernel.source()
    exported = re.findall(r"^DS4S_EXPORT .*?(ds4s_\w+)\(", source, re.MULTILINE)
    assert sorted(exported) == sorted(EXPORTS)
    for name in re.findall(r'#include "(.*)"', source):
        assert (csrc_root() / name).is_file()
    assert f'"{kernel.name}"' in source
    assert ("FwdParams" in source) == (kernel.direction == "fwd")


def test_source_names_no_folder_of_this_machine():
    assert not any(str(Path.home()) in kernel.source() for kernel in CPU_KERNELS)


def test_amx_multiplies_bfloat16_only():
    assert {kernel.dtype for kernel in CPU_KERNELS if kernel.isa == "amx"} == {"bf16"}


def test_rows_are_values():
    """Equal rows are one kernel: what is loaded is looked up by them."""
    assert CpuKernel("fwd", "fp32", "avx2") in set(CPU_KERNELS)
