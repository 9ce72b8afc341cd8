"""`ds_report` on machines with GPUs, in each situation of toolkits, lists and caches.

The op's own builder answers, with the real nvcc; PyTorch and its GPUs are made up.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from op_builder.cache.loaded_kernel import ABI_VERSION
from op_builder.toolchain import nvcc_wheels, toolkits
from op_builder.toolchain.tool import Tool
from tests import fakes

from .report_machine import H200, Machine, Outcome, cuda_torch, report
from .toys import SOURCE

OP = "evoformer_attn"
# The command for a machine without parts of PyTorch, as all of these are.
WHEELS = f'pip install "{nvcc_wheels.PARTS}=={nvcc_wheels.TRIED}"'
A100, V100 = ("NVIDIA A100", (8, 0)), ("Tesla V100", (7, 0))

# Toys under the names and keys of real kernels: the report finds them and sees whether they load.
PLANT = """\
from op_builder import EvoformerAttnBuilder, paths
from op_builder.ops import presets
from op_builder.toolchain import arch, elf
from op_builder.cache.key import Header
from op_builder.cache.publish import Built, publish
def plant(root, architecture, count=2):
    builder = EvoformerAttnBuilder()
    kernels = builder.kernels_for(presets.INSTALL, arch.parse(architecture))[:count]
    for job in builder.jobs(kernels):
        name = job.name.encode().ljust(64, b"\\0")
        library = Path({toy!r}).with_name(job.name)
        library.write_bytes(Path({toy!r}).read_bytes().replace(b"@" * 64, name))
        publish(Path(root), Built(job, library, Path({log!r}), (), 1.0), load=Path.exists)
"""


@pytest.fixture(autouse=True)
def real():
    tool = toolkits.find_nvcc()
    if not tool.ok:
        pytest.skip(f"nvcc: {tool.reason}; {tool.remedy}")
    return tool


def machine(folder: Path, *gpus: tuple[str, tuple[int, int]], **variables: str) -> Machine:
    """One with nvcc, CUTLASS and all else that is needed."""
    made = Machine(folder, torch=cuda_torch(list(gpus or H200)), variables=variables)
    made.programs = (*made.programs, "nvcc")
    made.prelude = PLANT.format(toy=str(toy(folder / "toy")), log=os.devnull)
    return made


def toy(folder: Path, more: str = "") -> Path:
    """A library with all exports that needs a glibc, whose name is to be filled in."""
    folder.mkdir(exist_ok=True)
    source = SOURCE.format(name="@" * 64, abi=ABI_VERSION, stream="", launch=more)
    source = source.replace('#include "toy.h"', "#define TOY_STATUS 0")
    source += 'extern "C" char* getenv(const char*);\nchar* glibc() { return getenv(""); }\n'
    command = ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(folder / "toy.so")]
    subprocess.run(command, input=source, text=True, check=True)
    return folder / "toy.so"


def gpu_lines(seen: Outcome) -> list[str]:
    return [line for line in seen.text.splitlines() if line.startswith("GPU ")]


def test_nothing_stands_in_the_way(tmp_path: Path) -> None:
    seen = report(machine(tmp_path))
    assert (seen.code, seen.op(OP)["state"]) == (0, "buildable")
    assert seen.json["verdict"] == "usable on the GPU"
    (gpu,) = seen.json["gpus"]
    assert (gpu["family"], gpu["arch"]) == ("sm90", "9.0a")
    assert gpu["note"].startswith("sm80 for")
    assert not seen.json["warnings"]


# --- toolkits ------------------------------------------------------------------------------------


def test_no_nvcc(tmp_path: Path) -> None:
    bare = machine(tmp_path)
    bare.programs = ("g++", "as", "ld")
    seen = report(bare)
    assert (seen.code, seen.op(OP)["state"]) == (1, "not")
    assert "nvcc: no CUDA compiler was found" in seen.op(OP)["reason"]
    assert WHEELS in seen.op(OP)["remedy"]


def test_no_cutlass(tmp_path: Path) -> None:
    bare = machine(tmp_path)
    bare.packages = ("ninja",)
    seen = report(bare)
    assert (seen.code, seen.op(OP)["state"]) == (1, "not")
    assert "CUTLASS: the CUTLASS headers were not found" in seen.op(OP)["reason"]
    assert "pip install --no-deps nvidia-cutlass" in seen.op(OP)["remedy"]


def test_mixed_wheels(tmp_path: Path, real: Tool) -> None:
    """They look whole; only compiling tells."""
    site = tmp_path / "site-packages"
    script = "echo \"Unsupported .version 9.5; current version is '9.0'\" >&2; exit 255"
    fakes.changed_toolkit(real.root, site / "nvidia" / "cu13", "bin/ptxas", script)
    for name in ("cuda_nvcc-13.0.88", "nvvm-13.5.37"):
        fakes.file(site / f"nvidia_{name}.dist-info" / "METADATA")
    mixed = machine(tmp_path)
    mixed.programs = ("g++", "as", "ld", "sh")
    seen = report(mixed)
    assert (seen.code, seen.op(OP)["state"]) == (1, "not")
    for place in (seen.op(OP), seen.software("nvcc")):
        assert "mixed wheels, nvidia-cuda-nvcc 13.0.88, nvidia-nvvm 13.5.37" in place["reason"]
        assert WHEELS in place["remedy"]
    # Beside a good one they are a warning.
    mixed.programs = (*mixed.programs, "nvcc")
    seen = report(mixed)
    assert (seen.code, seen.op(OP)["state"]) == (0, "buildable")
    assert "passed over PyPI wheel: mixed wheels" in seen.json["warnings"][0]


def test_several_toolkits_and_two_kinds_of_gpu(tmp_path: Path, real: Tool) -> None:
    """Each GPU is served by its own: Volta by an older one than the rest."""
    two = machine(tmp_path, A100, V100)
    fakes.toolkit(tmp_path / "usr-local" / "cuda-12.9", "12.9.86", ("70", "80", "90"))
    seen = report(two)
    assert (seen.code, seen.op(OP)["state"]) == (0, "buildable")
    assert seen.software("nvcc")["version"] == real.version
    assert seen.software("nvcc")["note"] == (
        f"also here: 12.9.86 in {tmp_path}/usr-local/cuda-12.9, for sm_70"
    )
    assert [(gpu["family"], gpu["arch"]) for gpu in seen.json["gpus"]] == [
        ("sm80", "8.0"),
        ("sm70", "7.0"),
    ]
    # One that is named rules, and what it cannot serve is told.
    two.variables["CUDA_HOME"] = str(real.root)
    seen = report(two)
    assert (seen.code, seen.op(OP)["state"]) == (0, "buildable")
    a100, v100 = seen.json["gpus"]
    assert a100["family"] == "sm80"
    assert v100["family"].startswith("none: no architecture is left")
    assert "the device is 7.0; this nvcc can do 7.5, 8.0" in v100["family"]
    assert "CUDA 12.9" in v100["family"]


def test_pytorch_of_another_cuda_is_no_fault(tmp_path: Path) -> None:
    other = machine(tmp_path)
    other.torch = cuda_torch(H200).replace("'13.0'", "'12.8'")
    seen = report(other)
    assert (seen.code, seen.op(OP)["state"]) == (0, "buildable")
    assert "is of no concern" in seen.software("CUDA of torch")["note"]
    other.variables["DS_SKIP_CUDA_CHECK"] = "1"
    assert report(other).software("CUDA of torch")["note"] == ""


# --- lists ---------------------------------------------------------------------------------------


def test_a_list_without_the_device(tmp_path: Path) -> None:
    seen = report(machine(tmp_path, A100, TORCH_CUDA_ARCH_LIST="7.5;9.0a"))
    assert (seen.code, seen.op(OP)["state"]) == (1, "not")
    for text in (seen.op(OP)["reason"], seen.json["gpus"][0]["family"]):
        assert "requested 7.5; 9.0a; the device is 8.0; this nvcc can do 7.5, 8.0" in text
        assert "add 8.0 to TORCH_CUDA_ARCH_LIST" in text


def test_a_list_that_nobody_can_read_is_told_once(tmp_path: Path) -> None:
    seen = report(machine(tmp_path, TORCH_CUDA_ARCH_LIST="8.0;sm_90"))
    assert (seen.code, seen.op(OP)["state"]) == (1, "not")
    assert "'sm_90'; write 9.0" in seen.op(OP)["reason"]
    assert not seen.json["warnings"]


def test_a_list_with_one_of_two_kinds(tmp_path: Path) -> None:
    seen = report(machine(tmp_path, A100, *H200, TORCH_CUDA_ARCH_LIST="9.0"))
    assert (seen.code, seen.op(OP)["state"]) == (0, "buildable")
    a100, h200 = seen.json["gpus"]
    assert "add 8.0 to TORCH_CUDA_ARCH_LIST" in a100["family"]
    assert (h200["family"], h200["arch"]) == ("sm90", "9.0a")


@pytest.mark.parametrize(
    ("text", "family", "arch"),
    [("9.0", "sm90", "9.0a"), ("Hopper", "sm90", "9.0a"), ("8.0+PTX", "sm80", "8.0+PTX")],
)
def test_hopper_under_each_name(text: str, family: str, arch: str, tmp_path: Path) -> None:
    (gpu,) = report(machine(tmp_path, TORCH_CUDA_ARCH_LIST=text)).json["gpus"]
    assert (gpu["family"], gpu["arch"]) == (family, arch)


# --- what is compiled already --------------------------------------------------------------------


def planted(made: Machine, where: str, architecture: str, more: str = "") -> Machine:
    """`where`: "prebuilt", "shared" or "cache"."""
    folder = made.folder / where
    if where == "prebuilt":
        made.prelude += f"paths.prebuilt_root = lambda: Path({str(folder)!r})\n"
    elif where == "shared":
        made.variables["DS4S_CACHE_PATH"] = str(folder)
    made.prelude += f"plant({str(folder)!r}, {architecture!r})\n{more}"
    return made


@pytest.mark.parametrize("compiler", [True, False], ids=["nvcc", "no nvcc"])
@pytest.mark.parametrize(
    ("where", "state"), [("prebuilt", "prebuilt"), ("shared", "cached"), ("cache", "cached")]
)
def test_kernels_that_fit(where: str, state: str, compiler: bool, tmp_path: Path) -> None:
    made = planted(machine(tmp_path, A100), where, "8.0")
    seen = report(made)
    assert (seen.code, seen.op(OP)["state"]) == (0, state)
    assert seen.op(OP)["detail"] == "2 of 12 kernels compiled"
    if compiler:
        return
    made.programs = ("g++", "as", "ld")
    made.prelude = made.prelude.rpartition("plant(")[0]
    seen = report(made)
    assert (seen.code, seen.op(OP)["state"]) == (0, state)
    assert "no other kernel can be compiled: nvcc" in seen.json["warnings"][0]


@pytest.mark.parametrize("where", ["prebuilt", "shared"])
def test_kernels_for_another_gpu(where: str, tmp_path: Path) -> None:
    """Installed for Ampere, run on Turing: it will compile, and says why."""
    turing = ("Tesla T4", (7, 5))
    made = planted(machine(tmp_path, turing), where, "8.0")
    made.prelude = made.prelude.replace("arch.parse(architecture))[:count]", NAMED_AS_TURINGS)
    seen = report(made)
    assert (seen.code, seen.op(OP)["state"]) == (0, "buildable")
    assert "0 of 8 kernels compiled" in seen.op(OP)["detail"]
    assert f"2 unfit: compiled for sm_80 ({tmp_path}/{where})" in seen.op(OP)["detail"]


# Templates of a lower family also compile for later GPUs: DS4S_CUDA_FAMILY.
NAMED_AS_TURINGS = (
    "arch.parse('7.5'))[:count]\n"
    "    from dataclasses import replace\n"
    "    kernels = [replace(kernel, arch=architecture) for kernel in kernels]"
)


def test_kernels_for_a_newer_system(tmp_path: Path) -> None:
    """Compiled in a newer image: a miss here, with the two versions of glibc."""
    old = "elf.own_glibc = lambda: (2, 1)\n"
    seen = report(planted(machine(tmp_path, A100), "cache", "8.0", old))
    assert (seen.code, seen.op(OP)["state"]) == (0, "buildable")
    assert "2 unfit: needs glibc 2." in seen.op(OP)["detail"]
    assert "this system has 2.1" in seen.op(OP)["detail"]


def test_kernels_of_other_sources(tmp_path: Path) -> None:
    """An image of last month beside a package of today."""
    changed = "(), 1.0)"
    made = planted(machine(tmp_path, A100), "shared", "8.0")
    made.prelude = made.prelude.replace(changed, "(Header(0, 'params.h', '0'),), 1.0)")
    seen = report(made)
    assert (seen.code, seen.op(OP)["state"]) == (0, "buildable")
    assert "2 unfit: its sources have changed since" in seen.op(OP)["detail"]


def test_kernels_that_cannot_be_loaded(tmp_path: Path) -> None:
    """There they are, whole and fitting, and no call would get them: it would compile again."""
    made = planted(machine(tmp_path, A100), "shared", "8.0")
    toy(tmp_path / "toy", "extern void nowhere(); nowhere();")
    seen = report(made)
    assert (seen.code, seen.op(OP)["state"]) == (0, "buildable")
    assert "0 of 12 kernels compiled; 2 cannot be loaded: " in seen.op(OP)["detail"]
    assert "undefined symbol: nowhere" in seen.op(OP)["detail"]
    made.programs = ("g++", "as", "ld")
    made.prelude = made.prelude.rpartition("plant(")[0]
    seen = report(made)
    assert (seen.code, seen.op(OP)["state"]) == (1, "not")


def test_a_toolkit_that_cannot_link(tmp_path: Path, real: Tool) -> None:
    """It compiles, and each first call would have failed at its end."""
    assert real.root is not None
    path = fakes.wheel_toolkit(real.root, tmp_path / "toolkit")
    (tmp_path / "toolkit" / "lib").unlink()
    fakes.file(tmp_path / "toolkit" / "lib" / "libcudart_static.a", "!<arch>\n")
    seen = report(machine(tmp_path, A100, CUDA_HOME=str(path.parents[1])))
    assert (seen.code, seen.op(OP)["state"]) == (1, "not")
    assert "cannot find -lcudadevrt" in seen.op(OP)["reason"]
    assert WHEELS in seen.op(OP)["remedy"]


def test_without_a_gpu_what_is_here_for_others(tmp_path: Path) -> None:
    """A login node with an installed wheel: what it holds, and what else can be compiled."""
    made = planted(machine(tmp_path), "prebuilt", "8.0")
    made.torch = cuda_torch([])
    seen = report(made)
    assert (seen.code, seen.op(OP)["state"]) == (0, "not")
    held, makes = seen.op(OP)["detail"].split("; ")
    assert held == "kernels installed: 2 for 8.0"
    assert makes.startswith("can be compiled for 7.") and ", 9.0, " in makes
    assert seen.op(OP)["reason"].startswith("no GPU")
    made.programs = ("g++", "as", "ld")
    made.prelude = made.prelude.rpartition("plant(")[0]
    assert report(made).op(OP)["detail"] == "kernels installed: 2 for 8.0"


def test_a_readonly_cache_and_a_home_that_cannot_be_written(tmp_path: Path) -> None:
    """A pod with an image's kernels: all is well, and what is lacking is told."""
    made = planted(machine(tmp_path, A100), "shared", "8.0")
    made.variables |= {"HOME": "/proc/self", "DS4S_CACHE_DIR": "/proc/self/none"}
    seen = report(made)
    assert (seen.code, seen.op(OP)["state"]) == (0, "cached")
    assert seen.op(OP)["detail"] == "2 of 12 kernels compiled"
    assert "cannot be written" in seen.json["cache"]["note"]
    assert any("set DS4S_CACHE_DIR" in warning for warning in seen.json["warnings"])
