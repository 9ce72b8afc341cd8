"""Finding nvcc, the host compiler and ninja: the order of places, versions, and every way of not
being there."""

from __future__ import annotations

import importlib
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from op_builder.errors import ToolchainError
from op_builder.toolchain import gpu, ninja, nvcc, nvcc_targets, smoke, tool, toolkits
from op_builder.toolchain.tool import command_exists
from tests import fakes

CONCERNED = ("CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX", "CXX", "CC", "NVCC_PREPEND_FLAGS")


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No tool anywhere: each test puts in what it is about. PATH keeps a shell's own programs for
    the scripts."""
    for name in CONCERNED:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("DS4S_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(nvcc, "SYSTEM_PREFIX", tmp_path / "usr-local")
    monkeypatch.setattr(sys, "path", fakes.import_path(tmp_path / "site-packages"))
    return tmp_path


def test_no_nvcc_says_so_and_what_to_install() -> None:
    tool = toolkits.find_nvcc()
    assert not tool.ok
    assert tool.path is None
    assert "no CUDA compiler" in tool.reason
    assert "cuda-toolkit[nvcc" in tool.remedy
    assert "CUDA_HOME" in tool.remedy
    with pytest.raises(ToolchainError, match="nvcc: no CUDA compiler was found; pip install"):
        toolkits.installed_cuda_version()


@pytest.mark.parametrize(
    ("driver", "capability", "why"),
    [
        ((12, 4), (9, 0), "serves CUDA up to 12.4"),
        ((13, 0), (7, 0), "12.9 is the last"),
        ((13, 0), (9, 0), ""),
    ],
)
def test_wheels_that_would_not_run_here_are_no_remedy(
    driver: tuple[int, int], capability: tuple[int, int], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nvcc's wheels begin with CUDA 13: not for older drivers, nor for Volta."""
    gpus = gpu.Gpus((gpu.Gpu("a GPU", capability),), driver=driver)
    monkeypatch.setattr(gpu, "detect", lambda: gpus)
    remedy = toolkits.find_nvcc().remedy
    assert why in remedy and "CUDA_HOME" in remedy
    assert ("pip install" in remedy) == (not why)


def test_flags_of_the_environment_that_may_be_the_cause_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another toolkit would refuse them as well."""
    words = "nvcc ended with 1: nvcc fatal   : Unknown option '-foo'"
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-foo")
    found = smoke._explain(words, tool.Tool("nvcc"), tool.Tool("host compiler"))
    assert found.remedy.startswith("unset NVCC_APPEND_FLAGS, or set CUDA_HOME")


def _cuda_home(root: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    fakes.toolkit(root / "home", "12.6.1")
    monkeypatch.setenv("CUDA_HOME", str(root / "home"))
    return "CUDA_HOME"


def _cuda_path(root: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    fakes.toolkit(root / "path", "12.6.1")
    monkeypatch.setenv("CUDA_PATH", str(root / "path"))
    return "CUDA_PATH"


def _wheel(root: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    fakes.toolkit(root / "site-packages" / "nvidia" / "cu13", "12.6.1")
    return "PyPI wheel"


def _conda(root: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    fakes.toolkit(root / "conda", "12.6.1")
    (root / "conda" / "conda-meta").mkdir()
    monkeypatch.setenv("CONDA_PREFIX", str(root / "conda"))
    return "conda environment"


def _on_path(root: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    fakes.wrapper(root / "bin" / "nvcc", fakes.toolkit(root / "opt", "12.6.1"))
    return "PATH"


def _system(root: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    fakes.toolkit(root / "usr-local" / "cuda-12.6", "12.6.1")
    return str(root / "usr-local" / "cuda-12.6")


# In the documented order of places.
PLACES: list[Callable[[Path, pytest.MonkeyPatch], str]] = [
    _cuda_home, _cuda_path, _wheel, _conda, _on_path, _system,
]  # fmt: skip


@pytest.mark.parametrize("first", range(len(PLACES)), ids=[place.__name__ for place in PLACES])
def test_places_are_searched_in_the_documented_order(
    first: int, bare_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, *_ = [place(bare_machine, monkeypatch) for place in PLACES[first:]]
    importlib.invalidate_caches()
    tool = toolkits.find_nvcc()
    assert tool.ok, tool.reason
    assert tool.where_found == expected
    assert toolkits.installed_cuda_version() == (12, 6)
    assert not tool.passed_over


@pytest.mark.parametrize("place", [_wheel, _conda, _on_path, _system])
def test_the_newest_of_all_places_is_taken(
    place: Callable[[Path, pytest.MonkeyPatch], str],
    bare_machine: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = place(bare_machine, monkeypatch)
    for name in ("9.2.148", "12.4.131"):  # the first is too old to serve
        fakes.toolkit(bare_machine / "usr-local" / f"cuda-{name[:-4]}", name)
    importlib.invalidate_caches()
    assert toolkits.find_nvcc().where_found == expected


@pytest.mark.parametrize("place", [_cuda_home, _cuda_path])
def test_a_named_toolkit_rules_whatever_else_is_there(
    place: Callable[[Path, pytest.MonkeyPatch], str],
    bare_machine: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Naming is an instruction: for an architecture that it cannot do, too."""
    expected = place(bare_machine, monkeypatch)
    fakes.toolkit(bare_machine / "usr-local" / "cuda-13.0", "13.0.88", ("75", "130"))
    assert toolkits.find_nvcc("sm_130").where_found == expected
    assert [tool.where_found for tool in toolkits.nvccs()] == [expected]


def test_volta_gets_the_older_of_two_toolkits(bare_machine: Path) -> None:
    fakes.toolkit(bare_machine / "usr-local" / "cuda-12.9", "12.9.41", ("70", "75", "90"))
    fakes.toolkit(bare_machine / "usr-local" / "cuda-13.0", "13.0.88", ("75", "90", "110"))
    assert toolkits.find_nvcc().version == "13.0.88"
    assert toolkits.find_nvcc("sm_70").version == "12.9.41"
    assert toolkits.find_nvcc("sm_90a").version == "13.0.88"
    assert toolkits.find_nvcc("sm_110").version == "13.0.88"
    assert toolkits.find_nvcc("sm_35").version == "13.0.88", "whose list a refusal then names"


def test_one_toolkit_in_several_places_is_one(bare_machine: Path) -> None:
    nvcc_path = fakes.toolkit(bare_machine / "usr-local" / "cuda-13.0", "13.0.88")
    (bare_machine / "usr-local" / "cuda").symlink_to(bare_machine / "usr-local" / "cuda-13.0")
    fakes.wrapper(bare_machine / "bin" / "nvcc", nvcc_path)
    assert [tool.where_found for tool in toolkits.nvccs()] == ["PATH"]


@pytest.mark.parametrize(
    ("driver", "expected"), [((12, 4), "12.6.1"), ((13, 0), "13.0.88"), ((0, 0), "13.0.88")]
)
def test_what_the_driver_does_not_serve_comes_last(
    driver: tuple[int, int],
    expected: str,
    bare_machine: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu, "detect", lambda: gpu.Gpus(driver=driver))
    fakes.toolkit(bare_machine / "usr-local" / "cuda-13.0", "13.0.88")
    assert toolkits.find_nvcc().version == "13.0.88", "better than none"
    _system(bare_machine, monkeypatch)
    assert toolkits.find_nvcc().version == expected


def test_newest_wheel_and_newest_system_toolkit_come_first(bare_machine: Path) -> None:
    fakes.toolkit(bare_machine / "usr-local" / "cuda-9.2", "9.2.148")
    fakes.toolkit(bare_machine / "usr-local" / "cuda-12.9", "12.9.41")
    fakes.toolkit(bare_machine / "usr-local" / "cuda-13.0", "13.0.88")
    assert toolkits.find_nvcc().version == "13.0.88"
    for name, version in (("cu13", "13.1.1"), ("cu14", "14.0.1")):
        fakes.toolkit(bare_machine / "site-packages" / "nvidia" / name, version)
    importlib.invalidate_caches()
    assert toolkits.find_nvcc().version == "14.0.1"


def test_wheels_are_found_beside_those_of_cuda_12_in_another_folder(
    bare_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an environment over the system's PyTorch: CUDA 12's wheels make `nvidia` a package."""
    system = bare_machine / "dist-packages"
    fakes.file(system / "nvidia" / "__init__.py")
    monkeypatch.setattr(sys, "path", [*sys.path, str(system)])
    fakes.toolkit(bare_machine / "site-packages" / "nvidia" / "cu13", "13.1.1")
    importlib.invalidate_caches()
    assert toolkits.find_nvcc().where_found == "PyPI wheel"


def test_the_toolkit_behind_a_shell_script_on_path_is_the_real_root(bare_machine: Path) -> None:
    real = fakes.toolkit(bare_machine / "opt" / "cuda")
    fakes.wrapper(bare_machine / "bin" / "nvcc", real)
    tool = toolkits.find_nvcc()
    assert (tool.ok, tool.path, tool.root) == (True, real, bare_machine / "opt" / "cuda")
    assert nvcc.cudart_folder(tool) == bare_machine / "opt" / "cuda" / "lib"


@pytest.mark.parametrize("named", ["usr", "usr/lib/nvidia-cuda-toolkit", ""])
def test_the_toolkit_of_debian_and_ubuntu(
    named: str, bare_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its nvcc.profile has no TOP, and its parts are where the system keeps those of all."""
    usr = bare_machine / "usr"
    on_path = fakes.debian_toolkit(usr)
    if named:
        monkeypatch.setenv("CUDA_HOME", str(bare_machine / named))
    else:
        monkeypatch.setenv("PATH", str(on_path.parent), prepend=":")
    tool = toolkits.find_nvcc()
    assert (tool.ok, tool.version, tool.reason) == (True, "12.4.131", "")
    assert tool.root == usr / "lib" / "nvidia-cuda-toolkit"
    assert nvcc.cudart_folder(tool) == usr / "lib" / "x86_64-linux-gnu"
    assert nvcc.include_folders(tool) == [usr / "include"]
    (usr / "include" / "cuda" / "std" / "version").unlink()
    assert "lacks libcu++" in toolkits.find_nvcc().reason


def test_a_new_toolkit_behind_the_same_script_is_noticed(bare_machine: Path) -> None:
    for version in ("12.8.1", "13.0.88"):
        real = fakes.toolkit(bare_machine / version, version)
        fakes.wrapper(bare_machine / "bin" / "nvcc", real)
        assert toolkits.find_nvcc().version == version


def test_ptxas_has_threads_where_that_was_tried(bare_machine: Path) -> None:
    for version, threads in (("12.9.86", False), ("13.0.88", True), ("14.1.5", True)):
        fakes.wrapper(bare_machine / "bin" / "nvcc", fakes.toolkit(bare_machine / version, version))
        flags = nvcc.local_flags(toolkits.find_nvcc(), toolkits.find_host_compiler())
        assert any("split-compile" in flag for flag in flags) == threads, version


def test_a_cuda_home_without_nvcc_is_passed_over_and_told(
    bare_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clusters set CUDA_HOME to folders that hold only the runtime: no reason for a job not to
    start."""
    monkeypatch.setenv("CUDA_HOME", str(bare_machine / "runtime-only"))
    _system(bare_machine, monkeypatch)
    tool = toolkits.find_nvcc()
    assert tool.ok
    assert tool.passed_over == (f"CUDA_HOME: there is no {bare_machine}/runtime-only/bin/nvcc",)


MISSING_PARTS = {
    "nvvm/bin/cicc": "nvidia-nvvm",
    "include/cuda_runtime_api.h": "nvidia-cuda-runtime",
    "include/crt/host_config.h": "nvidia-cuda-crt",
    "lib/libcudart_static.a": "static CUDA runtime",
    "include/cccl/cuda/std/version": "nvidia-cuda-cccl",
}


@pytest.mark.parametrize("part", MISSING_PARTS)
def test_a_toolkit_with_a_part_missing_is_unfit(part: str, bare_machine: Path) -> None:
    fakes.toolkit(bare_machine / "usr-local" / "cuda")
    (bare_machine / "usr-local" / "cuda" / part).unlink()
    tool = toolkits.find_nvcc()
    assert not tool.ok
    assert MISSING_PARTS[part] in tool.reason
    assert tool.remedy


def test_mixed_versions_are_unfit(bare_machine: Path) -> None:
    root = bare_machine / "site-packages" / "nvidia" / "cu13"
    fakes.toolkit(root, "13.0.88")
    fakes.file(root / "include" / "cuda_runtime_api.h", "#define CUDART_VERSION  13020\n")
    tool = toolkits.find_nvcc()
    assert not tool.ok
    assert "nvcc is of CUDA 13.0.88 but the headers" in tool.reason
    assert "13.2" in tool.reason


def test_an_unfit_toolkit_does_not_hide_a_fit_one(
    bare_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes.program(bare_machine / "bin" / "nvcc", "#!/bin/sh\necho broken >&2\nexit 3\n")
    _system(bare_machine, monkeypatch)
    tool = toolkits.find_nvcc()
    assert tool.ok
    assert tool.version == "12.6.1"
    assert len(tool.passed_over) == 1
    assert "ended with 3: broken" in tool.passed_over[0]


def test_a_mended_nvcc_is_believed_again(bare_machine: Path) -> None:
    """A failure is never remembered: what mends it need not touch the program itself."""
    fakes.toolkit(bare_machine / "usr-local" / "cuda")
    cicc = bare_machine / "usr-local" / "cuda" / "nvvm" / "bin" / "cicc"
    cicc.unlink()
    assert not toolkits.find_nvcc().ok
    cicc.touch()
    assert toolkits.find_nvcc().ok


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("#!/bin/sh\nexit 0\n", "does not tell its version"),
        ("not a program\n", "Exec format error"),
        ("#!/no/such/interpreter\n", "cannot be run"),
    ],
)
def test_an_nvcc_that_is_none(text: str, says: str, bare_machine: Path) -> None:
    fakes.program(bare_machine / "bin" / "nvcc", text)
    tool = toolkits.find_nvcc()
    assert not tool.ok
    assert says in tool.reason
    assert tool.remedy


def test_an_old_cuda_is_refused_with_the_oldest_that_serves(bare_machine: Path) -> None:
    fakes.toolkit(bare_machine / "usr-local" / "cuda", "10.2.89")
    tool = toolkits.find_nvcc()
    assert not tool.ok
    assert "10.2.89" in tool.reason
    assert "11.8" in tool.reason


def test_targets_hold_the_suffixed_names_that_nvcc_does_not_list(bare_machine: Path) -> None:
    fakes.toolkit(bare_machine / "usr-local" / "cuda", "13.0.88", ("75", "90", "120"))
    real = nvcc_targets.targets(toolkits.find_nvcc()).real
    assert set(real) == {"sm_75", "sm_90", "sm_120", "sm_90a", "sm_120a", "sm_120f"}
    fakes.toolkit(bare_machine / "usr-local" / "cuda", "11.8.89", ("70", "90"))
    old = nvcc_targets.targets(toolkits.find_nvcc())
    assert old.real == ("sm_70", "sm_90")
    assert old.virtual == ("compute_70", "compute_90")
    fakes.toolkit(bare_machine / "usr-local" / "cuda", "12.0.140", ("70", "90"))
    assert nvcc_targets.targets(toolkits.find_nvcc()).real == ("sm_70", "sm_90")
    fakes.toolkit(bare_machine / "usr-local" / "cuda", "12.1.105", ("70", "90"))
    assert nvcc_targets.targets(toolkits.find_nvcc()).real == ("sm_70", "sm_90", "sm_90a")


def test_no_nvcc_has_no_targets() -> None:
    assert nvcc_targets.targets(toolkits.find_nvcc()).real == ()


NINJA = "#!/bin/sh\necho {version}\n"


def test_no_ninja_says_so(monkeypatch: pytest.MonkeyPatch, bare_machine: Path) -> None:
    tool = ninja.find_ninja()
    assert (tool.ok, tool.reason, tool.remedy) == (
        False,
        "ninja was not found",
        "pip install ninja",
    )


@pytest.mark.parametrize(
    "place", ["site-packages/ninja/data/bin/ninja", "bin/ninja", "site-packages/bin/ninja"]
)
def test_the_packages_ninja_comes_before_path(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = tmp_path / "venv"
    site = environment / "lib" / "python3.11" / "site-packages"
    fakes.file(site / "ninja" / "__init__.py", "raise RuntimeError('must not be imported')\n")
    path = (
        environment / place
        if place.startswith("bin")
        else environment / "lib" / "python3.11" / place
    )
    fakes.program(path, NINJA.format(version="1.13.2.git"))
    fakes.program(tmp_path / "bin" / "ninja", NINJA.format(version="1.10.0"))
    monkeypatch.setattr(sys, "path", fakes.import_path(site))
    tool = ninja.find_ninja()
    assert (tool.ok, tool.where_found, tool.version, tool.path) == (
        True,
        "PyPI package",
        "1.13.2",
        path,
    )
    shutil.rmtree(site / "ninja")
    assert ninja.find_ninja().where_found == "PATH"


def test_fedoras_name_for_ninja(bare_machine: Path) -> None:
    fakes.program(bare_machine / "bin" / "ninja-build", NINJA.format(version="1.11.1"))
    assert ninja.find_ninja().version == "1.11.1"


def test_command_exists(bare_machine: Path) -> None:
    fakes.program(bare_machine / "bin" / "something", "#!/bin/sh\n")
    fakes.file(bare_machine / "bin" / "not-executable")
    assert command_exists("something")
    assert command_exists("nothing|something")
    assert not command_exists("nothing")
    assert not command_exists("not-executable")


def test_an_empty_part_of_path_is_not_the_current_folder(
    bare_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that lies beside a user's data is not run because PATH ends with a colon."""
    fakes.program(bare_machine / "elsewhere" / "something", "#!/bin/sh\n")
    monkeypatch.chdir(bare_machine / "elsewhere")
    for path in (f"{bare_machine}/bin:", f":{bare_machine}/bin", "::"):
        monkeypatch.setenv("PATH", path)
        assert not command_exists("something"), path


def test_a_relative_folder_on_path_gives_an_absolute_program(
    bare_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compilers run in another folder than the caller's."""
    fakes.program(bare_machine / "bin" / "ninja", NINJA.format(version="1.12.0"))
    monkeypatch.chdir(bare_machine)
    monkeypatch.setenv("PATH", "bin")
    assert ninja.find_ninja().path == bare_machine / "bin" / "ninja"


def test_what_the_dynamic_linker_says_is_no_answer(
    bare_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clusters set LD_PRELOAD, also in containers that lack the library: every program says so."""
    fakes.program(bare_machine / "bin" / "ninja", NINJA.format(version="1.12.0"))
    fakes.toolkit(bare_machine / "toolkit")
    monkeypatch.setenv("CUDA_HOME", str(bare_machine / "toolkit"))
    monkeypatch.setenv("LD_PRELOAD", "/opt/xalt/2.10/libxalt_init.so")
    found, compiler = ninja.find_ninja(), toolkits.find_nvcc()
    assert (found.ok, found.version, found.identity) == (True, "1.12.0", "1.12.0")
    assert compiler.ok and compiler.identity.startswith("nvcc: NVIDIA")
    assert "xalt" not in compiler.identity
    failed = tool.run(["/bin/sh", "-c", "echo cannot find -lm >&2; exit 1"])
    assert failed.problem == "/bin/sh ended with 1: cannot find -lm"


def test_programs_get_a_folder_for_temporary_files_that_exists(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Python and gcc do without the one in TMPDIR, nvcc does not."""
    monkeypatch.setenv("TMPDIR", "/there/is/none")
    monkeypatch.setattr(tempfile, "tempdir", None)  # Python's answer is of its first question
    for folder, expected in ((None, tempfile.gettempdir()), (str(tmp_path), ".")):
        said = tool.run(["/bin/sh", "-c", "echo $TMPDIR"], cwd=folder).output
        assert said.strip() == expected
    assert smoke._UNANSWERED.search("nvcc fatal   : Could not open output file '/none/a.ii'")
