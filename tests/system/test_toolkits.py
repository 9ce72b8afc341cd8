"""CUDA toolkits that look whole and are not: tried with the real nvcc, told apart, passed over."""

import os
import resource
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from op_builder.toolchain import host_compiler, nvcc_wheels, smoke, toolkits
from op_builder.toolchain import nvcc as nvcc_module
from tests import fakes

from .toys import Workshop

NEWER_PTX = (
    "echo \"ptxas t.ptx, line 9; fatal   : Unsupported .version 9.5; current version is '9.0'\" >&2"
    "; exit 255"
)
COUNTED = 'echo >> "$COUNT"; exec {real} "$@"'


@pytest.fixture
def real():
    tool = toolkits.find_nvcc()
    if not tool.ok:
        pytest.skip(f"nvcc: {tool.reason}; {tool.remedy}")
    return tool


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DS4S_CACHE_DIR", str(tmp_path / "cache"))


def chosen(path, monkeypatch, where="CUDA_HOME"):
    """The toolkit of this nvcc, named by the user."""
    monkeypatch.setenv(where, str(path.parents[1]))
    return toolkits.find_nvcc(prove=True)


def test_a_good_toolkit_is_tried_once_and_in_a_second(real, tmp_path, monkeypatch):
    """Processor time, the compilers' included: what else the machine does is not the toolkit's."""
    count = tmp_path / "count"
    monkeypatch.setenv("COUNT", str(count))
    cicc = real.root / "nvvm" / "bin" / "cicc"
    path = fakes.changed_toolkit(
        real.root, tmp_path / "toolkit", "nvvm/bin/cicc", COUNTED.format(real=cicc)
    )
    host_compiler.find_host_compiler()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    tool = chosen(path, monkeypatch)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert tool.ok, tool.reason
    # 0.87 s on a quiet machine; who shares its cores with others gets less of them.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2.5
    assert chosen(path, monkeypatch).ok
    assert count.read_text().count("\n") == 1


MIXED = {
    "assembler older than the device compiler": (
        ("bin/ptxas", NEWER_PTX),
        "the device compiler writes PTX 9.5, the assembler reads up to 9.0",
    ),
    "no such option": (
        ("nvvm/bin/cicc", "echo 'cicc: unknown option --new' >&2; exit 2"),
        "cicc: unknown option --new",
    ),
}


@pytest.mark.parametrize("how", MIXED)
@pytest.mark.parametrize("wheels", [True, False], ids=["wheels", "folder"])
def test_parts_that_do_not_fit_together(how, wheels, real, tmp_path, monkeypatch):
    """What is mixed, in the wheels' own versions where it is made of wheels, and the cure."""
    (part, script), meaning = MIXED[how]
    site = tmp_path / "site-packages"
    root = site / "nvidia" / "cu13" if wheels else tmp_path / "toolkit"
    path = fakes.changed_toolkit(real.root, root, part, script)
    for name in ("cuda_nvcc-13.0.88", "cuda_crt-13.0.88", "cuda_runtime-13.0.96", "nvvm-13.5.37"):
        fakes.file(site / f"nvidia_{name}.dist-info" / "METADATA")
    monkeypatch.setattr(nvcc_module, "_candidates", lambda: [candidate(path)])
    tool = toolkits.find_nvcc(prove=True)
    assert not tool.ok
    assert meaning in tool.reason
    if wheels:
        assert "mixed wheels, nvidia-cuda-nvcc 13.0.88" in tool.reason
        assert "nvidia-nvvm 13.5.37" in tool.reason
    assert nvcc_wheels.wheels() in tool.remedy


def test_headers_of_another_release(real, tmp_path, monkeypatch):
    """As `cuda-toolkit[nvcc]` alone installs them: crt newer than nvcc."""
    path = fakes.changed_toolkit(real.root, tmp_path / "toolkit", "bin/bin2c", "exit 0")
    include = tmp_path / "toolkit" / "include"
    include.unlink()
    (tmp_path / "toolkit" / "targets").unlink(missing_ok=True)  # leads to the real ones
    include.mkdir()
    for entry in (real.root / "include").iterdir():
        (include / entry.name).symlink_to(entry)
    (include / "crt").unlink()
    shutil.copytree(real.root / "include" / "crt", include / "crt")
    header = include / "crt" / "host_runtime.h"
    text = header.read_text()
    assert "__cudaLaunch(fun" in text
    header.write_text(text.replace("__cudaLaunch(fun", "__cudaLaunchOther(fun"))
    tool = chosen(path, monkeypatch)
    assert not tool.ok
    assert "nvcc and its headers (crt) disagree about __cudaLaunch" in tool.reason
    assert nvcc_wheels.wheels() in tool.remedy


def test_a_host_compiler_newer_than_nvcc(real, tmp_path, monkeypatch):
    """The commonest of all on clusters; the cure is another compiler, not another toolkit."""
    newer = fakes.program(
        tmp_path / "bin" / "g++-99",
        "#!/bin/sh\n"
        'case "$*" in *__CUDACC__*) set -- -U__GNUC__ -D__GNUC__=99 "$@";; esac\n'
        'exec g++ "$@"\n',
    )
    monkeypatch.setenv("CXX", str(newer))
    tool = toolkits.find_nvcc(prove=True)
    assert not tool.ok
    assert f"nvcc {real.version} refuses the host compiler {newer}" in tool.reason
    assert "are not supported" in tool.reason
    assert "set CXX to an older compiler" in tool.remedy


@pytest.mark.parametrize(
    "script",
    ["kill -9 $$", "kill -TERM $$", "kill -XFSZ $$", "echo No space left on device >&2; exit 1"],
)
def test_a_fault_of_the_machine_is_not_the_toolkits(script, real, tmp_path, monkeypatch):
    """Nothing is proved by it, and nothing remembered."""
    path = fakes.changed_toolkit(real.root, tmp_path / "toolkit", "nvvm/bin/cicc", script)
    assert chosen(path, monkeypatch).ok
    fakes.program(path.parents[1] / "nvvm" / "bin" / "cicc", f"#!/bin/sh\n{NEWER_PTX}\n")
    assert not chosen(path, monkeypatch).ok


def test_the_runtimes_folder_may_have_a_comma(real, tmp_path):
    """nvcc splits values there. Wheels of CUDA 13.0 and 13.1 cannot link without the flag."""
    folder = fakes.toolkit(tmp_path / "smith,j").parents[1] / "lib"
    (tmp_path / "x.o").touch()
    tool = replace(real, root=folder.parent)
    flags = nvcc_module.local_flags(tool, host_compiler.find_host_compiler())
    command = [str(real.path), "--dryrun", "-shared", *flags, "x.o", "-o", "x.so"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert f"-L{folder} " in done.stderr.replace('"', "")


def test_believed_until_something_is_compiled(real, tmp_path, monkeypatch):
    """A job whose kernels are there already does not wait for a compiler to be tried."""
    path = fakes.changed_toolkit(real.root, tmp_path / "toolkit", "bin/ptxas", NEWER_PTX)
    monkeypatch.setenv("CUDA_HOME", str(path.parents[1]))
    assert toolkits.find_nvcc().ok
    host = host_compiler.find_host_compiler()
    assert smoke.problem(toolkits.find_nvcc(), host, prove=True) is not None
    assert not toolkits.find_nvcc().ok, "known from now on"


TOY_OP = """
from dataclasses import dataclass
from pathlib import Path
from op_builder import EvoformerAttnBuilder
from op_builder.toolchain import nvcc
nvcc.SYSTEM_PREFIX = Path({prefix!r})
@dataclass(frozen=True)
class Toy:
    arch: str = "9.0"
    first = (7, 0)
    usual_seconds = 1.0
    name = "toy"
    def source(self):
        return workshop.source().replace('#include "toy.h"', "#define TOY_STATUS 40")
try:
    kernel = EvoformerAttnBuilder().load(kernels=[Toy()]).kernel(Toy())
    report(origin=[kernel.origin])
except ToolchainError as error:
    report(error=str(error))
"""


def test_a_mixed_toolkit_is_passed_over_for_a_good_one(real, tmp_path):
    """The job starts, with the toolkit that works; without one it ends with what is wrong."""
    workshop = Workshop.make(tmp_path / "workshop", "CUDA")
    path = fakes.changed_toolkit(real.root, tmp_path / "mixed", "bin/ptxas", NEWER_PTX)
    second = fakes.changed_toolkit(real.root, tmp_path / "mixed, too", "bin/ptxas", NEWER_PTX)
    others = [folder for folder in os_path() if not (Path(folder) / "nvcc").exists()]
    places = [str(path.parent), str(second.parent), *others]
    fakes.file(tmp_path / "usr-local" / "nothing")
    variables = {"PATH": os.pathsep.join(places), "CUDA_HOME": "", "CUDA_PATH": ""}
    alone = workshop.run(TOY_OP.format(prefix=str(tmp_path / "usr-local")), **variables).report
    assert "the device compiler writes PTX 9.5" in alone["error"]
    assert nvcc_wheels.wheels() in alone["error"]
    shutil.rmtree(workshop.cache)
    (tmp_path / "usr-local" / "cuda").symlink_to(real.root)
    good = workshop.run(TOY_OP.format(prefix=str(tmp_path / "usr-local")), **variables).report
    assert good == {"origin": ["built"]}


def link(path, folder, *flags):
    """What nvcc says when it links a source of nothing as kernels are linked."""
    (folder / "empty.cu").write_text("")
    command = [str(path), "-shared", *nvcc_module.LINK_FLAGS, *flags, "empty.cu", "-o", "empty.so"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True).stderr


def test_a_toolkit_of_wheels_whose_nvcc_looks_in_another_folder(real, tmp_path, monkeypatch):
    """It cannot link by itself; told where its libraries are, it can, and kernels are made."""
    path = fakes.wheel_toolkit(real.root, tmp_path / "site-packages" / "nvidia" / "cu13")
    assert "cannot find -lcudart_static" in link(path, tmp_path)
    assert link(path, tmp_path, f"-L{path.parents[1] / 'lib'}") == ""
    assert chosen(path, monkeypatch).ok
    workshop = Workshop.make(tmp_path / "workshop", "CUDA")
    script = TOY_OP.format(prefix=str(tmp_path / "usr-local"))
    made = workshop.run(script, CUDA_HOME=str(path.parents[1])).report
    assert made == {"origin": ["built"]}


def test_a_toolkit_that_compiles_and_cannot_link(real, tmp_path, monkeypatch):
    """Found out before anything long is compiled, with the library that it lacks."""
    path = fakes.wheel_toolkit(real.root, tmp_path / "toolkit")
    (tmp_path / "toolkit" / "lib").unlink()
    fakes.file(tmp_path / "toolkit" / "lib" / "libcudart_static.a", "!<arch>\n")
    tool = chosen(path, monkeypatch)
    assert not tool.ok
    assert "it cannot compile and link a small kernel" in tool.reason
    assert "cannot find -lcudadevrt" in tool.reason
    assert nvcc_wheels.wheels() in tool.remedy


def candidate(path):
    from op_builder.toolchain.tool import Candidate

    return Candidate("PyPI wheel", path)


def os_path():
    return [str(Path(sys.executable).parent), *os.environ["PATH"].split(os.pathsep)]
