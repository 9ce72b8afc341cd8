"""The list of kernels: names that are unique, sources that name what exists."""

import ast
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from op_builder.cache.loaded_kernel import ABI_VERSION, EXPORTS
from op_builder.ops import instantiations
from op_builder.ops.instantiations import CPU_KERNELS, FAMILIES, CpuKernel, serving
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


SERVING = {
    (6, 1): (),
    (7, 0): ("sm70",),
    (7, 2): ("sm70",),
    (7, 5): ("sm75",),
    (8, 0): ("sm80",),
    (8, 9): ("sm80",),
    (9, 0): ("sm90", "sm80"),
    (10, 0): ("sm80",),
    (12, 1): ("sm80",),
}


@pytest.mark.parametrize("device", SERVING)
def test_families_of_a_device(device):
    assert tuple(family.name for family in serving(device)) == SERVING[device]


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_a_family_is_whole(family):
    """What its row names exists."""
    assert find_spec(f"deepspeed4science.backends.{family.backend}")
    for direction, dtypes in family.dtypes.items():
        for dtype in dtypes.values():
            assert family.dtype_for(direction, dtype) == dtype, "a kernel of another's dtype"
        assert family.usual_seconds[direction] > 0
    assert bool(family.target) == bool(family.first_cuda)


def names_a_family(node):
    """A family or a compute capability, written out."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.fullmatch(r"[sS]m\d+", node.value) is not None
    capabilities = [list(end) for one in FAMILIES.values() for end in (one.first, (7, 5))]
    return (
        isinstance(node, ast.Tuple)
        and [getattr(part, "value", None) for part in node.elts] in capabilities
    )


def test_nothing_else_names_a_family_or_its_devices():
    """Which family serves what stands in one list: a new one needs no other line."""
    root = Path(instantiations.__file__).parents[2]
    found = [
        f"{path.relative_to(root)}:{node.lineno}"
        for package in ("op_builder", "deepspeed4science")
        for path in sorted((root / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if names_a_family(node) and path != Path(instantiations.__file__)
    ]
    assert found == []
    assert names_a_family(ast.parse("x == (9, 0)").body[0].value.comparators[0])
    assert names_a_family(ast.parse('family == "sm90"').body[0].value.comparators[0])


def test_rows_are_values():
    """Equal rows are one kernel: what is loaded is looked up by them."""
    assert CpuKernel("fwd", "fp32", "avx2") in set(CPU_KERNELS)
