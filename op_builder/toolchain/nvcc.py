"""nvcc and its toolkit: place, version and architectures, or why there is none.

Places, in the order that decides between equal versions (toolkits.py chooses):

1. `CUDA_HOME`, then `CUDA_PATH`
2. the PyPI wheels (`nvidia/cu13/bin/nvcc` and the like), found without importing them
3. the conda environment: `CONDA_PREFIX`, or the one this Python lives in
4. `PATH`; an nvcc there may be a shell script, whose toolkit `nvcc --dryrun` prints
5. `/usr/local/cuda`, then `/usr/local/cuda-*`, newest first
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .. import env, paths
from . import gpu, memo
from .host_compiler import find_host_compiler
from .nvcc_wheels import install
from .tool import Candidate, Tool, UnfitError, conda_prefixes, numbers, on_path, run

SYSTEM_PREFIX = Path("/usr/local")
# The package of Debian and Ubuntu has its programs in /usr/lib/nvidia-cuda-toolkit/bin, its headers
# in /usr/include and its libraries in /usr/lib/x86_64-linux-gnu.
DEBIAN = "nvidia-cuda-toolkit"
OLDEST = (11, 8)  # the first with sm_90

# The flags of every kernel. No -use_fast_math: masks are infinities, and the exponential is our
# own. Hidden symbols keep many units apart in one process. Warning 20014 is off: our device
# functions call CUTLASS's host-device helpers on purpose.
HOST_FLAGS = ("-fPIC", "-fvisibility=hidden")
FLAGS = (
    # -O is for host code, which only plans and launches: a unit compiles up to a second sooner than
    # with -O3. Device code is optimized fully anyway.
    *("-std=c++17", "-O1", "--expt-relaxed-constexpr", "-diag-suppress=20014"),
    *(word for flag in HOST_FLAGS for word in ("-Xcompiler", flag)),
)
# ptxas compiles a unit's kernels on so many threads, from this release on, which was tried: the
# same machine code, two seconds sooner where a unit has a dozen kernels.
PTXAS_THREADS, FIRST_WITH_PTXAS_THREADS = 4, (13, 0)
# The static runtime: one library serves every torch, and needs no libcudart.so.
LINK_FLAGS = ("-cudart", "static", "-Xlinker", "--exclude-libs=ALL")


@dataclass(frozen=True)
class Survey:
    """All toolkits of this machine, or only the one that the user named, if it is fit."""

    fit: tuple[Tool, ...]  # best first
    unfit: tuple[Tool, ...]
    passed_over: tuple[
        str, ...
    ]  # places that somebody named or that hold unfit ones, each with why


def survey() -> Survey:
    """The toolkits of this machine, judged by their files and version messages."""
    fit: dict[Path | None, Tool] = {}
    unfit: list[Tool] = []
    passed_over: list[str] = []
    for candidate in _candidates():
        if not os.path.isfile(candidate.path):
            if candidate.named:
                passed_over.append(f"{candidate.where}: there is no {candidate.path}")
            continue
        tool = _examine(candidate)
        if not tool.ok:
            unfit.append(tool)
            passed_over.append(f"{candidate.where}: {tool.reason}")
        elif candidate.named:
            return Survey((tool,), tuple(unfit), tuple(passed_over))
        else:
            fit.setdefault(tool.root, tool)
    return Survey(_best_first(fit.values()), tuple(unfit), tuple(passed_over))


def _best_first(tools: Iterable[Tool]) -> tuple[Tool, ...]:
    """Newest first; after all others those of a CUDA version that the driver does not serve."""
    newest = sorted(tools, key=lambda tool: numbers(tool.version), reverse=True)
    if len({two(tool.version)[0] for tool in newest}) < 2:
        return tuple(newest)
    served = gpu.detect().driver[0] or sys.maxsize  # the query takes milliseconds
    return tuple(sorted(newest, key=lambda tool: two(tool.version)[0] > served))


def cudart_folder(nvcc: Tool) -> Path | None:
    """The folder of libcudart_static.a, which every kernel links; None when it is missing."""
    return _first(_library_folders(nvcc.root), "libcudart_static.a")


def local_flags(nvcc: Tool, host: Tool) -> tuple[str, ...]:
    """Flags that change no machine code. They name folders of this machine, the host compiler and
    the runtime's libraries, which the wheels of CUDA 13.0 and 13.1 have in lib, while their nvcc
    searches lib64; and threads.
    """
    folder = cudart_folder(nvcc)
    quote = '"' if "," in str(folder) else ""  # nvcc splits other values at commas
    threads = two(nvcc.version) >= FIRST_WITH_PTXAS_THREADS
    return (
        *("-ccbin", str(host.path)),
        *([f"-L{quote}{folder}{quote}"] if folder else []),
        *([f"-Xptxas=--split-compile={PTXAS_THREADS}"] if threads else []),
    )


def include_folders(nvcc: Tool) -> list[Path]:
    """The folders of its headers: conda and the system's packages keep them below `targets`."""
    return _include_folders(nvcc.root)


def _candidates() -> Iterable[Candidate]:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if folder := env.text(variable):
            yield Candidate(variable, paths.absolute(folder) / "bin" / "nvcc", named=True)
    for folder_ in _wheel_folders():
        yield Candidate("PyPI wheel", folder_ / "bin" / "nvcc")
    for prefix in conda_prefixes():
        yield Candidate("conda environment", prefix / "bin" / "nvcc")
    yield from on_path("nvcc")
    versions = _newest_first(paths.matching(SYSTEM_PREFIX, "cuda-*"))
    for folder_ in (SYSTEM_PREFIX / "cuda", *versions):
        yield Candidate(str(folder_), folder_ / "bin" / "nvcc")


def _wheel_folders() -> Iterable[Path]:
    """Those of all folders for packages. `nvidia` is not looked up as a package: an `__init__.py`
    of CUDA 12's wheels in one of the folders would hide the wheels in the others.
    """
    for place in dict.fromkeys(sys.path):
        yield from _newest_first(paths.matching(paths.absolute(place) / "nvidia", "cu[0-9]*"))


def _newest_first(folders: Iterable[Path]) -> list[Path]:
    return sorted(folders, key=lambda folder: numbers(folder.name), reverse=True)


def two(version: str) -> tuple[int, int]:
    found = numbers(version)
    return (found[0], found[1]) if len(found) > 1 else (0, 0)


def _examine(candidate: Candidate) -> Tool:
    path = candidate.path
    try:
        if _is_script(path):
            path = _behind(path, memo.file_stamp(path))
        stamp = memo.file_stamp(path)
        said = memo.known("nvcc-1", stamp) or _ask(str(path))
        if said["top"]:  # not remembered without it: the machine lacks something then
            memo.remember("nvcc-1", stamp, lambda: said)
        version: str = said["version"]
        if two(version) < OLDEST:
            oldest = ".".join(map(str, OLDEST))
            raise UnfitError(f"{path} is of CUDA {version}; {oldest} is the oldest that serves")
        root = Path(os.path.realpath(said["top"] or path.parent.parent))
        _require_whole(root, version)
    except UnfitError as unfit:
        return Tool("nvcc", path, where_found=candidate.where, reason=str(unfit), remedy=install())
    identity: str = said["identity"]
    return Tool("nvcc", path, version, candidate.where, ok=True, identity=identity, root=root)


def _is_script(path: Path) -> bool:
    try:
        with path.open("rb") as stream:
            return stream.read(2) == b"#!"
    except OSError:
        return False


def _ask(path: str) -> dict[str, str]:
    spoken = run([path, "--version"])
    if spoken.problem:
        raise UnfitError(spoken.problem)
    match = re.search(r"release \d+\.\d+, V(\d+\.\d+\.\d+)", spoken.answer)
    if match is None:
        raise UnfitError(f"{path} does not tell its version")
    return {
        "version": match[1],
        "identity": " ".join(spoken.answer.split()),
        "top": _top(path),
    }


def _top(path: str) -> str:
    """The toolkit's folder according to nvcc.profile, else above nvcc's own; empty where neither is
    told.
    """
    # /dev/null is a source that every machine has. Even a dry run starts the host compiler, which
    # need not be the gcc on PATH that nvcc would choose.
    host = find_host_compiler()
    ccbin = ["-ccbin", str(host.path)] if host.ok else []
    rehearsed = run([path, "--dryrun", *ccbin, "-c", "-x", "cu", os.devnull]).output
    told: dict[str, str] = dict(re.findall(r"^#\$ (TOP|_HERE_)=(.+)$", rehearsed, re.MULTILINE))
    here = told.get("_HERE_", "").strip()
    return told.get("TOP", "").strip() or os.path.dirname(here)  # Debian's profile has no TOP


@functools.lru_cache(maxsize=16)
def _behind(script: Path, _stamp: str) -> Path:
    """The nvcc that a script runs, found once in each process and never kept on disk: the script's
    own stamp does not change with the nvcc behind it.
    """
    top = _top(str(script))
    real = Path(os.path.realpath(top)) / "bin" / "nvcc"
    return real if top and os.path.isfile(real) else script


def _require_whole(root: Path, version: str) -> None:
    """Raises UnfitError where a part of the toolkit is missing or has another version."""
    include, libraries = _include_folders(root), _library_folders(root)
    cicc = "bin/cicc" if root.name == DEBIAN else "nvvm/bin/cicc"
    parts = {
        "the device compiler (nvidia-nvvm)": _first([root], cicc),
        "the CUDA runtime headers (nvidia-cuda-runtime)": _first(include, "cuda_runtime_api.h"),
        "the compiler's own headers (nvidia-cuda-crt)": _first(include, "crt/host_config.h"),
        "the static CUDA runtime (nvidia-cuda-runtime)": _first(libraries, "libcudart_static.a"),
        "libcu++ (nvidia-cuda-cccl)": _first(include, "cccl/cuda/std/version")
        or _first(include, "cuda/std/version"),
    }
    for part, place in parts.items():
        if place is None:
            raise UnfitError(f"the toolkit in {root} lacks {part}")
    headers = _runtime_version(include)
    if headers and headers != two(version):
        of = ".".join(map(str, headers))
        raise UnfitError(
            f"nvcc is of CUDA {version} but the headers in {root} are of {of}: mixed versions"
        )


def _runtime_version(include: Iterable[Path]) -> tuple[int, int] | None:
    folder = _first(include, "cuda_runtime_api.h")
    if folder is None:
        return None
    try:
        with (folder / "cuda_runtime_api.h").open(errors="replace") as stream:
            text = stream.read(1 << 16)  # of 600 KB; the version is in line 139
    except OSError:
        return None
    match = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", text)
    return (int(match[1]) // 1000, int(match[1]) % 1000 // 10) if match else None


def _include_folders(root: Path | None) -> list[Path]:
    if root is not None and root.name == DEBIAN:
        return [root.parents[1] / "include"]
    return _roots(root, "include")


def _library_folders(root: Path | None) -> list[Path]:
    if root is not None and root.name == DEBIAN:
        return paths.matching(root.parent, "*-linux-gnu")
    return _roots(root, "lib64", "lib")


def _roots(root: Path | None, *folders: str) -> list[Path]:
    if root is None:
        return []
    targets_ = paths.matching(root / "targets", "*")
    return [base / folder for base in (root, *targets_) for folder in folders]


def _first(folders: Iterable[Path], file: str) -> Path | None:
    return next((folder for folder in folders if os.path.isfile(folder / file)), None)
