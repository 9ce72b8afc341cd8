"""The second process of the demo: its failure is told, not swallowed."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from deepspeed4science.demo import cli
from deepspeed4science.demo.cli import main
from deepspeed4science.demo.startup import Startup, measure_startup
from deepspeed4science.errors import ToolchainError


def test_a_failed_second_process_says_why():
    with pytest.raises(RuntimeError, match="no_such_dtype"):
        measure_startup(device="cpu", dtype="no_such_dtype")


def test_beyond_torch_is_everything_after_the_import_of_torch():
    assert Startup(torch_s=9.0, import_s=0.25, first_call_s=0.5).beyond_torch_s == 0.75


def test_every_kernel_that_was_compiled_counts():
    """Also one whose time the cache does not tell."""
    startup = Startup(1.0, 0.1, 9.0, {"sm90_fwd": 8.5, "sm90_bwd": None})
    assert startup.num_built == 2


def test_cuda_without_a_gpu_is_refused_in_one_line(capsys):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main(["--device", "cuda"]) == 2
    assert "--device cpu" in capsys.readouterr().out


def test_a_machine_without_a_compiler_is_told_what_to_install(capsys, monkeypatch):
    message = "no C++ compiler was found; install one"

    def fail(cases, device):
        raise ToolchainError(message)

    monkeypatch.setattr(cli, "_prepare_kernels", fail)
    assert main(["--device", "cpu"]) == 1
    assert capsys.readouterr().out.endswith(f"\nerror: {message}\n")
