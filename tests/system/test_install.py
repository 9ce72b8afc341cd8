"""Installs that compile: the wheel is built, installed elsewhere and loaded, as people do it.

The tree is a copy whose table of calls is cut to one kernel for each op; the rest is the real
thing: pip, nvcc and the host compiler, build isolation, an sdist, an editable install.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from op_builder.toolchain.toolkits import find_nvcc
from tests import fakes

from . import trees
from .trees import backend, environment, pip

# Loads what its argument says in a process that may run no program, and reports where from.
LOAD = """
import json, logging, subprocess, sys
wanted, may_run = sys.argv[1].split(), sys.argv[2] == "may run programs"
logging.basicConfig(format="%(message)s")
def refuse(*arguments, **keywords): raise AssertionError("nothing may be compiled")
import op_builder
from op_builder.toolchain import cpu_isa
op = op_builder.ALL_OPS[wanted[0]]
if wanted[0] == "evoformer_attn":
    device = tuple(int(part) for part in wanted[2].split("."))
    kernel = op.kernel(family="sm80", direction="fwd", dtype=wanted[1], head_dim=32, bias="both",
                       aligned=True, device=device)
else:
    kernel = op.kernel(direction="fwd", dtype=wanted[1])
jobs = op.jobs([kernel])
if not may_run:
    subprocess.Popen.__init__ = refuse
try:
    found = op.load(kernels=[kernel]).kernel(kernel)
    print(json.dumps({"origin": found.origin, "path": str(found.path)}))
except op_builder.errors.ToolchainError as error:
    print(json.dumps({"error": str(error)}))
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of what git knows, cut to one kernel for each op."""
    copy = trees.clone(tmp_path_factory.mktemp("install") / "tree", without=("tests", "benchmarks"))
    with (copy / "op_builder" / "ops" / "presets.py").open("a") as table:
        table.write('\nINSTALL = (Call("fwd", "bf16", 32, "both"),)\n')
        table.write('INSTALL_CPU = (Call("fwd", "fp32", 32, "both"),)\n')
    return copy


@pytest.fixture(scope="module")
def wheel(tree, tmp_path_factory):
    """tree -> sdist -> `pip wheel`, with build isolation, for a GPU that is not here."""
    if not find_nvcc().ok:
        pytest.skip(f"needs nvcc: {find_nvcc().reason}")
    folder = tmp_path_factory.mktemp("wheel")
    made = backend(f"build_sdist({str(folder)!r})", tree)
    assert made.returncode == 0, made.stderr
    (sdist,) = folder.glob("*.tar.gz")
    done = pip(
        *("wheel", "-v", "--no-deps", "--wheel-dir", str(folder), str(sdist)),
        home=folder,
        DS_BUILD_EVOFORMER_ATTN="1",
        DS_BUILD_EVOFORMER_ATTN_CPU="1",
        TORCH_CUDA_ARCH_LIST="8.0",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "compiled sm80_fwd_bf16_d32_both_aligned for 8.0 in" in done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    target = tmp_path_factory.mktemp("site")
    done = pip("install", "--no-deps", "--target", str(target), str(wheel), home=target.parent)
    assert done.returncode == 0, done.stderr
    return target


def load(target: Path, home: Path, wanted: str, *, may_run: bool = False, **changes: str):
    """In a fresh process elsewhere, without a compiler on PATH unless it `may_run` programs."""
    path = os.environ["PATH"] if may_run else str(home)
    variables = {"PYTHONPATH": str(target), "CUDA_HOME": str(home), "PATH": path} | changes
    prefix = (
        "import op_builder.toolchain.nvcc\nfrom pathlib import Path\n"
        f"op_builder.toolchain.nvcc.SYSTEM_PREFIX = Path({str(home)!r})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", prefix + LOAD, wanted, "may run programs" if may_run else ""],
        cwd=home,
        env=environment(home, **variables),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_wheel_is_for_any_python_and_torch(wheel):
    """The tag says so, and the kernels lie in the cache's own layout beside the sources."""
    assert "-py3-none-linux_" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    libraries = [name for name in names if name.endswith(".so")]
    assert [name.split("/")[:3] for name in libraries] == [
        ["deepspeed4science", "prebuilt", "units"]
    ] * 2
    assert {Path(name).parent.name.rpartition("-")[0] for name in libraries} == {
        "cpu_fwd_fp32_portable",
        "sm80_fwd_bf16_d32_both_aligned",
    }
    assert any(name.endswith("csrc/deepspeed4science/evoformer_attn/params.h") for name in names)
    assert not [name for name in names if "/locks/" in name or "/memo/" in name]
    assert not [name for name in names if name.startswith("csrc/")]


@pytest.mark.parametrize(
    "wanted",
    [
        "evoformer_attn_cpu fp32",
        "evoformer_attn bf16 8.0",
        "evoformer_attn bf16 8.6",  # runs what was compiled for 8.0
    ],
)
def test_loading_the_wheel_compiles_nothing(installed, tmp_path, wanted):
    """No compiler, no CUTLASS, no nvcc: the kernels of the wheel are loaded, without a word."""
    hidden = fakes.no_cutlass_package(tmp_path / "modules")
    found, messages = load(installed, tmp_path, wanted, PYTHONPATH=f"{hidden}:{installed}")
    assert found["origin"] == "prebuilt"
    assert found["path"].startswith(f"{installed}/deepspeed4science/prebuilt/units/")
    assert messages == ""


def test_gpu_that_the_wheel_does_not_cover(installed, tmp_path):
    """It is told, with the reason, before the JIT says what it lacks here."""
    found, messages = load(installed, tmp_path, "evoformer_attn bf16 9.0")
    assert "nvcc: " in found["error"]
    assert messages.count("is not among the 2 kernels compiled while installing") == 1
    assert "it was compiled for sm_80 there); it has to be compiled, and" in messages


def test_kernel_that_the_wheel_does_not_hold_is_compiled(installed, tmp_path):
    quick = {"may_run": True, "CXX": str(fakes.quick_compiler(tmp_path / "g++-quick"))}
    found, messages = load(installed, tmp_path, "evoformer_attn_cpu fp16", **quick)
    assert found["origin"] == "built"
    assert messages.count("is not among the 2 kernels compiled while installing") == 1
    assert "none of them is for such inputs" in messages
    again = load(installed, tmp_path, "evoformer_attn_cpu fp16", **quick)
    assert again == ({"origin": "cache", "path": found["path"]}, "")


def test_editable_install(tree, tmp_path):
    """Kernels lie in the tree, sources stay where they are; a changed header wins over them."""
    site = tmp_path / "site"
    done = pip(
        *("install", "--no-deps", "--no-build-isolation", "--editable", str(tree)),
        *("--prefix", str(site)),
        home=tmp_path,
        DS_BUILD_EVOFORMER_ATTN_CPU="1",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (packages,) = site.glob("lib*/python*/site-packages")
    wanted = "evoformer_attn_cpu fp32"
    # A folder on PYTHONPATH is not a site folder: .pth files there are read by site.addsitedir.
    (tmp_path / "start" / "sitecustomize.py").parent.mkdir()
    (tmp_path / "start" / "sitecustomize.py").write_text(
        f"import site\nsite.addsitedir({str(packages)!r})\n"
    )
    found, messages = load(tmp_path / "start", tmp_path, wanted)
    assert found["origin"] == "prebuilt"
    assert found["path"].startswith(f"{tree}/deepspeed4science/prebuilt/units/")
    assert messages == ""
    header = tree / "csrc" / "deepspeed4science" / "evoformer_attn" / "params.h"
    before = header.read_text()
    header.write_text(before + "// changed\n")
    try:
        found, messages = load(tmp_path / "start", tmp_path, wanted, may_run=True)
    finally:
        header.write_text(before)
        shutil.rmtree(tree / "deepspeed4science" / "prebuilt")
    assert found["origin"] == "built"
    assert "its sources have changed since" in messages


def test_wheel_holds_what_was_asked_for_and_nothing_older(tree, tmp_path):
    """build/ is left by the wheel before: what it was asked for is not what this one is."""
    names, quick = [], str(fakes.quick_compiler(tmp_path / "g++-quick"))
    for changes in (
        {"DS_BUILD_EVOFORMER_ATTN_CPU": "1"},
        {"DS_BUILD_EVOFORMER_ATTN_CPU": "1", "DS4S_CPU_ISA": "avx2"},
        {"DS_BUILD_OPS": "1", "DS_BUILD_EVOFORMER_ATTN": "0", "DS_BUILD_EVOFORMER_ATTN_CPU": "0"},
    ):
        made = backend(f"build_wheel({str(tmp_path)!r})", tree, CXX=quick, **changes)
        assert made.returncode == 0, made.stderr
        file = made.stdout.split()[-1]
        libraries = [n for n in zipfile.ZipFile(tmp_path / file).namelist() if n.endswith(".so")]
        names.append((file.rpartition("-")[2], [Path(name).stem for name in libraries]))
    assert names[0][0].startswith("linux_") and names[0][1] == ["cpu_fwd_fp32_portable"]
    assert names[1][1] == ["cpu_fwd_fp32_avx2"]
    assert names[2] == ("any.whl", [])


IMPOSSIBLE = {
    "CUTLASS": ({"TORCH_CUDA_ARCH_LIST": "9.0"}, "CUTLASS: the CUTLASS headers were not found"),
    "no GPU and no list": ({}, "to compile for another machine, set TORCH_CUDA_ARCH_LIST"),
    "architecture of no nvcc": (
        {"TORCH_CUDA_ARCH_LIST": "6.1;9.0"},
        "cannot be compiled for 6.1: the templates begin at 7.0, and nvcc",
    ),
    "nonsense": ({"TORCH_CUDA_ARCH_LIST": "sm_90"}, "got 'sm_90'; write 9.0"),
    "no switch": ({"DS_BUILD_EVOFORMER_ATTN": "maybe"}, "expected 1 or 0, got 'maybe'"),
}


@pytest.mark.parametrize(("changes", "words"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_asked_for_and_impossible(tree, tmp_path, changes, words):
    """No wheel, and the reason: never one without the kernels."""
    from op_builder.toolchain import gpu

    if not changes and gpu.detect().found:
        pytest.skip("there is a GPU here")
    if words.startswith("CUTLASS"):
        hidden = str(fakes.no_cutlass_package(tmp_path / "modules"))
        changes = changes | {"PYTHONPATH": hidden, "CUTLASS_PATH": ""}
    made = backend(
        f"build_wheel({str(tmp_path)!r})", tree, **{"DS_BUILD_EVOFORMER_ATTN": "1"} | changes
    )
    assert made.returncode != 0
    assert words in made.stderr
    assert not list(tmp_path.glob("*.whl"))


def test_isolation_that_hides_what_is_installed(tree, tmp_path):
    """uv and build make an environment of their own for the build: `pip install` is no remedy."""
    from op_builder.toolchain.cutlass import SYSTEM_INCLUDES

    if any((folder / "cutlass").exists() for folder in SYSTEM_INCLUDES):
        pytest.skip("this system has CUTLASS outside of Python's packages")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    packages = tmp_path / "packages"
    packages.mkdir()
    here = Path(importlib.util.find_spec("setuptools").origin).parents[1]
    for place in (*here.glob("setuptools*"), here / "_distutils_hack"):
        (packages / place.name).symlink_to(place)
    made = backend(
        f"build_wheel({str(tmp_path)!r})",
        tree,
        python=str(tmp_path / "env" / "bin" / "python"),
        PYTHONPATH=str(packages),
        CUTLASS_PATH="",
        DS_BUILD_EVOFORMER_ATTN="1",
        TORCH_CUDA_ARCH_LIST="9.0",
    )
    last = made.stderr.strip().splitlines()[-1]
    assert "CUTLASS: the CUTLASS headers were not found" in last
    assert "--no-build-isolation" in last and "set CUTLASS_PATH" in last
