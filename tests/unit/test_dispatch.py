"""Which kernel computes a call: what Hopper's own take, and what goes to Sm80 with a reason. No GPU
is needed.
"""

from __future__ import annotations

import logging
import struct
import threading
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from deepspeed4science import dispatch, implementation, params, prepared  # noqa: E402
from deepspeed4science.backends import cuda, in_order  # noqa: E402
from deepspeed4science.backends.kernels import Kernels  # noqa: E402
from deepspeed4science.backends.sm90 import tma_obstacle  # noqa: E402
from deepspeed4science.call import BackwardCall, ForwardCall  # noqa: E402
from deepspeed4science.dispatch import choose  # noqa: E402
from deepspeed4science.errors import KernelError, NoBackendError  # noqa: E402
from deepspeed4science.prepared import PreparedBackward, PreparedForward  # noqa: E402
from deepspeed4science.problem import Problem  # noqa: E402
from op_builder import EvoformerAttnBuilder, OpBuilder  # noqa: E402
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
    bias1_dtype=torch.bfloat16,
    bias2_dtype=torch.bfloat16,
)


def tensor(dtype=torch.bfloat16):
    return torch.empty(1, 3, 40, 2, 32, dtype=dtype)


@pytest.fixture
def hopper(monkeypatch):
    """Every device is of compute capability 9.0; the backends are new, so nothing is remembered."""
    for name in ("DS4S_CUDA_FAMILY", "TORCH_CUDA_ARCH_LIST", "DS4S_VERBOSE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cuda, "capability", lambda device: (9, 0))
    tool = Tool("nvcc", ok=True)
    monkeypatch.setattr(toolkits, "nvccs", lambda **_: iter((tool,)))
    monkeypatch.setattr(nvcc_targets, "targets", lambda tool: Targets(("sm_90", "sm_90a")))
    monkeypatch.setattr(dispatch, "BACKENDS", in_order())
    monkeypatch.setattr(prepared, "_told", set())
    cuda.serving_families.cache_clear()
    yield
    cuda.serving_families.cache_clear()


def kernel(direction, *tensors, problem=PROBLEM):
    return choose(problem, direction, tensors).kernel


def test_hoppers_calls_are_sm90s(hopper):
    tensors = [tensor() for _ in range(5)]
    assert kernel("fwd", *tensors[:3]).name == "sm90_fwd_bf16_d32_both"
    assert kernel("bwd", *tensors).name == "sm90_bwd_bf16_d32_bias2"
    tensors[1] = tensors[1][:, :1].expand(1, 3, 40, 2, 32)
    assert kernel("bwd", *tensors).name == "sm80_bwd_bf16_d32_bias2_aligned"


@pytest.mark.parametrize("family", ["sm90", "sm80", "sm75"])
def test_forced_family(family, hopper, monkeypatch):
    monkeypatch.setenv("DS4S_CUDA_FAMILY", family)
    problem = PROBLEM._replace(dtype=torch.float16)
    choice = choose(problem, "fwd", [tensor(torch.float16)] * 3)
    assert (choice.kernel.family, choice.reason) == (family, "")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float32}, "float32: wgmma multiplies 16-bit numbers"),
        ({"D": 12}, "D = 12, Dv = 32: TMA reads head dimensions that are multiples of 8"),
        ({"Dv": 20}, "D = 32, Dv = 20: TMA reads head dimensions that are multiples of 8"),
        ({"Dv": 136}, "D = 32, Dv = 136: the largest head dimension is 128"),
    ],
    ids=lambda value: str(value),
)
def test_sm80_takes_what_sm90_refuses(change, reason, hopper):
    choice = choose(PROBLEM._replace(**change), "fwd", [tensor()] * 3)
    assert choice.kernel.family == "sm80"
    assert choice.reason == f"Sm80 takes the place of Sm90 (fwd): {reason}"


def test_refusals_of_all_are_listed(hopper):
    with pytest.raises(NoBackendError) as raised:
        choose(PROBLEM._replace(D=264), "fwd", [tensor()] * 3)
    said = str(raised.value)
    for name, largest in (("Sm90", 128), ("Sm80", 256)):
        assert f"  {name}: D = 264, Dv = 32: the largest head dimension is {largest}\n" in said
    assert "  Sm75: compute capability 9.0 is served by sm90\n" in said
    assert "  Cpu: tensors are on cuda:0, not on the CPU\n" in said


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_dimensions_above_128(dtype, hopper):
    """The backward takes 16-bit types."""
    wide = PROBLEM._replace(D=136, dtype=dtype)
    assert choose(wide, "fwd", [tensor(dtype)] * 3).kernel.head_dim == 256
    if dtype == torch.bfloat16:
        assert choose(wide, "bwd", [tensor(dtype)] * 3).kernel.head_dim == 256
    else:
        with pytest.raises(NoBackendError, match="of the backward in fp32 is 128"):
            choose(wide, "bwd", [tensor(dtype)] * 3)


def test_other_gpus_are_not_sm90s(hopper, monkeypatch):
    for device in ((8, 0), (10, 0), (12, 0)):
        monkeypatch.setattr(cuda, "capability", lambda _, device=device: device)
        cuda.serving_families.cache_clear()
        backend = dispatch.BACKENDS[1]
        major, minor = device
        assert backend.name == "Sm90"
        assert backend.device_obstacle(PROBLEM.device) == (
            f"compute capability {major}.{minor} is served by sm80"
        )


def test_amds_gpus_are_refused(hopper, monkeypatch):
    """To PyTorch they are "cuda" devices; an MI250X has the compute capability of Hopper."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(NoBackendError, match=r"Sm90: this PyTorch is built for AMD's GPUs"):
        choose(PROBLEM, "fwd", [tensor()] * 3)


def test_a_device_that_a_family_is_forced_upon_in_vain(hopper, monkeypatch):
    monkeypatch.setattr(cuda, "capability", lambda device: (8, 0))
    monkeypatch.setenv("DS4S_CUDA_FAMILY", "sm90")
    with pytest.raises(NoBackendError, match=r"expected one of sm70, sm75, sm80 on .* got sm90"):
        choose(PROBLEM, "fwd", [tensor()] * 3)


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


def test_one_unfit_tensor_makes_it_sm80s_with_a_reason(hopper):
    """Aligned stays aligned: an expanded k is no reason for the slower Sm80 kernel."""
    choice = choose(PROBLEM, "fwd", [tensor(), tensor()[:, :1].expand(1, 3, 40, 2, 32), tensor()])
    assert choice.kernel.name == "sm80_fwd_bf16_d32_both_aligned"
    assert (
        choice.reason == "Sm80 takes the place of Sm90 (fwd): k: it is expanded over N (stride 0)"
    )
    row = kernel("fwd", tensor(), tensor(), odd_address())
    assert row.name == "sm80_fwd_bf16_d32_both_unaligned"


def test_what_sm80_reads_in_pieces_of_16_bytes(hopper, monkeypatch):
    """Strides count over each dimension; of channels that are copied, those of the copy."""
    monkeypatch.setenv("DS4S_CUDA_FAMILY", "sm80")
    odd_heads = torch.empty(1, 3, 40, 2, 36, dtype=torch.bfloat16)[..., :32]  # rows of 144 bytes
    channels_first = torch.empty(1, 3, 32, 2, 41, dtype=torch.bfloat16)[..., 1:].transpose(2, 4)
    for k, ending in ((tensor(), ""), (odd_heads, "un"), (channels_first, "")):
        name = kernel("fwd", tensor(), k, tensor()).name
        assert name == f"sm80_fwd_bf16_d32_both_{ending}aligned"


def test_the_wider_of_both_head_dimensions_counts(hopper):
    """Also after a call that is like it but for the values' channels."""
    for Dv, tier in ((32, 32), (64, 64), (16, 32)):
        row = kernel("fwd", *[tensor()] * 3, problem=PROBLEM._replace(Dv=Dv))
        assert row.head_dim == tier


def test_to_choose_says_nothing_and_loads_nothing(hopper, caplog, monkeypatch):
    """A query is no call; what is done with its answer tells the reason."""
    monkeypatch.setenv("DS4S_VERBOSE", "1")
    monkeypatch.setattr(OpBuilder, "load", None)
    monkeypatch.setattr(OpBuilder, "prefetch", None)
    with caplog.at_level(logging.DEBUG):
        for direction in ("fwd", "bwd"):
            assert choose(PROBLEM, direction, [tensor(), tensor(), odd_address()]).reason
    assert not caplog.records


@pytest.fixture
def launched(hopper, monkeypatch):
    """What is handed to kernels, which do not run: layout and bytes. Tensors are on the CPU."""
    found = []
    kernel, empty = SimpleNamespace(name="kernel"), torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, device=None, **how: empty(*size, **how))
    monkeypatch.setattr(Kernels, "load", lambda self, spec: kernel)
    monkeypatch.setattr(Kernels, "prefetch", lambda self, spec: None)

    def launch(self, kernel, packed, device):
        found.append(packed)
        return 0

    monkeypatch.setattr(cuda.CudaBackend, "launch", launch)
    monkeypatch.setattr(cuda.CudaBackend, "workspace_bytes", lambda *_: 0)
    return found


def forward(q, k, v, *, with_lse=False):
    choice = choose(PROBLEM, "fwd", (q, k, v))
    return PreparedForward(choice, PROBLEM)(ForwardCall(q, k, v, None, None, with_lse))


@pytest.mark.parametrize(("verbose", "level"), [("1", logging.WARNING), ("", logging.INFO)])
def test_a_reason_is_told_once_when_the_call_runs(
    verbose, level, hopper, launched, monkeypatch, caplog
):
    monkeypatch.setenv("DS4S_VERBOSE", verbose)
    with caplog.at_level(logging.INFO, prepared.__name__):
        for _ in range(2):
            forward(tensor(), tensor()[:, :1].expand(1, 3, 40, 2, 32), tensor())
    (record,) = caplog.records
    assert record.levelno == level
    assert record.getMessage() == (
        "Sm80 takes the place of Sm90 (fwd): k: it is expanded over N (stride 0)"
    )


GRADIENTS = {
    "sum": lambda: torch.ones((), dtype=torch.bfloat16).expand(1, 3, 40, 2, 32),
    "expanded row": lambda: torch.randn(1, 3, 1, 2, 32).bfloat16().expand(1, 3, 40, 2, 32),
    "channels first": lambda: torch.randn(1, 3, 32, 2, 40).bfloat16().transpose(2, 4),
    "odd address": lambda: odd_address().normal_(),
    "odd rows": lambda: odd_rows().normal_(),
}


def gradient_given_to_the_kernel(do_, launched, family="sm90"):
    """Address and strides of `do_` as the kernel of a backward gets them, and the values there."""
    choice = choose(PROBLEM, "bwd", [tensor() for _ in range(5)])
    if family != choice.kernel.family:
        backend = next(one for one in dispatch.BACKENDS if one.name.lower() == family)
        choice = choice._replace(backend=backend)
    q, k, v, o = (tensor() for _ in range(4))
    call = BackwardCall(do_, q, k, v, o, torch.empty(1, 3, 2, 40), None, None, [True] * 5)
    given = choice.backend.prepare(PROBLEM, call).do_
    PreparedBackward(choice, PROBLEM)(call)
    (packed,) = launched
    launched.clear()
    at = params.BWD.offsets()["do_stride"]
    assert struct.unpack_from("=4q", packed, at) == given.stride()[:4]
    return given


@pytest.mark.parametrize("refuses", [False, True])
def test_rows_of_dbias2_are_padded_unless_the_kernel_refuses(refuses, launched, monkeypatch):
    at = params.BWD.offsets()["dbias2_stride"]

    def workspace_bytes(self, kernel, packed, device):
        (stride,) = struct.unpack_from("=q", packed, at)
        asked.append(stride)
        return -1 if refuses and stride != 39 else 0

    asked = []
    monkeypatch.setattr(cuda.CudaBackend, "workspace_bytes", workspace_bytes)
    monkeypatch.setattr(prepared, "_MOST_ROUNDED", 0)
    problem = PROBLEM._replace(Lk=39)
    q, k = tensor(), tensor()[:, :, :39].contiguous()
    bias2 = torch.empty(1, 1, 2, 40, 39, dtype=torch.bfloat16)
    lse = torch.empty(1, 3, 2, 40)
    call = BackwardCall(q, q, k, k, q, lse, None, bias2, [True] * 5)
    choice = choose(problem, "bwd", [q, k, k, q, q])
    compute = PreparedBackward(choice, problem, rounds=True)
    for _ in range(2):
        dbias2 = compute(call)[4]
        stride = 39 if refuses else 40
        assert dbias2.shape == bias2.shape and dbias2.stride()[3:] == (stride, 1)
        assert dbias2.dtype == torch.float32
        (packed,) = launched
        assert struct.unpack_from("=q", packed, at) == (stride,)
        launched.clear()
    assert asked == ([40, 39] if refuses else [40])
    # The operator's gradients are dense: tracing says so.
    assert PreparedBackward(choice, problem)(call)[4].stride()[3:] == (39, 1)


def test_gradients_of_broadcast_biases_are_summed_before_they_are_rounded(hopper, monkeypatch):
    """A kernel that rounds writes to memory of the bias's own shape, which has less room."""
    found = []
    monkeypatch.setattr(implementation, "PreparedBackward", lambda *_, rounds: found.append(rounds))
    monkeypatch.setattr(implementation, "describe", lambda call: PROBLEM)
    bias1, bias2 = (
        torch.empty(shape).bfloat16() for shape in ((1, 3, 1, 1, 40), (1, 1, 2, 40, 40))
    )
    for one, two in ((bias1, bias2), (bias1[:, :1], bias2), (bias1, bias2[:, :, :1])):
        results = tensor(), torch.empty(1, 3, 2, 40)
        call = BackwardCall(tensor(), *[tensor()] * 3, *results, one, two, [True] * 5)
        implementation.prepare_backward(call, rounds=True)
    assert found == [True, False, False]


def test_threads_agree_on_the_rows_of_dbias2(launched, monkeypatch):
    """The kernel refuses padded rows to one thread, while another one has allocated some."""
    stride_at = params.BWD.offsets()["dbias2_stride"]
    allocated, first_is_done = threading.Event(), threading.Event()
    new_sums = PreparedBackward._new_sums

    def workspace_bytes(self, kernel, packed, device):
        return -1 if struct.unpack_from("=q", packed, stride_at) != (39,) else 0

    def allocate(self, lse):
        rows = new_sums(self, lse)
        if threading.current_thread() is thread:
            allocated.set()
            first_is_done.wait(1)
        return rows

    monkeypatch.setattr(cuda.CudaBackend, "workspace_bytes", workspace_bytes)
    monkeypatch.setattr(PreparedBackward, "_new_sums", allocate)
    monkeypatch.setattr(prepared, "_MOST_ROUNDED", 0)
    problem = PROBLEM._replace(Lk=39)
    q, k = tensor(), tensor()[:, :, :39].contiguous()
    bias2 = torch.empty(1, 1, 2, 40, 39, dtype=torch.bfloat16)
    call = BackwardCall(q, q, k, k, q, torch.empty(1, 3, 2, 40), None, bias2, [True] * 5)
    compute = PreparedBackward(choose(problem, "bwd", [q, k, k, q, q]), problem, rounds=True)
    found = []
    thread = threading.Thread(target=lambda: found.append(compute(call)[4]))
    thread.start()
    assert allocated.wait(10)
    found.append(compute(call)[4])
    first_is_done.set()
    thread.join()
    assert [one.stride()[3:] for one in found] == [(39, 1)] * 2


@pytest.mark.parametrize(("status", "is_late"), [(1, False), (2, False), (700, True), (710, True)])
def test_a_kernel_before_may_have_failed(status, is_late, launched, monkeypatch):
    """As an index out of range in PyTorch's own kernel, which the next launch tells of."""
    kernel = SimpleNamespace(name="kernel", status_string=lambda status: "no words")
    monkeypatch.setattr(Kernels, "load", lambda self, spec: kernel)
    monkeypatch.setattr(cuda.CudaBackend, "launch", lambda *_: status)
    with pytest.raises(KernelError, match=f"status {status}: no words") as refused:
        forward(tensor(), tensor(), tensor())
    assert ("CUDA_LAUNCH_BLOCKING=1" in str(refused.value)) == is_late


def test_a_call_after_one_that_failed_asks_for_the_workspace_again(launched, monkeypatch):
    """A program may go on after an error: free memory and call again. Without memory for a kernel's
    code, no device tells how many of its blocks it runs, from which the workspace follows.
    """
    workspace_at, answers = params.FWD.offsets()["workspace"], [0, 4096]

    def launch(self, kernel, packed, device):
        launched.append(struct.unpack_from("=Q", packed, workspace_at)[0])
        return 0 if launched[-1] else 2

    kernel = SimpleNamespace(name="kernel", status_string=lambda status: "out of memory")
    monkeypatch.setattr(Kernels, "load", lambda self, spec: kernel)
    monkeypatch.setattr(cuda.CudaBackend, "workspace_bytes", lambda *_: answers.pop(0))
    monkeypatch.setattr(cuda.CudaBackend, "launch", launch)
    q = tensor()
    compute = PreparedForward(choose(PROBLEM, "fwd", (q, q, q)), PROBLEM)
    call = ForwardCall(q, q, q, None, None, False)
    with pytest.raises(KernelError, match=r"kernel stopped with status 2: out of memory\."):
        compute(call)
    compute(call)
    compute(call)
    assert [bool(address) for address in launched] == [False, True, True] and not answers


@pytest.mark.parametrize("make", GRADIENTS.values(), ids=GRADIENTS.keys())
def test_a_gradient_that_tma_cannot_read_is_copied(make, launched):
    do_ = make()
    given = gradient_given_to_the_kernel(do_, launched)
    assert torch.equal(given, do_)
    assert given.stride(-1) == 1 and tma_obstacle(given) == ""


def test_a_result_that_tma_cannot_read_is_copied(launched):
    """O as a caller of the operator may have it, such as vmap, which expands it."""
    o = tensor()[:, :1].normal_().expand(1, 3, 40, 2, 32)
    q, backend = tensor(), choose(PROBLEM, "bwd", [tensor() for _ in range(5)]).backend
    call = BackwardCall(q, q, q, q, o, torch.empty(1, 3, 2, 40), None, None, [True] * 5)
    given = backend.prepare(PROBLEM, call)
    assert tma_obstacle(given.o) == "" and torch.equal(given.o, o) and given.do_ is q


def test_other_gradients_are_not_copied(launched):
    heads_first = torch.randn(1, 3, 2, 40, 32).bfloat16().transpose(2, 3)
    for do_ in (tensor(), heads_first):
        assert gradient_given_to_the_kernel(do_, launched) is do_
    expanded = GRADIENTS["expanded row"]()
    assert gradient_given_to_the_kernel(expanded, launched, family="sm80") is expanded


def test_the_backward_that_is_compiled_ahead_is_the_one_that_runs(launched, monkeypatch):
    """q with its channels apart is copied, and it is the copy that decides."""
    ahead = []
    monkeypatch.setattr(Kernels, "prefetch", lambda self, spec: ahead.append(spec))
    q = torch.empty(1, 3, 32, 2, 40, dtype=torch.bfloat16).transpose(2, 4)
    monkeypatch.setattr(implementation, "describe", lambda call: PROBLEM)
    for with_lse, differentiable in ((True, True), (False, True), (True, False)):
        call = ForwardCall(q, tensor(), tensor(), None, None, with_lse)
        implementation.prepare_forward(call, differentiable=differentiable)
    assert ahead == [kernel("bwd", *[tensor() for _ in range(5)])]


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
        choose(PROBLEM, "fwd", [tensor()] * 3)
    assert asked == [(9, 0)]


@pytest.mark.parametrize(("verbose", "lines"), [("1", ["fast: tiles=3"]), ("0", []), ("", [])])
def test_what_a_kernel_runs_is_told_at_its_first_call(verbose, lines, monkeypatch, caplog):
    """And nothing of a kernel without a plan."""
    monkeypatch.setenv("DS4S_VERBOSE", verbose)
    kernels = Kernels(EvoformerAttnBuilder())
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            kernels.tell_plan(SimpleNamespace(name="fast", plan=lambda params: "tiles=3"), b"")
            kernels.tell_plan(SimpleNamespace(name="plain", plan=lambda params: ""), b"")
    assert [record.getMessage() for record in caplog.records] == lines


def test_a_forward_without_a_backward_gives_lse(launched, monkeypatch):
    """Head dimensions that only a forward has; a backward, when it comes, is refused."""
    problem = PROBLEM._replace(D=136, Dv=136, dtype=torch.float32)
    q = torch.empty(1, 3, 40, 2, 136)
    monkeypatch.setattr(implementation, "describe", lambda call: problem)
    call = ForwardCall(q, q, q, None, None, with_lse=True)
    _, lse = implementation.prepare_forward(call, differentiable=True)(call)
    assert lse.shape == (1, 3, 2, 40)
    with pytest.raises(NoBackendError):
        choose(problem, "bwd", (q, q, q))
