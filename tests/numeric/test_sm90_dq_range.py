"""dq that Hopper's backward adds up in float16, above D = 32, from operands of any size. A factor
takes sums into the range of float16; sums out of it are computed again (dq_range.h).
"""

import itertools

import pytest
import torch

from deepspeed4science.reference import evoformer_attention
from tests.numeric.cases import LATER_DELTA, Case, sm90_marks
from tests.numeric.law import NAMES, check, ours, relative_error, run, with_do

pytestmark = [*sm90_marks(), pytest.mark.usefixtures("only_sm90_runs")]

# One kernel for each of these, with sections of the queries, and with delta of later rows n beside
# the kernel that needs it.
CASES = [
    Case("D48", N=8, Lq=768, H=4, D=48),
    Case("D64", N=9, Lq=768, H=4, D=64),
    Case("D128", N=8, Lq=512, H=4, D=128),
    Case("sections", N=32, Lq=1000, Lk=900, H=1, D=64),
    LATER_DELTA,
]


def scale_v(x):
    x.v *= 1e4


def small_k_and_v(x):
    x.k *= 1e-3
    x.v *= 1e-4


def small_do(x):
    x.do *= 1e-9


def huge_do(x):
    x.do *= 1e25


def rows_of_many_sizes(x):
    sizes = torch.logspace(-12, 12, x.do.shape[1], device=x.do.device)
    x.do *= sizes.view(1, -1, 1, 1, 1).to(x.do.dtype)


def heads_of_many_sizes(x):
    sizes = torch.logspace(-9, 9, x.do.shape[3], device=x.do.device).view(-1, 1)
    x.do *= sizes.to(x.do.dtype)
    x.v *= sizes.flip(0).to(x.v.dtype) ** 0.5


def heads_without_gradient(x):
    x.do[:, :, :, 1:2] = 0


def hidden_by_bias1(x):
    x.k[:, :, 5:9], x.v[:, :, 5:9], x.bias1[..., 5:9] = 1e4, 1e6, -torch.inf


def hidden_by_bias2(x):
    x.k[:, :, 5:9], x.v[:, :, 5:9], x.bias2[..., 5:9] = 1e4, 1e6, -torch.inf


def few_visible_keys(x):
    x.bias1[:, ::2, ..., 3:] = -torch.inf
    x.do *= 1e-8


def huge_key_without_weight(x):
    x.k[0, 0, :16], x.v[0, 0, :16], x.bias2[..., :16] = 1e5, 1e6, -1e6


def one_huge_value(x):
    x.v[:, 2, 3] *= 3e6


def nan_in_do(x):
    x.do[:, 2, 8:11] = torch.nan


def padded(x):
    x.bias1[..., x.bias1.shape[-1] // 2 :] = -torch.inf
    x.do[:, :, x.do.shape[2] // 2 :] = 0
    x.do[:, 3] = 0


CHANGES = [
    *(scale_v, small_k_and_v, small_do, huge_do),
    *(rows_of_many_sizes, heads_of_many_sizes, heads_without_gradient),
    *(hidden_by_bias1, hidden_by_bias2, few_visible_keys, huge_key_without_weight),
    *(one_huge_value, nan_in_do, padded),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_size_of(case, change, plans):
    """The law, and dq of each row n and head beside eager PyTorch's, whatever the others are."""
    inputs = with_do(case.inputs(torch.bfloat16, "cuda"))
    change(inputs)
    found = check(inputs)[NAMES.index("dQ")]
    assert plans[-1]["dkdv"].startswith("dq_global")
    assert ("later_delta" in plans[-1]) == (case is LATER_DELTA)
    eager, exact = (
        run(evoformer_attention, inputs, dtype)[NAMES.index("dQ")]
        for dtype in (torch.bfloat16, torch.float64)
    )
    for n, h in itertools.product(range(case.N), range(case.H)):
        x, e, reference = found[:, n, :, h], eager[:, n, :, h], exact[:, n, :, h]
        allowed = 1.25 * relative_error(e, reference) + torch.finfo(x.dtype).eps
        assert relative_error(x, reference) <= allowed, (n, h)


def nothing(x):
    pass


@pytest.mark.parametrize(
    "change",
    [
        *(nothing, scale_v, small_k_and_v, small_do, huge_do, padded, hidden_by_bias1),
        *(rows_of_many_sizes, heads_of_many_sizes, heads_without_gradient),
    ],
)
def test_of_usual_sizes_nothing_is_computed_again(change, plans):
    inputs = with_do(Case("D64", N=32, Lq=1024, H=4, D=64).inputs(torch.bfloat16, "cuda"))
    change(inputs)
    assert_is_computed_once(inputs, plans)


def assert_is_computed_once(inputs, plans):
    """To compute dq again would take more than 0.2 ns for each score."""
    leaves = [tensor.requires_grad_() for tensor in inputs.tensors()]
    o = ours(*leaves)
    milliseconds = []
    for _ in range(6):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.autograd.grad(o, leaves, inputs.do, retain_graph=True)
        end.record()
        torch.cuda.synchronize()
        milliseconds.append(start.elapsed_time(end))
    assert plans[-1]["dkdv"].startswith("dq_global")
    assert min(milliseconds[1:]) < 0.05e-6 * 32 * 4 * 1024**2


@pytest.mark.parametrize("size", [1e-3, 1.0, 60.0])
def test_float16(size):
    inputs = with_do(Case("D64", N=6, Lq=390, H=4, D=64).inputs(torch.float16, "cuda"))
    inputs.do *= size
    check(inputs)


def test_sums_are_as_exact_as_before():
    """0.0025 with sums in float32, of many keys."""
    inputs = with_do(Case("long", N=2, Lq=256, Lk=4096, H=2, D=64).inputs(torch.bfloat16, "cuda"))
    of_dq = NAMES.index("dQ")
    exact = run(evoformer_attention, inputs, torch.float64)[of_dq]
    assert relative_error(run(ours, inputs)[of_dq], exact) < 0.0032
