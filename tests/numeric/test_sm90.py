"""Hopper's own kernels: that they really run where they should, and their tiles' own edges.

Everything else in this folder runs on them too, wherever they are the GPU's family.
"""

from functools import partial

import pytest
import torch

from deepspeed4science import DS4Sci_EvoformerAttention
from deepspeed4science.reference import evoformer_attention
from tests.numeric.cases import Case, sm90_marks
from tests.numeric.law import check, check_calls

pytestmark = sm90_marks()
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


@each_dtype
@pytest.mark.parametrize("D", [8, 16, 24, 32, 40, 48, 64, 88, 96, 104, 128])
def test_every_head_dimension_is_its_own(D, dtype, ran):
    """And the law holds in each tier, at both its ends."""
    check(Case("tier", N=3, Lq=130, D=D).inputs(dtype, "cuda"))
    assert {name[:8] for name in ran} == {"sm90_fwd", "sm90_bwd"}


def heads_first(x):
    return x.transpose(2, 3).contiguous().transpose(2, 3)


def padded(x):
    """Rows 16 bytes apart from where they would be."""
    wide = torch.empty(*x.shape[:-1], x.shape[-1] + 8, dtype=x.dtype, device=x.device)
    return wide[..., :-8].copy_(x)


def slice_of_more(x):
    more = torch.randn(2, x.shape[1] + 2, *x.shape[2:], device=x.device).to(x.dtype)
    return more[:1, 1:-1].copy_(x)


@pytest.mark.parametrize("layout", [heads_first, padded, slice_of_more])
def test_layouts_of_models_need_neither_copy_nor_another_family(layout, ran):
    inputs = Case("layout", N=5, Lq=70).inputs(torch.bfloat16, "cuda")
    inputs.q, inputs.k, inputs.v = layout(inputs.q), layout(inputs.k), layout(inputs.v)
    check(inputs)
    assert {name[:8] for name in ran} == {"sm90_fwd", "sm90_bwd"}


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_what_tma_cannot_read_is_sm80s_and_right(name, ran):
    inputs = Case("expanded", N=5, Lq=70).inputs(torch.float16, "cuda")
    setattr(inputs, name, getattr(inputs, name)[:, :1].expand_as(getattr(inputs, name)))
    check(inputs)
    assert {name[:8] for name in ran} == {"sm80_fwd", "sm80_bwd"}


LENGTHS = sorted({1, 7, 8, *(tile + step for tile in (64, 128, 192, 256) for step in (-1, 0, 1))})


@pytest.mark.parametrize("Lk", LENGTHS)
def test_every_edge_of_a_key_tile(Lk):
    check(Case("keys", N=2, Lq=33, Lk=Lk, H=1).inputs(torch.bfloat16, "cuda"))


@pytest.mark.parametrize("biases", [False, True], ids=["none", "both"])
@pytest.mark.parametrize("D", [32, 48, 128])
@pytest.mark.parametrize("width", [1, 16, 17, 32, 33, 49])
def test_every_width_of_the_last_step(width, D, biases):
    """The forward cuts it, behind an even and an odd number of whole ones; keys end there, or what
    is visible of them.
    """
    for L in (64 + width, 128 + width, 192 + width):
        check(
            Case("width", N=3, Lq=70, Lk=L, D=D, bias1=biases, bias2=biases).inputs(
                torch.bfloat16, "cuda"
            )
        )
        if biases:
            inputs = Case("masked", N=3, Lq=70, Lk=320, D=D).inputs(torch.bfloat16, "cuda")
            inputs.bias1[..., L:] = -torch.inf
            inputs.bias1[:, 1, ..., L - 3 :] = -1e9
            check(inputs)


@pytest.mark.parametrize("Lq", LENGTHS)
def test_every_edge_of_a_query_tile(Lq):
    check(Case("queries", N=2, Lq=Lq, Lk=40, H=1).inputs(torch.float16, "cuda"))


@pytest.mark.parametrize(("bias1", "bias2"), [(0, 0), (1, 0), (0, 1), (1, 1)])
@pytest.mark.parametrize("N", [1, 2, 3, 4, 7])
def test_rows_that_share_a_tile_of_bias2(N, bias1, bias2):
    """Whatever number of rows one block takes: also the last rows of one B and the first of the
    next.
    """
    case = Case("rows", B=3, N=N, Lq=72, H=3, D=16, bias1=bool(bias1), bias2=bool(bias2))
    check(case.inputs(torch.bfloat16, "cuda"))


@pytest.mark.parametrize("L", [70, 71, 72])
@pytest.mark.parametrize("over", ["B", "H", "Lq", "B, H", "Lk"])
def test_broadcast_pair_bias(over, L):
    """bias2 of size 1 over some dimensions; rows of whole, even and odd length."""
    inputs = Case("broadcast", B=2, N=3, Lq=L, H=2).inputs(torch.bfloat16, "cuda")
    for name in over.split(", "):
        inputs.bias2 = inputs.bias2.narrow({"B": 0, "H": 2, "Lq": 3, "Lk": 4}[name], 0, 1)
    check(inputs)


def test_more_tiles_than_blocks_and_fewer():
    """Each block of a persistent grid computes many tiles, and may have none to do."""
    check(Case("many", B=2, N=150, Lq=130, H=4).inputs(torch.bfloat16, "cuda"))
    check(Case("one", N=1, Lq=20, H=1).inputs(torch.bfloat16, "cuda"))


@each_dtype
@pytest.mark.parametrize(("bias1", "bias2"), [(0, 0), (1, 0), (0, 1), (1, 1)])
@pytest.mark.parametrize("Lk", [33, 64, 100, 190, 256, 300, 700])
def test_warpgroups_that_divide_the_keys_of_one_row(Lk, bias1, bias2, dtype, plans):
    """By four and by two; some have no keys. In the second, blocks have one tile or two."""
    few = {"fewest_tiles": (1, 3), "few_tiles": (11, 8)}
    for kernel, (B, H) in few.items():
        case = Case("divided", B=B, N=1, Lq=200, Lk=Lk, H=H, D=24, bias1=bias1, bias2=bias2)
        check(case.inputs(dtype, "cuda"))
        assert plans[-2]["kernel"] == kernel


@each_dtype
@pytest.mark.parametrize("value", [-torch.inf, -1e9])
@pytest.mark.parametrize(("B", "H"), [(3, 3), (11, 8)], ids=["by-four", "by-two"])
def test_masks_where_warpgroups_divide_the_keys(B, H, value, dtype):
    """Each b another: nothing seen, steps before, between and behind hidden ones, a single key."""
    inputs = Case("masked", B=B, N=1, Lq=200, Lk=500, H=H, D=32).inputs(dtype, "cuda")
    value = max(value, torch.finfo(dtype).min) if value > -torch.inf else value
    inputs.bias1[0] = value
    inputs.bias1[1, ..., :192] = value
    inputs.bias1[1, ..., 256:384] = value
    inputs.bias1[2, ..., 70:] = value
    if B > 3:
        inputs.bias1[3, ..., :320] = value
        inputs.bias1[4, ..., 1:] = value
        inputs.bias1[5, ..., 128:] = value
        inputs.bias1[6, ..., 64:128] = value
    check(inputs)


@each_dtype
@pytest.mark.parametrize(("B", "H"), [(1, 3), (11, 8)], ids=["by-four", "by-two"])
def test_references_that_differ_among_warpgroups(B, H, dtype):
    """Scores that rise or fall along the keys; NaN and infinity that only one warpgroup sees."""

    def draw(slope):
        inputs = Case("slope", B=B, N=1, Lq=130, Lk=400, H=H).inputs(dtype, "cuda")
        inputs.bias1 += slope * torch.arange(400, device="cuda")
        return inputs

    def draw_without_dbias1(slope):
        inputs = draw(slope)
        inputs.needs = (True, True, True, False, True)
        return inputs

    # With 8 one key has nearly all of the weight: few elements decide about dbias1 (docs/math.md).
    narrow = dtype == torch.float16
    for slope in (-2.0, -0.25, 0.5, 2.0):
        check_calls(partial(draw, slope), draws=16)
    for slope in (-8.0, 8.0):
        check_calls(
            partial(draw_without_dbias1 if narrow else draw, slope), draws=16 if narrow else 256
        )
    inputs = draw(0)
    inputs.bias2[..., 5, 70] = torch.nan
    inputs.bias2[..., 6, 200] = torch.inf
    check(inputs)


@each_dtype
@pytest.mark.parametrize("L", [65, 389])
def test_lse_is_the_natural_logarithm(L, dtype):
    """Backwards of any family rebuild P from it: an error of lse is a relative error of P, to be
    small against P's own rounding (an eighth of it). It is that of scores without the largest bias1
    of their row n. A row without keys has -inf.
    """
    inputs = Case("lse", N=2, Lq=L, H=2).inputs(dtype, "cuda")
    inputs.bias1[:, 1] = -torch.inf
    tensors = (inputs.q, inputs.k, inputs.v, inputs.bias1, inputs.bias2)
    _, lse = torch.ops.deepspeed4science.evoformer_attn(*tensors, True)
    q, k, _, bias1, bias2 = (t.double() for t in tensors)
    scores = torch.einsum("bnqhd,bnkhd->bnhqk", q, k) / q.shape[-1] ** 0.5 + bias2
    scores += bias1 - bias1.amax(-1, keepdim=True)
    assert (lse[:, 1] == -torch.inf).all()
    error = (lse[:, 0].double() - scores.logsumexp(-1)[:, 0]).abs().max()
    assert error <= torch.finfo(dtype).eps / 8


def test_bit_identical_over_runs_and_without_lse():
    """No atomics in a forward; lse is one more output and changes nothing else."""
    tensors = Case("again", B=2, N=9, Lq=200, H=3).inputs(torch.bfloat16, "cuda").tensors()
    expected = DS4Sci_EvoformerAttention(*tensors[:3], tensors[3:])
    for _ in range(5):
        assert torch.equal(DS4Sci_EvoformerAttention(*tensors[:3], tensors[3:]), expected)
    o, _ = torch.ops.deepspeed4science.evoformer_attn(*tensors, True)
    assert torch.equal(o, expected)


@pytest.mark.parametrize("value", [-torch.inf, -1e9])
@pytest.mark.parametrize("where", ["first", "middle", "last", "all but one"])
def test_masked_tiles(where, value):
    """Whole tiles of keys out of sight, wherever they lie among the others."""
    inputs = Case("masked", N=4, Lq=100, Lk=400, H=2).inputs(torch.bfloat16, "cuda")
    inputs.bias1.zero_()
    key = torch.arange(400, device="cuda")
    hidden = {
        "first": key < 130,
        "middle": (key >= 128) & (key < 260),
        "last": key >= 200,
        "all but one": key != 321,
    }[where]
    inputs.bias1[..., hidden] = value
    check(inputs)


def test_outliers_in_every_seed():
    """Scores of a few hundred, where a running maximum moves late."""
    for scale in (1.0, 4.0, 12.0):
        inputs = Case("spread", N=3, Lq=150, H=2).inputs(torch.bfloat16, "cuda")
        inputs.q.mul_(scale)
        inputs.k.mul_(scale)
        check(inputs)


@each_dtype
@pytest.mark.parametrize("D", [32, 48])
@pytest.mark.parametrize("slope", [-8.0, -0.25, 0.0625, 0.5, 8.0])
def test_scores_that_rise_or_fall_along_the_keys(slope, D, dtype):
    """The reference of the softmax comes from the first keys, and moves when p says so, again and
    again; bias1 and bias2 are added before it is asked.
    """

    def draw(hidden):
        inputs = Case("slope", N=3, Lq=150, Lk=400, D=D).inputs(dtype, "cuda")
        rise = slope * torch.arange(400, device="cuda")
        inputs.bias1[:, :2] += rise
        inputs.bias2[..., ::2, :] += rise
        inputs.bias1[..., :hidden] = -1e4  # a first reference is made of these keys
        return inputs

    for hidden in (0, 16):
        check_calls(partial(draw, hidden), draws=16)


@pytest.mark.parametrize("L", [64, 389])
def test_poison_behind_the_tensors_is_never_seen(L):
    """NaN in the memory around q, k, v and both biases: tiles reach past their ends."""
    case = Case("poison", N=3, Lq=L, H=2)
    inputs = case.inputs(torch.bfloat16, "cuda")
    clean = [t.clone() for t in inputs.tensors()]
    expected = evoformer_attention(*(t.double() for t in clean))

    def poisoned(x):
        room = torch.full((x.numel() + 16384,), torch.nan, dtype=x.dtype, device=x.device)
        view = room[8192 : 8192 + x.numel()].view(x.shape)
        return view.copy_(x)

    q, k, v, bias1, bias2 = map(poisoned, clean)
    o = DS4Sci_EvoformerAttention(q, k, v, [bias1, bias2])
    assert o.isfinite().all()
    plain = DS4Sci_EvoformerAttention(*clean[:3], clean[3:])
    assert torch.equal(o, plain)
    assert (o.double() - expected).norm() / expected.norm() < 0.01


@pytest.mark.parametrize(("Lq", "Lk", "D"), [(2090, 2000, 32), (2610, 2560, 32), (2610, 2560, 64)])
def test_long_calls_whose_blocks_keep_step(Lq, Lk, D, plans):
    """Where bias2 does not fit into the L2 cache, blocks take tiles in another order, and wait for
    each other: of each row n the same comes out as of a call with few of them.
    """
    x = Case("long", B=2, N=49, Lq=Lq, Lk=Lk, H=4, D=D).inputs(torch.bfloat16, "cuda")
    x.bias1[0, 1, ..., :1000] = -torch.inf
    with torch.no_grad():
        whole = DS4Sci_EvoformerAttention(x.q, x.k, x.v, [x.bias1, x.bias2])
        parts = [
            DS4Sci_EvoformerAttention(
                *(one[:, n] for one in (x.q, x.k, x.v)), [x.bias1[:, n], x.bias2]
            )
            for n in (slice(0, 20), slice(20, 49))
        ]
    assert [plan.get("groups_of_band") for plan in plans] == ["12", None, None]
    assert torch.equal(whole, torch.cat(parts, dim=1))
