"""`ds_report` in every situation it must survive: it always prints, and tells the truth.

Each test runs the report in a process of its own whose packages, PATH and home are laid out for the
situation. Most use a make-believe torch, which imports at once; compilers are the real ones.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed4science import __version__
from tests import fakes

from .report_machine import FAKE_TORCH, H200, ROOT, Machine, cuda_op, cuda_torch, report


def test_a_machine_with_all_that_the_cpu_op_needs(tmp_path: Path) -> None:
    seen = report(Machine(tmp_path))
    assert (seen.code, seen.op()["state"]) == (0, "buildable")
    assert seen.json["verdict"] == "usable on the CPU"
    assert set(seen.json["cpu"]["isa"]) == {"fp32", "fp16", "bf16"}
    assert not seen.json["warnings"]


# --- something is missing ------------------------------------------------------------------------


def test_no_compiler(tmp_path: Path) -> None:
    seen = report(Machine(tmp_path, programs=()))
    assert (seen.code, seen.op()["state"]) == (1, "not")
    assert "no C++ compiler was found" in seen.op()["reason"]
    assert "apt-get install g++" in seen.op()["remedy"]
    assert not seen.software("host compiler")["ok"]


def test_a_compiler_named_in_cxx_that_is_not_there(tmp_path: Path) -> None:
    seen = report(Machine(tmp_path, variables={"CXX": "g++-99"}))
    assert seen.code == 1
    assert "CXX=g++-99 names no program" in seen.op()["reason"]


def test_no_ninja(tmp_path: Path) -> None:
    seen = report(Machine(tmp_path, packages=()))
    assert (seen.code, seen.op()["state"]) == (1, "not")
    assert (seen.op()["reason"], seen.op()["remedy"]) == (
        "ninja: ninja was not found",
        "pip install ninja",
    )


def test_no_cutlass_does_not_concern_the_cpu(tmp_path: Path) -> None:
    seen = report(Machine(tmp_path, packages=("ninja",)))
    assert seen.code == 0
    assert "pip install --no-deps nvidia-cutlass" in seen.software("CUTLASS")["remedy"]


def test_no_torch(tmp_path: Path) -> None:
    seen = report(Machine(tmp_path, torch=None))
    assert seen.code == 1
    assert seen.software("torch")["reason"] == "it is not installed"
    assert "pip install" in seen.software("torch")["remedy"]
    assert seen.op()["state"] == "buildable"  # what is wrong is not the op


BROKEN_TORCHES = {
    "library missing": ("raise OSError('libcudart.so.13: cannot open')", "libcudart.so.13: cannot"),
    "dependency missing": ("import no_such_module", "No module named 'no_such_module'"),
    "damaged file": ("def", "SyntaxError"),
    "exits": ("raise SystemExit(7)", "SystemExit: 7"),
    "really exits": ("import os; os._exit(7)", "ended the process with exit code 7"),
    "crashes": ("import os; os.abort()", "by SIGABRT"),
    "hangs": ("import threading; threading.Event().wait()", "did not end within 1 s"),
    "noisy and broken": ("print('x' * 200000); raise ValueError('noise')", "ValueError: noise"),
}


@pytest.mark.parametrize("how", BROKEN_TORCHES)
def test_broken_torch(how: str, tmp_path: Path) -> None:
    text, says = BROKEN_TORCHES[how]
    impatient = "import deepspeed4science.torch_probe as p\np.TIMEOUT_S = 1.0\n"
    prelude = impatient if how == "hangs" else ""
    seen = report(Machine(tmp_path, torch=text + "\n", prelude=prelude))
    assert seen.code == 1
    assert says in seen.software("torch")["reason"]
    remedy = seen.software("torch")["remedy"]
    assert ("run ds_report again" if how == "hangs" else "pip install --force-reinstall") in remedy


def test_torch_too_old(tmp_path: Path) -> None:
    old = FAKE_TORCH.format(version="2.9.1", cuda=None, gpus=[], archs=[])
    seen = report(Machine(tmp_path, torch=old))
    assert seen.code == 1
    assert "2.9.1; 2.10 is the oldest" in seen.software("torch")["reason"]
    assert seen.json["no_gpu"] == "neither PyTorch nor the driver sees one"  # it was asked


# --- the cache -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("home", "words"),
    [
        ("/proc/self", "/proc/self/.cache/deepspeed4science cannot be written"),  # not even by root
        ("nowhere", "there is no home folder"),
    ],
)
def test_no_home_that_can_be_written(tmp_path: Path, home: str, words: str) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    variables = {"HOME": home, "DS4S_CACHE_DIR": "", "TMPDIR": str(temporary)}
    seen = report(Machine(tmp_path, variables=variables))
    assert (seen.code, seen.op()["state"]) == (0, "buildable")
    assert seen.json["cache"]["folder"] == f"{temporary}/deepspeed4science-{os.geteuid()}"
    assert "temporary" in seen.json["cache"]["note"]
    assert seen.json["warnings"][0].startswith(words)
    assert "set DS4S_CACHE_DIR" in seen.json["warnings"][0]


def test_no_folder_that_can_be_written(tmp_path: Path) -> None:
    """As in a read-only container: tools and PyTorch can be asked, and are not to be installed."""
    nowhere = "import tempfile\ntempfile._candidate_tempdir_list = lambda: []\n"
    variables = {"HOME": "/proc/self", "DS4S_CACHE_DIR": ""}
    seen = report(Machine(tmp_path, variables=variables, prelude=nowhere))
    assert seen.software("torch")["ok"] and seen.software("ninja")["ok"]
    assert seen.op()["remedy"] == "set TMPDIR to a folder that can be written"
    assert "compiled kernels cannot be kept" in seen.json["warnings"][0]


def test_a_cache_folder_that_is_a_file(tmp_path: Path) -> None:
    fakes.file(tmp_path / "cache")
    assert report(Machine(tmp_path)).code == 0


def test_a_kernel_in_the_cache(tmp_path: Path) -> None:
    """Really compiled, by another process."""
    build = (
        "from op_builder import EvoformerAttnCPUBuilder as B\n"
        "b = B()\nb.load(verbose=False, kernels=[b.kernel(direction='fwd', dtype='fp32')])\n"
    )
    environment = {
        **os.environ,
        "DS4S_CPU_ISA": "portable",
        "DS4S_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": str(ROOT),
        "CXX": str(fakes.quick_compiler(tmp_path / "g++-quick")),
    }
    subprocess.run([sys.executable, "-c", build], env=environment, check=True, timeout=300)
    machine = Machine(tmp_path, variables={"DS4S_CPU_ISA": "portable"})
    seen = report(machine)
    assert (seen.code, seen.op()["state"]) == (0, "cached")
    assert seen.op()["detail"] == "1 of 6 kernels compiled"
    assert seen.json["cache"]["kernels"] == 1
    assert seen.json["cache"]["size_bytes"] > 10_000
    # Without a compiler that kernel can still be used, and the report says what cannot.
    machine.programs = ()
    seen = report(machine)
    assert (seen.code, seen.op()["state"]) == (0, "cached")
    assert "no other kernel can be compiled: host compiler" in seen.json["warnings"][0]
    # A damaged library is no kernel.
    library = next((tmp_path / "cache" / "units").glob("*/*.so"))
    library.write_bytes(library.read_bytes()[:-1])
    assert report(machine).op()["state"] == "not"


# --- GPUs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["prebuilt", "cached", "buildable", "not"])
@pytest.mark.parametrize("torch", ["for the CPU", "for CUDA"])
def test_without_a_gpu_a_cuda_op_is_never_okay(state: str, torch: str, tmp_path: Path) -> None:
    machine = Machine(tmp_path, prelude=cuda_op(state))
    if torch == "for CUDA":
        machine.torch = cuda_torch([])
    seen = report(machine)
    assert seen.op("evoformer_attn")["state"] == "not"
    assert "no GPU" in seen.op("evoformer_attn")["reason"]
    assert "[OKAY]" not in seen.line("evoformer_attn ")
    assert seen.code == 0  # the CPU op decides


@pytest.mark.parametrize("state", ["prebuilt", "cached", "buildable"])
def test_a_gpu_and_its_op(state: str, tmp_path: Path) -> None:
    seen = report(Machine(tmp_path, torch=cuda_torch(H200), prelude=cuda_op(state)))
    assert (seen.code, seen.json["verdict"]) == (0, "usable on the GPU")
    assert seen.op("evoformer_attn")["state"] == state
    assert seen.json["gpus"] == [
        {"name": "NVIDIA H200", "capability": "9.0", "family": "sm90", "arch": "", "note": ""}
    ]


def test_a_gpu_whose_op_cannot_be_had_is_not_usable(tmp_path: Path) -> None:
    op = cuda_op("not", "nvcc: no CUDA compiler was found", "pip install nvcc")
    seen = report(Machine(tmp_path, torch=cuda_torch(H200), prelude=op))
    assert (seen.code, seen.op()["state"]) == (1, "buildable")
    assert seen.op("evoformer_attn")["reason"] == "nvcc: no CUDA compiler was found"
    assert seen.op("evoformer_attn")["remedy"] == "pip install nvcc"


FAMILIES = {(6, 1): "none", (7, 0): "sm70", (7, 5): "sm75", (8, 6): "sm80", (12, 0): "sm80"}


def test_each_gpu_has_its_row(tmp_path: Path) -> None:
    gpus = [(f"GPU {major}.{minor}", (major, minor)) for major, minor in FAMILIES]
    seen = report(Machine(tmp_path, torch=cuda_torch(gpus), prelude=cuda_op("cached")))
    assert [gpu["family"].split(":")[0] for gpu in seen.json["gpus"]] == list(FAMILIES.values())


def test_a_forced_family_and_one_that_cannot_be(tmp_path: Path) -> None:
    """The real builder is asked: nothing of it needs a GPU to choose a family."""
    gpus = [("Old", (7, 0)), ("New", (9, 0))]
    machine = Machine(tmp_path, torch=cuda_torch(gpus), variables={"DS4S_CUDA_FAMILY": "sm75"})
    old, new = report(machine).json["gpus"]
    assert old["family"].startswith("none: DS4S_CUDA_FAMILY: expected one of sm70")
    assert new["family"] == "sm75 (DS4S_CUDA_FAMILY)"


def test_a_gpu_that_only_the_driver_sees(tmp_path: Path) -> None:
    machine = Machine(tmp_path, prelude=cuda_op("cached"))
    fakes.program(tmp_path / "bin" / "nvidia-smi", "#!/bin/sh\necho NVIDIA A100\n")
    seen = report(machine)
    assert seen.json["no_gpu"] == (
        "the driver has NVIDIA A100, but this PyTorch is built for the CPU only"
    )
    assert "NVIDIA A100" in seen.op("evoformer_attn")["reason"]


# --- settings and our own faults -----------------------------------------------------------------


_WORDS = """Found GPU0 Tesla V100 which is of compute capability (CC) 7.0.
For CUDA 12.6 use pip install torch"""


def test_a_gpu_that_pytorch_is_not_built_for(tmp_path: Path) -> None:
    """PyTorch counts it, and says in several lines which build serves it."""
    torch = cuda_torch([("Tesla V100", (7, 0))], ["sm_75", "compute_120"])
    torch += f"import warnings\nwarnings.warn({_WORDS!r})\n"
    seen = report(Machine(tmp_path, torch=torch, prelude=cuda_op("cached")))
    assert (seen.code, seen.json["verdict"]) == (0, "usable on the CPU")
    assert seen.json["no_gpu"] == "this PyTorch has no kernels for Tesla V100"
    assert seen.json["warnings"] == [f"torch: {' '.join(_WORDS.split())}"]


def test_one_of_two_gpus_that_pytorch_is_not_built_for(tmp_path: Path) -> None:
    torch = cuda_torch([("Tesla V100", (7, 0)), *H200], ["sm_75", "sm_90"])
    seen = report(Machine(tmp_path, torch=torch, prelude=cuda_op("cached")))
    assert (seen.code, [gpu["name"] for gpu in seen.json["gpus"]]) == (0, ["NVIDIA H200"])
    assert seen.json["warnings"] == ["this PyTorch has no kernels for Tesla V100"]


def test_a_forced_instruction_set_that_cannot_be_had(tmp_path: Path) -> None:
    cpuinfo = fakes.file(tmp_path / "cpuinfo", "flags : fma f16c avx2 avx512f\n")
    older = (
        f"from op_builder.toolchain import cpu_isa\ncpu_isa.PROC_CPUINFO = Path({str(cpuinfo)!r})\n"
    )
    seen = report(Machine(tmp_path, variables={"DS4S_CPU_ISA": "amx"}, prelude=older))
    assert (seen.code, seen.op()["state"]) == (1, "not")
    assert "DS4S_CPU_ISA=amx" in seen.op()["reason"]
    assert "unset it" in seen.op()["reason"]


def test_an_architecture_list_that_nobody_can_read(tmp_path: Path) -> None:
    seen = report(Machine(tmp_path, variables={"TORCH_CUDA_ARCH_LIST": "8.0;sm_90"}))
    assert seen.code == 0
    (warning,) = seen.json["warnings"]
    assert "'sm_90'; write 9.0" in warning


@pytest.mark.parametrize("variable", ["MAX_JOBS", "DS4S_VERBOSE"])
def test_a_setting_that_every_first_call_would_refuse(variable: str, tmp_path: Path) -> None:
    seen = report(Machine(tmp_path, variables={variable: "many"}))
    assert (seen.code, seen.op()["state"]) == (1, "not")
    assert f"{variable}: expected" in seen.op()["reason"]
    assert "got 'many'" in seen.op()["reason"]
    assert seen.json["warnings"] == []  # said already


@pytest.mark.parametrize("variable", ["DS_BUILD_EVOFORMER_ATTN_CPU", "DS4S_CUDA_FAMILY"])
def test_a_setting_that_a_build_would_refuse(variable: str, tmp_path: Path) -> None:
    seen = report(Machine(tmp_path, variables={variable: "many"}))
    assert seen.code == 0
    assert f"{variable}: expected" in seen.json["warnings"][0]
    assert "got 'many'" in seen.json["warnings"][0]


def test_a_flag_that_a_build_without_a_gpu_would_refuse(tmp_path: Path) -> None:
    seen = report(Machine(tmp_path, variables={"DS_IGNORE_CUDA_DETECTION": "many"}))
    assert seen.code == 0
    assert "DS_IGNORE_CUDA_DETECTION: expected 1 or 0" in seen.op("evoformer_attn")["reason"]
    assert seen.json["warnings"] == []  # said already


def test_a_cuda_home_that_holds_nothing_is_a_warning(tmp_path: Path) -> None:
    nvcc = fakes.toolkit(tmp_path / "opt")
    machine = Machine(tmp_path, variables={"CUDA_HOME": "/no/such/cuda"})
    fakes.wrapper(tmp_path / "bin" / "nvcc", nvcc)
    seen = report(machine)
    assert seen.software("nvcc")["version"] == "13.0.88"
    assert "CUDA_HOME: there is no /no/such/cuda/bin/nvcc" in seen.json["warnings"][0]


def test_an_op_that_raises(tmp_path: Path) -> None:
    bad = cuda_op("cached").replace("return OpStatus", "raise KeyError('oops') #")
    seen = report(Machine(tmp_path, torch=cuda_torch(H200), prelude=bad))
    assert seen.code == 1
    assert seen.op("evoformer_attn")["reason"] == "see the warnings"
    assert "KeyError: 'oops'" in seen.json["warnings"][0]


def test_our_own_package_damaged(tmp_path: Path) -> None:
    gone = "sys.modules.update({n: None for n in sys.modules if n.startswith('op_builder')})\n"
    seen = report(Machine(tmp_path, prelude=gone))
    assert seen.code == 1
    assert "op_builder" in seen.json["warnings"][0]


# --- how it prints -------------------------------------------------------------------------------


def test_a_terminal_without_the_letters_of_a_path(tmp_path: Path) -> None:
    folder = tmp_path / "Versuch-\u00e4\u00f6\u03b1"
    folder.mkdir()
    variables = {"PYTHONIOENCODING": "ascii", "DS4S_CACHE_DIR": str(folder)}
    machine = Machine(tmp_path, variables=variables)
    seen = machine.report()  # JSON holds the letters, this table cannot
    assert seen.code == 0
    assert "Versuch-\\xe4" in seen.text


@pytest.mark.parametrize("command", ["report", "cache list", "cache list --json"])
def test_a_reader_who_goes_away(command: str, tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    command = f"{sys.executable} -m deepspeed4science {command} | true; exit ${{PIPESTATUS[0]}}"
    ran = subprocess.run(
        ["bash", "-c", command],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{machine._site()}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")


def test_most_of_its_time_is_the_import_of_torch() -> None:
    """Processor time, its children included: what else the machine does is not the report's."""
    pytest.importorskip("torch")

    def run(*arguments: str) -> tuple[float, str]:
        command = [sys.executable, *arguments]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        ran = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return seconds, ran.stdout

    imports, reports = [], []
    for _ in range(2):
        imports.append(run("-c", "import torch")[0])
        seconds, printed = run("-m", "deepspeed4science", "report", "--json")
        assert json.loads(printed)["software"][0]["ok"]
        reports.append(seconds)
    assert min(reports) < 1.6 * min(imports), (reports, imports)


def test_commands_of_the_module() -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "deepspeed4science", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert run().returncode == 2
    assert "report" in run().stderr
    assert run("--help").returncode == 0
    assert "demo" in run("--help").stdout
    assert run("no-such-command").returncode == 2
    for command in (("--version",), ("report", "--version")):
        said = run(*command)
        assert (said.returncode, said.stdout) == (0, f"deepspeed4science {__version__}\n")


def test_a_command_without_torch_says_so_in_one_line() -> None:
    """As from a shell in which the environment with PyTorch is not active."""
    script = (
        "import sys; sys.modules['torch'] = None; "
        "from deepspeed4science.__main__ import main; sys.exit(main(['demo']))"
    )
    ran = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 1
    assert ran.stderr.startswith(f"demo: expected PyTorch; {sys.executable} has none.")
    assert ran.stderr.count("\n") == 1
