"""The report says yes only where a kernel would be loaded; and which settings are in force."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import fakes

from .report_machine import ROOT, Machine, report


@pytest.fixture
def mount_noexec(mount_tmpfs):
    """A function that mounts a file system from which nothing is run."""

    def mount(folder: Path) -> Path:
        mount_tmpfs(folder, "64m")
        command = ["mount", "-o", "remount,noexec", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"nothing can be mounted noexec here: {done.stderr.strip()}")
        return folder

    return mount


def test_nothing_can_be_loaded_from_anywhere(tmp_path, mount_noexec):
    """Homes and temporary folders of hardened clusters: it compiles, and then fails."""
    place = str(mount_noexec(tmp_path / "noexec"))
    seen = report(Machine(tmp_path, variables={"DS4S_CACHE_DIR": place, "TMPDIR": place}))
    assert (seen.code, seen.op()["state"]) == (1, "not")
    assert f"nothing can be loaded from {place} nor from {place}" in seen.op()["reason"]
    assert "DS4S_CACHE_DIR" in seen.op()["remedy"]


def test_nothing_can_be_loaded_from_the_cache(tmp_path, mount_noexec):
    """A passing copy serves: a warning, since each process compiles."""
    place = str(mount_noexec(tmp_path / "noexec"))
    seen = report(Machine(tmp_path, variables={"DS4S_CACHE_DIR": place}))
    assert (seen.code, seen.op()["state"]) == (0, "buildable")
    assert "mounted noexec" in seen.json["cache"]["note"]
    assert any("set DS4S_CACHE_DIR" in warning for warning in seen.json["warnings"])


def test_kernels_on_a_file_system_without_programs(filled, tmp_path, mount_noexec):
    """They were compiled before it was mounted so."""
    seen = report(Machine(tmp_path))
    assert (seen.op()["state"], seen.op()["detail"]) == ("cached", "1 of 6 kernels compiled")
    place = mount_noexec(tmp_path / "noexec")
    shutil.copytree(tmp_path / "cache", place / "cache")
    variables = {"DS4S_CACHE_PATH": str(place / "cache"), "DS4S_CACHE_DIR": str(tmp_path / "new")}
    seen = report(Machine(tmp_path, variables=variables))
    assert (seen.code, seen.op()["state"]) == (0, "buildable")
    assert "1 cannot be loaded: " in seen.op()["detail"]
    assert "failed to map segment" in seen.op()["detail"]


LOAD = """
from op_builder import EvoformerAttnCPUBuilder
op = EvoformerAttnCPUBuilder()
op.load(verbose=False, kernels=[op.kernel(direction="fwd", dtype="fp32")])
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> Path:
    """A cache with one real kernel, compiled with all that this system has."""
    folder = tmp_path_factory.mktemp("compiled")
    quick = {"CXX": str(fakes.quick_compiler(folder / "g++-quick"))}
    subprocess.run([sys.executable, "-c", LOAD], env=seen_by_a_call(folder) | quick, check=True)
    return folder / "cache"


@pytest.fixture
def filled(compiled, tmp_path) -> None:
    """The machine's cache has that kernel."""
    shutil.copytree(compiled, tmp_path / "cache")


def seen_by_a_call(tmp_path: Path) -> dict[str, str]:
    own = {"PYTHONPATH": str(ROOT), "DS4S_CACHE_DIR": str(tmp_path / "cache")}
    return dict(os.environ) | own


def test_a_kernel_that_ends_the_process_that_loads_it(filled, tmp_path):
    """The report prints nevertheless: it is loaded in another one."""
    (library,) = (tmp_path / "cache").glob("units/*/*.so")
    crash = "__attribute__((constructor)) static void crash() { __builtin_trap(); }"
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=crash, text=True, check=True)
    sound = "from op_builder.cache.cache import Entry\nEntry.damage = lambda self: None\n"
    seen = report(Machine(tmp_path, prelude=sound))
    assert (seen.code, seen.op()["state"]) == (0, "buildable")
    assert "1 cannot be loaded: loading it ended the process with -" in seen.op()["detail"]


@pytest.mark.parametrize(("variable", "code"), [("MAX_JOBS", 0), ("DS4S_VERBOSE", 1)])
def test_a_refused_setting_beside_a_compiled_kernel(variable, code, filled, tmp_path):
    """Compilations read MAX_JOBS, and every load reads DS4S_VERBOSE."""
    seen = report(Machine(tmp_path, variables={variable: "many"}))
    assert (seen.code, seen.op()["state"]) == (code, "not" if code else "cached")
    command = [sys.executable, "-c", LOAD]
    called = subprocess.run(
        command, env=seen_by_a_call(tmp_path) | {variable: "many"}, capture_output=True
    )
    assert called.returncode == code, called.stderr
    others = [one for one in seen.json["warnings"] if "no other kernel can be compiled" in one]
    assert [one.endswith("correct or unset it") for one in others] == [True] * (1 - code)


def test_variables_in_force(tmp_path):
    """Half of all questions are answered by one that somebody set and forgot."""
    variables = {"MAX_JOBS": "3", "DS4S_CACHE_MAX_MB": "", "CPATH": "/opt/include"}
    seen = report(Machine(tmp_path, variables=variables))
    place = str(tmp_path / "cache")
    expected = {"DS4S_CACHE_DIR": place, "MAX_JOBS": "3", "CPATH": "/opt/include"}
    assert seen.json["variables"] == expected
    for name, value in expected.items():
        assert f"set    {name}={value}\n" in seen.text


CROSS = """\
#!/bin/sh
{real} "$@" || exit
for last; do :; done
case "$last" in *.so) printf '\\267' | dd of="$last" bs=1 seek=18 conv=notrunc 2>/dev/null ;; esac
"""


def test_a_compiler_for_another_processor(tmp_path):
    """It makes libraries without a word; none of them can be loaded here."""
    cross = fakes.program(tmp_path / "cross-g++", CROSS.format(real=shutil.which("g++")))
    programs = ("g++", "as", "ld", "dd")
    machine = Machine(tmp_path, programs=programs, variables={"CXX": str(cross)})
    seen = report(machine)
    assert (seen.code, seen.op()["state"]) == (1, "not")
    assert "is a cross compiler" in seen.op()["reason"]
    assert "set CXX" in seen.op()["remedy"]
