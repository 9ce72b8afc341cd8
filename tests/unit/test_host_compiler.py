"""Finding the host compiler: CXX, CC, PATH, and compilers that do not compile or do not answer."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from op_builder import env
from op_builder.toolchain import host_compiler, tool
from tests import fakes


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No compiler anywhere: each test puts in what it is about."""
    for name in ("CXX", "CC", "NVCC_CCBIN", "NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("DS4S_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


def real_compiler() -> str:
    found = shutil.which("g++", path=os.defpath) or shutil.which("c++", path=os.defpath)
    if found is None:
        pytest.skip("needs a real C++ compiler, and none is in the system's folders")
    return found


def test_no_compiler_says_so_and_what_to_install() -> None:
    tool = host_compiler.find_host_compiler()
    assert not tool.ok
    assert "no C++ compiler was found" in tool.reason
    assert "apt-get install g++" in tool.remedy
    assert "CXX" in tool.remedy


def test_a_real_compiler_is_tried_and_known_by_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.defpath)
    tool = host_compiler.find_host_compiler() if real_compiler() else None
    assert tool is not None
    assert tool.ok
    assert tool.where_found == "PATH"
    assert tool.version[0].isdigit()
    assert tool.version in tool.identity
    monkeypatch.setenv("LD_PRELOAD", "/opt/xalt/2.10/libxalt_init.so")  # every program complains
    monkeypatch.setenv("DS4S_CACHE_DIR", os.devnull)  # nothing remembered
    assert host_compiler.find_host_compiler().identity == tool.identity


@pytest.mark.parametrize("path", [None, ""])
def test_without_a_path_the_systems_folders_are_searched(
    path: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs and services may inherit no environment at all."""
    real_compiler()
    if path is None:
        monkeypatch.delenv("PATH")
    else:
        monkeypatch.setenv("PATH", path)
    assert host_compiler.find_host_compiler().ok
    assert env.for_compiler()["PATH"] == os.defpath, "nvcc's host compiler looks for as there"


@pytest.mark.parametrize(
    "before",
    ["", "ccache ", "env ", "/usr/bin/env A= /opt/bin/ccache ", "env CCACHE_DIR=/tmp A_1= ccache "],
)
@pytest.mark.parametrize("after", ["", " -m64"])
def test_cxx_may_carry_a_launcher_and_flags(
    before: str, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = real_compiler()
    monkeypatch.setenv("PATH", os.defpath)
    monkeypatch.setenv("CXX", f"{before}{compiler}{after}")
    tool = host_compiler.find_host_compiler()
    assert (tool.ok, tool.where_found, str(tool.path)) == (True, "CXX", compiler)


@pytest.mark.parametrize("quote", ["", "'"])
def test_cxx_may_have_blanks_in_its_path(
    quote: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = fakes.wrapper(tmp_path / "of two words" / "g++", real_compiler())
    monkeypatch.setenv("PATH", os.defpath)
    monkeypatch.setenv("CXX", f"{quote}{compiler}{quote}")
    tool = host_compiler.find_host_compiler()
    assert (tool.reason, str(tool.path)) == ("", str(compiler))


@pytest.mark.parametrize("cxx", ["no-such-compiler", "/no/such/g++", "'unbalanced"])
def test_a_cxx_that_is_not_there_is_an_error_and_not_passed_over(
    cxx: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", os.defpath)
    monkeypatch.setenv("CXX", cxx)
    tool = host_compiler.find_host_compiler()
    assert not tool.ok
    assert f"CXX={cxx}" in tool.reason
    assert tool.remedy.startswith("correct or unset CXX, or install a C++17 compiler (")


def test_settings_of_a_compiler_that_failed_may_be_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as those of a cluster's module that is loaded for another compiler."""
    real_compiler()
    monkeypatch.setenv("PATH", os.defpath)
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-w")  # which a host compiler does not read
    broken = str(fakes.program(tmp_path / "programs" / "as", "#!/bin/sh\nexit 1\n").parent)
    monkeypatch.setenv("COMPILER_PATH", broken)
    tool = host_compiler.find_host_compiler()
    assert not tool.ok
    assert tool.remedy.startswith("unset COMPILER_PATH, or install a C++17 compiler (")
    assert tool.remedy.endswith(") or set CXX to one")


@pytest.mark.parametrize(
    ("cc", "cxx"),
    [
        ("gcc", "g++"),
        ("gcc-12", "g++-12"),
        ("clang", "clang++"),
        ("clang-17", "clang++-17"),
        ("cc", "c++"),
        ("x86_64-conda-linux-gnu-cc", "x86_64-conda-linux-gnu-c++"),
        ("icx", "icpx"),
    ],
)
def test_cc_names_its_sibling(
    cc: str, cxx: str, bare_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes.program(bare_machine / "bin" / cc, "#!/bin/sh\n")
    fakes.wrapper(bare_machine / "bin" / cxx, Path(real_compiler()))
    monkeypatch.setenv("PATH", f"{bare_machine}/bin:{os.defpath}")
    monkeypatch.setenv("CC", cc)
    tool = host_compiler.find_host_compiler()
    assert tool.ok
    assert tool.where_found == "CC"
    assert tool.path == bare_machine / "bin" / cxx


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("NVCC_CCBIN", "gcc-12"),
        ("NVCC_CCBIN", "{0}/folder"),
        ("NVCC_PREPEND_FLAGS", "-ccbin=g++-12"),
        ("NVCC_APPEND_FLAGS", "-w --compiler-bindir  {0}/g++-12 -O2"),
    ],
)
def test_the_host_compiler_that_nvcc_is_told_to_use(
    variable: str, value: str, bare_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Often since the g++ on PATH is too new for nvcc. CXX comes first."""
    bin_ = bare_machine / "bin"
    for path in (bin_ / "g++-12", bin_ / "folder" / "g++", bin_ / "g++-13"):
        fakes.wrapper(path, Path(real_compiler()))
    fakes.program(bin_ / "gcc-12", "#!/bin/sh\n")
    monkeypatch.setenv("PATH", f"{bin_}:{os.defpath}")
    monkeypatch.setenv(variable, value.format(bin_))
    tool = host_compiler.find_host_compiler()
    wanted = bin_ / "folder" / "g++" if "folder" in value else bin_ / "g++-12"
    assert (tool.ok, tool.where_found, tool.path) == (True, variable, wanted)
    monkeypatch.setenv("CXX", "g++-13")
    assert host_compiler.find_host_compiler().path == bin_ / "g++-13"
    monkeypatch.delenv("CXX")
    monkeypatch.setenv(variable, "-ccbin /no/such/g++")
    assert host_compiler.find_host_compiler().where_found == "PATH"


@pytest.mark.parametrize(("cc", "told"), [("gcc-99", "g++-99"), ("icc", "icc")])
def test_a_cc_that_is_not_there_is_told(
    cc: str, told: str, bare_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes.wrapper(bare_machine / "bin" / "c++", Path(real_compiler()))
    monkeypatch.setenv("PATH", f"{bare_machine}/bin:{os.defpath}")
    monkeypatch.setenv("CC", cc)
    tool = host_compiler.find_host_compiler()
    assert tool.ok and tool.where_found == "PATH"
    assert tool.passed_over == (f"CC: there is no {told}",)


LAME = {
    "has no C++ in it": (
        "#!/bin/sh\n[ $1 = --version ] && echo 12.2.0 && exit 0\necho error: no cc1plus\nexit 1\n",
        "no cc1plus",
    ),
    "writes nothing": ("#!/bin/sh\necho gcc 12.2.0\n", "wrote nothing"),
    "says nothing": ("#!/bin/sh\n", "wrote nothing"),
}  # fmt: skip


@pytest.mark.parametrize("lame", LAME)
def test_a_compiler_that_cannot_compile_is_unfit_whatever_it_says(
    lame: str, bare_machine: Path
) -> None:
    text, says = LAME[lame]
    fakes.program(bare_machine / "bin" / "g++", text)
    tool = host_compiler.find_host_compiler()
    assert not tool.ok
    assert says in tool.reason
    assert tool.remedy


def test_a_lame_compiler_does_not_hide_a_good_one(
    bare_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_compiler()
    fakes.program(bare_machine / "bin" / "c++", LAME["writes nothing"][0])
    monkeypatch.setenv("PATH", f"{bare_machine}/bin:{os.defpath}")
    tool = host_compiler.find_host_compiler()
    assert tool.ok
    assert tool.path != bare_machine / "bin" / "c++"
    assert len(tool.passed_over) == 1


@pytest.mark.parametrize("activated", [True, False])
def test_the_compiler_of_a_conda_environment_is_found_without_cxx(
    activated: bool, bare_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jupyter's kernels and batch jobs run the environment's Python without its activation."""
    prefix = bare_machine / "env"
    (prefix / "conda-meta").mkdir(parents=True)
    path = prefix / "bin" / "x86_64-conda-linux-gnu-c++"
    fakes.program(path, f'#!/bin/sh\nPATH={os.defpath} exec {real_compiler()} "$@"\n')
    if activated:
        monkeypatch.setenv("CONDA_PREFIX", str(prefix))
    else:
        monkeypatch.delenv("CONDA_PREFIX", raising=False)
        monkeypatch.setattr(sys, "prefix", str(prefix))
    found = host_compiler.find_host_compiler()
    assert (found.ok, found.path, found.where_found) == (True, path, "conda environment")


def test_a_compiler_that_does_not_answer_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load tests the compiler several times, each with several commands of up to 30 s."""
    monkeypatch.setattr(tool, "TIMEOUT_S", 0.2)
    monkeypatch.setattr(tool, "_silent_since", {})
    calls = tmp_path / "calls"
    compiler = tmp_path / "g++"
    compiler.write_text(f"#!/bin/sh\necho call >> {calls}\n/bin/sleep 20\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    for _ in range(3):
        found = host_compiler.find_host_compiler()
        assert (found.ok, found.remedy) == (False, "try again, or install it on a local disk")
    assert calls.read_text() == "call\n"
    monkeypatch.setattr(tool, "_SILENT_S", 0.0)
    host_compiler.find_host_compiler()
    assert calls.read_text() == "call\n" * 2, "and again some time later"


def test_a_c_compiler_does_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """gcc compiles C++, but what it links lacks the C++ runtime."""
    gcc = shutil.which("gcc", path=os.defpath)
    if gcc is None:
        pytest.skip("needs gcc")
    monkeypatch.setenv("PATH", os.defpath)
    monkeypatch.setenv("CXX", gcc)
    tool = host_compiler.find_host_compiler()
    assert not tool.ok
    assert "undefined reference" in tool.reason


def test_what_a_script_runs_is_asked_for_each_time(
    bare_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script stays as it is; the compiler behind it is replaced, or removed."""
    current = bare_machine / "current"
    script = bare_machine / "bin" / "c++"
    script.write_text(f'#!/bin/sh\nexec {current} "$@"\n')
    current.write_text(f'#!/bin/sh\nexec {real_compiler()} "$@"\n')
    for file in (script, current):
        file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{bare_machine / 'bin'}:{os.defpath}")
    monkeypatch.setenv("CXX", str(script))
    before = host_compiler.find_host_compiler()
    assert before.ok
    newer = "[ $1 = --version ] && echo 'g++ (new) 99.1.0' && exit"
    current.write_text(f'#!/bin/sh\n{newer}\nexec {real_compiler()} "$@"\n')
    after = host_compiler.find_host_compiler()
    assert after.ok and (after.version, before.version != after.version) == ("99.1.0", True)
    current.unlink()
    assert not host_compiler.find_host_compiler().ok
