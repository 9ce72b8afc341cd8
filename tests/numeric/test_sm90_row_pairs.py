"""Hopper's backward where two rows n add to dbias2 together (sm90/backward/row_pairs.h). More of
its calls are in test_sm90_backward.py, among those of the other kernels.
"""

import pytest
import torch

from deepspeed4science import DS4Sci_EvoformerAttention
from deepspeed4science.reference import evoformer_attention
from tests.numeric.cases import Case, sm90_marks
from tests.numeric.law import (
    NAMES,
    check,
    determinism,
    ours,
    relative_error,
    run,
    violations,
    with_do,
)

pytestmark = [*sm90_marks(), pytest.mark.usefixtures("only_sm90_runs")]

# Clusters of two rows n add to dbias2 together; of an odd N the last row n is alone.
PAIRED = [
    Case("pairs", N=132, Lq=130, Lk=180, H=2),
    Case("pairs-odd", B=2, N=67, Lq=448, Lk=332, H=2, D=24),
    Case("pairs-no-bias1", N=131, Lq=67, Lk=152, H=2, D=8, Dv=24, bias1=False),
    Case("pairs-padded", N=131, Lq=389, Lk=391, H=2),
    Case("pairs-padded-large", N=130, Lq=300, Lk=150, H=24),
    Case("pairs-padded-long-large", N=132, Lq=520, Lk=71, H=30),
    Case("pairs-of-16", N=132, Lq=550, Lk=131, H=2, D=16),
    Case("pairs-long", N=131, Lq=768, Lk=260, H=2),
    Case("pairs-two-parts", N=131, Lq=900, Lk=391, H=1, D=16),
    Case("pairs-three-parts", B=2, N=66, Lq=1601, Lk=132, H=1, D=24),
    Case("pairs-six-parts", N=132, Lq=3900, Lk=72, H=1),
    Case("pairs-three-parts-large", N=131, Lq=1597, Lk=701, H=1),
    Case("pairs-of-48-large", N=33, Lq=448, Lk=389, H=24, D=48),
    Case("pairs-of-48", N=33, Lq=448, Lk=388, H=24, D=48),
    Case("pairs-of-64-sections", N=80, Lq=1000, Lk=900, H=1, D=64),
    Case("pairs-of-64", B=2, N=19, Lq=330, Lk=516, H=16, D=64, Dv=56),
]


def paired_kernel(case):
    """The kernel for two rows n together that a call runs, if sums may be in any order; or None.
    Above D = 32 there must also be memory for accumulators of dq, as in PAIRED.
    """
    head_dim = max(case.D, case.Dv or 0)
    if head_dim > 32:
        return "dq_global_paired" if case in PAIRED else None
    if not case.bias2 or (case.Lq > 768 and case not in PAIRED):
        return None
    if case.Lq > 768:
        return "parts_paired"
    return "narrow_paired" if case.Lq <= 512 else "long_paired"


@pytest.mark.parametrize(
    ("N", "L", "H", "D"),
    [(384, 384, 4, 32), (129, 384, 4, 32), (200, 640, 4, 32), (90, 1100, 1, 32), (24, 520, 16, 48)],
)
def test_without_gradients_dbias2_is_zero(N, L, H, D, plans):
    """Of rows n in pairs: bias2 would be added if a stage were filled before its dS is read."""
    inputs = Case("zero", N=N, Lq=L, H=H, D=D).inputs(torch.bfloat16, "cuda")
    inputs.do = torch.zeros_like(inputs.q)
    for _ in range(200):
        assert run(ours, inputs)[NAMES.index("dbias2")].count_nonzero() == 0
    assert plans[-1]["dkdv"].endswith("_paired")


def test_large_odd_dbias2_with_and_without_dq(plans):
    """Of more than 2^20 elements, which autograd rounds. Without dq another kernel runs, which
    takes no padded rows.
    """
    inputs = Case("odd", N=130, Lq=300, Lk=150, H=24).inputs(torch.bfloat16, "cuda")
    tensors = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v, inputs.bias2)]
    do = torch.randn_like(inputs.q)

    def gradients(wanted):
        o = DS4Sci_EvoformerAttention(inputs.q, inputs.k, inputs.v, [inputs.bias1, inputs.bias2])
        return torch.autograd.grad(o, wanted, do)

    of_all = gradients(tensors)[1:]
    assert plans[-1]["dkdv"] == "narrow_paired"  # Lk = 150: it adds to padded rows
    inputs.q = inputs.q.detach()
    of_some = gradients(tensors[1:])
    assert plans[-1]["dkdv"] == "keys"
    for one, other in zip(of_all, of_some, strict=True):
        assert one.dtype == other.dtype == torch.bfloat16
        assert relative_error(one, other) < 0.01


each_paired = pytest.mark.parametrize(
    ("N", "Lq", "H", "D"),
    [(150, 200, 2, 32), (150, 520, 2, 32), (132, 800, 1, 32), (40, 400, 32, 48)],
)


@each_paired
@pytest.mark.parametrize(
    "hidden",
    [
        "every-second",
        "thirds",
        "lengths",
        "last-half",
        "first-tiles",
        "second-tiles",
        "other-tiles",
    ],
)
def test_rows_in_pairs_that_see_other_keys(hidden, N, Lq, H, D, plans):
    inputs = Case("other-keys", N=N, Lq=Lq, Lk=388, H=H, D=D).inputs(torch.bfloat16, "cuda")
    bias1 = inputs.bias1
    if hidden == "every-second":
        bias1[:, ::2] = -torch.inf
    elif hidden == "thirds":
        bias1[:, ::3, ..., :130] = -torch.inf
        bias1[:, 1::3, ..., 130:] = -torch.inf
    elif hidden == "lengths":
        lengths = torch.randint(0, 389, (*bias1.shape[:4], 1), device="cuda")
        bias1[torch.arange(388, device="cuda") >= lengths] = -torch.inf
    elif hidden == "last-half":
        bias1[..., 194:] = -torch.inf
    else:  # tiles of 64 keys, two of which are a round
        tile = torch.arange(388, device="cuda") // 64
        of_round = torch.arange(N, device="cuda")[:, None] % 4 // 2  # the same in both rows n
        if hidden != "other-tiles":
            of_round = torch.full_like(of_round, hidden == "second-tiles")
        bias1[(tile % 2 == of_round)[None, :, None, None]] = -torch.inf
    check(inputs)
    assert plans[-1]["dkdv"].endswith("_paired")


@each_paired
def test_unread_rows_in_pairs(N, Lq, H, D, plans):
    """Rows n that row_mask leaves out hold NaN; the other row n of their cluster is read."""
    inputs = Case("unread", N=N, Lq=Lq, Lk=388, H=H, D=D).inputs(torch.bfloat16, "cuda")
    inputs.row_mask = torch.rand(1, N, device="cuda") < 0.5
    inputs.do = torch.randn_like(inputs.q)
    for tensor in (inputs.q, inputs.k, inputs.v, inputs.do):
        tensor[~inputs.row_mask] = torch.nan
    o, dq, dk, dv, dbias1, _ = check(inputs)
    for tensor in (o, dq, dk, dv, dbias1):
        assert (tensor[~inputs.row_mask] == 0).all()
    assert plans[-1]["dkdv"].endswith("_paired")


@pytest.mark.parametrize("hidden", ["nothing", "other-keys", "last-keys"])
def test_sections_of_the_queries(hidden, plans):
    """Accumulators of dq hold sections of the queries, and are used again and again. delta is in
    dq until that is written.
    """
    case = Case("sections", N=80, Lq=1000, Lk=900, H=1, D=64)
    inputs = with_do(case.inputs(torch.bfloat16, "cuda"))
    if hidden != "nothing":
        inputs.bias1[:, :: 2 if hidden == "other-keys" else 1, ..., 570:] = -torch.inf
    first = check(inputs)
    sections = int(plans[-1]["dq_sections"])
    assert sections == 4 and int(plans[-1]["dq_accumulators"]) < sections * case.N / 4
    of_dq = NAMES.index("dQ")
    exact = run(evoformer_attention, inputs, torch.float64)[of_dq]
    allowed = 1.02 * relative_error(first[of_dq], exact)
    for _ in range(20):
        assert relative_error(run(ours, inputs)[of_dq], exact) < allowed


IN_PARTS = Case("parts", N=131, Lq=2400, Lk=72, H=1)  # four parts of the queries


@pytest.mark.parametrize("size", [1e-34, 1e-3, 1.0, 1e32])
def test_sums_between_parts_of_the_queries_lose_nothing(size, plans):
    """dk and dv of one part after another are as exact as those of all queries at once, whatever
    their size: deterministic kernels compute these.
    """
    inputs = with_do(IN_PARTS.inputs(torch.bfloat16, "cuda"))
    inputs.do *= size
    inputs.do[:, 5] = 0
    in_parts = check(inputs)
    assert (plans[-1]["dkdv"], plans[-1]["query_parts"]) == ("parts_paired", "4")
    with determinism():
        at_once = run(ours, inputs)
    exact = run(evoformer_attention, inputs, torch.float64)
    for name in ("dK", "dV"):
        x, y, reference = (of[NAMES.index(name)] for of in (in_parts, at_once, exact))
        assert relative_error(x, reference) < 1.02 * relative_error(y, reference), name


@pytest.mark.parametrize("query", [0, 700, 2399])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, 1e6])
def test_infinities_of_a_part_of_the_queries(value, query, plans):
    """dO of one query has it in one column: so has dV of all keys. Nothing else of dV is lost."""
    inputs = with_do(IN_PARTS.inputs(torch.bfloat16, "cuda"))
    inputs.do[:, ::7, query, :, 3] = value
    of_dv = NAMES.index("dV")
    x, eager, exact = (
        run(*call)[of_dv]
        for call in (
            (ours, inputs),
            (evoformer_attention, inputs, torch.bfloat16),
            (evoformer_attention, inputs, torch.float64),
        )
    )
    assert not violations([x], [eager], [exact], [torch.finfo(x.dtype).eps], ["dV"])
    others = [column for column in range(32) if column != 3]
    assert relative_error(x[..., others], exact[..., others]) < 0.004
    assert plans[-1]["dkdv"] == "parts_paired"
