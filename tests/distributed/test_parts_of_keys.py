"""What ring attention is made of, in one process: results over parts of the keys, merged, and the
backward operator on parts, with the lse and O of all keys.
"""

import math

import pytest

torch = pytest.importorskip("torch")

from deepspeed4science import DS4Sci_EvoformerAttention  # noqa: E402
from deepspeed4science.arguments import largest_finite  # noqa: E402
from deepspeed4science.distributed import merge_attention  # noqa: E402
from deepspeed4science.errors import InvalidInputError  # noqa: E402
from deepspeed4science.operators import backward_op, forward_op  # noqa: E402
from deepspeed4science.reference import evoformer_attention  # noqa: E402
from tests.numeric.cases import DEVICES, Case  # noqa: E402
from tests.numeric.law import run, ulps, violations  # noqa: E402

pytestmark = pytest.mark.usefixtures("seed")
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)
CASES = [
    Case("typical", B=2, N=5, Lq=70, Lk=100, H=2, D=32),
    Case("wide", N=2, Lq=40, Lk=200, H=2, D=64),
    Case("one-key", N=4, Lq=200, Lk=33, H=2, D=16),
]
# A part's lse and that of all keys are float32; halves of their last places are errors of P.
LSE_ULPS = 2 * 4 * torch.finfo(torch.float32).eps / 2


def parts(length):
    """Of one key, of a third, of the rest."""
    return [slice(0, 1), slice(1, length // 3), slice(length // 3, length)]


@pytest.mark.parametrize("device", DEVICES)
@DTYPES
def test_merged_parts_are_the_whole(device, dtype):
    inputs = CASES[0].inputs(dtype, device)
    q, k, v, bias1, bias2 = inputs.tensors()
    bias1[0, 0, ..., :60] = -math.inf  # all of the first parts
    bias1[0, 1] = -math.inf
    o, lse = torch.zeros_like(q, dtype=torch.float32), q.new_full((2, 5, 2, 70), -math.inf).float()
    for one in parts(100):
        biases = [bias1[..., one], bias2[..., one]]
        part = DS4Sci_EvoformerAttention(q, k[:, :, one], v[:, :, one], biases, return_lse=True)
        o, lse = merge_attention(o, lse, *part)
    _, whole_lse = DS4Sci_EvoformerAttention(q, k, v, [bias1, bias2], return_lse=True)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-5, atol=1e-5)
    assert o.dtype == torch.float32 and (o[0, 1] == 0).all()
    assert o.is_contiguous()  # the dimensions of lse have another order
    inputs.needs = (False,) * 5
    eager, reference = (run(evoformer_attention, inputs, one) for one in (dtype, torch.float64))
    ulp = torch.finfo(dtype).eps + LSE_ULPS
    assert not violations([o.to(dtype)], eager[:1], reference[:1], [ulp], names=("O",))


def test_what_no_key_is_seen_of_counts_for_nothing():
    o, lse = torch.randn(3, 2, 4), torch.randn(2, 3)
    unseen = torch.full((3, 2, 4), math.nan), torch.full((2, 3), -math.inf)
    for pair in ((o, lse, *unseen), (*unseen, o, lse)):
        merged, merged_lse = merge_attention(*pair)
        assert torch.equal(merged, o) and torch.equal(merged_lse, lse)
    assert (merge_attention(*unseen, *unseen)[0] == 0).all()


def test_merged_parts_have_the_wider_dtype():
    o, lse = torch.randn(3, 2, 4), torch.randn(2, 3)
    for pair in ((o, o.bfloat16()), (o.bfloat16(), o)):
        merged, _ = merge_attention(pair[0], lse, pair[1], lse)
        torch.testing.assert_close(merged, (pair[0] + pair[1]) / 2)


def test_merged_parts_have_no_derivatives():
    """lse has none, so that those of O alone would be wrong."""
    o, lse = torch.randn(3, 2, 4, requires_grad=True), torch.randn(2, 3)
    assert not any(x.requires_grad for x in merge_attention(o, lse, o, lse))


def test_merged_parts_are_an_average_where_lse_is_large():
    """Where -1e9 hides all keys, lse has no digits for the number of keys; 3 times O is no mean."""
    q, k = torch.randn(1, 2, 9, 2, 8), torch.randn(1, 2, 100, 2, 8)
    bias1 = torch.zeros(1, 2, 1, 1, 100)
    bias1[:, 1] = -1e9
    o, lse = torch.zeros(1, 2, 9, 2, 8), torch.full((1, 2, 2, 9), -math.inf)
    for one in parts(100):
        own = q, k[:, :, one], torch.ones_like(k[:, :, one]), [bias1[..., one]]
        o, lse = merge_attention(o, lse, *DS4Sci_EvoformerAttention(*own, return_lse=True))
    torch.testing.assert_close(o, torch.ones_like(o), rtol=0, atol=2e-6)


def test_shapes_that_do_not_fit_are_refused():
    o, lse = torch.randn(3, 2, 4), torch.randn(2, 3)
    for other in ((o, lse.T), (o[..., :1], lse)):
        with pytest.raises(InvalidInputError, match=r"expected \[\*, Lq, H, Dv\]"):
            merge_attention(o, lse, *other)


def check_gradients_of_parts(inputs):
    """They are parts of the gradients of all keys."""
    q, k, v, bias1, bias2 = inputs.tensors()
    wanted, dtype = inputs.needs, q.dtype
    o, lse = forward_op(q, k, v, bias1, bias2, True)
    lse = lse + largest_finite(bias1)[..., 0].float()
    dq, of_keys = torch.zeros_like(q, dtype=torch.float32), []
    for one in parts(k.shape[2]):
        of_part = k[:, :, one], v[:, :, one], bias1[..., one], bias2[..., one]
        own = lse - largest_finite(of_part[2])[..., 0].float()
        arguments = inputs.do, q, *of_part[:2], o, own, *of_part[2:], list(wanted)
        first, *rest = backward_op(*arguments, partial_keys=True)
        dq = dq + first.float() if wanted[0] else dq
        of_keys.append(rest)
    whole = [
        torch.cat(x, dim) for x, dim in zip(zip(*of_keys, strict=True), (2, 2, 4, 4), strict=True)
    ]
    ours = [dq, *whole]
    eager, reference = (run(evoformer_attention, inputs, x)[1:] for x in (dtype, torch.float64))
    found = [x.to(dtype) if want else None for x, want in zip(ours, wanted, strict=True)]
    ulp = [x + LSE_ULPS for x in ulps([dq.to(dtype)] * 5)]
    names = ("dQ", "dK", "dV", "dbias1", "dbias2")
    assert not violations(found, eager, reference, ulp, names=names)


@pytest.mark.parametrize("device", DEVICES)
@DTYPES
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("wanted", [(True,) * 5, (False, False, True, False, False)], ids=str)
def test_gradients_of_parts_are_parts_of_the_gradients(device, dtype, case, wanted):
    inputs = case.inputs(dtype, device)
    inputs.bias1[0, 0, ..., 3:9] = -math.inf
    inputs.do, inputs.needs = torch.randn_like(inputs.q), wanted
    check_gradients_of_parts(inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_gradients_of_parts_where_lse_is_large_and_of_a_head_that_sees_nothing(dtype):
    """P of scores near 100 is not overflow, and NaN in that head's values reaches nothing."""
    inputs = CASES[0].inputs(dtype, "cpu")
    inputs.bias2 += 100.0
    inputs.bias2[:, :, 1], inputs.v[..., 1, :] = -math.inf, math.nan
    inputs.do = torch.randn_like(inputs.q)
    check_gradients_of_parts(inputs)


@DTYPES
def test_gradients_of_a_part_that_a_head_does_not_see(dtype):
    """It sees other parts, so its lse is finite. NaN in the part's values reaches nothing."""
    inputs = CASES[0].inputs(dtype, "cpu")
    q, k, v, bias1, bias2 = inputs.tensors()
    bias2[:, :, 1, :, :60] = -math.inf
    o, lse = forward_op(q, k, v, bias1, bias2, True)
    lse = lse + (largest_finite(bias1) - largest_finite(bias1[..., :60]))[..., 0].float()
    of_part = o, lse, bias1[..., :60], bias2[..., :60], [True] * 5
    do, k, v = torch.randn_like(q), k[:, :, :60], v[:, :, :60]
    finite = backward_op(do, q, k, v, *of_part, partial_keys=True)
    v[..., 1, :] = math.nan
    found = backward_op(do, q, k, v, *of_part, partial_keys=True)
    assert all(torch.equal(x, expected) for x, expected in zip(found, finite, strict=True))
