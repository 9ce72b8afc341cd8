"""Every environment variable the project reads, as data; nothing else touches `os.environ`.

Variables are never written: a change by one build would leak into the next.
A test compares docs/environment.md, and the README's six, with `VARIABLES`. An empty value counts
as unset.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from .errors import BuildError

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


@dataclass(frozen=True)
class Variable:
    name: str
    meaning: str
    default: str  # in words
    of_the_system: bool = False  # set by the system: not in the documents' table


# Variables that compilers and linkers read by themselves and that change their output.
# C_INCLUDE_PATH is for C alone.
_OF_COMPILERS = (
    ("NVCC_PREPEND_FLAGS", "flags nvcc reads by itself"),
    ("NVCC_APPEND_FLAGS", "flags nvcc reads by itself"),
    ("CPATH", "folders of headers that compilers search before their own"),
    ("CPLUS_INCLUDE_PATH", "folders of headers that compilers search before their own"),
    ("LIBRARY_PATH", "folders of libraries that compilers link"),
    ("LD_RUN_PATH", "folders that the linker writes into libraries"),
    ("COMPILER_PATH", "folders of the compiler's own programs"),
    ("GCC_EXEC_PREFIX", "folder of the compiler's own programs"),
)

VARIABLES: tuple[Variable, ...] = (
    Variable(
        "CUTLASS_PATH",
        "a CUTLASS checkout or its include folder",
        "the `nvidia-cutlass` package, then the usual prefixes",
    ),
    Variable("DS_BUILD_OPS", "1: compile every op while installing", "0"),
    Variable(
        "DS_BUILD_EVOFORMER_ATTN", "1: compile the CUDA op while installing", "`DS_BUILD_OPS`"
    ),
    Variable(
        "DS_BUILD_EVOFORMER_ATTN_CPU",
        "1: compile the CPU op while installing",
        "`DS_BUILD_OPS`",
    ),
    Variable(
        "TORCH_CUDA_ARCH_LIST",
        "target architectures, such as `8.0;9.0a` or `7.5+PTX`",
        "the architecture of the tensor's device",
    ),
    Variable(
        "DS_SKIP_CUDA_CHECK",
        "1: do not warn where nvcc's CUDA differs from torch's (which is no error)",
        "0",
    ),
    Variable(
        "DS_IGNORE_CUDA_DETECTION",
        "1: build CUDA ops on a machine without a GPU; not needed with `TORCH_CUDA_ARCH_LIST`",
        "0",
    ),
    Variable(
        "DS4S_CACHE_DIR",
        "folder in which compiled kernels are kept",
        "`TORCH_EXTENSIONS_DIR`, else the user's cache folder",
    ),
    Variable(
        "DS4S_CACHE_PATH",
        "folders of compiled kernels, separated by `:`, searched before the cache, never written; "
        "they must be yours or root's, and writable by no other user",
        "none",
    ),
    Variable(
        "DS4S_CACHE_MAX_MB",
        "size of the cache above which a build removes the least recently used kernels; 0: never",
        "2048",
    ),
    Variable(
        "TORCH_EXTENSIONS_DIR",
        "its subfolder `deepspeed4science` is the cache when `DS4S_CACHE_DIR` is unset",
        "unset",
    ),
    Variable(
        "XDG_CACHE_HOME",
        "its subfolder `deepspeed4science` is the cache when neither of the two above is set",
        "`~/.cache`",
        of_the_system=True,
    ),
    Variable(
        "HOME", "where the user's cache folder and `~` are", "set by the system", of_the_system=True
    ),
    Variable("TMPDIR", "where compilations run", "`/tmp`", of_the_system=True),
    Variable(
        "MAX_JOBS",
        "compile at most this many kernels at once",
        "as many as cores and memory allow, control groups included",
    ),
    Variable("CUDA_HOME", "CUDA toolkit to use", "`CUDA_PATH`, then the usual places"),
    Variable("CUDA_PATH", "CUDA toolkit to use when `CUDA_HOME` is unset", "unset"),
    *(Variable(name, f"{what}; part of the cache key", "unset") for name, what in _OF_COMPILERS),
    Variable(
        "NVCC_CCBIN",
        "nvcc's host compiler, as `-ccbin` in the flags above; taken when `CXX` and `CC` are unset",
        "unset",
    ),
    Variable("CC", "C compiler; names the host compiler when `CXX` is unset", "unset"),
    Variable(
        "CXX",
        "C++ compiler; also nvcc's host compiler",
        "`c++`, `g++`, `clang++` on `PATH`; the conda environment",
    ),
    Variable(
        "CONDA_PREFIX",
        "a conda environment whose CUDA and CUTLASS are considered",
        "unset",
        of_the_system=True,
    ),
    Variable("PATH", "where programs are looked for", "set by the system", of_the_system=True),
    Variable(
        "DS4S_CPU_ISA",
        "force the CPU kernels' instruction set: `amx`, `avx512`, `avx2` or `portable`",
        "the best one that processor and compiler have",
    ),
    Variable(
        "DS4S_CUDA_FAMILY",
        "force the CUDA template family: `sm70`, `sm75`, `sm80` or `sm90`",
        "the device's own",
    ),
    Variable(
        "DS4S_VERBOSE",
        "1: show progress while compiling and, once each, why a call uses an older family and "
        "the plan of a kernel; 0: none of these",
        "progress only",
    ),
)


def table() -> str:
    """The table of docs/environment.md, in Markdown."""
    shown = [variable for variable in VARIABLES if not variable.of_the_system]
    rows = [f"| `{one.name}` | {one.meaning} | {one.default} |" for one in shown]
    return "\n".join(["| variable | meaning | default |", "|---|---|---|", *rows])


_NAMES = frozenset(variable.name for variable in VARIABLES)


def text(name: str) -> str | None:
    """The variable's value without surrounding blanks; None when unset or empty."""
    if name not in _NAMES:
        raise KeyError(f"{name} is not in op_builder/env.py's table; add a row for it there first")
    value = os.environ.get(name, "").strip()
    return value or None


def flag(name: str) -> bool | None:
    """True or False; None when unset, so that the caller can fall back to another variable."""
    value = text(name)
    if value is None:
        return None
    if value.lower() in _TRUE:
        return True
    if value.lower() in _FALSE:
        return False
    raise BuildError(f"{name}: expected 1 or 0, got {value!r}; set one of these or unset it")


def positive_int(name: str) -> int | None:
    value = text(name)
    if value is None:
        return None
    if value.isdecimal() and int(value) > 0:
        return int(value)
    raise BuildError(
        f"{name}: expected a whole number of at least 1, got {value!r}; correct or unset it"
    )


def whole_number(name: str) -> int | None:
    value = text(name)
    if value is None or value.isdecimal():
        return int(value) if value else None
    raise BuildError(f"{name}: expected a whole number or 0, got {value!r}; correct or unset it")


def choice(name: str, allowed: tuple[str, ...]) -> str | None:
    value = text(name)
    if value is None or value.lower() in allowed:
        return value and value.lower()
    raise BuildError(
        f"{name}: expected one of {', '.join(allowed)}, got {value!r}; correct or unset it"
    )


def folders(name: str) -> tuple[str, ...]:
    """The parts of a `:`-separated list of folders, `~` expanded; empty parts are dropped."""
    value = text(name) or ""
    return tuple(os.path.expanduser(part.strip()) for part in value.split(":") if part.strip())


def in_force() -> dict[str, str]:
    """Every variable of the table that is set, but for HOME and PATH, which always are."""
    names = (variable.name for variable in VARIABLES if variable.name not in ("HOME", "PATH"))
    return {name: value for name in names if (value := text(name))}


def search_path() -> str:
    """PATH; where it is not set, as in jobs that inherit no environment, the system's folders."""
    return text("PATH") or os.defpath


def settings_of_compilers() -> tuple[tuple[str, str], ...]:
    """(name, value) of the set variables that compilers read by themselves: for the cache key."""
    return tuple((name, value) for name, _ in _OF_COMPILERS if (value := text(name)))


def settings_line() -> str:
    """The same as one line, for a memo's key: a compiler's answer may depend on these settings."""
    return " ".join(map("=".join, settings_of_compilers()))


def for_compiler() -> dict[str, str]:
    """A copy of the whole environment for a compiler, with messages in English, which we parse, and
    with a PATH: without one, nvcc's host compiler does not find its assembler.

    GCC_COLORS and friends are left to the compiler, which writes to a file and therefore uses none.
    """
    copy = dict(os.environ)
    copy["LC_ALL"] = "C"
    copy["PATH"] = search_path()
    return copy
