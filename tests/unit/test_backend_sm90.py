"""Which calls Hopper's own kernels take, and which go to Sm80 with a reason (no GPU needed)."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from deepspeed4science import backend_cuda, backend_sm90, backends  # noqa: E402
from deepspeed4science.backend_sm90 import Sm90Backend, tma_obstacle  # noqa: E402
from deepspeed4science.errors import NoBackendError  # noqa: E402
from deepspeed4science.problem import Problem  # noqa: E402
from op_builder import EvoformerAttnBuilder  # noqa: E402
from op_builder.toolchain import nvcc_targets, toolkits  # noqa: E402
from op_builder.toolchain.nvcc_targets import Targets  # noqa: E402
from op_builder.toolchain.tool import Tool  # noqa: E402

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


def tensor(dtype=torch.bfloat16):
    return torch.empty(1, 3, 40, 2, 32, dtype=dtype)


@pytest.fixture
def hopper(monkeypatch):
    """Every device is of compute capability 9.0; the backends are new, so nothing is remembered."""
    for name in ("DS4S_CUDA_FAMILY", "TORCH_CUDA_ARCH_LIST", "DS4S_VERBOSE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(backend_cuda, "_capability", lambda device: (9, 0))
    tool = Tool("nvcc", ok=True)
    monkeypatch.setattr(toolkits, "nvccs", lambda **_: iter((tool,)))
    monkeypatch.setattr(nvcc_targets, "targets", lambda tool: Targets(("sm_90", "sm_90a")))
    sm80 = backend_cuda.CudaBackend("sm80")
    monkeypatch.setattr(backends, "BACKENDS", (Sm90Backend(), sm80))


def kernel(direction, *tensors, problem=PROBLEM):
    backend = backends.select(problem)
    assert isinstance(backend, backend_cuda.CudaBackend)
    return backend._spec(direction, problem, tensors)


def test_hoppers_calls_are_sm90s(hopper):
    tensors = [tensor() for _ in range(8)]
    assert kernel("fwd", *tensors[:4]).name == "sm90_fwd_bf16_d32_both"
    assert kernel("bwd", *tensors).name == "sm90_bwd_bf16_d32_bias2"
    tensors[1] = tensors[1][:, :1].expand(1, 3, 40, 2, 32)
    assert kernel("bwd", *tensors).name == "sm80_bwd_bf16_d32_bias2_aligned"


@pytest.mark.parametrize("family", ["sm90", "sm80", "sm75"])
def test_forced_family(family, hopper, monkeypatch):
    monkeypatch.setenv("DS4S_CUDA_FAMILY", family)
    monkeypatch.setattr(
        backends, "BACKENDS", (*backends.BACKENDS, backend_cuda.CudaBackend("sm75"))
    )
    problem = replace(PROBLEM, dtype=torch.float16)
    assert kernel("fwd", *[tensor(torch.float16)] * 4, problem=problem).family == family


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float32}, "16-bit"),
        ({"D": 12}, "D = 12, Dv = 32: TMA reads head dimensions that are multiples of 8"),
        ({"Dv": 20}, "Dv = 20: TMA reads"),
    ],
    ids=lambda value: str(value),
)
def test_sm80_takes_what_sm90_refuses(change, reason, hopper):
    problem = replace(PROBLEM, **change)
    (said,) = backends.BACKENDS[0].not_supported_reasons(problem)
    assert reason in said
    assert backends.select(problem).name == "Sm80"


def test_refusals_of_both_are_listed(hopper):
    with pytest.raises(NoBackendError) as raised:
        backends.select(replace(PROBLEM, D=136))
    for name in ("Sm90", "Sm80"):
        assert f"  {name}: D = 136, Dv = 32: the largest head dimension is 128" in str(raised.value)


def test_other_gpus_are_not_sm90s(hopper, monkeypatch):
    for device in ((8, 0), (10, 0), (12, 0)):
        monkeypatch.setattr(backend_cuda, "_capability", lambda _, device=device: device)
        backend = Sm90Backend()
        major, minor = device
        assert backend.not_supported_reasons(PROBLEM) == [
            f"compute capability {major}.{minor} is served by sm80"
        ]


def odd_address():
    return torch.empty(3 * 40 * 2 * 32 + 1, dtype=torch.bfloat16)[1:].view(1, 3, 40, 2, 32)


def odd_rows():
    return torch.empty(1, 3, 40, 66, dtype=torch.bfloat16)[..., :64].unflatten(-1, (2, 32))


def far_apart():
    strides = (8, 1 << 39, 8, 8, 1)
    return torch.empty_strided((1, 2, 1, 1, 8), strides, dtype=torch.bfloat16, device="meta")


OBSTACLES = [
    (odd_address, "its address is not a multiple of 16 bytes"),
    (odd_rows, "its stride over L, 66"),
    (lambda: tensor()[:, :1].expand(1, 3, 40, 2, 32), "expanded over N (stride 0)"),
    (lambda: tensor()[:, :, :1].expand(1, 3, 40, 2, 32), "expanded over L (stride 0)"),
    (far_apart, "2^40 bytes or more"),
]


@pytest.mark.parametrize(("make", "reason"), OBSTACLES, ids=[reason for _, reason in OBSTACLES])
def test_what_tma_cannot_read(make, reason):
    assert reason in tma_obstacle(make())


@pytest.mark.parametrize(
    "view",
    [
        tensor(),
        tensor()[:, 1:, 3:30, 1:, 8:24],
        torch.empty(1, 3, 2, 40, 32, dtype=torch.bfloat16).transpose(2, 3),
        torch.empty(1, 1, 40, 2, 32, dtype=torch.bfloat16).as_strided(
            (1, 1, 40, 2, 32), (0, 0, 64, 32, 1)
        ),
    ],
    ids=["contiguous", "slice", "heads first", "stride 0 where the size is 1"],
)
def test_what_tma_can_read(view):
    assert tma_obstacle(view) == ""


def test_one_unfit_tensor_makes_it_sm80s_with_a_reason_told_once(hopper, monkeypatch, caplog):
    """Aligned stays aligned: an expanded k is no reason for the slower Sm80 kernel."""
    monkeypatch.setenv("DS4S_VERBOSE", "1")
    expanded = tensor()[:, :1].expand(1, 3, 40, 2, 32)
    with caplog.at_level(logging.INFO, backend_sm90.__name__):
        for _ in range(2):
            row = kernel("fwd", tensor(), expanded, tensor(), tensor())
            assert row.name == "sm80_fwd_bf16_d32_both_aligned"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        "Sm80 takes the place of Sm90 (fwd): k: it is expanded over N (stride 0)"
    )
    row = kernel("fwd", tensor(), tensor(), odd_address(), tensor())
    assert row.name == "sm80_fwd_bf16_d32_both_unaligned"


GRADIENTS = {
    "sum": lambda: torch.ones((), dtype=torch.bfloat16).expand(1, 3, 40, 2, 32),
    "expanded row": lambda: torch.randn(1, 3, 1, 2, 32).bfloat16().expand(1, 3, 40, 2, 32),
    "channels first": lambda: torch.randn(1, 3, 32, 2, 40).bfloat16().transpose(2, 4),
    "odd address": lambda: odd_address().normal_(),
    "odd rows": lambda: odd_rows().normal_(),
}


def gradient_given_to_the_kernel(backend, do_, monkeypatch):
    """`do_` as `Backend.backward` hands it to `_launch`; everything on the CPU, nothing runs."""
    given = []
    monkeypatch.setattr(backend, "_launch", lambda *arguments: given.append(arguments[2]))
    problem = replace(PROBLEM, device=torch.device("cpu"))
    q, k, v, o = (tensor() for _ in range(4))
    lse = torch.empty(1, 3, 2, 40)
    backend.backward(problem, do_, q, k, v, o, lse, None, None, wanted=[True] * 5)
    ((*_, given_do, dq, dk, dv),) = given
    assert not any(tma_obstacle(t) for t in (dq, dk, dv))
    return given_do


@pytest.mark.parametrize("make", GRADIENTS.values(), ids=GRADIENTS.keys())
def test_a_gradient_that_tma_cannot_read_is_copied(make, monkeypatch):
    do_ = make()
    given = gradient_given_to_the_kernel(Sm90Backend(), do_, monkeypatch)
    assert torch.equal(given, do_)
    assert given.stride(-1) == 1 and tma_obstacle(given) == ""


def test_other_gradients_are_not_copied(monkeypatch):
    heads_first = torch.randn(1, 3, 2, 40, 32).bfloat16().transpose(2, 3)
    for do_ in (tensor(), heads_first):
        given = gradient_given_to_the_kernel(Sm90Backend(), do_, monkeypatch)
        assert given.data_ptr() == do_.data_ptr()
    expanded = GRADIENTS["expanded row"]()
    sm80 = backend_cuda.CudaBackend("sm80")  # reads any strides
    given = gradient_given_to_the_kernel(sm80, expanded, monkeypatch)
    assert given.data_ptr() == expanded.data_ptr()


def test_the_backward_that_is_compiled_ahead_is_the_one_that_runs(hopper, monkeypatch):
    """q with its channels apart is copied, and it is the copy that decides."""
    backend = backends.BACKENDS[0]
    ahead = []
    monkeypatch.setattr(backend._builder, "prefetch", ahead.extend)
    monkeypatch.setattr(backend, "_launch", lambda *arguments: None)
    q = torch.empty(1, 3, 32, 2, 40, dtype=torch.bfloat16).transpose(2, 4)
    problem = replace(PROBLEM, device=torch.device("cpu"))
    backend.forward(problem, q, tensor(), tensor(), None, None, with_lse=True)
    assert ahead == [kernel("bwd", *[tensor() for _ in range(8)])]
    backend.forward(problem, q, tensor(), tensor(), None, None, with_lse=False)
    assert len(ahead) == 1


def test_quiet_without_being_asked(hopper, caplog):
    with caplog.at_level(logging.INFO, backend_sm90.__name__):
        kernel("fwd", tensor(), tensor(), odd_address(), tensor())
    assert [record.levelno for record in caplog.records] == [logging.INFO]


def test_the_answer_of_the_builder_is_asked_for_once(hopper, monkeypatch):
    """It looks for nvcc, which takes milliseconds."""
    asked = []
    real = EvoformerAttnBuilder.families
    monkeypatch.setattr(
        EvoformerAttnBuilder,
        "families",
        lambda self, device: asked.append(device) or real(self, device),
    )
    for _ in range(3):
        backends.select(PROBLEM)
    assert asked == [(9, 0)]
