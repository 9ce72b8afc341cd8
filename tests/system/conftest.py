"""Folders for the loader's tests: an ordinary one, and file systems that refuse to be written.
nvcc, and the folders of headers, for tests that compile CUDA code.
"""

import os
import subprocess

import pytest

from op_builder import paths
from op_builder.toolchain import cutlass, toolkits

from .toys import Workshop, kill_spawned


@pytest.fixture
def workshop(tmp_path, request):
    """A workshop of C++ toys, unless the test names another language."""
    yield Workshop.make(tmp_path / "workshop", getattr(request, "param", "C++"))
    kill_spawned()


@pytest.fixture
def mount_tmpfs(tmp_path):
    """A function that mounts a small file system of its own; needs the right to mount."""
    mounted = []

    def mount(folder, size):
        folder.mkdir(parents=True, exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=755", "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"a file system of our own cannot be mounted here: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def make_readonly(mount_tmpfs):
    """A function that makes a filled folder read-only, for root as well."""
    changed = []

    def make(folder):
        if os.geteuid() != 0:
            for path in (folder, *folder.rglob("*")):
                if path.is_dir():
                    path.chmod(0o555)
                    changed.append(path)
            return
        bind = ["mount", "--bind", str(folder), str(folder)]
        done = subprocess.run(bind, capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"nothing can be mounted read-only here: {done.stderr.strip()}")
        changed.append(folder)
        subprocess.run(["mount", "-o", "remount,ro,bind", str(folder)], check=True)

    yield make
    for path in changed:
        if os.geteuid() != 0:
            path.chmod(0o755)
        else:
            subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.fixture(scope="module")
def nvcc():
    tool = toolkits.find_nvcc()
    if not tool.ok:
        pytest.skip(f"nvcc: {tool.reason}; {tool.remedy}")
    return tool


@pytest.fixture(scope="module")
def includes():
    headers = cutlass.find_cutlass()
    if not headers.ok:
        pytest.skip(f"CUTLASS: {headers.reason}; {headers.remedy}")
    return [f"-I{paths.csrc_root()}", f"-I{headers.include_dir}"]
