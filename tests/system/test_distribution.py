"""What the source distribution and a wheel hold, and where an editable install can be used from."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from . import trees


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A clone under its own name, as `git clone` makes it."""
    return trees.clone(tmp_path_factory.mktemp("home") / "deepspeed4science")


def test_the_source_distribution_is_the_repository(tree, tmp_path):
    """Its README speaks of scripts/demo and scripts/test: they are there, and can be run."""
    made = trees.backend(f"build_sdist({str(tmp_path)!r})", tree)
    assert made.returncode == 0, made.stderr
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        members = {one.name.partition("/")[2]: one for one in archive.getmembers()}
    assert [n for n in trees.tracked() if n not in members and not n.startswith(".")] == []
    assert all(members[f"scripts/{name}"].mode & 0o111 for name in ("demo", "test", "setup-venv"))


def test_a_wheel_holds_the_headers_once(tree, tmp_path):
    """As data of the package, and none that an earlier build has left behind."""
    package = tree / "build" / "lib" / "deepspeed4science"
    for stale in (package / "csrc" / "removed.h", package / "renamed_since.py"):
        stale.parent.mkdir(parents=True, exist_ok=True)
        stale.touch()
    made = trees.backend(f"build_wheel({str(tmp_path)!r})", tree)
    assert made.returncode == 0, made.stderr
    names = zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()
    held = {name for name in names if "csrc/" in name}
    sources = [name for name in trees.tracked() if name.startswith("csrc/")]
    assert held == {f"deepspeed4science/{name}" for name in sources}
    assert "deepspeed4science/renamed_since.py" not in names
    top = {name.partition("/")[0] for name in names}
    assert top - {"deepspeed4science", "op_builder"} == {"deepspeed4science-0.1.0.dist-info"}


def test_setuptools_that_is_too_old(tmp_path):
    """Without build isolation, that of the environment is used: Python 3.11 puts 65 into a venv."""
    (tmp_path / "setuptools.py").write_text('__version__ = "65.5.0"\n')
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); exec(open('setup.py').read())"
    done = subprocess.run(
        [sys.executable, "-c", f"__file__ = 'setup.py'; {script}"],
        cwd=trees.REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "needs setuptools 77 or newer to be built; this is 65.5.0" in done.stderr


def test_an_editable_install_from_the_folder_above(tree, tmp_path):
    """There, Python sees a folder of the package's name before it asks anybody else."""
    options = ("--no-deps", "--no-build-isolation", "--prefix", str(tmp_path))
    done = trees.pip("install", *options, "--editable", str(tree), home=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (packages,) = tmp_path.glob("lib*/python*/site-packages")
    script = f"""
import site
site.addsitedir({str(packages)!r})
import deepspeed4science
from op_builder import paths
print(deepspeed4science.__file__)
print(deepspeed4science.__version__, paths.csrc_root())
"""
    for folder in (tree.parent, tree, Path("/")):
        seen = subprocess.run(
            [sys.executable, "-c", script],
            cwd=folder,
            env=trees.environment(tmp_path),
            capture_output=True,
            text=True,
        )
        assert seen.returncode == 0, f"{folder}: {seen.stderr}"
        file, rest = seen.stdout.splitlines()
        assert file == str(tree / "deepspeed4science" / "__init__.py")
        assert rest == f"0.1.0 {tree}/csrc/deepspeed4science/evoformer_attn"
