"""The host compiler: place and version, or why there is none.

Places, in this order: `CXX`; the C++ sibling of `CC`; the one that nvcc's flags or `NVCC_CCBIN`
name; `c++`, `g++`, `clang++` on `PATH`; the conda environment. A `CXX` that does not work is an
error and is not skipped, since naming a compiler is an instruction.
"""

from __future__ import annotations

import os
import re
import shlex
import tempfile
from collections.abc import Iterable
from pathlib import Path

from .. import env, paths
from ..system import shortages
from . import elf, memo
from .tool import Candidate, Ran, Tool, UnfitError, conda_prefixes, first_fit, on_path, run

_INSTALL_COMPILER = (
    "install a C++17 compiler (apt-get install g++, dnf install gcc-c++, "
    "conda install cxx-compiler)"
)
_CCBIN = re.compile(r"(?:^|\s)--?(?:ccbin|compiler-bindir)(?:=|\s+)(\S+)")
_LAUNCHERS = frozenset({"ccache", "sccache", "distcc", "icecc", "env"})

# The requirements of every CPU kernel: C++17 with its library, and shared libraries.
_SMOKE_FLAGS = ("-std=c++17", "-O1", "-fPIC")
_SMOKE_SOURCE = """\
#include <cmath>
#include <cstdint>
#include <vector>
extern "C" float smoke(float* x, std::int64_t n) {
  std::vector<float> copy(x, x + n);  // links the C++ runtime, which a C compiler leaves out
  x[0] = copy.back();
  if constexpr (sizeof(float) == 4) {
    for (std::int64_t i = 0; i < n; ++i) x[i] = std::exp(x[i]);
  }
  return x[0];
}
"""


def find_host_compiler() -> Tool:
    return first_fit(
        "host compiler",
        _compiler_candidates(),
        _examine_compiler,
        missing=_no_compiler(),
        remedy=_remedy(failed=False),
    )


def _named(words: str) -> list[Candidate]:
    """The program that a CXX such as `env A=1 ccache g++ -m64` names, less launchers, variables
    and flags; or the one whose path, blanks included, is the whole of it.
    """
    try:
        parts = [words] if os.path.isfile(words) else shlex.split(words)
    except ValueError:
        parts = [words]
    programs = [
        part
        for part in parts
        if not part.startswith("-")
        and os.path.basename(part) not in _LAUNCHERS
        and not ("=" in part and part.partition("=")[0].isidentifier())
    ]
    if not programs:
        return []
    if "/" in programs[0]:
        return [Candidate("", paths.absolute(programs[0]))]
    return list(on_path(programs[0]))


def _compiler_candidates() -> Iterable[Candidate]:
    if cxx := env.text("CXX"):
        for candidate in _named(cxx)[:1]:
            yield Candidate("CXX", candidate.path, named=True)
        return
    if cc := env.text("CC"):
        missing = _sibling(Path(cc)) or Path(cc)
        found = [_sibling(one.path) for one in _named(cc)[:1]] or [missing]
        for path in filter(None, found):
            yield Candidate("CC", path, named=True)
    for variable, named in _named_for_nvcc():
        for candidate in _named(named)[:1]:
            path = candidate.path / "g++" if os.path.isdir(candidate.path) else candidate.path
            yield Candidate(variable, _sibling(path) or path, named=True)
    yield from on_path("c++", "g++", "clang++")
    # cxx-compiler's, which is named in CXX only where the environment is activated
    for prefix in conda_prefixes():
        for path in paths.matching(prefix / "bin", "*-conda*-linux-gnu-c++"):
            yield Candidate("conda environment", path)


def _named_for_nvcc() -> Iterable[tuple[str, str]]:
    """The variable and the host compiler of nvcc that it names, often since the one on PATH is too
    new for nvcc. nvcc takes the last flag.
    """
    for variable in ("NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS"):
        for named in reversed(_CCBIN.findall(env.text(variable) or "")):
            yield variable, named
    if named := env.text("NVCC_CCBIN"):
        yield "NVCC_CCBIN", named


def _no_compiler() -> str:
    if cxx := env.text("CXX"):
        return f"CXX={cxx} names no program that is there (a path with blanks needs quotes)"
    return "no C++ compiler was found: no CXX, and no c++, g++ or clang++ on PATH"


def _remedy(*, failed: bool) -> str:
    """CXX first, which may be misspelt; then, if a compiler failed, the settings that it read."""
    settings = [name for name, _ in env.settings_of_compilers() if not name.startswith("NVCC_")]
    unset = f"unset {' and '.join(settings)}, or " if failed and settings else ""
    if env.text("CXX"):
        return f"correct or unset CXX, or {unset}{_INSTALL_COMPILER}"
    return f"{unset}{_INSTALL_COMPILER} or set CXX to one"


def _sibling(c_compiler: Path) -> Path | None:
    """gcc-12 -> g++-12, clang -> clang++, x86_64-linux-gnu-cc -> x86_64-linux-gnu-c++."""
    for c, cxx in (("clang", "clang++"), ("gcc", "g++"), ("cc", "c++"), ("icx", "icpx")):
        name, count = re.subn(rf"(^|-){c}(?=$|-)", rf"\g<1>{cxx}", c_compiler.name)
        if count:
            return c_compiler.with_name(name)
    return None


def _examine_compiler(candidate: Candidate) -> Tool:
    path = candidate.path
    name, where = "host compiler", candidate.where
    try:
        key = f"{memo.file_stamp(path)} {env.settings_line()} {_behind(path)}".rstrip()
        identity: str = memo.remember("compiler-3", key, lambda: _try_compiler(str(path)))
    except (UnfitError, OSError) as unfit:  # OSError: no folder to try it in
        remedy = shortages.remedy(str(unfit)) or _full_disk() or _remedy(failed=True)
        return Tool(name, path, where_found=where, reason=str(unfit), remedy=remedy)
    version = re.search(r"\d+\.\d+(\.\d+)?", identity)
    return Tool(name, path, version[0] if version else "", where, ok=True, identity=identity)


def _behind(path: Path) -> str:
    """What a script or a launcher's link runs now: its own stamp does not change with it."""
    try:
        with path.open("rb") as stream:
            script = stream.read(2) == b"#!"
    except OSError:
        script = False
    if not script and os.path.basename(os.path.realpath(path)) not in _LAUNCHERS:
        return ""
    spoken = run([str(path), "--version"])
    if spoken.problem:
        raise UnfitError(spoken.problem)
    return spoken.answer


def _full_disk() -> str:
    try:
        return shortages.disk_remedy(paths.build_root())
    except OSError:
        return "set TMPDIR to a folder that can be written"


def _try_compiler(path: str) -> str:
    """The compiler's identity, after it has made a shared library from a test source."""
    spoken = run([path, "--version"])
    problem = spoken.problem
    with tempfile.TemporaryDirectory(prefix="ds4s-smoke-") as folder:
        compile_ = [path, *_SMOKE_FLAGS, "-x", "c++", "-c", "-", "-o", "smoke.o"]
        problem = problem or run(compile_, stdin=_SMOKE_SOURCE, cwd=folder).problem
        problem = (
            problem
            or run(
                [path, "-shared", "-Wl,--no-undefined", "smoke.o", "-o", "smoke.so"], cwd=folder
            ).problem
        )
        if not problem and not os.path.isfile(Path(folder) / "smoke.so"):
            problem = f"{path} says it compiled a C++ source but wrote nothing"
        made = elf.machine(Path(folder) / "smoke.so")
    if not problem and elf.own_machine() not in (0, made):
        problem = f"{path} is a cross compiler: what it makes is for another processor"
    machine = Ran("") if problem else run([path, "-dumpmachine"])
    if problem := problem or machine.problem:
        raise UnfitError(problem)
    # gcc's version line begins with the name of the command: c++ and g++ are one compiler and share
    # a cache key.
    line = re.sub(r"^\S+ \(", "gcc (", spoken.answer.strip().partition("\n")[0])
    return f"{line} {machine.answer.strip()}"
