"""CONTRACT: a query whose keys are all -inf (by bias1, by bias2, by both together) is 0 and adds 0
to every gradient, whatever padding holds; gradients that are exactly 0 are returned as 0.
"""

import math

import pytest
import torch

from deepspeed4science.reference import evoformer_attention
from tests.numeric.cases import DEVICES, DTYPES, Case
from tests.numeric.law import check, ours, run

pytestmark = pytest.mark.usefixtures("seed")
each_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
QUERIES = slice(20, 45)  # those that see nothing


def by_bias1(inputs):
    """All queries of the row n = 1."""
    inputs.bias1[:, 1] = -math.inf
    inputs.bias2 = None
    inputs.needs = (True, True, True, True, False)
    return (slice(None), 1)


def by_bias2(inputs):
    inputs.bias2[:, :, :, QUERIES] = -math.inf
    return (slice(None), slice(None), QUERIES)


def by_both(inputs):
    """Neither hides all keys alone."""
    half = inputs.bias1.shape[-1] // 2
    inputs.bias1[:, 1, ..., :half] = -math.inf
    inputs.bias2[:, :, :, QUERIES, half:] = -math.inf
    return (slice(None), 1, QUERIES)


def nan_in_do(inputs, unseen):
    inputs.do[unseen] = math.nan


def infinite_do(inputs, unseen):
    inputs.do[unseen] = math.inf


def overflow(inputs, unseen):
    """dP = dO V^T is past the largest float."""
    inputs.do[unseen] = torch.finfo(inputs.do.dtype).max / 2


def nan_in_v(inputs, unseen):
    """Only where nobody sees the row's values at all."""
    inputs.v[:, 1] = math.nan


def infinite_v(inputs, unseen):
    inputs.v[:, 1] = math.inf


HIDDEN = (by_bias1, by_bias2, by_both)
POISONS = [(hide, poison) for hide in HIDDEN for poison in (nan_in_do, infinite_do, overflow)] + [
    (by_bias1, nan_in_v),
    (by_bias1, infinite_v),
]


def hidden_inputs(hide, poison, dtype, device, Lk=150):
    inputs = Case("unseen", B=2, N=3, Lq=70, Lk=Lk, H=2, D=16).inputs(dtype, device)
    inputs.do = torch.randn_like(inputs.q)
    unseen = hide(inputs)
    poison(inputs, unseen)
    return inputs, unseen


@pytest.mark.parametrize("device", DEVICES)
@each_dtype
@pytest.mark.parametrize(
    ("hide", "poison"), POISONS, ids=lambda function: getattr(function, "__name__", None)
)
def test_unseen_queries_pass_nothing_on(hide, poison, dtype, device):
    """All gradients keep the law and are finite; O and dq of those queries are 0."""
    inputs, unseen = hidden_inputs(hide, poison, dtype, device)
    o, dq, *others = check(inputs)
    assert (o[unseen] == 0).all() and (dq[unseen] == 0).all()
    assert all(x is None or x.isfinite().all() for x in (o, dq, *others))


@each_dtype
@pytest.mark.parametrize("needs_all", [True, False], ids=["all", "v"])
def test_an_infinite_key_that_no_weight_falls_on(needs_all, dtype):
    """Its scores are -inf; for a query that sees nothing, 0 times it must not come into sums. Nor
    may NaN in the values of a head that sees nothing, nor what lies past the last of an odd number
    of queries.
    """
    inputs = Case("infinite", B=1, N=4, Lq=101, Lk=100, H=2, D=8).inputs(dtype, "cpu")
    inputs.do = torch.randn_like(inputs.q)
    inputs.q[..., 0] = -inputs.q[..., 0].abs() - 0.1
    inputs.k[0, :, 7, :, 0] = math.inf
    inputs.bias2[0, 0, 0, 3] = inputs.bias2[0, 0, 1] = -math.inf
    inputs.v[..., 1, :] = math.nan
    if not needs_all:
        inputs.needs = (False, False, True, False, False)
    gradients = run(ours, inputs)[2:]
    assert all(x is None or x.isfinite().all() for x in gradients)
    check(inputs)


@each_dtype
def test_an_infinite_value_of_the_key_that_holds_most_weight(dtype):
    """Its dP is infinite: NaN in its own dS, and an infinity, not NaN, in those of other keys."""
    inputs = Case("infinite", B=1, N=1, Lq=50, Lk=100, H=2, D=8).inputs(dtype, "cpu")
    inputs.q, inputs.bias2[..., 60] = inputs.q / 8, 12.0
    inputs.v[..., 60, :, 0] = math.inf
    inputs.needs = (False, False, False, False, True)
    dbias2 = check(inputs)[-1]
    assert dbias2[..., 60].isnan().all() and dbias2[..., :60].isinf().all()


@pytest.mark.parametrize("device", DEVICES)
@each_dtype
def test_all_queries_of_a_head_see_nothing_in_values_that_are_nan(dtype, device):
    """By bias2: its whole gradient is 0, and so is dV."""
    inputs, _ = hidden_inputs(by_bias2, nan_in_do, dtype, device)
    inputs.bias2[:, :, 1] = -math.inf
    inputs.v[..., 1, :] = math.nan
    o, dq, dk, dv, _, dbias2 = check(inputs)
    for x in (o, dq, dk, dv):
        assert (x[:, :, :, 1] == 0).all()
    assert (dbias2[:, :, 1] == 0).all()


@pytest.mark.parametrize("device", DEVICES)
@each_dtype
def test_o_of_unseen_queries_is_zero_whatever_values_hold(dtype, device):
    """All queries of a head, by bias2."""
    inputs, unseen = hidden_inputs(by_bias2, nan_in_do, dtype, device)
    inputs.bias2[:, :, 1] = -math.inf
    inputs.v[..., 1, :] = math.nan
    with torch.no_grad():
        o = ours(*inputs.tensors())
    assert (o[unseen] == 0).all() and (o[:, :, :, 1] == 0).all()
    assert o.isfinite().all()


# N, Lq, Lk, H, D: on Hopper each takes other kernels, or other tiles of one.
PASSES = (
    (132, 100, 330, 2, 32),
    (132, 780, 70, 2, 32),
    (132, 100, 200, 2, 48),
    (3, 70, 300, 40, 64),
    (2, 60, 300, 60, 128),
    (1, 130, 130, 50, 32),
    (1, 130, 200, 25, 32),
    (1, 70, 300, 60, 64),
    (9, 100, 72, 2, 32),
)
each_pass = pytest.mark.parametrize("shape", PASSES, ids=str)
gpu = pytest.mark.parametrize("device", DEVICES[1:])


@pytest.fixture(params=[False, True], ids=["fast", "deterministic"])
def deterministic(request):
    torch.use_deterministic_algorithms(request.param)
    yield
    torch.use_deterministic_algorithms(False)


def inputs_of_pass(shape, device, B=1):
    N, Lq, Lk, H, D = shape
    inputs = Case("pass", B=B, N=N, Lq=Lq, Lk=Lk, H=H, D=D).inputs(torch.float16, device)
    inputs.do = torch.randn_like(inputs.q)
    return inputs


@gpu
@each_pass
def test_unseen_queries_of_each_pass(shape, device, deterministic):
    """Some by both biases, some by bias2, and all of one head."""
    inputs = inputs_of_pass(shape, device)
    unseen = by_bias2(inputs)
    half = shape[2] // 2
    inputs.bias1[:, -1, ..., :half] = -math.inf
    inputs.bias2[:, :, :, 50:53, half:] = -math.inf
    inputs.bias2[:, :, 1] = -math.inf
    inputs.v[..., 1, :] = math.nan
    inputs.do[unseen] = math.nan
    inputs.do[:, -1, 50:53] = math.inf
    o, dq, *others = check(inputs)
    assert (o[unseen] == 0).all() and (dq[unseen] == 0).all()
    assert all(x.isfinite().all() for x in (o, dq, *others))


@gpu
@each_pass
def test_rows_that_bias1_hides_in_each_pass(shape, device, deterministic):
    """The last row n of a batch, with NaN in its dO and V."""
    inputs = inputs_of_pass(shape, device, B=2)
    unseen = (1, shape[0] - 1)
    for tensor, poison in ((inputs.bias1, -math.inf), (inputs.v, math.nan), (inputs.do, math.nan)):
        tensor[unseen] = poison
    o, dq, dk, dv, *dbias = check(inputs)
    assert all((x[unseen] == 0).all() for x in (o, dq, dk, dv))
    assert all(x.isfinite().all() for x in (o, dq, dk, dv, *dbias))


@gpu
def test_visible_queries_keep_their_nan(device):
    """Beside hidden ones: what is computed again tells the caller of an overflow as before."""
    inputs, unseen = hidden_inputs(by_bias2, nan_in_do, torch.float16, device)
    inputs.do[0, 1, 3, 1] = math.nan
    _, dq, dk, _, dbias1, dbias2 = check(inputs)
    assert (dq[unseen] == 0).all() and dq[0, 1, 3, 1].isnan().all()
    assert dk[0, 1, :, 1].isnan().all() and dk.isnan().sum() == dk[0, 1, :, 1].numel()
    assert dbias1[0, 1].isnan().all() and dbias1[1].isfinite().all()
    assert dbias2[0, 0, 1, 3].isnan().all() and dbias2.isnan().sum() == dbias2.shape[-1]


@pytest.mark.parametrize("Lk", [9, 150], ids=["few-keys", "many-keys"])
def test_few_scores_are_as_sound(Lk):
    """float32 has other code for them."""
    for hide, poison in POISONS:
        inputs, _ = hidden_inputs(hide, poison, torch.float32, "cpu", Lk)
        inputs.bias1 = None if inputs.bias1 is None else inputs.bias1[:1]
        few = [t if t is None else t[:1] for t in (inputs.q, inputs.k, inputs.v, inputs.bias2)]
        inputs.q, inputs.k, inputs.v, inputs.bias2 = few
        inputs.do = inputs.do[:1]
        assert all(x is None or x.isfinite().all() for x in check(inputs))


def zero_times_nan(q, k, v, bias1, bias2):
    """What the formula gives as it stands: weights of 0, and no selection."""
    scores = torch.einsum("...qhd,...khd->...hqk", q, k) / q.shape[-1] ** 0.5 + bias1 + bias2
    unseen = scores.amax(-1, keepdim=True) == -math.inf
    weights = scores.masked_fill(unseen, 0.0).softmax(-1).masked_fill(unseen, 0.0)
    return torch.einsum("...hqk,...khd->...qhd", weights, v)


def test_weights_of_zero_alone_are_noticed():
    inputs, _ = hidden_inputs(by_bias2, nan_in_do, torch.float32, "cpu")
    check(inputs)
    with pytest.raises(AssertionError, match="NaN or infinities"):
        check(inputs, zero_times_nan)


# Exact zeros


def one_visible_key(inputs):
    bias1 = inputs.bias1
    seen = torch.randint(bias1.shape[-1], (*bias1.shape[:-1], 1), device=bias1.device)
    inputs.bias1.fill_(-math.inf).scatter_(-1, seen, 0.5)


def one_key_far_above(inputs):
    """The weights of the others are 0 in float32."""
    one_visible_key(inputs)
    inputs.bias1.clamp_(min=-1e4)


def one_visible_key_by_bias2(inputs):
    inputs.bias2.fill_(-math.inf)
    inputs.bias2[..., 7] = 3.0


def first_or_last_key_alone(inputs):
    inputs.bias2.fill_(-math.inf)
    inputs.bias2[..., ::2, -1] = inputs.bias2[..., 1::2, 0] = 3.0


ZEROS = (one_visible_key, one_key_far_above, one_visible_key_by_bias2)


def assert_zero_gradients(inputs, function=ours):
    _, dq, dk, _, dbias1, dbias2 = run(function, inputs)
    for name, x in zip(("dq", "dk", "dbias1", "dbias2"), (dq, dk, dbias1, dbias2), strict=True):
        assert not x.any(), f"{name}: {x.abs().max():.2g}, not 0"


HIDES = [
    pytest.param(hide, "cpu", id=f"cpu-{hide.__name__}")
    for hide in (*ZEROS, first_or_last_key_alone)
]
HIDES += [pytest.param(one_visible_key, "cuda", id="cuda", marks=DEVICES[1].marks)]


@each_dtype
@pytest.mark.parametrize(("hide", "device"), HIDES)
@pytest.mark.parametrize("lengths", [(9, 9), (70, 150), (130, 500)], ids=str)
def test_one_visible_key_has_gradients_of_exactly_zero(lengths, hide, device, dtype):
    """Adam makes full steps of any other number. GPUs tell by bias1 (docs/math.md)."""
    Lq, Lk = lengths
    inputs = Case("one", B=1, N=3, Lq=Lq, Lk=Lk, H=2, D=32).inputs(dtype, device)
    hide(inputs)
    inputs.q = inputs.q * 3
    assert_zero_gradients(inputs)
    check(inputs)


@gpu
@each_pass
def test_rows_that_see_one_key_in_each_pass(shape, device, deterministic):
    """Beside rows that see more."""
    inputs = inputs_of_pass(shape, device)
    inputs.bias1[:, 0, ..., 1:] = -math.inf
    inputs.bias1[:, 2::3, ..., : shape[2] - 1] = -math.inf
    inputs.bias1[:, 4::3, ..., 5:] = -math.inf
    ones = (inputs.bias1 > -math.inf).sum(-1).flatten() == 1
    _, dq, dk, dv, dbias1, _ = check(inputs)
    assert dv[:, ones].any()
    assert not any(x[:, ones].any() for x in (dq, dk, dbias1))


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("hide", ZEROS[1:], ids=lambda hide: hide.__name__)
def test_how_far_from_zero_where_bias1_does_not_tell(hide, dtype, device):
    """The limit that docs/math.md states: dbias2 is dS where N is 1."""
    inputs = Case("one", B=1, N=1, Lq=130, Lk=500, H=4, D=32).inputs(dtype, device)
    inputs.do = torch.randn_like(inputs.q)
    hide(inputs)
    sums = torch.einsum("bnqhd,bnkhd->bnhqk", inputs.do.abs().double(), inputs.v.abs().double())
    ds = run(ours, inputs)[-1].double().abs()
    print(f"dS / sum |dO V|: 2^{math.log2(max((ds / sums).max().item(), 2**-40)):.2f}")
    assert (ds <= 2**-21 * sums).all()


@each_dtype
@pytest.mark.parametrize("device", DEVICES)
def test_no_other_key(dtype, device):
    """Attention over the columns of a lone sequence; also where only zeros are asked for."""
    inputs = Case("lone", B=2, N=3, Lq=70, Lk=1, H=2).inputs(dtype, device)
    assert_zero_gradients(inputs)
    check(inputs)
    inputs.needs = (True, True, False, True, True)
    assert not any(x is not None and x.any() for x in run(ours, inputs)[1:])


def test_gradients_that_are_nearly_zero_are_noticed():
    inputs = Case("one", B=1, N=3, Lq=9, Lk=150, H=2, D=32).inputs(torch.float32, "cpu")
    one_key_far_above(inputs)
    inputs.bias1[..., 3] = inputs.bias1.amax()  # a second key

    with pytest.raises(AssertionError, match="not 0"):
        assert_zero_gradients(inputs, evoformer_attention)
