"""bfloat16 on compute capability 7.0 and 7.5 goes through the float32 kernels, with one notice. No
GPU is needed: devices are pretended, and the CPU's kernels, which read the same parameters, stand
in for theirs.
"""

import logging

import pytest

torch = pytest.importorskip("torch")


from deepspeed4science import dispatch  # noqa: E402
from deepspeed4science.backends import cuda, prepare, sm80  # noqa: E402
from deepspeed4science.backends.sm80 import Sm80Backend  # noqa: E402
from deepspeed4science.call import ForwardCall  # noqa: E402
from deepspeed4science.dispatch import choose  # noqa: E402
from deepspeed4science.errors import NoBackendError  # noqa: E402
from deepspeed4science.problem import Problem  # noqa: E402
from op_builder import EvoformerAttnBuilder, EvoformerAttnCPUBuilder  # noqa: E402
from op_builder.ops import presets  # noqa: E402
from op_builder.ops.instantiations import FAMILIES  # noqa: E402
from op_builder.toolchain.arch import Arch  # noqa: E402
from tests.numeric.cases import Case  # noqa: E402
from tests.numeric.law import check, ours  # noqa: E402

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
    bias1_dtype=torch.bfloat16,
    bias2_dtype=torch.bfloat16,
)
OLD = {(7, 0): "sm70", (7, 2): "sm70", (7, 5): "sm75"}


TENSORS = [torch.empty(1, 3, 40, 2, 32, dtype=torch.bfloat16)] * 3


@pytest.fixture(params=OLD, ids=str)
def capability(request, monkeypatch):
    """Every device is of this one, and this machine's nvcc compiles for it."""
    for name in ("DS4S_CUDA_FAMILY", "TORCH_CUDA_ARCH_LIST"):
        monkeypatch.delenv(name, raising=False)
    kernel = EvoformerAttnBuilder.kernel
    monkeypatch.setattr(
        EvoformerAttnBuilder,
        "kernel",
        lambda self, *, device, **given: kernel(self, device=device, target=Arch(*device), **given),
    )
    monkeypatch.setattr(cuda, "capability", lambda device: request.param)
    cuda.serving_families.cache_clear()
    yield request.param
    cuda.serving_families.cache_clear()


def test_a_call_is_taken_by_the_family_of_the_device(capability):
    choice = choose(PROBLEM, "fwd", TENSORS)
    assert (choice.kernel.family, choice.kernel.dtype) == (OLD[capability], "fp32")
    assert choice.reason == ""


def test_float16_and_float32_are_computed_as_they_are(capability):
    for dtype, name in ((torch.float16, "fp16"), (torch.float32, "fp32")):
        assert choose(PROBLEM._replace(dtype=dtype), "fwd", TENSORS).kernel.dtype == name


def test_newer_families_compute_bfloat16_as_it_is():
    for family in ("sm80", "sm90"):
        assert FAMILIES[family].dtype_for("fwd", "bf16") == "bf16"


def test_what_float32_does_not_take(capability):
    """64 KiB of shared memory on 7.5; no head dimension above 256 anywhere."""
    for wide in (PROBLEM._replace(D=128), PROBLEM._replace(D=256)):
        if capability == (7, 5):
            with pytest.raises(NoBackendError, match=r"bfloat16 goes, too.*above 96.*use float16"):
                choose(wide, "fwd", TENSORS)
        else:
            choice = choose(wide, "fwd", TENSORS)
            assert (choice.backend.name, choice.kernel.head_dim) == ("Sm70", wide.D)
    with pytest.raises(NoBackendError, match="largest head dimension is 256"):
        choose(PROBLEM._replace(D=264), "fwd", TENSORS)


def test_what_is_converted_is_aligned_by_its_channels(capability):
    """Its copy begins anywhere that suits, whatever the original's strides."""
    odd = torch.empty(1, 3, 40, 66, dtype=torch.bfloat16)[..., :64].unflatten(-1, (2, 32))
    assert choose(PROBLEM, "fwd", [odd] * 3).kernel.aligned
    narrow = torch.empty(1, 3, 40, 2, 30, dtype=torch.bfloat16)
    assert not choose(PROBLEM._replace(D=30), "fwd", [narrow] * 3).kernel.aligned


@pytest.mark.parametrize("target", ["7.0", "7.5"])
def test_what_is_compiled_beforehand(target):
    """A wheel for such a GPU has the kernels that bfloat16 will ask for."""
    wanted = presets.calls(presets.INSTALL_ROWS, dtypes=("bf16", "fp32"))
    arch = Arch(*(int(part) for part in target.split(".")))
    kernels = EvoformerAttnBuilder().kernels_for(wanted, (arch,))
    assert {kernel.dtype for kernel in kernels} == {"fp32"}
    assert len(kernels) == len(presets.INSTALL_ROWS) * 2


class OnTheCpu(Sm80Backend):
    """Launches the CPU's kernel of the chosen dtype in place of the GPU's."""

    def __init__(self, family):
        super().__init__(FAMILIES[family])
        self.kernels = self
        self.specs = []

    def device_obstacle(self, device):
        return ""

    def prefetch(self, spec):
        pass

    def load(self, spec):
        self.specs.append(spec)
        builder = EvoformerAttnCPUBuilder()
        on_cpu = builder.kernel(direction=spec.direction, dtype=spec.dtype)
        return builder.load(kernels=[on_cpu]).kernel(on_cpu)

    def workspace_bytes(self, kernel, packed, device):
        return 0

    def launch(self, kernel, packed, device):
        return kernel.run(packed, 0)


@pytest.fixture
def stand_in(capability, monkeypatch):
    backend = OnTheCpu(OLD[capability])
    monkeypatch.setattr(dispatch, "BACKENDS", (backend,))
    sm80._tell_of_float32.cache_clear()
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
    """A backward that takes each two numbers of dO for one."""
    real = prepare.in_dtype

    def reinterpreted(call, dtype):
        converted = real(call, dtype)
        if isinstance(call, ForwardCall):
            return converted
        return converted._replace(do_=torch.cat([call.do_, call.do_], -1).view(dtype))

    inputs = Case("one", N=5, Lq=70).inputs(torch.bfloat16, "cpu")
    monkeypatch.setattr(sm80, "in_dtype", reinterpreted)
    with pytest.raises(AssertionError):
        check(inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("of_bias", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_biases_of_every_dtype_beside_every_other(of_bias, dtype):
    """As GPU kernels read them: what is finite stays finite."""
    limits = torch.finfo(of_bias)
    bias = torch.tensor([1.5, -torch.inf, torch.inf, torch.nan, limits.min, limits.max]).to(of_bias)
    call = ForwardCall(None, None, None, bias, None, False)
    read = prepare.with_biases_in_dtype(call, dtype).bias1
    assert read.dtype == dtype
    assert (read.isfinite() == bias.isfinite()).all() and (read.isnan() == bias.isnan()).all()
    assert read[0] == 1.5 and read[1] == -torch.inf and read[2] == torch.inf


def test_one_notice(stand_in, caplog):
    x = Case("notice").inputs(torch.bfloat16, "cpu")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            ours(*x.tensors())
    (said,) = [record.getMessage() for record in caplog.records]
    assert "bfloat16 is computed in float32 on this GPU" in said


def test_float16_gets_no_notice(stand_in, caplog):
    x = Case("notice").inputs(torch.float16, "cpu")
    with caplog.at_level(logging.WARNING):
        ours(*x.tensors())
    assert not caplog.records
