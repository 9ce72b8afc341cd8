"""The ELF reader against what is on every machine that can run these tests."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from op_builder.toolchain import elf


def a_library():
    import _ctypes

    return Path(_ctypes.__file__)  # an extension module: exports one function and needs glibc


def test_exports_and_machine():
    library = elf.read(a_library())
    assert "PyInit__ctypes" in library.exports
    assert "PyErr_SetString" not in library.exports, "used, not exported"
    assert library.machine == elf.own_machine() != 0


def test_own_machine_is_known_without_proc(monkeypatch):
    """Otherwise a kernel that is there would never be taken for one of this machine."""
    read = elf.machine
    monkeypatch.setattr(elf, "machine", lambda path: 0 if "/proc/" in path else read(path))
    assert elf.own_machine.__wrapped__() == elf.own_machine() != 0
    monkeypatch.setattr(sys, "executable", None)  # of an embedded interpreter
    assert elf.own_machine.__wrapped__() == 0


def test_needed_glibc_is_what_readelf_says():
    if shutil.which("readelf") is None:
        pytest.skip("binutils' readelf is not installed")
    said = subprocess.run(
        ["readelf", "-V", str(a_library())], capture_output=True, text=True
    ).stdout
    versions = [tuple(map(int, found)) for found in re.findall(r"Name: GLIBC_(\d+)\.(\d+)", said)]
    assert elf.read(a_library()).glibc == max(versions, default=(0, 0))
    assert elf.own_glibc() > (0, 0)


@pytest.mark.parametrize("size", [0, 5, 19, 63, 64, 1000, -8])
def test_cut_file_is_an_error_with_words(tmp_path, size):
    cut = tmp_path / "cut.so"
    cut.write_bytes(a_library().read_bytes()[:size])
    with pytest.raises(ValueError, match=r"\w+"):
        elf.read(cut)


def test_other_kinds_of_file(tmp_path):
    script = tmp_path / "script.so"
    script.write_bytes(b"#!/bin/sh\n" * 100)
    with pytest.raises(ValueError, match="ELF"):
        elf.read(script)
