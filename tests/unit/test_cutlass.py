"""Finding the CUTLASS headers: the order of places, versions, and every way of not being there."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from op_builder.errors import ToolchainError
from op_builder.toolchain import cutlass
from tests import fakes


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUTLASS_PATH", raising=False)
    monkeypatch.delenv("CONDA_PREFIX", raising=False)
    monkeypatch.setattr(cutlass, "SYSTEM_INCLUDES", (tmp_path / "local", tmp_path / "usr"))
    monkeypatch.setattr(sys, "path", fakes.import_path(tmp_path / "site-packages"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))


def package(root: Path, version: str = "4.2.0") -> Path:
    library = root / "site-packages" / "cutlass_library"
    fakes.file(library / "__init__.py", "raise RuntimeError('must not be imported')\n")
    importlib.invalidate_caches()
    return fakes.cutlass(library / "source" / "include", version)


def test_nothing_there() -> None:
    found = cutlass.find_cutlass()
    assert not found.ok
    assert "not found" in found.reason
    assert "pip install --no-deps nvidia-cutlass" in found.remedy
    with pytest.raises(ToolchainError, match="CUTLASS: the CUTLASS headers were not found; pip"):
        found.require()


@pytest.mark.parametrize("below", ["", "include"], ids=["include folder", "checkout"])
def test_cutlass_path_wins(below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path)
    include = fakes.cutlass(tmp_path / "mine" / below, "4.3.1")
    monkeypatch.setenv("CUTLASS_PATH", str(tmp_path / "mine"))
    found = cutlass.find_cutlass()
    assert (found.ok, found.version, found.where_found) == (True, "4.3.1", "CUTLASS_PATH")
    assert found.include_dir == include


@pytest.mark.parametrize("has_package", [True, False])
@pytest.mark.parametrize("version", ["3.6.0", None], ids=["old", "no headers"])
def test_an_unfit_cutlass_path_gives_way_to_the_package(
    version: str | None, has_package: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed's users have set it for DeepSpeed, to 3.5 or 3.6, or to any folder."""
    reason = f"CUTLASS_PATH={tmp_path}/named holds neither"
    if version:
        include = fakes.cutlass(tmp_path / "named" / "include", version)
        reason = f"CUTLASS in {include} is {version}; 4.2.0 is the oldest that serves"
    monkeypatch.setenv("CUTLASS_PATH", str(tmp_path / "named"))
    if has_package:
        package(tmp_path)
    found = cutlass.find_cutlass()
    assert found.ok == has_package
    assert found.passed_over[0].startswith(f"CUTLASS_PATH: {reason}")
    if has_package:
        assert found.where_found == "nvidia-cutlass package"
    else:
        assert found.reason.startswith(reason)
        assert found.remedy.startswith("pip install --no-deps nvidia-cutlass==")


def test_a_module_without_a_spec_is_no_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cutlass_library", ModuleType("cutlass_library"))
    fakes.cutlass(tmp_path / "usr", "4.2.3")
    assert cutlass.find_cutlass().version == "4.2.3"


def test_order_package_conda_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.cutlass(tmp_path / "usr", "4.2.3")
    assert cutlass.find_cutlass().version == "4.2.3"
    fakes.cutlass(tmp_path / "local", "4.2.2")
    assert cutlass.find_cutlass().version == "4.2.2"
    fakes.cutlass(tmp_path / "prefix" / "include", "4.3.0")
    assert cutlass.find_cutlass().version == "4.3.0"  # of an environment that is not activated
    fakes.cutlass(tmp_path / "conda" / "include", "4.2.1")
    monkeypatch.setenv("CONDA_PREFIX", str(tmp_path / "conda"))
    assert cutlass.find_cutlass().version == "4.2.1"
    package(tmp_path)
    found = cutlass.find_cutlass()
    assert (found.version, found.where_found) == ("4.2.0", "nvidia-cutlass package")


def test_an_old_one_is_refused_with_the_oldest_that_serves(tmp_path: Path) -> None:
    fakes.cutlass(tmp_path / "usr", "2.11.0")
    found = cutlass.find_cutlass()
    assert not found.ok
    assert found.version == "2.11.0"
    assert "2.11.0" in found.reason
    assert "4.2.0 is the oldest" in found.reason
    assert found.remedy


def test_an_old_one_does_not_hide_a_good_one(tmp_path: Path) -> None:
    fakes.cutlass(tmp_path / "local", "3.1.0")
    fakes.cutlass(tmp_path / "usr", "4.2.0")
    found = cutlass.find_cutlass()
    assert found.ok
    assert found.version == "4.2.0"
    assert len(found.passed_over) == 1
    assert "3.1.0" in found.passed_over[0]


def test_unreadable_versions_and_missing_cute(tmp_path: Path) -> None:
    fakes.file(tmp_path / "usr" / "cutlass" / "version.h", "// nothing\n")
    assert "does not tell its version" in cutlass.find_cutlass().reason
    fakes.cutlass(tmp_path / "usr")
    (tmp_path / "usr" / "cute" / "tensor.hpp").unlink()
    assert "lacks CuTe" in cutlass.find_cutlass().reason
