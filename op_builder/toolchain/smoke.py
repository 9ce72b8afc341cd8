"""Tests, once for each CUDA toolkit, that it compiles and links a small kernel; that takes a
second.

Wheels come in parts that pip may take from different releases: nvcc, its device compiler (nvvm),
its headers (crt, cccl) and the runtime. Each part may look sound while the whole fails, late and
with obscure messages. Also, an nvcc may refuse a host compiler that is newer than itself.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from .. import env, paths
from ..system import shortages
from . import memo
from .nvcc import FLAGS, LINK_FLAGS, cudart_folder, include_folders, local_flags
from .nvcc_wheels import wheels
from .tool import Tool, run

# Uses both sides of nvcc: the device compiler and assembler for the kernel, and nvcc's own headers
# with the host compiler for the stub that launches it.
SOURCE = """\
#include <cuda/std/version>
__global__ void smoke(float* x) { *x = exp2f(*x); }
extern "C" int run(float* x) { return smoke<<<1, 1>>>(x), cudaGetLastError(); }
"""
_COMMAND = (*FLAGS, "-shared", *LINK_FLAGS)
_PARTS = ("nvcc", "crt", "runtime")  # of nvidia-cuda-...; and nvidia-nvvm
_SMALL_DISK_BYTES = 16 << 20


@dataclass(frozen=True)
class Problem:
    reason: str
    remedy: str


class _UnprovenError(Exception):
    """The test failed for a reason that says nothing about the toolkit."""


def problem(nvcc: Tool, host: Tool, *, prove: bool) -> Problem | None:
    """Why `nvcc` cannot compile and link with `host`; None where it can, or where that is unknown.

    prove: test it if that was not done before; otherwise only earlier results are used.
    """
    if nvcc.path is None or nvcc.root is None or host.path is None:
        return None
    command = [str(nvcc.path), *_COMMAND, *local_flags(nvcc, host), "smoke.cu", "-o", "smoke.so"]
    headers = (folder / name for folder in include_folders(nvcc) for name in _HEADERS)
    runtime = (cudart_folder(nvcc) or nvcc.root) / "libcudart_static.a"
    files = (nvcc.path, *(nvcc.root / name for name in _PROGRAMS), *headers, runtime, host.path)
    stamps = [memo.file_stamp(file) for file in files]
    identities = (nvcc.identity, host.identity, env.settings_line())
    key = "\n".join((*identities, *command, SOURCE, *stamps))
    try:
        words = memo.known("nvcc-smoke-3", key)
        if words is None and prove:
            words = memo.remember("nvcc-smoke-3", key, lambda: _try(command))
    except _UnprovenError:
        return None
    return _explain(words, nvcc, host) if words else None


# A toolkit in which one of these has changed counts as another one.
_PROGRAMS = ("bin/ptxas", "bin/cudafe++", "bin/fatbinary", "nvvm/bin/cicc", "bin/cicc")
_HEADERS = ("crt/host_config.h", "crt/host_runtime.h", "cuda_runtime_api.h")


def _try(command: list[str]) -> str:
    """The compiler's message where it fails; empty where it succeeds."""
    try:
        with tempfile.TemporaryDirectory(prefix="ds4s-smoke-") as folder:
            (Path(folder) / "smoke.cu").write_text(SOURCE)
            ran = run(command, cwd=folder)
            if not ran.problem and not os.path.isfile(Path(folder) / "smoke.so"):
                return f"{command[0]} says it compiled a kernel but wrote nothing"
            full = shutil.disk_usage(folder).free < _SMALL_DISK_BYTES
    except OSError as error:
        raise _UnprovenError from error
    words = f"{ran.problem}\n{ran.output}"
    if ran.problem and (full or shortages.remedy(words) or _UNANSWERED.search(words)):
        raise _UnprovenError
    return words if ran.problem else ""


# Killed, or without a folder to write to: nothing is known of the compiler.
_UNANSWERED = re.compile(r"cannot be run|ended with -|Could not open output file")


def _explain(words: str, nvcc: Tool, host: Tool) -> Problem:
    first = words.partition("\n")[0]
    if refused := re.search(
        r"unsupported [\w ]+ version!\s*(.*?)(?:!| The nvcc flag|$)", words, re.MULTILINE
    ):
        return Problem(
            f"nvcc {nvcc.version} refuses the host compiler {host.path} {host.version}: "
            f"{refused[1].strip(' .')}",
            "set CXX to an older compiler, or CUDA_HOME to a newer toolkit",
        )
    fresh = f"{wheels()}, in a fresh environment"
    versions = _wheels(nvcc.root)
    if len({tuple(version.split(".")[:2]) for _, version in versions}) > 1:
        parts = ", ".join(f"{name} {version}" for name, version in versions)
        return Problem(f"mixed wheels, {parts}: {_meaning(words) or first}", fresh)
    if meaning := _meaning(words):
        return Problem(f"the parts of {nvcc.root} are of different versions: {meaning}", fresh)
    flags = [name for name, _ in env.settings_of_compilers() if name.startswith("NVCC_")]
    unset = f"unset {' and '.join(flags)}, or " if flags else ""
    return Problem(
        f"it cannot compile and link a small kernel: {first}",
        f"{unset}set CUDA_HOME to another toolkit, or {wheels()} in a fresh environment",
    )


def _meaning(words: str) -> str:
    """The meaning of a message by which one part complains about another of a different version."""
    if found := re.search(r"Unsupported \.version ([\d.]+); current version is '([\d.]+)'", words):
        return f"the device compiler writes PTX {found[1]}, the assembler reads up to {found[2]}"
    if found := re.search(
        r"macro \"(__cuda\w+)\" passed|\W(__cuda\w+).{1,3} was not declared", words
    ):
        return f"nvcc and its headers (crt) disagree about {found[1] or found[2]}"
    return ""


def _wheels(root: Path | None) -> list[tuple[str, str]]:
    """The wheels of a toolkit in <site-packages>/nvidia/cu13, with their versions."""
    if root is None or root.parent.name != "nvidia":
        return []
    site = root.parent.parent
    names = (*(f"nvidia_cuda_{part}" for part in _PARTS), "nvidia_nvvm")
    found = [
        (name, folder) for name in names for folder in paths.matching(site, f"{name}-*.dist-info")
    ]
    return [
        (name.replace("_", "-"), folder.name.removesuffix(".dist-info").partition("-")[2])
        for name, folder in found
    ]
