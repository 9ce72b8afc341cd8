"""Where things are: checkout, wheel, cache folders."""

import os
import shutil
import subprocess
import sys
import tempfile
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


def test_sources_in_an_archive(tmp_path, monkeypatch):
    """A wheel on PYTHONPATH, a zipapp: Python imports from it, but a compiler reads no header."""
    archive = tmp_path / "deepspeed4science-0.1.0-py3-none-any.whl"
    archive.touch()
    monkeypatch.setattr(paths, "_HERE", archive / "op_builder")
    with pytest.raises(BuildError, match=rf"in the archive {archive}, .* unpack it, or install it"):
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


def test_a_cache_that_is_written_is_no_readonly_one(monkeypatch, tmp_path):
    """In these, kernels of other compilers count as well."""
    for name in ("XDG_CACHE_HOME", "TORCH_EXTENSIONS_DIR", "DS4S_CACHE_DIR", "DS4S_CACHE_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    paths.cache_root().mkdir(parents=True)
    assert paths.readonly_roots() == ()
    monkeypatch.setattr(paths, "_may_write", lambda folder: False)
    assert paths.readonly_roots() == (tmp_path / ".cache" / "deepspeed4science",)


def test_relative_cache_does_not_follow_the_working_directory_later(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS4S_CACHE_DIR", "kernels")
    assert paths.cache_root() == tmp_path / "kernels"


@pytest.fixture
def no_home(monkeypatch, tmp_path):
    """A container's nameless user, and the folder that takes the place of his cache."""
    for name in ("XDG_CACHE_HOME", "TORCH_EXTENSIONS_DIR", "DS4S_CACHE_DIR", "DS4S_CACHE_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"deepspeed4science-{os.geteuid()}"


def test_no_home_at_all(no_home):
    """A folder that lasts as long as the machine, and that nobody else can write."""
    assert paths.cache_root() == no_home
    assert no_home.stat().st_mode & 0o777 == 0o700
    assert "there is no home folder" in paths.cache_note()
    assert str(no_home) in paths.cache_note()
    assert paths.readonly_roots() == ()


def _others_may_write(folder):
    folder.mkdir()
    folder.chmod(0o777)


def _link(folder):
    folder.symlink_to(folder.parent)


def _file(folder):
    folder.touch()


def _somebody_elses(folder):
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    os.chown(folder, 12345, 12345)


@pytest.mark.parametrize("prepare", [_others_may_write, _link, _file, _somebody_elses])
def test_a_temporary_folder_that_somebody_else_prepared_is_not_used(no_home, prepare):
    """What is loaded from it would be his code: then there is no folder, and nothing is kept."""
    prepare(no_home)
    assert "compiled kernels cannot be kept: set DS4S_CACHE_DIR" in paths.cache_note()
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
