"""The vector instructions of the CPU kernels: those that processor, system and compiler all
support.

    isa = cpu_isa.best("bf16")          # "amx", "avx512", "avx2" or "portable"
    flags = cpu_isa.flags(isa)          # ("-mavx512f", ...)

The processor's instructions are those that Linux lists in /proc/cpuinfo, which leaves out registers
that the system does not save and restore (XCR0); on other systems they come from py-cpuinfo. A set
counts after the host compiler has compiled and assembled a source with its instructions. Without a
compiler, an existing kernel can still be chosen by the processor alone. A test compilation takes a
third of a second, so its result is kept on disk.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from .. import env, paths
from ..errors import ToolchainError
from . import memo
from .cpu_probe_sources import PROBES
from .host_compiler import find_host_compiler
from .tool import Tool, UnfitError, on_path, run

CPU_ISAS = ("amx", "avx512", "avx2", "portable")  # best first
PROC_CPUINFO = Path("/proc/cpuinfo")

_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq")
# What the processor must have, in Linux's names.
_NEEDS: dict[str, tuple[str, ...]] = {
    "amx": (*_AVX512, "avx512_bf16", "amx_tile", "amx_bf16", "fma", "f16c"),
    "avx512bf16": (*_AVX512, "avx512_bf16", "fma", "f16c"),
    "avx512": (*_AVX512, "fma", "f16c"),
    "avx2": ("avx2", "fma", "f16c"),
    "portable": (),
}
# The compiler's names have no underscores, and AMX's have dashes.
_FLAGS: dict[str, tuple[str, ...]] = {
    level: tuple(f"-m{name.replace('amx_', 'amx-').replace('_', '')}" for name in names)
    for level, names in _NEEDS.items()
}


@dataclass(frozen=True)
class Processor:
    machine: str  # py-cpuinfo's: "X86_64", "ARM_8", "PPC_64"
    brand: str
    features: frozenset[str]  # Linux's names without underscores
    source: str  # where these come from


@dataclass(frozen=True)
class CpuIsa:
    processor: Processor
    available: tuple[str, ...]  # best first; "portable" is always the last
    refused: tuple[tuple[str, str], ...]  # (instruction set, why it is not available)
    bf16: bool  # whether AVX-512's own bfloat16 instructions are available
    compiler: Tool  # the one that was tried; where it is not ok, only the processor counted

    def best(self, dtype: str) -> str:
        """The instruction set for "fp32", "fp16" or "bf16". AMX multiplies bfloat16 only."""
        return next(isa for isa in self.available if isa != "amx" or dtype == "bf16")

    def flags(self, isa: str) -> tuple[str, ...]:
        """The compiler's flags for an instruction set on this processor."""
        return _FLAGS["avx512bf16" if isa == "avx512" and self.bf16 else isa]

    def stand_ins(self, isa: str) -> tuple[tuple[str, ...], ...]:
        """Flags of other compilers for kernels of the same set, which run here as well."""
        return (_FLAGS["avx512"],) if isa == "avx512" and self.bf16 else ()


def detect() -> CpuIsa:
    """The instruction sets that can be used here; `DS4S_CPU_ISA` forces one.

    With `amx` forced, AVX-512 serves the dtypes that AMX cannot multiply. Raises ToolchainError
    where the forced set cannot be used here, BuildError where it is none of the four.
    """
    return _detect(env.choice("DS4S_CPU_ISA", CPU_ISAS), find_host_compiler())


def best(dtype: str) -> str:
    return detect().best(dtype)


def flags(isa: str) -> tuple[str, ...]:
    return detect().flags(isa)


def cpu_arch() -> str:
    """The flag that makes a compiler use all of this processor; our own kernels use `flags`."""
    return "-mcpu=native" if processor().machine.startswith("PPC_") else "-march=native"


def simd_width() -> str:
    """The vector width as DeepSpeed's sources want it defined."""
    usable = detect().available
    if "avx512" in usable:
        return "-D__AVX512__"
    return "-D__AVX256__" if "avx2" in usable else "-D__SCALAR__"


@functools.lru_cache(maxsize=8)
def _detect(forced: str | None, compiler: Tool) -> CpuIsa:
    here = processor()
    refused: dict[str, str] = {}
    available: list[str] = []
    bf16 = False
    # Beside AMX, AVX-512 serves the other dtypes. Sets below the first vector set that works are
    # never chosen, and so not tried.
    wanted = CPU_ISAS if forced is None else ("amx", "avx512") if forced == "amx" else (forced,)
    for isa in wanted:
        if available and available[-1] != "amx":
            break
        if isa == "avx512":
            bf16 = "amx" in available or not _why_not("avx512bf16", compiler)
        # The compiled source of the larger set contains these instructions.
        proven = isa == "avx512" and bf16
        if why := "" if proven else _why_not(isa, compiler):
            refused[isa] = why
        else:
            available.append(isa)
    if forced in refused:
        others = [isa for isa in CPU_ISAS if isa != forced and not why_not_here(isa)]
        raise ToolchainError(
            f"DS4S_CPU_ISA={forced}: {refused[forced]}; unset it or name one of {', '.join(others)}"
        )
    if "portable" not in available:
        available.append("portable")
    return CpuIsa(here, tuple(available), tuple(refused.items()), bf16, compiler)


def why_not_here(level: str) -> str:
    """Why kernels of an instruction set, from any compiler, cannot run here; empty: they can."""
    here = processor().features
    lacking = [name for name in _NEEDS[level] if name.replace("_", "") not in here]
    if lacking:
        return f"this processor or system lacks {', '.join(lacking)}"
    return _amx_refusal() if level == "amx" else ""


def _why_not(level: str, compiler: Tool) -> str:
    return why_not_here(level) or _compile_problem(level, compiler)


def _compile_problem(level: str, compiler: Tool) -> str:
    """Why the compiler cannot make code for `level`; empty when it can or when there is none."""
    if level == "portable" or not compiler.ok or compiler.path is None:
        return ""
    source = PROBES[level]
    command = [str(compiler.path), "-std=c++17", "-O1", *_FLAGS[level], "-x", "c++", "-c", "-"]
    stamps = [memo.file_stamp(compiler.path), memo.file_stamp(_assembler(compiler.path))]
    key = "\n".join([compiler.identity, *stamps, env.settings_line(), *command, source])

    def attempt() -> str:
        with tempfile.TemporaryDirectory(prefix="ds4s-isa-", dir=paths.build_root()) as folder:
            ran = run([*command, "-o", "probe.o"], stdin=source, cwd=folder)
        if ran.problem and not _is_about_the_code(ran.output):
            # A temporary shortage of memory or disk, not a property of the compiler.
            raise UnfitError(ran.problem)
        return ran.problem

    try:
        problem: str = memo.remember("isa-2", key, attempt)
    except (UnfitError, OSError) as error:
        problem = str(error)
    return f"the host compiler cannot make code for it: {problem}" if problem else ""


@functools.lru_cache(maxsize=8)
def _assembler(compiler: Path) -> Path:
    """The assembler, which may be installed or found on PATH apart from its compiler."""
    name = run([str(compiler), "-print-prog-name=as"]).answer.strip() or "as"
    return next((one.path for one in on_path(name)), Path(name))


def _is_about_the_code(output: str) -> bool:
    return any(
        word in output
        for word in ("unrecognized", "unknown argument", "target specific", "no such instruction")
    )


def _amx_refusal() -> str:
    """Why the system refuses AMX's tiles to this process; empty where it grants them.

    The tiles' state is large, so Linux grants it to a process on request
    (Documentation/arch/x86/xstate.rst). The request here is the one that the kernel makes before
    its first tile.
    """
    if not sys.platform.startswith("linux"):
        return "AMX is used on Linux only"
    arch_prctl, get_permission, request_permission, tile_data = 158, 0x1022, 0x1023, 18
    libc = ctypes.CDLL(None, use_errno=True)
    granted = ctypes.c_uint64(0)
    if (
        libc.syscall(arch_prctl, get_permission, ctypes.byref(granted)) == 0
        and granted.value >> tile_data & 1
    ):
        return ""
    if libc.syscall(arch_prctl, request_permission, tile_data) == 0:
        return ""
    return "the system refuses the permission for AMX's tile registers (arch_prctl)"


@functools.lru_cache(maxsize=1)
def processor() -> Processor:
    """The processor as the system describes it; never raises, and runs no program on Linux."""
    if not sys.platform.startswith("linux"):
        return _ask_py_cpuinfo()
    listed = _first_block()
    source = str(PROC_CPUINFO)
    if not listed:
        source += " cannot be read, so no vector instructions are assumed"
    return Processor(
        _machine(), listed.get("model name", ""), _names(listed.get("flags", "")), source
    )


def _ask_py_cpuinfo() -> Processor:
    try:
        import cpuinfo  # type: ignore[import-untyped]  # takes a second: not at module import

        said = cpuinfo.get_cpu_info()
        features = _names(" ".join(said.get("flags", [])))
        return Processor(str(said["arch"]), str(said.get("brand_raw", "")), features, "py-cpuinfo")
    except Exception as error:  # it raises a bare Exception for processors that it does not know
        source = f"no vector instructions are assumed ({type(error).__name__}: {error})"
        return Processor(_machine(), "", frozenset(), source)


def _machine() -> str:
    """The kind of machine, by py-cpuinfo's name."""
    name = platform.machine().lower()
    known = {"x86_64": "X86_64", "amd64": "X86_64", "aarch64": "ARM_8", "ppc64le": "PPC_64"}
    return known.get(name, name.upper())


def _names(text: str) -> frozenset[str]:
    """The names without underscores: some sources write avx512_bf16, others avx512bf16."""
    return frozenset(name.replace("_", "").lower() for name in text.split())


def _first_block() -> dict[str, str]:
    """The first processor of /proc/cpuinfo."""
    block: dict[str, str] = {}
    try:
        with PROC_CPUINFO.open(errors="replace") as stream:
            for line in stream:
                name, colon, value = line.partition(":")
                if not colon:
                    break
                block[name.strip()] = value.strip()
    except OSError:
        return {}
    return block
