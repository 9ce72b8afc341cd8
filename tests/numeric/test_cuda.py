"""CONTRACT, on a GPU: the tensor's device, the current stream, graphs, threads, forced
families, TF32.
"""

import subprocess
import sys

import pytest
import torch

from deepspeed4science import DS4Sci_EvoformerAttention, below_autograd, operators
from deepspeed4science.call import BackwardCall
from deepspeed4science.demo.measure import peak_extra_bytes
from deepspeed4science.errors import NoBackendError
from deepspeed4science.problem import DTYPE_NAMES
from deepspeed4science.reference import evoformer_attention
from op_builder import EvoformerAttnBuilder
from op_builder.ops.instantiations import FAMILIES, WIDE_TIER
from tests.numeric.cases import DTYPES, SHAPES, Case, cuda_family, cuda_reason
from tests.numeric.graphs import replayed_and_direct
from tests.numeric.law import check, check_calls, equal_rows, ours, relative_error, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(cuda_reason() is not None, reason=cuda_reason() or ""),
    pytest.mark.usefixtures("seed"),
]
CASE = Case("cuda", B=1, N=5, Lq=70, H=2)


@pytest.fixture(params=["fp16", "bf16"])
def dtype_of_16_bits(request):
    """That kernels compute in."""
    capability = torch.cuda.get_device_capability()
    family = FAMILIES[EvoformerAttnBuilder().family(capability)]
    if family.dtype_for("bwd", request.param) != request.param:
        pytest.skip(f"{request.param} is computed in another dtype")
    return DTYPES[request.param]


def attention(tensors):
    return DS4Sci_EvoformerAttention(*tensors[:3], tensors[3:])


FEW_SCORES = [c for c in SHAPES if c.B * c.N * c.H * c.Lq * (c.Lk or c.Lq) <= 4096]


@pytest.mark.parametrize("case", FEW_SCORES, ids=lambda case: case.id)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
def test_kernels_take_few_scores_too(case, dtype, kernels_only):
    """As they would if float64 were not more exact."""
    inputs = case.inputs(dtype, "cuda")
    if inputs.q[..., 0, 0].numel() * inputs.k.shape[2] <= 16:
        pytest.skip("the law would be a draw")
    check(inputs)


def test_runs_on_the_current_stream():
    """Work queued before on a side stream is seen; the default stream is not waited for."""
    tensors = CASE.inputs(torch.float16, "cuda").tensors()
    expected = attention(tensors)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        late = [torch.zeros_like(t) for t in tensors]
        # Tens of milliseconds in which a wrong stream would read zeros.
        torch.cuda._sleep(50_000_000)
        for target, source in zip(late, tensors, strict=True):
            target.copy_(source)
        o = attention(late)
    stream.synchronize()
    assert torch.equal(o, expected)


def test_graph_capture():
    tensors = [t.requires_grad_() for t in CASE.inputs(torch.float16, "cuda").tensors()]
    do = torch.randn_like(tensors[0])

    def step():
        o = attention(tensors)
        return (o, *torch.autograd.grad(o, tensors, do))

    for a, b in zip(*replayed_and_direct(step, tensors), strict=True):
        assert relative_error(a, b) < 1e-3  # the fast backward may add in another order


IN_A_NEW_THREAD = """
import threading
import torch
from deepspeed4science import DS4Sci_EvoformerAttention

q, k, v = (torch.randn(1, 64, 128, 4, 32, device="cuda").bfloat16() for _ in range(3))
shapes = (1, 64, 1, 1, 128), (1, 1, 4, 128, 128)
biases = [torch.randn(*shape, device="cuda").bfloat16() for shape in shapes]


def attend():
    return DS4Sci_EvoformerAttention(q, k, v, biases)


expected = attend().cpu()  # its memory is in PyTorch's cache now
found = []
thread = threading.Thread(target=lambda: found.append(attend()))
thread.start()
thread.join()
print(torch.equal(found[0].cpu(), expected))
"""


def test_a_thread_that_has_not_used_the_device():
    """It has no CUDA context until a call makes one; PyTorch's allocator makes none here."""
    command = [sys.executable, "-c", IN_A_NEW_THREAD]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.split() == ["True"], done.stderr


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU only")
def test_second_device():
    """The tensor's device counts, not the current one."""
    tensors = CASE.inputs(torch.float16, "cuda:1").tensors()
    assert torch.cuda.current_device() == 0
    o = attention(tensors)
    assert o.device == torch.device("cuda:1")
    assert relative_error(o, evoformer_attention(*(t.double() for t in tensors))) < 2e-3
    assert torch.cuda.current_device() == 0


HALF_DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"]
)


@HALF_DTYPES
@pytest.mark.parametrize("D", [16, 32, 48, 64])
def test_deterministic_gradients_keep_the_law(D, dtype):
    """From 9.0 up they come from other kernels than the fast ones."""
    torch.use_deterministic_algorithms(True)
    try:
        check(Case("fixed-order", B=2, N=9, Lq=131, Lk=150, H=3, D=D).inputs(dtype, "cuda"))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("fixed_order", [False, True], ids=["any-order", "fixed-order"])
@pytest.mark.parametrize(("N", "D"), [(17, 32), (384, 32), (3000, 32), (3000, 16)])
def test_many_equal_rows_in_float32(N, D, fixed_order):
    """With one sum for each of 16 slices, dbias2 of 3000 equal rows would have 2.4 times the error
    that is allowed.
    """
    one = Case("equal", N=1, Lq=40, Lk=71, H=2, D=D)

    def draw():
        return equal_rows(one.inputs(torch.float32, "cuda"), N)

    torch.use_deterministic_algorithms(fixed_order)
    try:
        check_calls(draw, draws=8)
        inputs = draw()
        first, again = run(ours, inputs), run(ours, inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not fixed_order or all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@HALF_DTYPES
@pytest.mark.parametrize("D", [16, 32, 48, 64])
def test_more_rows_than_are_under_way_at_a_time(D, dtype):
    """Memory for dq that goes from one (b, n, h) to a later one is clean, and nobody waits for
    ever.
    """
    check(Case("many-pairs", B=2, N=151, Lq=34, Lk=140, H=4, D=D).inputs(dtype, "cuda"))


@HALF_DTYPES
@pytest.mark.parametrize(("D", "N"), [(16, 70), (32, 103), (48, 150), (64, 216)])
def test_dq_in_the_memory_of_dk(D, N, dtype):
    """Long keys and few queries: dq of some (b, n, h) is added up in memory of dk or dv, and the
    last ones share what is left.
    """
    check(Case("dq-in-dk", B=2, N=N, Lq=64, Lk=1000, H=4, D=D).inputs(dtype, "cuda"))


@pytest.mark.parametrize("sees", ["all", "nothing", "one key"])
@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)], ids=str)
def test_kernels_round_small_bias_gradients(sees, wanted, dtype_of_16_bits):
    """The sums in float32 that the operator gives, as PyTorch rounds them: also where queries see
    nothing or rows n see one key, so that some are computed again.
    """
    inputs = Case("rounded", B=2, N=3, Lq=70, Lk=90, H=2).inputs(dtype_of_16_bits, "cuda")
    if sees == "nothing":
        inputs.bias2[:, :, :, 3:40:3] = -torch.inf
        inputs.v[:, 1, 7] = torch.nan
    if sees == "one key":
        inputs.bias1[:, 1, ..., 1:] = -torch.inf
    tensors = inputs.tensors()
    torch.use_deterministic_algorithms(True)
    try:
        o, lse = operators.forward_op(*tensors, True)
        needs = (True, True, True, *wanted)
        call = BackwardCall(torch.randn_like(o), *tensors[:3], o, lse, *tensors[3:], needs)
        rounded = below_autograd.backward(call)[3:]
        sums = operators.backward_op(*call)[3:]
    finally:
        torch.use_deterministic_algorithms(False)
    for want, mine, theirs in zip(wanted, rounded, sums, strict=True):
        assert (mine is not None) == want
        if want:
            assert mine.dtype == dtype_of_16_bits and theirs.dtype == torch.float32
            assert torch.equal(mine.nan_to_num(7e3), theirs.to(dtype_of_16_bits).nan_to_num(7e3))


@pytest.mark.parametrize(("N", "L", "H"), [(384, 384, 4), (768, 768, 4), (512, 384, 8)])
def test_speed_costs_no_memory(N, L, H):
    """The fast gradients take no more of it than those with a fixed order of additions."""
    family = EvoformerAttnBuilder().family(torch.cuda.get_device_capability())
    if family != "sm80":
        pytest.skip(f"a promise of the sm80 family; the family here is {family}")
    tensors = [
        t.requires_grad_()
        for t in Case("", N=N, Lq=L, H=H).inputs(torch.bfloat16, "cuda").tensors()
    ]

    def peak(deterministic):
        torch.use_deterministic_algorithms(deterministic)
        return peak_extra_bytes(
            lambda: torch.autograd.grad(attention(tensors).sum(), tensors), torch.device("cuda")
        )

    try:
        assert peak(False) <= peak(True)
    finally:
        torch.use_deterministic_algorithms(False)


def round_to_tf32(x):
    """10 bits of mantissa, to nearest: what a tensor core sees of a float32 operand."""
    bits = x.detach().contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


class Tf32Product(torch.autograd.Function):
    """einsum of two tensors with TF32 operands, and likewise for its gradients."""

    @staticmethod
    def forward(ctx, equation, a, b):
        a, b = round_to_tf32(a), round_to_tf32(b)
        ctx.save_for_backward(a, b)
        ctx.equation = equation
        return torch.einsum(equation, a, b)

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        inputs, output = ctx.equation.split("->")
        left, right = inputs.split(",")
        grad = round_to_tf32(grad)
        grad_a = torch.einsum(f"{output},{right}->{left}", grad, b)
        return None, grad_a, torch.einsum(f"{output},{left}->{right}", grad, a)


def eager_in_tf32(q, k, v, bias1, bias2):
    """Eager with its products on TF32 tensor cores, whatever cuBLAS would choose for the size."""
    product = Tf32Product.apply
    scores = product("bnqhd,bnkhd->bnhqk", q, k) / q.shape[-1] ** 0.5 + bias1 + bias2
    return product("bnhqk,bnkhd->bnqhd", scores.softmax(-1), v)


@pytest.mark.parametrize("D", [8, 32, 64, 128])
def test_tf32_keeps_the_law(D):
    """Forward and backward, against an eager that really rounds its operands to TF32."""
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        check(Case("tf32", N=5, Lq=70, D=D).inputs(torch.float32, "cuda"), eager=eager_in_tf32)
    finally:
        torch.set_float32_matmul_precision(before)


def test_tf32_is_used_only_when_allowed():
    tensors = CASE.inputs(torch.float32, "cuda").tensors()
    reference = evoformer_attention(*(t.double() for t in tensors))
    assert torch.get_float32_matmul_precision() == "highest"
    assert relative_error(attention(tensors), reference) < 2e-6


def test_head_dimension_above_256_is_refused_with_reasons():
    q = torch.randn(1, 1, 70, 1, 264, dtype=torch.float16, device="cuda")
    with pytest.raises(NoBackendError, match="largest head dimension is 256"):
        DS4Sci_EvoformerAttention(q, q, q)


WIDE = (
    Case("D136", Lq=70, Lk=129, D=136),
    Case("D256", Lq=70, Lk=129, D=256),
    Case("Dv200", Lq=129, Lk=70, D=40, Dv=200),
    Case("odd", Lq=77, D=255, Dv=131),
)


@pytest.mark.parametrize("case", WIDE, ids=lambda case: case.id)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
def test_head_dimensions_up_to_256_keep_the_law(case, dtype):
    """Keys hidden by a finite mask in every row n, all of them in one. Both directions, where there
    is a backward.
    """
    inputs = case.inputs(dtype, "cuda")
    inputs.bias1[..., :20] = torch.finfo(torch.float16).min / 2
    inputs.bias1[:, 1] = -torch.inf
    served = FAMILIES["sm80"].largest_head_dim("bwd", DTYPE_NAMES[dtype]) == WIDE_TIER
    compiles_soon = case.D % 8 == 0  # a minute otherwise
    inputs.needs = (served and compiles_soon and cuda_family() in ("sm80", "sm90"),) * 5
    check(inputs)


def test_no_backward_of_wide_heads_in_float32():
    q = torch.randn(1, 1, 70, 1, 136, device="cuda", requires_grad=True)
    o = DS4Sci_EvoformerAttention(q, q, q)
    with pytest.raises(NoBackendError, match="of the backward in fp32 is 128"):
        o.sum().backward()


@pytest.mark.parametrize("D", [8, 32, 64])
@pytest.mark.parametrize("family", ["sm70", "sm75"])
def test_bfloat16_of_the_families_that_do_not_multiply_it(family, D, ran, monkeypatch):
    """Through float32, whatever the GPU here is; a float32 mask keeps its value."""
    monkeypatch.setenv("DS4S_CUDA_FAMILY", family)
    inputs = Case("old", B=2, N=5, Lq=70, Lk=90, D=D).inputs(torch.bfloat16, "cuda")
    inputs.bias1 = inputs.bias1.float()
    inputs.bias1[..., 60:] = -1e9
    check(inputs)
    assert {name.partition("_d")[0] for name in ran} == {f"{family}_fwd_fp32", f"{family}_bwd_fp32"}


@pytest.mark.parametrize("of_bias", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_biases_of_another_dtype(dtype, of_bias):
    inputs = CASE.inputs(dtype, "cuda")
    inputs.bias1, inputs.bias2 = inputs.bias1.to(of_bias), inputs.bias2.to(of_bias)
    check(inputs)


def test_memory_is_linear_in_length():
    """Nothing of size N x L x L: forward and backward together stay below a tenth of it."""
    tensors = [
        t.requires_grad_()
        for t in Case("m", N=256, Lq=256, H=4).inputs(torch.float16, "cuda").tensors()
    ]
    attention(tensors).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    o = attention(tensors)
    torch.autograd.grad(o, tensors, torch.ones_like(o))
    extra = torch.cuda.max_memory_allocated() - before
    scores = 256 * 4 * 256 * 256 * 4
    assert extra < scores / 2
