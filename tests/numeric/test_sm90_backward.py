"""Hopper's own backward: that it really runs where it should, and the edges of its passes.

Everything else in this folder runs on it too, wherever it is the GPU's family's.
"""

import pytest
import torch

from deepspeed4science import DS4Sci_EvoformerAttention
from deepspeed4science.demo.measure import peak_extra_bytes
from deepspeed4science.reference import evoformer_attention
from tests.numeric.cases import LATER_DELTA, Case, sm90_marks
from tests.numeric.graphs import replayed_and_direct
from tests.numeric.law import NAMES, check, determinism, ours, relative_error, run
from tests.numeric.test_error_law import GRADIENT_LAYOUTS
from tests.numeric.test_sm90_row_pairs import PAIRED, paired_kernel

pytestmark = [*sm90_marks(), pytest.mark.usefixtures("only_sm90_runs")]
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
both_variants = pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "same-bits"])


def plan_of(inputs, plans):
    """What the backward of ours runs."""
    run(ours, inputs)
    return plans[-1]


EDGES = [(63, 65), (65, 63), (64, 192), (127, 193), (129, 191), (193, 129), (191, 127), (257, 33)]


@both_variants
@pytest.mark.parametrize("D", [32, 64, 128])
@pytest.mark.parametrize(("Lq", "Lk"), EDGES)
def test_edges_of_tiles_in_both_directions(Lq, Lk, D, deterministic):
    """What a pass owns and what it streams end in the middle of a tile, or just behind one."""
    with determinism(deterministic):
        check(Case("edges", B=2, N=3, Lq=Lq, Lk=Lk, H=1, D=D).inputs(torch.bfloat16, "cuda"))


@each_dtype
@both_variants
@pytest.mark.parametrize("D", [16, 32, 64, 128])
def test_many_rows_for_few_tiles_of_dbias2(D, deterministic, dtype):
    """Several blocks share the sum over n of one tile: a number of rows that no share divides."""
    with determinism(deterministic):
        check(Case("slices", N=131, Lq=100, Lk=70, H=1, D=D).inputs(dtype, "cuda"))


DIVIDED = [
    Case("columns-tails", N=200, Lq=768, Lk=766, H=4),
    Case("whole-tiles", N=70, Lq=768, Lk=766, H=4),
    Case("columns", N=130, Lq=768, Lk=766, H=1),
    Case("two-batches", B=2, N=120, Lq=768, Lk=766, H=2),
    Case("D64", N=200, Lq=768, H=3, D=64),
    Case("no-bias1", N=100, Lq=768, Lk=766, H=4, bias1=False),
]
MASKS = {
    "none": lambda bias1: None,
    "last-half": lambda bias1: bias1[..., bias1.shape[-1] // 2 :].fill_(-torch.inf),
    "ragged": lambda bias1: bias1[:, ::3, ..., 100:].fill_(-1e9),
    "rows": lambda bias1: bias1[:, -40:].fill_(-torch.inf),
}


@pytest.mark.parametrize(
    ("case", "mask"),
    [(case, mask) for case in DIVIDED for mask in MASKS if case.bias1 or mask == "none"],
    ids=lambda one: getattr(one, "id", one),
)
def test_rows_divided_among_clusters(case, mask, plans):
    """dbias2 is that of the fixed order, whose slices the host chooses, up to the order of sums. Up
    to D = 32, rows of dbias2 do not begin at multiples of 16 bytes, so rows n are not paired.
    """
    inputs = case.inputs(torch.bfloat16, "cuda")
    if case.bias1:
        MASKS[mask](inputs.bias1)
    inputs.bias2 = inputs.bias2.float()  # whose gradient is not rounded
    inputs.do = torch.randn_like(inputs.q)
    found = run(ours, inputs)[NAMES.index("dbias2")]
    assert plans[-1]["equal_tiles"] == "partitioned"
    with determinism(True):
        wanted = run(ours, inputs)[NAMES.index("dbias2")]
    assert relative_error(found, wanted) < 2e-6


@both_variants
@pytest.mark.parametrize(
    ("Lq", "D"),
    [
        *((100, 32), (192, 32), (256, 32), (300, 32), (700, 32)),
        *((200, 48), (100, 64), (200, 128), (1300, 128)),
    ],
)
def test_blocks_in_pairs_and_alone_for_dbias2(Lq, D, deterministic):
    """Pairs share keys where few of their queries are empty; of 700 the last block has none."""
    with determinism(deterministic):
        check(Case("pairs", N=19, Lq=Lq, Lk=130, H=1, D=D).inputs(torch.bfloat16, "cuda"))


@both_variants
@pytest.mark.parametrize(("Lq", "Lk", "D"), [(70, 131, 24), (131, 70, 64), (200, 192, 128)])
def test_dbias2_of_one_row(Lq, Lk, D, deterministic):
    """With N = 1 the pass over queries stores dS; with nobody asking for dq the bias pass does."""
    inputs = Case("one-row", B=2, N=1, Lq=Lq, Lk=Lk, H=3, D=D).inputs(torch.bfloat16, "cuda")
    with determinism(deterministic):
        check(inputs)
        inputs.bias1[0] = -torch.inf
        check(inputs)
        inputs.needs = (False, True, True, True, True)
        check(inputs)


@both_variants
@pytest.mark.parametrize("D", [24, 64])
def test_one_row_of_many_tiles(D, deterministic, plans):
    """Blocks for several rows n would come to two tiles; those for several tiles come to one."""
    inputs = Case("one-row", B=2, N=1, Lq=600, Lk=700, H=8, D=D).inputs(torch.bfloat16, "cuda")
    with determinism(deterministic):
        check(inputs)
        plan = plan_of(inputs, plans)
    assert (plan["dkdv"], plan["dq"]) == ("few_keys" if D == 24 else "keys", "few_queries")


@each_dtype
@both_variants
@pytest.mark.parametrize(
    ("Lq", "Lk", "D"), [(70, 200, 24), (130, 384, 32), (768, 520, 8), (500, 1024, 32)]
)
def test_one_row_in_a_cluster(Lq, Lk, D, deterministic, dtype, plans):
    """Blocks have tiles of keys, add up dq, and store dbias2 rounded: two to eight of them. Hidden
    are whole tiles, a part of one, and all keys of a row n.
    """
    inputs = Case("one-row", B=3, N=1, Lq=Lq, Lk=Lk, H=3, D=D).inputs(dtype, "cuda")
    with determinism(deterministic):
        check(inputs)
        plan = plan_of(inputs, plans)
        inputs.bias1[0, ..., :192] = -torch.inf
        inputs.bias1[1, ..., Lk - 70 :] = -torch.inf
        check(inputs)
        inputs.bias1[2] = -torch.inf
        check(inputs)
    assert (plan["dkdv"], plan["dbias2"]) == ("cluster_fused", "rounded_with_dkdv")


# dq by additions to accumulators that few (b, n, h) have at a time.
ACCUMULATORS = Case("accumulators", N=20, Lq=200, Lk=202, H=24, D=64)
# The same, and dbias2 is added to in that pass. Afterwards order_dbias2 mends its order in memory
# and makes its rows add up to 0; of 1,088 keys and more it reads them twice.
WITH_DBIAS2 = [
    Case("dbias2-ragged", N=9, Lq=203, Lk=332, H=60, D=128),
    Case("dbias2-whole", B=2, N=5, Lq=128, Lk=192, H=64, D=96, Dv=72),
    Case("dbias2-long", N=3, Lq=70, Lk=1156, H=16, D=128),
]
# Rows and heads for all multiprocessors, so that dk, dv and dq come from one pass.
ONE_PASS = [
    Case("one-round", N=132, Lq=130, Lk=182, H=2),
    Case("rounds", N=132, Lq=100, Lk=330, H=2),
    Case("most-with-delta", N=132, Lq=512, Lk=200, H=2),
    Case("one-step", N=132, Lq=40, Lk=190, H=3),
    Case("rounds-of-128", N=132, Lq=200, Lk=450, H=3),
    Case("rounds-of-128-odd", N=132, Lq=100, Lk=390, H=2, bias2=False),
    Case("long", N=132, Lq=520, Lk=130, H=2),
    Case("long-rounds", N=132, Lq=600, Lk=450, H=3),
    Case("split", N=29, Lq=800, Lk=661, H=2),
    Case("split-odd", N=132, Lq=833, Lk=180, H=2, D=16, bias2=False),
    Case("three-blocks", N=39, Lq=1601, Lk=330, H=2),
    Case("three-blocks-odd", N=39, Lq=2303, Lk=130, H=2, D=16, bias2=False),
    Case("four-blocks", N=30, Lq=2410, Lk=190, H=2),
    Case("narrow", N=132, Lq=67, Lk=150, H=2, D=8, Dv=24, bias1=False),
    Case("heads-of-48", N=132, Lq=330, Lk=200, H=2, D=48),
    Case("heads-of-48-split", N=132, Lq=520, Lk=300, H=2, D=40, Dv=48),
    ACCUMULATORS,
    Case("accumulators-wide", B=2, N=3, Lq=130, Lk=301, H=32, D=128),
    Case("accumulators-ragged", N=5, Lq=77, Lk=330, H=40, D=72, Dv=104, bias1=False),
    Case("accumulators-long", N=90, Lq=400, Lk=302, H=18, D=48),
    *WITH_DBIAS2,
    *PAIRED,
]


@both_variants
@pytest.mark.parametrize("case", ONE_PASS, ids=lambda case: case.id)
def test_one_pass_for_dk_dv_and_dq(case, deterministic):
    inputs = case.inputs(torch.bfloat16, "cuda")
    with determinism(deterministic):
        check(inputs)


@pytest.mark.parametrize("case", [ACCUMULATORS, *WITH_DBIAS2], ids=lambda case: case.id)
def test_dq_accumulators_in_float16(case):
    check(case.inputs(torch.float16, "cuda"))


@pytest.mark.parametrize("case", WITH_DBIAS2, ids=lambda case: case.id)
def test_rows_of_dbias2_add_up_to_zero(case, plans):
    """math.md (16a), where the kernel that orders dbias2 does it."""
    inputs = case.inputs(torch.bfloat16, "cuda")
    inputs.bias2 = inputs.bias2.float()
    dbias2 = run(ours, inputs)[NAMES.index("dbias2")].double()
    assert plans[-1]["dbias2"] == "added_with_dkdv"
    assert (dbias2.sum(-1).abs() / dbias2.abs().sum(-1)).max() < 2e-6


@pytest.mark.parametrize("sees", ["nothing", "one key"])
@pytest.mark.parametrize("case", WITH_DBIAS2, ids=lambda case: case.id)
def test_gradients_that_are_repaired_after_rows_are_ordered(case, sees):
    inputs = case.inputs(torch.bfloat16, "cuda")
    if sees == "nothing":
        inputs.bias2[:, :, :, 3:40:3] = -torch.inf
        inputs.v[:, 1, 7] = torch.nan
    else:
        inputs.bias1[:, 1, ..., 1:] = -torch.inf
    check(inputs)


@pytest.mark.parametrize("N", [50, 66, 100])
def test_few_queries_of_many_rows(N):
    """Rows for which a cluster's two blocks would have work, but not queries for both."""
    check(Case("few", N=N, Lq=64, Lk=192, H=1).inputs(torch.bfloat16, "cuda"))


# Blocks wait for others of the same kernel, or of the one before.
WAITING = pytest.mark.parametrize(
    "case",
    [ACCUMULATORS, WITH_DBIAS2[0], ONE_PASS[1], PAIRED[1], LATER_DELTA],
    ids=lambda case: case.id,
)


@WAITING
@pytest.mark.parametrize("number", range(3))
def test_blocks_that_wait_beside_other_work(case, number):
    """While another stream's work delays some of them."""
    inputs = case.inputs(torch.bfloat16, "cuda")
    busy = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(4 + number):
            busy @ busy
    check(inputs)


@pytest.mark.parametrize("case", ONE_PASS, ids=lambda case: case.id)
def test_one_pass_is_what_runs(case, plans):
    inputs = case.inputs(torch.bfloat16, "cuda")
    inputs.do = torch.randn_like(evoformer_attention(*inputs.tensors()[:3]))
    plan = plan_of(inputs, plans)
    paired = paired_kernel(case)
    assert paired is not None or case not in PAIRED
    if paired:
        assert (plan["dkdv"], plan["dbias2"]) == (paired, "added_with_dkdv"), plan
    else:
        assert plan["dkdv"].endswith("fused") or plan["dkdv"] == "dq_global", plan
    assert "dq" not in plan
    apart = plan.get("dbias2", "").endswith("_dbias2")
    assert apart == (case.bias2 and case not in WITH_DBIAS2 and not paired), plan
    most = 768 if paired else 512
    assert ("computes_delta" in plan) == (case.Lq <= most and max(case.D, case.Dv or 0) <= 32), plan


@pytest.mark.parametrize(("N", "H", "D"), [(80, 8, 64), (24, 32, 128)])
def test_peak_memory_is_that_of_results(N, H, D):
    """O, dq, dk, dv, and dbias2's sum in float32 beside its copy: what passes need besides is gone
    by then, lse too.
    """
    inputs = Case("memory", N=N, Lq=512, H=H, D=D).inputs(torch.bfloat16, "cuda")
    trained = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v, inputs.bias2)]
    do = torch.randn_like(inputs.q)

    def step():
        o = DS4Sci_EvoformerAttention(inputs.q, inputs.k, inputs.v, [inputs.bias1, inputs.bias2])
        torch.autograd.grad(o, trained, do)

    results = 4 * do.nbytes + (4 + 2) * inputs.bias2.numel()
    one_lse = 4 * N * H * 512
    assert 0 <= peak_extra_bytes(step, do.device) - results <= 2**20 < one_lse


@pytest.mark.parametrize("value", [-torch.inf, -1e9])
def test_one_pass_with_masks(value):
    """-1e9 on all keys of a row moves its lse into dq's place, which the pass itself overwrites."""
    for case in (*ONE_PASS[1:4], ONE_PASS[5], ACCUMULATORS, WITH_DBIAS2[0], *PAIRED[:2]):
        inputs = case.inputs(torch.bfloat16, "cuda")
        inputs.bias1[:, 1::3] = value
        inputs.bias1[:, ::3, ..., 64:200] = value
        check(inputs)


@both_variants
@pytest.mark.parametrize("Lk", [190, 600])
@pytest.mark.parametrize("Lq", [1, 16, 17, 63, 64, 65, 448, 511, 512, 513, 575, 768])
def test_delta_of_several_rows_in_a_block(Lq, Lk, deterministic, plans):
    """A block passes from one (b, n, h) to the next, leaves out rows n that see nothing, among them
    all of some blocks (with 132 multiprocessors), and a tile of 192 keys that nobody sees.
    """
    inputs = Case("delta", N=220, Lq=Lq, Lk=Lk, H=3, D=16 if Lq % 2 else 32).inputs(
        torch.bfloat16, "cuda"
    )
    inputs.bias1[:, 44:88] = -torch.inf
    inputs.bias1[:, 5::44] = -torch.inf
    if Lk > 384:
        inputs.bias1[..., 192:384] = -torch.inf
    with determinism(deterministic):
        check(inputs)
    assert ("computes_delta" in plans[-1]) == (Lq <= (512 if deterministic else 768))


def test_more_rows_than_a_grid_has_in_y():
    """B * N past 65,535 with dbias2, whose sum over n eager cannot do in 16 bits."""

    def eager_in_float32(q, k, v, bias1, bias2):
        o = evoformer_attention(*(t.float() for t in (q, k, v, bias1, bias2)))
        return o.to(q.dtype)

    inputs = Case("rows", N=65_600, Lq=3, H=1, D=8).inputs(torch.bfloat16, "cuda")
    check(inputs, eager=eager_in_float32)


@each_dtype
@pytest.mark.parametrize(
    "case",
    [
        Case("slices", N=131, Lq=100, Lk=70, H=1),
        Case("ragged", B=2, N=9, Lq=389, Lk=131, H=3, D=64),
        Case("wide", N=16, Lq=200, H=2, D=128),
        Case("no-bias2", B=2, N=5, Lq=131, H=3, bias2=False),
        Case("many-tiles", N=33, Lq=330, H=4),
    ],
    ids=lambda case: case.id,
)
def test_deterministic_is_bit_identical(case, dtype):
    """Also with another stream's work on the same multiprocessors, which shuffles the blocks."""
    inputs = case.inputs(dtype, "cuda")
    inputs.do = torch.randn_like(inputs.q)
    busy = torch.randn(4096, 4096, device="cuda")
    side = torch.cuda.Stream()
    with determinism(True):
        first = run(ours, inputs)
        for number in range(6):
            torch.cuda.synchronize()
            if number % 2:
                with torch.cuda.stream(side):
                    busy @ busy
            for name, a, b in zip(NAMES, first, run(ours, inputs), strict=True):
                assert a is b is None or torch.equal(a, b), name


@both_variants
@pytest.mark.parametrize("number", range(10))
def test_ten_fresh_seeds(number, deterministic, session_seed):
    """A mid-size call, ten times with other numbers; -rP prints the errors against float64."""
    torch.manual_seed(session_seed + number)
    inputs = Case("seeds", N=24, Lq=192, H=4).inputs(torch.bfloat16, "cuda")
    with determinism(deterministic):
        result = check(inputs)
    reference = run(evoformer_attention, inputs, torch.float64)
    errors = (relative_error(x, ref) for x, ref in zip(result, reference, strict=True))
    print(*(f"{name} {error:.5f}" for name, error in zip(NAMES, errors, strict=True)))


def heads_first(do):
    return do.transpose(2, 3).contiguous().transpose(2, 3)


@pytest.mark.parametrize(
    "layout", [*GRADIENT_LAYOUTS.values(), heads_first], ids=[*GRADIENT_LAYOUTS, "heads-first"]
)
def test_no_gradient_layout_needs_another_family(layout):
    """What TMA cannot read of them is copied; `only_sm90_runs` sees who ran."""
    inputs = Case("layout", N=5, Lq=70).inputs(torch.bfloat16, "cuda")
    inputs.do = layout(torch.randn_like(inputs.q))
    check(inputs)


@pytest.mark.parametrize(("Lq", "Lk"), [(64, 64), (389, 131), (131, 389)])
def test_poison_behind_the_tensors_is_never_seen(Lq, Lk):
    """NaN in the memory around q, k, v, both biases and dO, of which tiles reach past their ends,
    changes no bit of any gradient.
    """
    inputs = Case("poison", N=3, Lq=Lq, Lk=Lk).inputs(torch.bfloat16, "cuda")
    inputs.do = torch.randn_like(inputs.q)

    def poisoned(x):
        room = torch.full((x.numel() + 16384,), torch.nan, dtype=x.dtype, device=x.device)
        return room[8192 : 8192 + x.numel()].view(x.shape).copy_(x)

    with determinism(True):
        plain = run(ours, inputs)
        for name in ("q", "k", "v", "bias1", "bias2", "do"):
            setattr(inputs, name, poisoned(getattr(inputs, name)))
        for name, a, b in zip(NAMES, plain, run(ours, inputs), strict=True):
            assert a.isfinite().all() and torch.equal(a, b), name


@pytest.mark.parametrize("value", [-torch.inf, -1e9])
def test_masked_tiles_and_rows(value):
    """Whole tiles of keys out of sight in one row, all keys in another, none in the rest."""
    inputs = Case("masked", N=6, Lq=150, Lk=400, H=2).inputs(torch.bfloat16, "cuda")
    inputs.bias1[:, 1, ..., :130] = value
    inputs.bias1[:, 2, ..., 128:260] = value
    inputs.bias1[:, 3, ..., 200:] = value
    inputs.bias1[:, 4] = -torch.inf
    result = check(inputs)
    for x in result[:5]:
        assert not x[:, 4].any()


def of_another_order(case):
    """What additions in another order change: of dq, float16 sums of two or, here, of six parts."""
    return 2e-3 if case is LATER_DELTA else 1e-3


def backward_in_a_graph(case):
    """Its workspace and its passes are captured, and replayed with other numbers."""
    tensors = [t.requires_grad_() for t in case.inputs(torch.bfloat16, "cuda").tensors()]
    do = torch.randn_like(tensors[0])

    def step():
        return torch.autograd.grad(
            DS4Sci_EvoformerAttention(*tensors[:3], tensors[3:]), tensors, do
        )

    return zip(*replayed_and_direct(step, tensors), strict=True)


def test_graph_of_a_deterministic_backward():
    with determinism(True):
        for a, b in backward_in_a_graph(Case("graph", N=40, Lq=70, H=1)):
            assert torch.equal(a, b)


@WAITING
def test_graph_with_blocks_that_wait(case):
    """Counters that each replay must find at zero, and a pass that begins before this one ends."""
    for a, b in backward_in_a_graph(case):
        assert relative_error(a, b) < of_another_order(case)


@WAITING
def test_blocks_that_wait_on_two_streams(case):
    """Of two grids that want all multiprocessors none waits for the other's end in vain."""
    inputs = [case.inputs(torch.bfloat16, "cuda") for _ in range(2)]
    for x in inputs:
        x.do = torch.randn_like(x.q)
    alone = [run(ours, x) for x in inputs]
    torch.cuda.synchronize()
    together = []
    for x in inputs:
        with torch.cuda.stream(torch.cuda.Stream()):
            together.append(run(ours, x))
    torch.cuda.synchronize()
    for expected, result in zip(alone, together, strict=True):
        for a, b in zip(result, expected, strict=True):
            assert relative_error(a, b) < of_another_order(case)
