"""The report's verdict and its two forms, on made-up answers; tests/system asks real machines."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed4science import probes, report, software_probe, torch_probe
from deepspeed4science.__main__ import main
from deepspeed4science.printing import show
from deepspeed4science.report import CacheRow, CpuRow, GpuRow, OpRow, Report, SoftwareRow, Why

CPU_OK = OpRow("evoformer_attn_cpu", "cpu", "buildable", "0 of 6 kernels compiled")
CPU_NOT = OpRow("evoformer_attn_cpu", "cpu", "not", "", (Why("no compiler", "install g++"),))
CUDA_OK = OpRow("evoformer_attn", "cuda", "cached", "2 of 8 kernels compiled")
CUDA_NOT = OpRow("evoformer_attn", "cuda", "not", "", (Why("no nvcc", "pip install nvcc"),))
GPU = GpuRow("NVIDIA H200", "9.0", "sm90", "9.0a", "sm80 for float32")


@pytest.mark.parametrize(
    ("torch_works", "gpus", "ops", "usable"),
    [
        (True, [], [CPU_OK], True),
        (True, [], [CPU_OK, CUDA_NOT], True),
        (True, [], [CPU_NOT, CUDA_NOT], False),
        (True, [], [], False),
        (True, [GPU], [CPU_OK, CUDA_OK], True),
        (True, [GPU], [CPU_NOT, CUDA_OK], True),
        (True, [GPU], [CPU_OK, CUDA_NOT], False),  # jobs are sent there for the GPU
        (True, [GPU], [CPU_OK], True),  # no CUDA op exists: nothing on this machine is missing
        (False, [], [CPU_OK], False),
        (False, [GPU], [CPU_OK, CUDA_OK], False),
    ],
)
def test_verdict(torch_works: bool, gpus: list[GpuRow], ops: list[OpRow], usable: bool) -> None:
    verdict, words = report.judge(torch_works, gpus, ops)
    assert verdict == usable
    assert words.startswith("usable" if usable else "not usable")


def made_up(**changes: object) -> Report:
    answers = {
        "version": "0.1.0",
        "system": "Linux x86_64",
        "python": "3.11.7",
        "ops": (CUDA_NOT, CPU_OK),
        "software": (
            SoftwareRow("torch", True, "2.13.0", "/site/torch"),
            SoftwareRow("nvcc", False, reason="none found", remedy="pip install nvcc"),
        ),
        "gpus": (GPU,),
        "no_gpu": "",
        "cpu": CpuRow("Some Processor", {"fp32": "avx512", "bf16": "amx"}, "a note"),
        "cache": CacheRow("/cache", 3, 12345, "another note"),
        "variables": {"MAX_JOBS": "3"},
        "usable": False,
        "verdict": "not usable: there is a GPU, but not evoformer_attn",
        "warnings": ("first warning", "second warning"),
    }
    return Report(**{**answers, **changes})  # type: ignore[arg-type]


def test_table_and_json_say_the_same() -> None:
    text, data = report.render(made_up()), json.loads(report.to_json(made_up()))
    assert set(data) == set(Report.__dataclass_fields__)
    for part in (
        "no nvcc",
        "pip install nvcc",
        "NVIDIA H200",
        "9.0",
        "sm90, compiled for 9.0a; sm80 for",
        "fp32 avx512",
        "amx",
    ):
        assert part in text
        assert part.split()[-1] in json.dumps(data)
    assert "/cache: 3 kernels, 0.0 MiB (12345 bytes)" in text


def test_warnings_come_last_and_each_on_its_line() -> None:
    lines = report.render(made_up()).splitlines()
    assert lines[-3:] == ["Warnings:", "  - first warning", "  - second warning"]
    assert "Warnings" not in report.render(made_up(warnings=()))


def test_a_no_is_followed_by_reason_and_remedy() -> None:
    lines = report.render(made_up()).splitlines()
    row = next(index for index, line in enumerate(lines) if line.startswith("evoformer_attn "))
    assert "[NO]" in lines[row]
    assert lines[row + 1 : row + 3] == ["    reason: no nvcc", "    remedy: pip install nvcc"]


def test_without_a_gpu_the_reason_stands_in_its_place() -> None:
    text = report.render(made_up(gpus=(), no_gpu="the driver sees none"))
    assert "GPU    none: the driver sees none" in text


@pytest.mark.parametrize("module", ["report", "torch_probe", "__main__"])
def test_only_the_standard_library_is_imported_at_import(module: str) -> None:
    """Otherwise what is broken could keep the report from being printed."""
    source = (Path(report.__file__).parent / f"{module}.py").read_text()
    for node in ast.parse(source).body:
        names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            assert name.partition(".")[0] in sys.stdlib_module_names, name


@pytest.mark.parametrize(
    ("nvcc", "driver", "warns"),
    [
        ("13.0.88", "12.8", True),
        ("13.0.88", "13.0", False),
        ("13.1.2", "13.0", False),  # minor versions are compatible
        ("12.9.1", "13.0", False),
        ("13.0.88", "", False),  # no GPU
        ("", "12.8", False),  # no nvcc
    ],
)
def test_a_driver_too_old_for_nvcc_is_a_warning(nvcc: str, driver: str, warns: bool) -> None:
    row = SoftwareRow("nvcc", bool(nvcc), nvcc)
    answer = torch_probe.TorchAnswer(True, driver=driver)
    assert bool(software_probe.driver_warning([row], answer)) == warns


@pytest.mark.parametrize(
    ("archs", "capability", "serves"),
    [
        ([], (7, 0), True),  # not known
        (["sm_75", "sm_80", "compute_120"], (7, 0), False),
        (["sm_50", "compute_60"], (7, 0), True),
        (["sm_80", "sm_90"], (8, 9), True),
        (["sm_80", "sm_90a"], (9, 0), True),
        (["sm_80", "sm_90"], (10, 0), False),
        (["sm_103", "sm_120"], (10, 0), False),
    ],
)
def test_which_gpus_a_pytorch_is_built_for(
    archs: list[str], capability: tuple[int, int], serves: bool
) -> None:
    assert torch_probe._serves(archs, capability) == serves


def test_amds_gpus_are_none() -> None:
    program = torch_probe._PROGRAM.replace("import torch", _ROCM)
    said = subprocess.run(
        [sys.executable, "-c", program, json.dumps(sys.path), ""],
        capture_output=True,
        text=True,
        check=True,
    )
    answer = torch_probe._understood(json.loads(said.stdout))
    assert answer.ok and not answer.gpus
    assert probes._no_gpu(answer).startswith("PyTorch is built for AMD's (ROCm 6.4)")
    rows = software_probe.torch_rows(answer, "")
    assert rows[1].where == "this PyTorch is built for AMD's GPUs (ROCm)"


# A PyTorch for ROCm, as the probe asks it.
_ROCM = """\
from types import SimpleNamespace as Module
        torch = Module(__version__="2.11.0+rocm6.4", __file__="torch/__init__.py")
        torch.version = Module(cuda=None, hip="6.4")
        torch.cuda = Module(is_available=lambda: True, device_count=lambda: 1)
        torch.cuda.get_device_name = lambda index: "AMD Instinct MI250X"
        torch.cuda.get_device_capability = lambda index: (9, 0)
"""


@pytest.mark.parametrize("interpreter", [None, "", "/no/such/python"])
def test_no_interpreter_to_ask_torch_with(
    interpreter: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a program that embeds Python."""
    monkeypatch.setattr(sys, "executable", interpreter)
    answer = torch_probe.TorchProbe().answer()
    assert not answer.ok
    assert answer.reason
    assert answer.remedy


def test_nothing_is_shown_where_standard_output_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ds_report >&-`: its exit code still tells."""
    monkeypatch.setattr(sys, "stdout", None)
    show("text")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_told_in_one_line() -> None:
    """A full disk: `ds_report > file` is then called to find out why nothing compiles."""
    program = "from deepspeed4science.printing import show; show('text')"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE, text=True
        )
    wanted = "error: the output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, wanted)


@pytest.mark.parametrize("unreadable", ["", "units"])
def test_a_shared_cache_that_cannot_be_read_is_told(
    unreadable: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As root's is, filled under a umask of 077."""
    (tmp_path / "units").mkdir()
    monkeypatch.setenv("DS4S_CACHE_PATH", str(tmp_path))
    for hidden, told in ((tmp_path / unreadable, True), (tmp_path / "elsewhere", False)):
        monkeypatch.setattr(os, "access", lambda path, _, hidden=hidden: Path(path) != hidden)
        found = probes.Probes()
        probes._cache(found)
        assert any("cannot be read by this user" in one for one in found.warnings) == told


def test_a_command_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["builds"]) == 2
    usage, _, told = capsys.readouterr().err.rpartition("\n\n")
    assert "build" in usage and told == "error: expected one of these commands, got 'builds'\n"
