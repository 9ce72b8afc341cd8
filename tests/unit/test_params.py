"""The structs that Python packs are the structs that C++ reads."""

import inspect
import re
import shutil
import struct
import subprocess
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from deepspeed4science import params  # noqa: E402
from deepspeed4science.params import Layout  # noqa: E402
from op_builder import paths  # noqa: E402

STRUCTS = {"FwdParams": params.FWD, "BwdParams": params.BWD}
each_struct = pytest.mark.parametrize("name", STRUCTS)


def fields_of_the_header(name):
    """(name, C type, elements of an array or 1) in order."""
    header = (paths.csrc_root() / "params.h").read_text()
    body = re.search(rf"struct {name} \{{(.*?)\n\}};", header, re.S).group(1)
    found = []
    for declaration in re.sub(r"//.*", "", body).split(";")[:-1]:
        kind, names = re.fullmatch(r"\s*((?:const )?\w+\*?) (.*)", declaration.strip()).groups()
        for one in names.split(","):
            field, count = re.fullmatch(r"\s*(\w+)(?:\[(\d+)\])?", one).groups()
            found.append((field, kind, int(count or 1)))
    return found


def described(layout):
    """The same of the description."""
    kinds = {"Q": "pointer", "q": "int64_t", "i": "int32_t", "f": "float"}
    return [(one.name, kinds[one.type[-1]], int(one.type[:-1] or 1)) for one in layout.fields]


def difference(name, layout):
    """The first field in which header and description differ; None when they are alike."""
    header = [
        (field, "pointer" if kind.endswith("*") else kind, count)
        for field, kind, count in fields_of_the_header(name)
    ]
    pairs = zip(header, described(layout), strict=False)
    unequal = next((pair for pair in pairs if pair[0] != pair[1]), None)
    return unequal or (None if len(header) == len(layout.fields) else "lengths")


@each_struct
def test_the_description_is_the_headers(name):
    """Names, types and order."""
    assert difference(name, STRUCTS[name]) is None


@each_struct
def test_a_swapped_pair_is_seen(name):
    """Any two neighbours, of one type as well; and a field too few."""
    fields = STRUCTS[name].fields
    for i in range(len(fields) - 1):
        swapped = Layout("q", *fields[:i], fields[i + 1], fields[i], *fields[i + 2 :])
        assert difference(name, swapped), fields[i].name
    assert difference(name, Layout("q", *fields[:-1])) == "lengths"


@each_struct
def test_offsets_agree_with_the_compiler(name, tmp_path):
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler to ask")
    expected = STRUCTS[name].offsets()
    lines = "".join(
        f'  std::printf("{field} %zu\\n", offsetof(ds4s::{name}, {field}));\n'
        for field in expected
        if field != "sizeof"
    )
    program = tmp_path / "offsets.cpp"
    program.write_text(
        "#include <cstddef>\n#include <cstdio>\n"
        f'#include "params.h"\nint main() {{\n{lines}'
        f'  std::printf("sizeof %zu\\n", sizeof(ds4s::{name}));\n}}\n'
    )
    binary = tmp_path / "offsets"
    subprocess.run(
        [compiler, "-std=c++17", f"-I{paths.csrc_root()}", program, "-o", binary], check=True
    )
    printed = subprocess.run([binary], capture_output=True, text=True, check=True).stdout
    measured = {key: int(value) for key, value in (line.split() for line in printed.splitlines())}
    assert measured == expected


SIZES = {"B": 2, "N": 3, "Lq": 5, "Lk": 7, "H": 4, "D": 6, "Dv": 8}
SHAPES = {
    "q": (2, 3, 5, 4, 6),
    "k": (2, 3, 7, 4, 6),
    "v": (2, 3, 7, 4, 8),
    "o": (2, 3, 5, 4, 8),
    "lse": (2, 3, 4, 5),
    "do_": (2, 3, 5, 4, 8),
    "dq": (2, 3, 5, 4, 6),
    "dk": (2, 3, 7, 4, 6),
    "dv": (2, 3, 7, 4, 8),
    "dbias1": (2, 3, 1, 1, 7),
    "dbias2": (2, 1, 4, 5, 7),
    "rounded_dbias1": (2, 3, 1, 1, 7),
    "rounded_dbias2": (2, 1, 4, 5, 7),
    "bias1": (2, 1, 1, 1, 7),
    "bias2": (1, 1, 4, 5, 1),
    "row_mask": (1, 3),
}


@each_struct
def test_every_value_is_where_its_name_says(name):
    """Tensors whose strides all differ, unpacked by the header's names."""
    tensors = {one: torch.empty(*shape, 3)[..., 0] for one, shape in SHAPES.items()}
    for one in ("q", "k", "v", "o", "do_", "dq", "dk", "dv"):  # strides that only this one has
        gap = 10 + len(one) * 7 + sum(map(ord, one))
        tensors[one] = torch.empty(*SHAPES[one][:-1], gap)[..., : SHAPES[one][-1]]
    tensors["bias1"] = tensors["bias1"].half()
    tensors["bias2"] = tensors["bias2"].bfloat16()
    problem = SimpleNamespace(**SIZES, scale=0.375, partial_keys=True)
    options = params.Options(num_threads=9, deterministic=1)
    layout = STRUCTS[name]
    taken = inspect.signature(layout.pack_pointers).parameters.keys() & tensors.keys()
    given = {one: tensors[one] for one in taken}
    packed = layout.pack_pointers(**given, workspace=4096)
    packed += layout.pack_rest(problem, options, **given)
    strides = {
        f"{one.rstrip('_')}_stride": tuple(tensor.stride()[:4])
        for one, tensor in tensors.items()
        if "bias" not in one and "mask" not in one
    }
    strides["bias1_stride"] = (tensors["bias1"].stride(0), 0, tensors["bias1"].stride(4))
    strides["bias2_stride"] = (0, tensors["bias2"].stride(2), tensors["bias2"].stride(3), 0)
    strides["row_mask_stride"] = (0, tensors["row_mask"].stride(1))
    expected = {one: tensor.data_ptr() for one, tensor in tensors.items()}
    expected |= SIZES | strides
    expected |= {"workspace": 4096, "bias1_dtype": 1, "bias2_dtype": 2, "num_threads": 9}
    expected |= {"deterministic": 1, "scale": 0.375, "reserved": 0, "partial_keys": 1}
    expected["dbias2_stride"] = tensors["dbias2"].stride(3)
    at = layout.offsets()
    for field, kind, count in fields_of_the_header(name):
        code = {"int64_t": "q", "int32_t": "i", "float": "f"}.get(kind, "Q")
        values = struct.unpack_from(f"={count}{code}", packed, at[field])
        assert values == (expected[field] if count > 1 else (expected[field],)), field


def test_what_is_missing_is_null():
    problem = SimpleNamespace(**SIZES, scale=1.0)
    tensors = {one: torch.empty(SHAPES[one]) for one in ("q", "k", "v", "o")}
    tensors |= dict.fromkeys(("bias1", "bias2", "row_mask", "lse"))
    packed = params.FWD.pack_pointers(**tensors, workspace=0)
    packed += params.FWD.pack_rest(problem, params.Options(1, 1), **tensors)
    for field in ("bias1", "bias2", "row_mask", "lse", "workspace", "bias1_dtype"):
        at = params.FWD.offsets()[field]
        assert packed[at : at + 4] == bytes(4), field
