"""bfloat16 on compute capability 7.0 and 7.5 goes through the float32 kernels, with one notice. No
GPU is needed: devices are pretended, and the CPU's kernels, which read the same parameters, stand
in for theirs.
"""

import logging
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from deepspeed4science import backend_cuda, backends  # noqa: E402
from deepspeed4science.backend import Backend  # noqa: E402
from deepspeed4science.backend_cuda import CudaBackend  # noqa: E402
from deepspeed4science.errors import NoBackendError  # noqa: E402
from deepspeed4science.problem import Problem  # noqa: E402
from op_builder import EvoformerAttnBuilder, EvoformerAttnCPUBuilder  # noqa: E402
from op_builder.ops import presets  # noqa: E402
from op_builder.toolchain.arch import Arch  # noqa: E402
from tests.numeric.cases import Case  # noqa: E402
from tests.numeric.law import check  # noqa: E402

PROBLEM = Problem(
    B=1,
    N=3,
    Lq=40,
    Lk=40,
    H=2,
    D=32,
    Dv=32,
    dtype=torch.bfloat16,
    device=torch.device("cuda", 0),
    bias1=torch.bfloat16,
    bias2=torch.bfloat16,
)
OLD = {(7, 0): "sm70", (7, 2): "sm70", (7, 5): "sm75"}


@pytest.fixture(params=OLD, ids=str)
def capability(request, monkeypatch):
    """Every device is of this one."""
    for name in ("DS4S_CUDA_FAMILY", "TORCH_CUDA_ARCH_LIST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(backend_cuda, "_capability", lambda device: request.param)
    monkeypatch.setattr(EvoformerAttnBuilder, "families", lambda self, device: (OLD[device],))
    monkeypatch.setattr(backends, "BACKENDS", (CudaBackend("sm75"), CudaBackend("sm70")))
    return request.param


def test_a_call_is_taken_by_the_family_of_the_device(capability):
    assert backends.select(PROBLEM).name.lower() == OLD[capability]


def test_float16_and_float32_are_computed_as_they_are(capability):
    for dtype in (torch.float16, torch.float32):
        problem = replace(PROBLEM, dtype=dtype)
        assert backends.select(problem)._kernel_dtype(problem) == dtype
    assert backends.select(PROBLEM)._kernel_dtype(PROBLEM) == torch.float32


def test_newer_families_compute_bfloat16_as_it_is():
    for family in ("sm80", "sm90"):
        assert CudaBackend(family)._kernel_dtype(PROBLEM) == torch.bfloat16


def test_what_float32_does_not_take(capability):
    """64 KiB of shared memory on 7.5; no head dimension above 128 anywhere."""
    wide = replace(PROBLEM, D=128)
    if capability == (7, 5):
        with pytest.raises(NoBackendError, match=r"bfloat16 goes, too.*above 96.*use float16"):
            backends.select(wide)
    else:
        assert backends.select(wide).name == "Sm70"
    with pytest.raises(NoBackendError, match="largest head dimension is 128"):
        backends.select(replace(PROBLEM, D=136))


@pytest.mark.parametrize("target", ["7.0", "7.5"])
def test_what_is_compiled_beforehand(target):
    """A wheel for such a GPU has the kernels that bfloat16 will ask for."""
    wanted = presets.calls(presets.INSTALL_ROWS, dtypes=("bf16", "fp32"))
    arch = Arch(*(int(part) for part in target.split(".")))
    kernels = EvoformerAttnBuilder().kernels_for(wanted, (arch,))
    assert {kernel.dtype for kernel in kernels} == {"fp32"}
    assert len(kernels) == len(presets.INSTALL_ROWS) * 2


class OnTheCpu(CudaBackend):
    """Launches the CPU's kernel of the chosen dtype in place of the GPU's."""

    def __init__(self, family):
        super().__init__(family)
        self.specs = []

    def not_supported_reasons(self, problem):
        return []

    def _prefetch_backward(self, problem, inputs):
        pass

    def _kernel(self, direction, problem, tensors):
        spec = self._spec(direction, problem, tensors)
        self.specs.append(spec)
        assert all(tensor is None or tensor.dtype == problem.dtype for tensor in tensors)
        builder = EvoformerAttnCPUBuilder()
        on_cpu = builder.kernel(direction=direction, dtype=spec.dtype)
        return builder.load(kernels=[on_cpu]).kernel(on_cpu)

    def _run(self, kernel, packed, device):
        return kernel.run(packed, 0)


@pytest.fixture
def stand_in(capability, monkeypatch):
    kernel = EvoformerAttnBuilder.kernel
    monkeypatch.setattr(  # as if this machine's nvcc compiled for such GPUs
        EvoformerAttnBuilder,
        "kernel",
        lambda self, *, device, **given: kernel(self, device=device, target=Arch(*device), **given),
    )
    backend = OnTheCpu(OLD[capability])
    monkeypatch.setattr(backends, "BACKENDS", (backend,))
    backend_cuda._tell_of_float32.cache_clear()
    return backend


@pytest.mark.usefixtures("seed")
def test_results_keep_the_law(stand_in):
    """O and dq, dk, dv are bfloat16, rounded once; biases are read in float32."""
    for case in (
        Case("one", N=5, Lq=70),
        Case("two", Lq=9, bias1=False),
        Case("none", bias2=False),
    ):
        check(case.inputs(torch.bfloat16, "cpu"))
    assert {(spec.dtype, spec.direction) for spec in stand_in.specs} == {
        ("fp32", "fwd"),
        ("fp32", "bwd"),
    }
    masked = Case("mask", N=3, Lq=70).inputs(torch.float32, "cpu")
    masked.bias1[..., 40:] = -1e9
    for name in ("q", "k", "v"):
        setattr(masked, name, getattr(masked, name).bfloat16())
    check(masked)
    one = Case("some", N=3, Lq=70).inputs(torch.bfloat16, "cpu")
    one.needs = (False, True, False, False, True)
    check(one)


@pytest.mark.usefixtures("seed")
def test_kernels_that_read_bfloat16_as_float32_are_noticed(stand_in, monkeypatch):
    """A backward without the conversion."""

    def unconverted(self, problem, *arguments, wanted):
        wide = replace(problem, dtype=torch.float32)
        return Backend.backward(self, wide, *arguments, wanted=wanted)

    inputs = Case("one", N=5, Lq=70).inputs(torch.bfloat16, "cpu")
    monkeypatch.setattr(CudaBackend, "backward", unconverted)
    with pytest.raises(AssertionError):
        check(inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("of_bias", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_biases_of_every_dtype_beside_every_other(of_bias, dtype):
    """As GPU kernels read them: what is finite stays finite."""
    limits = torch.finfo(of_bias)
    bias = torch.tensor([1.5, -torch.inf, torch.inf, torch.nan, limits.min, limits.max]).to(of_bias)
    read = CudaBackend("sm80")._prepare_bias(bias, replace(PROBLEM, dtype=dtype))
    assert read.dtype == dtype
    assert (read.isfinite() == bias.isfinite()).all() and (read.isnan() == bias.isnan()).all()
    assert read[0] == 1.5 and read[1] == -torch.inf and read[2] == torch.inf


def test_one_notice(stand_in, caplog):
    x = Case("notice").inputs(torch.bfloat16, "cpu")
    problem = replace(PROBLEM, device=x.q.device)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            stand_in.forward(problem, *x.tensors(), with_lse=False)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "bfloat16 is computed in float32 on this GPU" in said


def test_float16_gets_no_notice(stand_in, caplog):
    x = Case("notice").inputs(torch.float16, "cpu")
    problem = replace(PROBLEM, device=x.q.device, dtype=torch.float16)
    with caplog.at_level(logging.WARNING):
        stand_in.forward(problem, *x.tensors(), with_lse=False)
    assert not caplog.records
