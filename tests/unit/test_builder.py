"""The builders' contract, with nothing compiled."""

import contextlib
import logging
import re
from types import SimpleNamespace

import pytest

import op_builder
from op_builder import ALL_OPS, CPUOpBuilder, EvoformerAttnCPUBuilder, OpBuilder, offered
from op_builder.build import jit
from op_builder.errors import BuildError, UnfitToolkitError
from op_builder.ops import prebuild
from op_builder.ops.instantiations import CPU_KERNELS, CpuKernel
from op_builder.toolchain import cpu_isa, host_compiler
from op_builder.toolchain.tool import Tool

NO_COMPILER = Tool("host compiler", reason="no c++ on PATH", remedy="apt-get install g++")


@pytest.fixture
def without_compiler(monkeypatch):
    monkeypatch.setattr(host_compiler, "find_host_compiler", lambda: NO_COMPILER)
    monkeypatch.setattr(cpu_isa, "find_host_compiler", lambda: NO_COMPILER)


def test_names_that_outsiders_use():
    builder = EvoformerAttnCPUBuilder()
    assert builder.NAME == "evoformer_attn_cpu"
    assert builder.BUILD_VAR == "DS_BUILD_EVOFORMER_ATTN_CPU"
    assert builder.absolute_name() == "deepspeed4science.evoformer_attn_cpu"
    assert isinstance(ALL_OPS["evoformer_attn_cpu"], EvoformerAttnCPUBuilder)
    assert issubclass(EvoformerAttnCPUBuilder, CPUOpBuilder) and issubclass(CPUOpBuilder, OpBuilder)
    assert not hasattr(op_builder, "__deepspeed__")


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_another_system_is_named(system, monkeypatch):
    """Not by Apple's linker, nor by a module that Windows does not have."""
    monkeypatch.setattr(op_builder.sys, "platform", system)
    with pytest.raises(ImportError, match=f"expected Linux, .*, got {system}; use WSL 2"):
        op_builder.__getattr__("EvoformerAttnCPUBuilder")


@pytest.mark.parametrize("builder", ALL_OPS.values(), ids=ALL_OPS)
def test_every_builder_answers_without_compiling(builder):
    """Each method of the contract on whatever machine this is, with the type it promises."""
    assert all(isinstance(flag, str) for flag in builder.cxx_args() + builder.nvcc_args())
    assert all(isinstance(flag, str) for flag in builder.extra_ldflags())
    assert isinstance(builder.is_compatible(verbose=False), bool)
    assert all(obstacle.reason for obstacle in builder.obstacles())


def test_cpu_op_has_nothing_for_nvcc():
    builder = EvoformerAttnCPUBuilder()
    assert builder.nvcc_args() == builder.compute_capability_args() == []
    assert builder.filter_ccs(["8.0", "9.0a"]) == []


def test_jobs_come_from_the_list_of_kernels():
    builder = EvoformerAttnCPUBuilder()
    kernels = builder.prebuilt_kernels()
    assert set(kernels) <= set(CPU_KERNELS)
    assert len(kernels) == 6, "three dtypes, two directions"
    jobs = builder.jobs(kernels)
    assert [job.name for job in jobs] == [kernel.name for kernel in kernels]
    assert builder.sources() == [f"{job.name}{job.suffix}" for job in jobs]
    assert all(str(job.include_dirs[0]) in builder.include_paths() for job in jobs)


def test_flags_name_no_folder():
    """They go into the key, which must be the same on every machine."""
    builder = EvoformerAttnCPUBuilder()
    for job in builder.jobs(builder.prebuilt_kernels()):
        assert not any("/" in flag for flag in (*job.flags, *job.link_flags))
        assert not any("native" in flag for flag in job.flags)
        assert not any(re.search(r"/\w+/", value) for _, value in job.identity)


def test_no_fast_math_and_no_openmp_runtime():
    """-ffast-math forgets infinities, as masks are; a second runtime fights with torch's."""
    builder = EvoformerAttnCPUBuilder()
    assert not {"-ffast-math", "-Ofast"} & set(builder.cxx_args())
    assert builder.cxx_args().index("-fno-fast-math") < builder.cxx_args().index(
        "-ffp-contract=fast"
    )
    assert not any("omp" in flag for flag in (*builder.cxx_args(), *builder.extra_ldflags()))


def test_kernel_follows_the_forced_instruction_set(monkeypatch):
    monkeypatch.setenv("DS4S_CPU_ISA", "portable")
    kernel = EvoformerAttnCPUBuilder().kernel(direction="bwd", dtype="fp16")
    assert kernel == CpuKernel("bwd", "fp16", "portable")


def test_without_a_compiler_jobs_exist_and_say_why(without_compiler):
    """A library made earlier may still be found, so a missing compiler is no error yet."""
    (job,) = EvoformerAttnCPUBuilder().jobs([CpuKernel("fwd", "fp32", "portable")])
    assert job.compiler is None
    assert job.problem == "host compiler: no c++ on PATH; apt-get install g++"


def test_is_compatible_tells_the_reason_when_asked(without_compiler, caplog):
    builder = EvoformerAttnCPUBuilder()
    assert builder.is_compatible(verbose=False) is False
    assert caplog.records == []
    with caplog.at_level(logging.WARNING):
        assert builder.is_compatible(verbose=True) is False
    assert "no c++ on PATH; apt-get install g++" in caplog.text


def test_prebuild_asked_for_and_impossible_is_an_error(without_compiler, monkeypatch, tmp_path):
    """Never a silent skip: the message names the op, the reason and the remedy."""
    monkeypatch.setenv("DS_BUILD_EVOFORMER_ATTN_CPU", "1")
    with pytest.raises(
        BuildError, match=r"evoformer_attn_cpu cannot be compiled here: .*no c\+\+ on"
    ):
        prebuild.build_requested(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, set()),
        ({"DS_BUILD_OPS": "0"}, set()),
        ({"DS_BUILD_OPS": "1"}, set(ALL_OPS)),
        ({"DS_BUILD_EVOFORMER_ATTN_CPU": "1"}, {"evoformer_attn_cpu"}),
        (
            {"DS_BUILD_OPS": "1", "DS_BUILD_EVOFORMER_ATTN_CPU": "0"},
            set(ALL_OPS) - {"evoformer_attn_cpu"},
        ),
    ],
    ids=["nothing", "refused", "all", "one", "all but one"],
)
def test_requested(monkeypatch, variables, expected):
    for name in ("DS_BUILD_OPS", *(builder.BUILD_VAR for builder in ALL_OPS.values())):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert {builder.NAME for builder in prebuild.requested()} == expected


@pytest.fixture
def loads(monkeypatch):
    """What the builder asks of the loader: (names, skip_prebuilt); `unfit`: how often it fails."""
    asked = SimpleNamespace(calls=[], unfit=0)

    def load(jobs, *, verbose, skip_prebuilt):
        asked.calls.append(([job.name for job in jobs], skip_prebuilt))
        if len(asked.calls) <= asked.unfit:
            raise UnfitToolkitError("such a toolkit")
        return [f"{job.name}, loaded" for job in jobs]

    monkeypatch.setattr(jit, "load", load)
    monkeypatch.setattr(op_builder.ops.builder, "_ready", {})
    return asked


def test_jit_load_passes_over_what_was_compiled_at_install(loads):
    """Unless it is loaded already."""
    builder = EvoformerAttnCPUBuilder()
    one, other = CpuKernel("fwd", "fp32", "portable"), CpuKernel("bwd", "fp32", "portable")
    assert builder.load(kernels=[one]).kernel(one) == f"{one.name}, loaded"
    both = builder.jit_load(kernels=[other, one])
    assert [both.kernel(kernel) for kernel in (one, other)] == [
        f"{kernel.name}, loaded" for kernel in (one, other)
    ]
    assert loads.calls == [([one.name], False), ([other.name], True)]


@pytest.mark.parametrize("unfit", [4, 5])
def test_four_toolkits_may_turn_out_to_be_unfit(unfit, loads):
    loads.unfit = unfit
    builder, kernel = EvoformerAttnCPUBuilder(), CpuKernel("fwd", "fp32", "portable")
    with contextlib.nullcontext() if unfit == 4 else pytest.raises(UnfitToolkitError):
        builder.load(kernels=[kernel])
    assert len(loads.calls) == 5


def test_functions_on_tensors_come_from_who_knows_tensors(monkeypatch):
    monkeypatch.setattr(offered, "_modules", {})
    loaded = EvoformerAttnCPUBuilder().load(kernels=[])
    with pytest.raises(BuildError, match="import deepspeed4science first"):
        _ = loaded.attention
    offered.offer("math", "attention", "attention_bwd", "sqrt")
    assert offered.function("sqrt")(4.0) == 2.0
