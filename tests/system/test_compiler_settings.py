"""What compilers read from the environment by themselves, and what then comes out otherwise."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from op_builder import EvoformerAttnBuilder, EvoformerAttnCPUBuilder, env
from op_builder.ops.instantiations import CpuKernel
from op_builder.toolchain import host_compiler, memo, nvcc, nvcc_targets, toolkits
from tests import fakes

from .toys import REPOSITORY

NAMES = [name for name, _ in env._OF_COMPILERS]
MARKED = '#include_next <cmath>\nextern "C" __attribute__((used)) const char mark[] = "marked";\n'


@pytest.fixture
def folder(tmp_path):
    """Headers, libraries and programs that a compiler would find before its own."""
    fakes.file(tmp_path / "cmath", MARKED)
    fakes.file(tmp_path / "lib" / "libm.so", f"GROUP({tmp_path}/mark.o)\n")
    fakes.file(tmp_path / "mark.cpp", 'extern const char mark[] = "marked";\n')
    subprocess.run(["g++", "-c", "mark.cpp"], cwd=tmp_path, check=True)
    fakes.program(tmp_path / "as", f'#!/bin/sh\nexec {shutil.which("as")} --defsym marked=1 "$@"\n')
    return tmp_path


def made(folder: Path, **changes: str) -> bytes:
    """A small library as g++ makes it under these settings; nothing when it refuses."""
    kept = {name: value for name, value in os.environ.items() if name not in NAMES}
    source = '#include <cmath>\nextern "C" double f(double x) { return std::sin(x); }\n'
    (folder / "small.cpp").write_text(source)
    (folder / "small.so").unlink(missing_ok=True)
    steps = (["g++", "-O1", "-fPIC", "-c", "small.cpp"], ["g++", "-shared", "small.o"])
    for step, name in zip(steps, ("small.o", "small.so"), strict=True):
        subprocess.run([*step, "-o", name], cwd=folder, env=kept | changes, capture_output=True)
    return (folder / "small.so").read_bytes() if (folder / "small.so").exists() else b""


@pytest.mark.parametrize("name", [*(n for n in NAMES if "NVCC" not in n), "C_INCLUDE_PATH"])
def test_each_changes_what_is_compiled_and_c_alone_does_not(name, folder):
    """So that the key holds what it must, and no more."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    values = {"GCC_EXEC_PREFIX": f"{folder}/", "LIBRARY_PATH": f"{folder}/lib"}
    value = values.get(name, str(folder))
    assert (made(folder, **{name: value}) != made(folder)) == (name in NAMES)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("builder", [EvoformerAttnCPUBuilder(), EvoformerAttnBuilder()])
def test_each_is_part_of_the_key(builder, name, monkeypatch):
    for other in NAMES:
        monkeypatch.delenv(other, raising=False)
    kernel = CpuKernel("fwd", "fp32", "portable")
    if builder.DEVICE == "cuda":
        kernel = builder.kernel(
            family="sm80", direction="fwd", dtype="bf16", head_dim=32, bias="both", aligned=True,
            device=(8, 0),
        )  # fmt: skip
    (before,) = builder.jobs([kernel])
    monkeypatch.setenv(name, "/opt/of/a/module")
    (after,) = builder.jobs([kernel])
    assert (name, "/opt/of/a/module") in after.identity
    assert before.ident != after.ident


LOAD = """
import json, sys
from op_builder import EvoformerAttnCPUBuilder
from op_builder.ops.instantiations import CpuKernel
kernel = CpuKernel("fwd", "fp32", "portable")
found = EvoformerAttnCPUBuilder().load(kernels=[kernel], verbose=False).kernel(kernel)
print(json.dumps([found.origin, b"marked" in found.path.read_bytes()]))
"""


def test_a_kernel_made_under_other_settings_is_not_taken(folder):
    """A module of a cluster was loaded in one job and not in the other."""
    if not host_compiler.find_host_compiler().ok:
        pytest.skip("needs a compiler")

    def load(**changes):
        kept = {name: value for name, value in os.environ.items() if name not in NAMES}
        own = {"PYTHONPATH": str(REPOSITORY), "DS4S_CACHE_DIR": str(folder / "cache")}
        done = subprocess.run(
            [sys.executable, "-c", LOAD], env=kept | own | changes, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    assert load() == ["built", False]
    assert load(CPLUS_INCLUDE_PATH=str(folder)) == ["built", True]
    assert load(CPLUS_INCLUDE_PATH=str(folder)) == ["cache", True]
    assert load() == ["cache", False]


def test_a_refusal_under_other_settings_is_not_remembered(folder, monkeypatch):
    """Flags that spoil every compilation, unset again: the toolkit is what it was."""
    monkeypatch.setenv("DS4S_CACHE_DIR", str(folder / "cache"))
    real = toolkits.find_nvcc()
    if not real.ok:
        pytest.skip(f"nvcc: {real.reason}; {real.remedy}")
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "--no-such-flag")
    assert not toolkits.find_nvcc(prove=True).ok
    monkeypatch.delenv("NVCC_APPEND_FLAGS")
    assert toolkits.find_nvcc(prove=True).ok


def test_a_poorer_answer_is_not_remembered(tmp_path, monkeypatch):
    """An nvcc that could not say where its toolkit is, or what it compiles for, is asked again."""
    monkeypatch.setenv("DS4S_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    path = fakes.toolkit(tmp_path / "toolkit")
    path.rename(path.with_name("nvcc.whole"))
    script = '#!/bin/sh\n[ "$1" = --version ] || [ -e {0}/mended ] || exit 1\nexec {1}.whole "$@"\n'
    fakes.program(path, script.format(tmp_path, path))
    monkeypatch.setattr(nvcc, "_is_script", lambda _: False)
    tool = toolkits.find_nvcc()
    assert (tool.ok, nvcc_targets.targets(tool)) == (True, nvcc_targets.Targets())
    (tmp_path / "mended").touch()
    memo._answers.clear()
    assert "sm_80" in nvcc_targets.targets(toolkits.find_nvcc()).real


@pytest.mark.parametrize(
    ("words", "is_refused"), [('-ffast-math "$@"', False), ('"$@" -ffast-math', True)]
)
def test_a_compiler_that_knows_no_infinities_unless_told(words, is_refused, tmp_path):
    """Intel's icpx, and compilers wrapped by a script: NaNs and masks would be lost in silence."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    fakes.program(tmp_path / "fast", f"#!/bin/sh\nexec g++ {words}\n")
    fakes.file(tmp_path / "unit.cpp", '#include "cpu/scalar.h"\n')
    builder = EvoformerAttnCPUBuilder()
    folders = (f"-I{folder}" for folder in builder.include_paths())
    done = subprocess.run(
        [str(tmp_path / "fast"), *builder.cxx_args(), *folders, "-fsyntax-only", "unit.cpp"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.returncode != 0) == is_refused == ("name another one in CXX" in done.stderr)
