"""Compiles the programs of tests/cpp/host."""

import subprocess
from pathlib import Path

import pytest

from op_builder import paths
from op_builder.toolchain import cutlass, host_compiler, toolkits
from op_builder.toolchain.nvcc import include_folders

from .stubs import with_stubs

HOST = Path(__file__).resolve().parents[1] / "cpp" / "host"


def built(folder, name, *flags):
    """Path of `name`.cpp's program in `folder`; skips where there is no compiler."""
    host = host_compiler.find_host_compiler()
    _skip_unless(host)
    return _compiled(host, folder, name, *flags, f"-I{paths.csrc_root()}")


def built_for_a_warp(folder, name):
    """The same for device code with a warp of 32 threads (tests/cpp/host/warp), which needs the
    headers of CUDA and of CUTLASS.
    """
    host, nvcc = host_compiler.find_host_compiler(), toolkits.find_nvcc()
    headers = cutlass.find_cutlass()
    _skip_unless(host, nvcc, headers)
    cuda = include_folders(nvcc)
    folders = [headers.include_dir, *cuda, *(each / "cccl" for each in cuda)]
    flags = ["-O1", "-pthread", f"-I{with_stubs(folder / 'headers', HOST / 'warp')}"]
    flags += [word for each in folders for word in ("-isystem", each)]
    return _compiled(host, folder, name, *flags)


def _skip_unless(*parts):
    for part in parts:
        if not part.ok:
            pytest.skip(f"{part.reason}; {part.remedy}")


def _compiled(host, folder, name, *flags):
    command = [host.path, "-std=c++17", *flags, HOST / f"{name}.cpp", "-o", folder / name]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / name
