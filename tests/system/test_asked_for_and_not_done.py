"""An install and `build` that cannot write what was asked for say so, and end with an error."""

import os
import shutil
import subprocess
import sys

import pytest

from tests import fakes

from .toys import REPOSITORY

BUILD = ("-m", "deepspeed4science", "build", "--cpu", "--dtype", "fp32", "--quiet")
INSTALL = "from op_builder.ops import prebuild; from pathlib import Path; prebuild.build_requested"


def run(tmp_path, *arguments, without_rights=False, **changes):
    """Python in a process of its own; without rights root is as any user is."""
    own = {"HOME": str(tmp_path), "PYTHONPATH": str(REPOSITORY), "DS4S_CPU_ISA": "portable"}
    own["CXX"] = str(fakes.quick_compiler(tmp_path / "g++-quick"))
    plain = []
    if without_rights and os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("needs setpriv, to be without root's rights")
        plain = ["setpriv", "--bounding-set", "-all", "--inh-caps", "-all"]
    return subprocess.run(
        [*plain, sys.executable, *arguments],
        cwd=tmp_path,
        env=dict(os.environ) | own | {"DS4S_CACHE_DIR": str(tmp_path / "cache")} | changes,
        capture_output=True,
        text=True,
        check=False,
    )


def forbidden(folder):
    folder.mkdir()
    folder.chmod(0o555)
    return folder


def test_out_that_no_file_system_has(tmp_path):
    """Told before anything is compiled, which takes minutes for a GPU."""
    done = run(tmp_path, *BUILD, "--out", "/proc/ds4s")
    assert done.returncode == 1, done.stdout
    assert "kernels cannot be written to /proc/ds4s (" in done.stderr
    assert "was compiled" not in done.stderr
    assert "DS4S_CACHE_PATH" not in done.stdout and "DS4S_CACHE_DIR" not in done.stderr


def test_out_that_may_not_be_written(tmp_path):
    folder = forbidden(tmp_path / "out")
    done = run(tmp_path, *BUILD, "--out", str(folder / "kernels"), without_rights=True)
    assert done.returncode == 1, done.stdout
    assert f"cannot be written to {folder}/kernels (Permission denied)" in done.stderr
    assert "was compiled" not in done.stderr


def test_out_that_others_may_write(tmp_path):
    """A folder of a lab, say: told before anything is compiled, and with the remedy alone."""
    folder = tmp_path / "out"
    folder.mkdir()
    folder.chmod(0o777)
    done = run(tmp_path, *BUILD, "--out", str(folder))
    assert done.returncode == 1, done.stdout
    assert f"can be written by others (chmod go-w {folder}, or " in done.stderr
    assert "free some space" not in done.stderr
    assert list(folder.iterdir()) == []


def test_a_cache_that_may_not_be_written(tmp_path):
    """Filling it is what `build` was asked for; a first call would do with a passing copy."""
    place = {"DS4S_CACHE_DIR": str(forbidden(tmp_path / "cache"))}
    done = run(tmp_path, *BUILD, without_rights=True, **place)
    assert done.returncode == 1, done.stdout
    assert f"2 of 2 kernels could not be kept in {tmp_path}/cache: " in done.stderr


@pytest.mark.parametrize("kib", [24, 200])
def test_a_disk_that_fills_while_installing(kib, tmp_path, mount_tmpfs):
    """None or some of six kernels find room; a wheel of those would look whole."""
    folder = mount_tmpfs(tmp_path / "small", f"{kib}k")
    done = run(tmp_path, "-c", f"{INSTALL}(Path({str(folder)!r}))", DS_BUILD_EVOFORMER_ATTN_CPU="1")
    assert done.returncode != 0
    assert f"was compiled but cannot be written to {folder} (No space left" in done.stderr
    kept = [*folder.rglob("*.so")]
    assert 0 < len(kept) < 6 if kib == 200 else not kept
