"""`python -m deepspeed4science build`: folders filled before anybody waits, then used read-only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from deepspeed4science import build_command
from op_builder import EvoformerAttnBuilder
from op_builder.ops import presets
from op_builder.ops.instantiations import HEAD_DIM_TIERS
from op_builder.toolchain.toolkits import find_nvcc
from tests import fakes

from .toys import REPOSITORY

LOAD = """
import json, subprocess, sys
from op_builder import EvoformerAttnCPUBuilder
op = EvoformerAttnCPUBuilder()
kernel = op.kernel(direction="fwd", dtype=sys.argv[1])
def refuse(*arguments, **keywords): raise AssertionError("nothing may be compiled")
subprocess.Popen.__init__ = refuse
found = op.load(kernels=[kernel]).kernel(kernel)
print(json.dumps({"origin": found.origin, "path": str(found.path)}))
"""


@pytest.fixture
def run(tmp_path):
    """A function that runs Python in a process with a home and a cache of its own."""

    def in_process(*arguments, stdout=subprocess.PIPE, **changes):
        ours = ("DS_", "DS4S_", "TORCH_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        own = {"HOME": str(tmp_path), "PYTHONPATH": str(REPOSITORY), "DS4S_CPU_ISA": "portable"}
        if "--cpu" in arguments:
            own["CXX"] = str(fakes.quick_compiler(tmp_path / "g++-quick"))
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=kept | own | changes,
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )

    return in_process


BUILD = ("-m", "deepspeed4science", "build")


def test_a_folder_that_holds_other_kernels_is_added_to(run, tmp_path):
    """In silence: what is missing in the folder that is being filled surprises nobody."""
    for dtype in ("fp32", "bf16"):
        chosen = (
            "--cpu",
            "--dtype",
            dtype,
            "--direction",
            "fwd",
            "--out",
            str(tmp_path / "kernels"),
        )
        done = run(*BUILD, *chosen, DS4S_CACHE_DIR=str(tmp_path / "passing"))
        assert done.returncode == 0, done.stderr
        assert "kernels compiled while installing" not in done.stderr
    assert len(list((tmp_path / "kernels" / "units").iterdir())) == 2


def test_several_readonly_folders_before_the_writable_one(run, tmp_path, make_readonly):
    """Baked into images: each kernel comes from the first folder that has it, nothing is written,
    no program runs, not even those that would tell what machine this is.
    """
    usual = {"CXX": ""}  # the compiler of which later loads would ask
    for name, dtype in (("one", "fp32"), ("two", "bf16")):
        folder = tmp_path / name
        done = run(
            *(*BUILD, "--cpu", "--dtype", dtype, "--direction", "fwd", "--out", str(folder)),
            DS4S_CACHE_DIR=str(tmp_path / f"passing-{name}"),
            **usual,
        )
        assert done.returncode == 0, done.stderr
        assert "1 kernels, " in done.stdout and "1 compiled now" in done.stdout
        assert f"DS4S_CACHE_PATH={folder}" in done.stdout
        make_readonly(folder)
        again = run(
            *(*BUILD, "--cpu", "--dtype", dtype, "--direction", "fwd", "--out", str(folder)),
            **usual,
        )
        assert (again.returncode, "0 compiled now" in again.stdout) == (0, True), again.stderr
    places = {
        "DS4S_CACHE_PATH": f"{tmp_path}/absent:{tmp_path}/one:{tmp_path}/two",
        "DS4S_CACHE_DIR": str(tmp_path / "own"),
    }
    for name, dtype in (("one", "fp32"), ("two", "bf16")):
        found = run("-c", LOAD, dtype, **places)
        assert found.returncode == 0, found.stderr
        answer = json.loads(found.stdout)
        assert answer["origin"] == "cache"
        assert answer["path"].startswith(f"{tmp_path}/{name}/units/")
    assert not (tmp_path / "own").exists()


def test_filling_again_compiles_nothing(run, tmp_path):
    command = (*BUILD, "--cpu", "--dtype", "fp32", "--direction", "fwd", "--quiet")
    place = {"DS4S_CACHE_DIR": str(tmp_path / "own")}
    first, second = run(*command, **place), run(*command, **place)
    assert "1 compiled now" in first.stdout and "0 compiled now" in second.stdout
    assert str(tmp_path / "own") in second.stdout
    assert first.stderr == second.stderr == ""


NO_BF16 = """\
#!/bin/sh
case "$*" in *-mavx512bf16*) echo "error: unrecognized option -mavx512bf16" >&2; exit 1 ;; esac
exec g++ "$@" -O0
"""


@pytest.mark.parametrize("made", ["as here", "for less", "by an older compiler"])
def test_folder_on_a_machine_without_any_program(made, run, tmp_path):
    """The best kernel of the folder that this processor runs, though a compiler could make better
    ones: there is none.
    """
    changes = {"DS4S_CPU_ISA": {"for less": "portable"}.get(made, "")}
    if made == "by an older compiler":
        changes["CXX"] = str(fakes.program(tmp_path / "g++-9", NO_BF16))
    done = run(
        *(*BUILD, "--cpu", "--dtype", "bf16", "--direction", "fwd", "--out", str(tmp_path / "one")),
        **changes,
    )
    assert done.returncode == 0, done.stderr
    bare = {"PATH": "/nonexistent", "DS4S_CPU_ISA": "", "DS4S_CACHE_DIR": str(tmp_path / "own")}
    found = run("-c", LOAD, "bf16", DS4S_CACHE_PATH=str(tmp_path / "one"), **bare)
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["path"].startswith(f"{tmp_path}/one/units/")
    assert found.stderr == ""


def test_its_last_lines_cannot_fail_it(run, tmp_path):
    """With a folder's name outside the terminal's encoding, and with a reader that has gone."""
    chosen = ("--cpu", "--dtype", "fp32", "--direction", "fwd", "--quiet")
    done = run(*BUILD, *chosen, "--out", str(tmp_path / "\xe9"), PYTHONIOENCODING="ascii")
    assert (done.returncode, "\\xe9" in done.stdout) == (0, True), done.stderr
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as closed:
        gone = run(*BUILD, *chosen, "--out", str(tmp_path / "\xe9"), stdout=closed)
    assert (gone.returncode, gone.stderr) == (0, "")


@pytest.mark.skipif(not find_nvcc().ok, reason="needs nvcc")
def test_a_gpu_that_is_not_here(run, tmp_path):
    """One real kernel, for an architecture that is named; it lies where a later load looks."""
    done = run(
        *(*BUILD, "--arch", "8.0", "--dtype", "bf16", "--head-dim", "32", "--bias", "none"),
        *("--direction", "fwd", "--out", str(tmp_path / "image")),
    )
    assert done.returncode == 0, done.stderr
    (entry,) = (tmp_path / "image" / "units").iterdir()
    assert entry.name.startswith("sm80_fwd_bf16_d32_none_aligned-")


REFUSED = {
    "architecture": (("--arch", "sm_90"), 1, "got 'sm_90'; write 9.0"),
    "old architecture": (("--arch", "6.1"), 1, "cannot be compiled for 6.1"),
    "no GPU": ((), 1, "or name one with --arch, or compile the CPU op with --cpu"),
    "dtype": (("--dtype", "fp64"), 2, "expected some of fp32, tf32, fp16, bf16, got 'fp64'"),
    "head dimension": (("--head-dim", "32,257"), 2, "expected numbers from 1 to 256"),
    "preset and more": (("--preset", "af3", "--bias", "both"), 2, "leave it or them out"),
    "no such kernel": (("--arch", "7.5", "--dtype", "tf32"), 1, "no kernel computes such calls"),
    "two folders": (("--out", "a:b"), 2, "expected a folder without ':', got 'a:b'"),
    "no folder": (("--out", ""), 2, "expected a folder without ':', got ''"),
    "a CPU's architecture": (("--cpu", "--arch", "8.0"), 2, "leave one of them out"),
    "tf32 on a CPU": (("--cpu", "--dtype", "tf32"), 1, "with --cpu, got tf32"),
}


@pytest.mark.parametrize(("options", "code", "words"), REFUSED.values(), ids=REFUSED)
def test_what_makes_no_sense_is_refused(options, code, words, monkeypatch, capsys):
    from op_builder.toolchain import gpu

    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    monkeypatch.setattr(gpu, "detect", lambda: gpu.Gpus(reason="there is no driver"))
    monkeypatch.setattr(build_command, "_build", lambda *rest, **more: pytest.fail("compiled"))
    if options[:1] == ("--arch",) and not find_nvcc().ok:
        pytest.skip("needs nvcc")
    try:
        said = build_command.main(options)
    except SystemExit as stop:
        said = stop.code
    assert said == code
    assert words in capsys.readouterr().err


def chosen(monkeypatch, *options, arch="8.0"):
    """The kernels that a command would compile."""
    seen = []
    monkeypatch.setattr(
        EvoformerAttnBuilder, "jobs", lambda self, kernels: seen.extend(kernels) or ["a job"]
    )
    monkeypatch.setattr(build_command, "_build", lambda *rest, **more: [])
    monkeypatch.setattr(EvoformerAttnBuilder, "require", lambda self, targets: None)
    assert build_command.main([*options, "--arch", arch]) == 0
    return seen


@pytest.mark.parametrize("preset", presets.PRESETS)
def test_a_preset_is_what_its_models_call(preset, monkeypatch, capsys):
    """Every row of the table, in both directions and each dtype."""
    kernels = chosen(monkeypatch, "--preset", preset, "--dtype", "bf16,fp32")
    for row in presets.PRESETS[preset]:
        tier = next(tier for tier in HEAD_DIM_TIERS if row.head_dim <= tier)
        forward = [
            k for k in kernels if (k.direction, k.head_dim, k.bias) == ("fwd", tier, row.bias)
        ]
        assert {k.dtype for k in forward} == {"bf16", "fp32"}, row
        assert any(k.direction == "bwd" and k.head_dim == tier for k in kernels)
    assert len(set(kernels)) == len(kernels)


def test_lists_and_unaligned(monkeypatch, capsys):
    kernels = chosen(
        *(monkeypatch, "--head-dim", "24,64", "--bias", "none,bias1", "--direction", "fwd"),
        "--unaligned",
    )
    assert {(k.head_dim, k.bias, k.aligned) for k in kernels} == {
        (tier, bias, aligned)
        for tier in (32, 64)
        for bias in ("none", "bias1")
        for aligned in (True, False)
    }
    assert {(k.dtype, k.direction, k.arch) for k in kernels} == {("bf16", "fwd", "8.0")}


@pytest.mark.parametrize("arch", ["8.0", "9.0a"])
def test_wide_heads_have_the_kernels_that_calls_choose(arch, monkeypatch, capsys):
    """Hopper's end at 128, and no backward in float32 goes beyond."""
    kernels = chosen(monkeypatch, "--head-dim", "160", "--dtype", "bf16,fp32", arch=arch)
    assert {(k.family, k.direction, k.dtype, k.head_dim) for k in kernels} == {
        ("sm80", "fwd", "bf16", 256),
        ("sm80", "fwd", "fp32", 256),
        ("sm80", "bwd", "bf16", 256),
    }


def test_a_kernel_that_no_device_of_an_architecture_runs_is_left_out(monkeypatch, capsys):
    """Compute capability 7.5 has too little shared memory for float32 above 96."""
    kernels = chosen(monkeypatch, "--head-dim", "96,128", "--dtype", "fp16,fp32", arch="7.5")
    assert {(k.dtype, k.head_dim) for k in kernels} == {("fp16", 96), ("fp16", 128), ("fp32", 96)}


def test_without_options_it_is_what_an_install_compiles(monkeypatch, capsys):
    kernels = chosen(monkeypatch)
    assert len(kernels) == 12
    assert {k.dtype for k in kernels} == set(presets.INSTALL_DTYPES)


def test_kernels_that_could_not_be_kept_are_an_error(monkeypatch, tmp_path, capsys):
    """They served this process alone, whose end is near."""
    monkeypatch.setenv("DS4S_CACHE_DIR", str(tmp_path / "cache"))
    kernel = SimpleNamespace(name="one", path=tmp_path / "ds4s-build-x" / "one.so")
    monkeypatch.setattr(build_command.jit, "load", lambda jobs, *, verbose: [kernel])
    assert build_command.main(["--cpu", "--direction", "fwd"]) == 1
    told = capsys.readouterr().err
    assert f"1 of 1 kernels could not be kept in {tmp_path}/cache: one; name a folder" in told
