"""The structs that Python packs are the structs that C++ reads."""

import re
import shutil
import subprocess

import pytest

pytest.importorskip("torch")

from deepspeed4science import params
from op_builder import paths

STRUCTS = {
    "FwdParams": (params.FWD_POINTERS, params.FWD_STRIDES, params.FWD_LAYOUT),
    "BwdParams": (params.BWD_POINTERS, params.BWD_STRIDES, params.BWD_LAYOUT),
}


@pytest.mark.parametrize("name", STRUCTS)
def test_offsets_agree_with_the_compiler(name, tmp_path):
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler to ask")
    pointers, strides, layout = STRUCTS[name]
    expected = params.offsets(pointers, strides)
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
    assert layout.size == expected["sizeof"]


def test_every_field_of_the_header_is_packed():
    """A field added to the header cannot be forgotten here."""
    header = (paths.csrc_root() / "params.h").read_text()
    for name, (pointers, strides, _) in STRUCTS.items():
        body = re.search(rf"struct {name} \{{(.*?)\n\}};", header, re.S).group(1)
        body = re.sub(r"//.*", "", body)
        fields = re.findall(r"(\w+)(?:\[\d+\])?\s*[;,]", body)
        assert fields == [f for f in params.offsets(pointers, strides) if f != "sizeof"]
