"""Where things are: checkout, wheel, cache folders."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from op_builder import paths
from op_builder.errors import BuildError

REPOSITORY = Path(__file__).parents[2]


def test_sources_in_a_checkout():
    assert paths.csrc_root() == REPOSITORY / "csrc" / "deepspeed4science" / "evoformer_attn"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """op_builder as in site-packages, with nothing beside it yet."""
    monkeypatch.setattr(paths, "_HERE", tmp_path / "site-packages" / "op_builder")
    return tmp_path / "site-packages"


def test_sources_in_a_wheel(installed):
    root = installed / "deepspeed4science" / "csrc" / "deepspeed4science" / "evoformer_attn"
    root.mkdir(parents=True)
    (root / "params.h").touch()
    assert paths.csrc_root() == root
    assert paths.prebuilt_root() == installed / "deepspeed4science" / "prebuilt"


def test_somebody_elses_csrc_is_not_ours(installed):
    """site-packages may hold a folder of that name from another package."""
    (installed / "csrc" / "deepspeed4science" / "evoformer_attn").mkdir(parents=True)
    with pytest.raises(BuildError, match=r"expected params\.h in .* reinstall"):
        paths.csrc_root()


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "/home/me/.cache/deepspeed4science"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/deepspeed4science"),
        ({"XDG_CACHE_HOME": "/xdg", "TORCH_EXTENSIONS_DIR": "/ext"}, "/ext/deepspeed4science"),
        ({"TORCH_EXTENSIONS_DIR": "/ext", "DS4S_CACHE_DIR": "~/kernels"}, "/home/me/kernels"),
    ],
    ids=["home", "xdg", "torch", "own"],
)
def test_cache_root(monkeypatch, variables, expected):
    for name in ("XDG_CACHE_HOME", "TORCH_EXTENSIONS_DIR", "DS4S_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert paths.cache_root() == Path(expected)


def test_relative_cache_does_not_follow_the_working_directory_later(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS4S_CACHE_DIR", "kernels")
    assert paths.cache_root() == tmp_path / "kernels"


def test_no_home_at_all(monkeypatch):
    """A container's nameless user: no folder can be named, so none is written."""
    for name in ("XDG_CACHE_HOME", "TORCH_EXTENSIONS_DIR", "DS4S_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    with pytest.raises(NotADirectoryError):
        paths.cache_root().mkdir(parents=True)


def test_installed_package_finds_its_sources(tmp_path):
    """The same files laid out as a wheel does, in a process of their own."""
    shutil.copytree(REPOSITORY / "op_builder", tmp_path / "op_builder")
    shutil.copytree(REPOSITORY / "csrc", tmp_path / "deepspeed4science" / "csrc")
    script = (
        "from op_builder import paths; assert paths.csrc_root().is_relative_to(paths._HERE.parent)"
    )
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True)
