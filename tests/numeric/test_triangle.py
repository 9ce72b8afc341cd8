"""cuEquivariance's signatures: layouts, masks and auxiliary results against the definition."""

import functools
import inspect
import math
from statistics import median

import pytest
import torch

import deepspeed4science
from deepspeed4science.errors import InvalidInputError
from deepspeed4science.reference import evoformer_attention
from deepspeed4science.triangle import (
    mask_to_kv_lengths,
    triangle_attention,
    triangle_multiplicative_update,
)
from tests.numeric import law
from tests.numeric.cases import DEVICES

pytestmark = pytest.mark.usefixtures("seed")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
B, N, H, Q, K, D = 2, 5, 2, 7, 11, 8


def inputs(dtype=torch.float32, device="cpu"):
    """Leaves in cuEquivariance's layout, and a ragged mask of which row n = 1 sees nothing."""
    q, k, v, bias = (
        torch.randn(*shape, device=device).to(dtype)
        for shape in ((B, N, H, Q, D), (B, N, H, K, D), (B, N, H, K, D), (B, 1, H, Q, K))
    )
    mask = torch.rand(B, N, 1, 1, K, device=device) < 0.6
    mask[..., 0] = True
    mask[:, 1] = False
    return q, k, v, bias, mask


@pytest.mark.parametrize("device", DEVICES)
@DTYPES
def test_keeps_the_error_law(device, dtype):
    q, k, v, bias, mask = inputs(dtype, device)

    def ours(q, k, v, bias1, bias2):
        heads_first = (tensor.transpose(2, 3) for tensor in (q, k, v))
        return triangle_attention(*heads_first, bias2, mask=bias1).transpose(2, 3)

    lengths_first = (tensor.transpose(2, 3) for tensor in (q, k, v))
    law.check(law.Inputs(*lengths_first, mask, bias), ours)


def test_signature_is_cuequivariances():
    names = list(inspect.signature(triangle_attention).parameters)
    assert names == ["q", "k", "v", "bias", "mask", "scale", "return_aux", "kv_lengths"]
    parameters = inspect.signature(triangle_multiplicative_update).parameters
    weights = [f"{x}_{y}" for x in ("norm_in", "p_in", "g_in", "norm_out", "p_out", "g_out")
               for y in ("weight", "bias")]  # fmt: skip
    assert list(parameters) == ["x", "direction", "mask", *weights, "eps", "precision"]
    assert deepspeed4science.triangle_attention is triangle_attention


def test_a_row_that_sees_nothing_is_zero_and_the_result_is_a_view():
    q, k, v, bias, mask = inputs()
    o = triangle_attention(q, k, v, bias, mask=mask)
    assert o.shape == (B, N, H, Q, D) and o.transpose(2, 3).is_contiguous()
    assert (o[:, 1] == 0).all() and o[:, 0].abs().min() > 0


def test_masks_of_numbers_and_lengths_and_four_dimensions():
    q, k, v, bias, mask = inputs()
    lengths = torch.randint(0, K + 3, (B, N, 1, 1, 1), dtype=torch.int32)
    prefix = torch.arange(K) < lengths
    assert mask_to_kv_lengths(prefix).equal(lengths.clamp(max=K))
    expected = triangle_attention(q, k, v, bias, prefix, 0.5)
    torch.testing.assert_close(
        triangle_attention(q, k, v, bias, scale=0.5, kv_lengths=lengths), expected
    )
    numbers = mask.float()  # no additive bias: 1 is seen, 0 is not
    torch.testing.assert_close(
        triangle_attention(q, k, v, bias, numbers), triangle_attention(q, k, v, bias, mask)
    )
    o, lse, largest = triangle_attention(q[0], k[0], v[0], bias[0], mask[0], return_aux=True)
    assert o.shape == (1, N, H, Q, D) and lse.shape == largest.shape == (1, N, H, Q)
    torch.testing.assert_close(o[0], triangle_attention(q, k, v, bias, mask)[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("masked", ["not", "each row n", "all rows n alike"])
def test_auxiliary_results(device, masked):
    q, k, v, bias, mask = inputs(device=device)
    mask = {"not": None, "each row n": mask, "all rows n alike": mask[:, 2:3]}[masked]
    q.requires_grad_()
    o, lse, largest = triangle_attention(q, k, v, bias, mask, return_aux=True)
    scores = torch.einsum("bnhqd,bnhkd->bnhqk", q.double(), k.double()) / math.sqrt(D) + bias
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    for result, expected in ((lse, scores.logsumexp(-1)), (largest, scores.amax(-1))):
        assert result.dtype == torch.float32 and not result.requires_grad
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)
    assert o.requires_grad


def test_auxiliary_results_compiled():
    """One graph for any number of rows n, which has no copy of the scores for each."""
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph

    attend = functools.partial(triangle_attention, scale=0.5, return_aux=True)
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=keep)
    q, k, v, bias, mask = inputs()
    for times in (1, 2):
        rows = (*(torch.cat([one] * times, dim=1) for one in (q, k, v)), bias)
        seen = torch.cat([mask] * times, dim=1)
        torch.testing.assert_close(compiled(*rows, seen), attend(*rows, seen), rtol=0, atol=0)
    assert len(graphs) == 1
    each = torch.func.vmap(lambda bias: attend(q, k, v, bias, mask))
    mapped = torch.compile(each, fullgraph=True, backend="eager")
    both = torch.stack([bias, -bias])
    torch.testing.assert_close(mapped(both), each(both))


def test_auxiliary_results_under_autocast_and_vmap_and_of_no_rows():
    """In float32, of the inputs as autocast has rounded them."""
    q, k, v, bias, _ = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        results = triangle_attention(q, k, v, bias, return_aux=True)
    rounded = [tensor.bfloat16() for tensor in (q, k, v)]
    expected = triangle_attention(*rounded, bias, return_aux=True)
    assert [one.dtype for one in results] == [torch.bfloat16, torch.float32, torch.float32]
    torch.testing.assert_close(results, expected, rtol=0, atol=0)
    each = torch.func.vmap(functools.partial(triangle_attention, return_aux=True))
    parts = [torch.stack([tensor, -tensor]) for tensor in (q, k, v, bias)]
    mapped, one = each(*parts), triangle_attention(q, k, v, bias, return_aux=True)
    torch.testing.assert_close(tuple(part[0] for part in mapped), one)
    only_bias = torch.func.vmap(lambda bias: triangle_attention(q, k, v, bias, return_aux=True))
    torch.testing.assert_close(tuple(part[0] for part in only_bias(parts[3])), one)
    only_mask = torch.func.vmap(lambda mask: triangle_attention(q, k, v, bias, mask, None, True))
    seen = torch.ones(2, B, N, 1, 1, K, dtype=torch.bool)
    torch.testing.assert_close(tuple(part[0] for part in only_mask(seen)), one)
    results = triangle_attention(q[:, :0], k[:, :0], v[:, :0], bias, return_aux=True)
    assert [one.shape for one in results] == [(B, 0, H, Q, D), (B, 0, H, Q), (B, 0, H, Q)]


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.tensor([[[[True, False, True]]]]), "mask: expected the seen keys of each row first"),
        (torch.ones(B, N, 1, 2, K), r"mask: expected \[B, N, 1, 1, K\]; got"),
    ],
)
def test_masks_that_are_no_lengths_are_told(mask, message):
    with pytest.raises(InvalidInputError, match=message):
        mask_to_kv_lengths(mask)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_lengths": torch.ones(B, N, 1, 1, 1, dtype=torch.int32)}, "mask or kv_lengths"),
        ({"mask": torch.ones(B, N, 1, Q, K)}, r"mask: expected \[B, N, 1, 1, K\] with "),
        ({"mask": torch.ones(B, N, 1, 1, K + 1)}, r"mask: expected \[B, N, 1, 1, K\] with "),
        ({"mask": torch.ones(B, N + 1, 1, 1, K)}, r"mask: expected \[B, N, 1, 1, K\] with "),
        ({"mask": [True] * K}, "mask: expected a tensor; got list"),
        ({"mask": None, "kv_lengths": torch.ones(B, N, 1, 2, 1)}, "kv_lengths: expected"),
    ],
)
def test_wrong_masks_are_told(change, message):
    q, k, v, bias, mask = inputs()
    with pytest.raises(InvalidInputError, match=message):
        triangle_attention(q, k, v, bias, **{"mask": mask, **change})


def test_wrong_tensors_are_told():
    """By the names that this function gives them."""
    q, k, v, bias, _ = inputs()
    wrong = [one.transpose(2, 3) for one in (q, k, v)]
    advice = ".* Heads come before lengths here"
    for name, given in (
        ("bias", (wrong[0], wrong[0], wrong[0], bias[..., :Q])),
        ("k", (q, wrong[1], v, bias)),
        ("v", (q, k, wrong[2], bias)),
    ):
        with pytest.raises(InvalidInputError, match=f"^{name}: expected{advice}"):
            triangle_attention(*given)
    with pytest.raises(InvalidInputError, match=r"^bias: .* q, k, v as \[B \* N, 1, H, L, D\]"):
        triangle_attention(q, k, v, bias.repeat(1, N, 1, 1, 1))
    with pytest.raises(InvalidInputError, match="bias: expected a tensor; got NoneType"):
        triangle_attention(q, k, v, None)
    with pytest.raises(InvalidInputError, match="q: expected at most five dimensions"):
        triangle_attention(q[None], k, v, bias)


C, HIDDEN, L = 12, 6, 5


def weights(dtype=torch.float64):
    shapes = {
        "norm_in_weight": (C,), "norm_in_bias": (C,), "p_in_weight": (2 * HIDDEN, C),
        "p_in_bias": (2 * HIDDEN,), "g_in_weight": (2 * HIDDEN, C), "g_in_bias": (2 * HIDDEN,),
        "norm_out_weight": (HIDDEN,), "norm_out_bias": (HIDDEN,), "p_out_weight": (C, HIDDEN),
        "p_out_bias": (C,), "g_out_weight": (C, C), "g_out_bias": (C,),
    }  # fmt: skip
    return {name: torch.randn(*shape, dtype=dtype) for name, shape in shapes.items()}


def by_loops(x, direction, mask, w, eps=1e-5):
    """Algorithms 11 and 12, one pair (i, j) after the other."""

    def norm(x, name):
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + eps).sqrt()
        return x * w[f"{name}_weight"] + w[f"{name}_bias"]

    def linear(x, name):
        return x @ w[f"{name}_weight"].T + w[f"{name}_bias"]

    x = norm(x, "norm_in")
    ab = mask[..., None] * linear(x, "g_in").sigmoid() * linear(x, "p_in")
    a, b = ab[..., :HIDDEN], ab[..., HIDDEN:]
    out = torch.zeros(*x.shape[:-1], HIDDEN, dtype=x.dtype)
    for i in range(L):
        for j in range(L):
            if direction == "outgoing":
                out[:, i, j] = (a[:, i] * b[:, j]).sum(1)
            else:
                out[:, i, j] = (a[:, :, i] * b[:, :, j]).sum(1)
    return linear(norm(out, "norm_out"), "p_out") * linear(x, "g_out").sigmoid()


@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
def test_multiplication_is_algorithms_11_and_12(direction):
    """Exactly so in float64. The second norm multiplies the roundings of a pair by up to 300 where
    its channels are near each other, so other dtypes are judged by the median of several calls.
    """
    other = "incoming" if direction == "outgoing" else "outgoing"
    errors = {"single": [], "rounded": [], "narrow": [], "other": []}
    for _ in range(9):
        x, w = torch.randn(2, L, L, C), weights(torch.float32)
        mask = (torch.rand(2, L, L) < 0.7).float()
        wide = {name: tensor.double() for name, tensor in w.items()}
        expected = by_loops(x.double(), direction, mask.double(), wide)
        exact = triangle_multiplicative_update(x.double(), direction, mask.double(), **wide)
        torch.testing.assert_close(exact, expected)
        one = triangle_multiplicative_update(x[0].double(), direction, mask[0].bool(), **wide)
        torch.testing.assert_close(one, expected[0])
        results = (
            triangle_multiplicative_update(x, direction, mask, **w),
            triangle_multiplicative_update(x, direction, mask, **w, precision="bfloat16"),
            triangle_multiplicative_update(x.bfloat16(), direction, mask, **w),
            triangle_multiplicative_update(x, other, mask, **w),
        )
        dtypes = [result.dtype for result in results]
        assert dtypes == [torch.float32, torch.bfloat16, torch.bfloat16, torch.float32]
        for found, result in zip(errors.values(), results, strict=True):
            found.append(law.relative_error(result, expected))
    middle = {name: median(found) for name, found in errors.items()}
    assert middle["single"] < 1e-6 and max(errors["single"]) < 1e-5
    assert max(*errors["rounded"], *errors["narrow"]) < 0.5
    assert middle["rounded"] < 0.05 > middle["narrow"] and middle["other"] > 0.1


def test_multiplication_tells_what_is_wrong():
    x, w = torch.randn(L, L, C), weights(torch.float32)
    with pytest.raises(InvalidInputError, match="direction: expected"):
        triangle_multiplicative_update(x, "up", **w)
    with pytest.raises(InvalidInputError, match="p_in_weight"):
        triangle_multiplicative_update(x)
    pairs = x.expand(2, L, L, C)
    for of, mask in ((x, (2, L, L)), (x, (L, L, 1)), (pairs, (2, L, L, 1)), (pairs, (3, L, L))):
        with pytest.raises(InvalidInputError, match=r"mask: expected \[\*, L, L\]"):
            triangle_multiplicative_update(of, mask=torch.ones(mask), **w)


def test_multiplication_takes_a_mask_with_or_without_batches():
    """x and the mask get their missing dimensions independently; the result has those of x."""
    x, w, mask = torch.randn(2, L, L, C), weights(torch.float32), torch.rand(L, L) < 0.7
    expected = triangle_multiplicative_update(x, mask=mask.expand(2, L, L), **w)
    torch.testing.assert_close(triangle_multiplicative_update(x, mask=mask, **w), expected)
    for one in (mask, mask[None], mask[None, None]):
        torch.testing.assert_close(triangle_multiplicative_update(x[0], mask=one, **w), expected[0])


def test_both_compile_whole():
    q, k, v, bias, mask = inputs()
    compiled = torch.compile(triangle_attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        compiled(q, k, v, bias, mask), triangle_attention(q, k, v, bias, mask)
    )
    expected = evoformer_attention(*(t.transpose(2, 3) for t in (q, k, v)), mask, bias)
    torch.testing.assert_close(compiled(q, k, v, bias, mask).transpose(2, 3), expected)
    x, w = torch.randn(L, L, C), weights(torch.float32)
    compiled = torch.compile(triangle_multiplicative_update, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, **w), triangle_multiplicative_update(x, **w))
