"""Choosing the CPU kernels' instruction set: processor, system and compiler must all agree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from op_builder.errors import BuildError, ToolchainError
from op_builder.toolchain import cpu_isa, memo
from op_builder.toolchain.cpu_isa import Processor
from op_builder.toolchain.tool import Tool
from tests import fakes

AVX2 = "fma f16c avx2"
AVX512 = f"{AVX2} avx512f avx512bw avx512vl avx512dq"
BF16 = f"{AVX512} avx512_bf16"
AMX = f"{BF16} amx_tile amx_bf16 amx_int8"

NO_COMPILER = Tool("host compiler", reason="none", remedy="install one")

Here = Callable[..., None]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.delenv("DS4S_CPU_ISA", raising=False)
    monkeypatch.setenv("DS4S_CACHE_DIR", str(tmp_path / "cache"))
    caches = (cpu_isa._detect, cpu_isa.processor)  # bound now: a test may replace the names
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Here:
    """Pretend to be on a processor, with a compiler and the system's word on AMX."""

    def set_up(features: str, compiler: Tool = NO_COMPILER, amx_refusal: str = "") -> None:
        cpu_isa._detect.cache_clear()
        processor = Processor("X86_64", "Pretended", cpu_isa._names(features), "test")
        monkeypatch.setattr(cpu_isa, "processor", lambda: processor)
        monkeypatch.setattr(cpu_isa, "find_host_compiler", lambda: compiler)
        monkeypatch.setattr(cpu_isa, "_amx_refusal", lambda: amx_refusal)

    return set_up


def compiler_that_refuses(folder: Path, *options: str, words: str = "unrecognized option") -> Tool:
    """A compiler that takes everything but these options."""
    tests = "".join(
        f'[ "$one" = {option} ] && echo "error: {words} $one" && exit 1\n' for option in options
    )
    path = fakes.program(
        folder / "picky", f'#!/bin/sh\nfor one in "$@"; do\n{tests}:; done\nexit 0\n'
    )
    return Tool("host compiler", path, "1.0", "test", ok=True, identity="picky")


@pytest.mark.parametrize(
    ("features", "bf16", "fp32"),
    [
        (AMX, "amx", "avx512"),
        (BF16, "avx512", "avx512"),
        (AVX512, "avx512", "avx512"),
        (AVX2, "avx2", "avx2"),
        ("avx2 fma", "portable", "portable"),  # no f16c
        (AMX.replace("amx_bf16", ""), "avx512", "avx512"),
        (AMX.replace("avx512_bf16", ""), "avx512", "avx512"),
        (AVX512.replace("avx512dq", ""), "avx2", "avx2"),  # a first-generation part
        ("neon asimd", "portable", "portable"),
        ("", "portable", "portable"),
    ],
)
def test_best_by_processor(features: str, bf16: str, fp32: str, here: Here) -> None:
    here(features)
    assert cpu_isa.best("bf16") == bf16
    assert cpu_isa.best("fp32") == cpu_isa.best("fp16") == fp32


def test_lacking_features_have_the_names_of_proc_cpuinfo(here: Here) -> None:
    here(AVX512)
    assert cpu_isa.why_not_here("amx").endswith("lacks avx512_bf16, amx_tile, amx_bf16")


def test_flags(here: Here) -> None:
    core = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
    here(AVX512)
    assert cpu_isa.flags("avx512") == (*core, "-mfma", "-mf16c")
    here(BF16)
    assert cpu_isa.flags("avx512") == (*core, "-mavx512bf16", "-mfma", "-mf16c")
    here(AMX)
    assert set(cpu_isa.flags("amx")) == {
        *core,
        "-mavx512bf16",
        "-mamx-tile",
        "-mamx-bf16",
        "-mfma",
        "-mf16c",
    }
    assert set(cpu_isa.flags("avx2")) == {"-mavx2", "-mfma", "-mf16c"}
    assert cpu_isa.flags("portable") == ()


def test_amx_needs_the_systems_permission(here: Here) -> None:
    here(AMX, amx_refusal="the system refuses")
    assert cpu_isa.best("bf16") == "avx512"
    assert dict(cpu_isa.detect().refused)["amx"] == "the system refuses"


def test_what_the_compiler_cannot_make_is_not_believed(here: Here, tmp_path: Path) -> None:
    here(AMX, compiler_that_refuses(tmp_path, "-mamx-tile"))
    found = cpu_isa.detect()
    assert (found.best("bf16"), found.bf16) == ("avx512", True)
    assert "unrecognized option -mamx-tile" in dict(found.refused)["amx"]


def test_an_older_compiler_without_bf16_keeps_avx512(here: Here, tmp_path: Path) -> None:
    here(BF16, compiler_that_refuses(tmp_path, "-mavx512bf16"))
    assert cpu_isa.best("bf16") == "avx512"
    assert "-mavx512bf16" not in cpu_isa.flags("avx512")


def test_a_compiler_without_vectors_leaves_portable(here: Here, tmp_path: Path) -> None:
    here(AMX, compiler_that_refuses(tmp_path, "-mavx2", "-mavx512f"))
    assert cpu_isa.detect().available == ("portable",)
    assert cpu_isa.simd_width() == "-D__SCALAR__"


def test_a_full_disk_is_not_remembered_as_the_compilers_fault(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = fakes.file(tmp_path / "disk-is-full")
    text = f"#!/bin/sh\n[ -e {full} ] && echo 'error: No space left on device' && exit 1\nexit 0\n"
    compiler = Tool("host compiler", fakes.program(tmp_path / "cc", text), "1", "test", ok=True)
    here(AVX2, compiler)
    assert cpu_isa.best("fp32") == "portable"
    full.unlink()
    monkeypatch.setattr(memo, "_answers", {})  # as in the next process
    here(AVX2, compiler)
    assert cpu_isa.best("fp32") == "avx2"


def test_probes_run_once_for_a_compiler(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here(AMX, compiler_that_refuses(tmp_path, "-mamx-tile"))
    first = cpu_isa.detect()
    cpu_isa._detect.cache_clear()
    monkeypatch.setattr(memo, "_answers", {})  # as in another process
    monkeypatch.setattr(cpu_isa, "run", lambda *_a, **_k: pytest.fail("asked the compiler again"))
    assert cpu_isa.detect() == first


def test_another_assembler_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler is the same; `module load binutils` puts another assembler on PATH."""
    path = shutil.which("g++")
    if path is None or os.uname().machine != "x86_64":
        pytest.skip("needs g++ for x86-64")
    compiler = Tool("host compiler", Path(path), "", "test", ok=True)
    monkeypatch.setattr(cpu_isa, "_assembler", cpu_isa._assembler.__wrapped__)
    if cpu_isa._compile_problem("amx", compiler):
        pytest.skip("needs a toolchain for AMX")
    named = cpu_isa.run([path, "-print-prog-name=as"]).answer.strip()
    old = tmp_path / Path(named).name  # gcc 16 looks for x86_64-linux-gnu-as first
    old.write_text("#!/bin/sh\ncat > /dev/null\necho 'Error: no such instruction' >&2\nexit 1\n")
    old.chmod(0o755)
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        assert "no such instruction" in cpu_isa._compile_problem("amx", compiler)
    assert not cpu_isa._compile_problem("amx", compiler)


@pytest.mark.parametrize("level", ["avx2", "avx512", "avx512bf16", "amx"])
def test_the_probe_sources_compile_with_their_flags_and_not_without(level: str) -> None:
    """A probe that compiles without its flags would prove nothing."""
    path = shutil.which("g++")
    if path is None or os.uname().machine != "x86_64":
        pytest.skip("needs g++ for x86-64")
    compiler = Tool("host compiler", Path(path), "", "test", ok=True)
    problem = cpu_isa._compile_problem(level, compiler)
    if problem and "unrecognized" in problem:
        pytest.skip(f"this g++ is too old: {problem}")
    assert not problem
    bare = cpu_isa.run(
        [path, "-std=c++17", "-x", "c++", "-c", "-", "-o", os.devnull], stdin=cpu_isa.PROBES[level]
    )
    assert bare.problem
    assert cpu_isa._is_about_the_code(bare.output)


@pytest.mark.parametrize(
    ("forced", "features", "bf16", "fp32"),
    [
        ("amx", AMX, "amx", "avx512"),
        ("avx512", AMX, "avx512", "avx512"),
        ("avx2", AMX, "avx2", "avx2"),
        ("portable", AMX, "portable", "portable"),
        ("PORTABLE", AMX, "portable", "portable"),
        ("avx2", AVX2, "avx2", "avx2"),
    ],
)
def test_forced(
    forced: str, features: str, bf16: str, fp32: str, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS4S_CPU_ISA", forced)
    here(features)
    assert (cpu_isa.best("bf16"), cpu_isa.best("fp32")) == (bf16, fp32)


def test_forced_but_impossible_names_what_is_lacking(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS4S_CPU_ISA", "avx512")
    here(AVX2)
    told = r"DS4S_CPU_ISA=avx512: .*lacks avx512f.*unset it or name one of avx2, portable$"
    with pytest.raises(ToolchainError, match=told):
        cpu_isa.detect()
    monkeypatch.setenv("DS4S_CPU_ISA", "neon")
    with pytest.raises(BuildError, match="DS4S_CPU_ISA: expected one of amx"):
        cpu_isa.detect()


# --- what the processor is ------------------------------------------------------------------------


@pytest.fixture
def py_cpuinfo(monkeypatch: pytest.MonkeyPatch) -> Callable[[object], None]:
    def install(answer: object) -> None:
        module = ModuleType("cpuinfo")

        def get_cpu_info() -> object:
            if isinstance(answer, Exception):
                raise answer
            return answer

        module.get_cpu_info = get_cpu_info  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "cpuinfo", module)

    return install


def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str) -> None:
    first = f"processor : 0\nmodel name : Some Processor\ncpu MHz : 1234.5\nflags : {flags}\n"
    text = f"{first}\nprocessor : 1\nflags : x\n"
    monkeypatch.setattr(cpu_isa, "PROC_CPUINFO", fakes.file(tmp_path / "proc-cpuinfo", text))


INTEL = {"arch": "X86_64", "brand_raw": "Intel", "flags": AMX.split()}


def test_linux_lists_what_it_saves_for_us(
    py_cpuinfo: Callable[[object], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """py-cpuinfo may ask the processor itself, which still has what the system strikes out."""
    py_cpuinfo(INTEL)
    proc(tmp_path, monkeypatch, AVX2 + " sse4_2")
    found = cpu_isa.processor()
    assert found.features == {"fma", "f16c", "avx2", "sse42"}
    assert found.brand == "Some Processor"


def test_no_program_is_asked_and_nothing_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where PATH holds none, the answer is the same; a poorer one would spoil later processes."""
    with_programs = cpu_isa.processor()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a program was run"))
    cpu_isa.processor.cache_clear()
    assert cpu_isa.processor() == with_programs
    assert not (tmp_path / "cache").exists()


def test_linux_that_lists_nothing_is_believed_to_have_no_vector_instruction(
    py_cpuinfo: Callable[[object], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    py_cpuinfo(INTEL)
    monkeypatch.setattr(cpu_isa, "PROC_CPUINFO", tmp_path / "missing")
    monkeypatch.setattr(sys, "platform", "linux")
    found = cpu_isa.processor()
    assert found.features == frozenset()
    assert "no vector instructions are assumed" in found.source


def test_other_systems_are_asked_by_py_cpuinfo(
    py_cpuinfo: Callable[[object], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    py_cpuinfo(INTEL)
    monkeypatch.setattr(sys, "platform", "darwin")
    found = cpu_isa.processor()
    assert "amxtile" in found.features
    assert (found.machine, found.brand, found.source) == ("X86_64", "Intel", "py-cpuinfo")


@pytest.mark.parametrize(
    "answer", [ImportError("No module"), Exception("unknown arch"), {"no": "arch"}]
)
def test_without_py_cpuinfo_no_vector_instruction_is_assumed(
    answer: object,
    py_cpuinfo: Callable[[object], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    py_cpuinfo(answer)
    monkeypatch.setattr(sys, "platform", "darwin")
    found = cpu_isa.processor()
    assert found.features == frozenset()
    assert "no vector instructions are assumed" in found.source


def test_another_processor_in_the_same_home_is_asked_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for flags in (AVX2, AMX):
        proc(tmp_path, monkeypatch, flags)
        cpu_isa.processor.cache_clear()
        assert ("amxtile" in cpu_isa.processor().features) == (flags == AMX)


def test_deepspeeds_names(here: Here) -> None:
    here(AMX)
    assert (cpu_isa.cpu_arch(), cpu_isa.simd_width()) == ("-march=native", "-D__AVX512__")
    here(AVX2)
    assert cpu_isa.simd_width() == "-D__AVX256__"
