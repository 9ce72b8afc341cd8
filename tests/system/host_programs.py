"""Compiles the programs of tests/cpp/host that need nothing but a host compiler."""

import subprocess
from pathlib import Path

import pytest

from op_builder import paths
from op_builder.toolchain import host_compiler

HOST = Path(__file__).resolve().parents[1] / "cpp" / "host"


def built(folder, name, *flags):
    """Path of `name`.cpp's program in `folder`; skips where there is no compiler."""
    host = host_compiler.find_host_compiler()
    if not host.ok:
        pytest.skip(f"{host.reason}; {host.remedy}")
    command = [host.path, "-std=c++17", *flags, f"-I{paths.csrc_root()}", HOST / f"{name}.cpp"]
    words = [str(word) for word in (*command, "-o", folder / name)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / name
