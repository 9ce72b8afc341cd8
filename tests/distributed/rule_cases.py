"""The sharding rules, forward and all gradients."""

from functools import partial

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from deepspeed4science import DS4Sci_EvoformerAttention
from deepspeed4science.errors import InvalidInputError

from .sharded import PLACEMENTS, Case, check, distribute, partly, run_sharded

BF16, FP16 = torch.bfloat16, torch.float16
NO_BIAS = {"bias1": None, "bias2": None}
BROADCAST = {"bias1": ("B", 1, 1, 1, "Lk"), "bias2": (1, 1, 1, "Lq", "Lk"), "draws": 6}

ONE_DIMENSION = [
    *(Case(f"rule-{axis}", (axis,)) for axis in ("B", "N", "H", "Lq", "Lk", "D", "-")),
    *(Case(f"rule-{axis}-bf16", (axis,), dtype=BF16) for axis in ("B", "N", "H", "Lq")),
    Case("rule-N-fp16", ("N",), dtype=FP16),
    *(Case(f"rule-{axis}-broadcast", (axis,), **BROADCAST) for axis in ("B", "N", "H", "Lq")),
    Case("rule-Lq-same-for-all-queries", ("Lq",), bias2=("B", 1, "H", 1, "Lk"), draws=2),
    Case("rule-N-one-mask-of-keys", ("N",), bias1=(1, 1, 1, 1, "Lk"), draws=10),
    *(Case(f"rule-{axis}-no-bias", (axis,), **NO_BIAS) for axis in ("B", "N", "H", "Lq")),
    *(Case(f"rule-{axis}-bias1", (axis,), bias2=None) for axis in ("N", "H")),
    *(Case(f"rule-{axis}-bias2", (axis,), bias1=None) for axis in ("N", "Lq")),
    *(Case(f"rule-{axis}-row-mask", (axis,), row_mask=True) for axis in ("B", "N", "H", "Lq")),
    Case("rule-N-scale", ("N",), options={"scale": -0.3}),
    Case("rule-N-bias-in-bf16", ("N",), bias_dtype=BF16),
    Case("rule-N-some-gradients", ("N",), needs=(True, False, False, False, True)),
    Case("rule-Lq-some-gradients", ("Lq",), needs=(False, True, True, True, False)),
    Case("rule-N-Lk-other", ("N",), Lk=34),
    Case("rule-N-uneven", ("N",), B=1, N=7),
    Case("rule-N-empty-shards", ("N",), B=1, N=1, Lq=40, draws=16),
    Case("rule-N-fewer-than-processes", ("N",), B=1, N=3, Lq=40),
    Case("rule-H-uneven", ("H",), H=5),
    Case("rule-Lq-389", ("Lq",), B=1, N=1, Lq=389, H=1),
    Case("rule-N-389", ("N",), B=1, N=389, Lq=12, H=1),
    # torch.chunk divides them among 4 processes as 2, 2, 1, 0 and as 2, 2, 2, 0.
    *(Case(f"rule-Lq-{Lq}", ("Lq",), N=30, Lq=Lq) for Lq in (5, 6)),
]
TWO_DIMENSIONS = [
    *(
        Case(f"mesh-{a}-{b}", (a, b))
        for a, b in [
            *(("B", "N"), ("N", "H"), ("N", "Lq"), ("H", "Lq"), ("B", "Lq"), ("N", "N")),
            *(("Lq", "Lq"), ("-", "N"), ("Lk", "N")),
        ]
    ),
    Case("mesh-B-N-bf16", ("B", "N"), dtype=BF16),
    Case("mesh-N-Lq-uneven", ("N", "Lq"), N=5, Lq=23, dtype=BF16),
    Case("mesh-N-H-row-mask", ("N", "H"), row_mask=True),
]


def run_case(case, world):
    mesh = world.mesh() if len(case.axes) == 1 else world.mesh(2, world.size // 2)
    draws = [case.inputs(world.device) for _ in range(case.draws)]
    check(world, *((run_sharded(inputs, mesh, case.axes)[0], inputs) for inputs in draws))


def compiled(world):
    """torch.compile, which traces the rules, too."""
    inputs = Case("", ("N",)).inputs(world.device)
    compiled = torch.compile(lambda *a, **k: DS4Sci_EvoformerAttention(*a, **k), fullgraph=True)
    ours, _ = run_sharded(inputs, world.mesh(), ("N",), compiled)
    check(world, (ours, inputs))


def checkpointed(world):
    from torch.utils.checkpoint import checkpoint

    inputs = Case("", ("N",)).inputs(world.device)
    function = partial(checkpoint, DS4Sci_EvoformerAttention, use_reentrant=False)
    ours, _ = run_sharded(inputs, world.mesh(), ("N",), function)
    check(world, (ours, inputs))


def placements(world):
    """Placements are kept: no rule moves an input that fits one."""
    expected = {
        "-": [Replicate()] * 6,
        "B": [Shard(0)] * 6,
        "N": [*[Shard(1)] * 5, Partial()],
        "H": [*[Shard(3)] * 4, Partial(), Shard(2)],
        "Lq": [*[Shard(2)] * 2, Partial(), Partial(), Partial(), Shard(3)],
    }
    for axis, wanted in expected.items():
        _, result = run_sharded(Case("", (), B=4).inputs(world.device), world.mesh(), (axis,))
        assert [x.placements for x in result] == [(one,) for one in wanted], axis
    shared = Case("", (), bias1=("B", 1, 1, 1, "Lk")).inputs(world.device)
    _, result = run_sharded(shared, world.mesh(), ("N",))
    assert [x.placements[0] for x in result] == [*[Shard(1)] * 4, Partial(), Partial()]


def rounded_once(world):
    """Partial gradients of a bias in 16 bits beside float32 are added before they are rounded."""
    case = Case("", ("N",), bias_dtype=BF16)
    inputs = case.inputs(world.device)
    ours, result = run_sharded(inputs, world.mesh(), ("N",))
    assert result[5].placements == (Replicate(),)
    inputs.bias2 = inputs.bias2.float()
    exact, _ = run_sharded(inputs, world.mesh(), ("N",))
    others = (ours[5] != exact[5].to(BF16)).float().mean()  # sums may be in another order on a GPU
    assert others < 0.01


def partial_bias(world):
    """Likewise where the bias is itself a sum over processes, on two dimensions of a mesh, too."""
    inputs = Case("", (), bias_dtype=BF16).inputs(world.device)
    meshes = [(world.mesh(), [Partial()])]
    if world.size >= 4:
        meshes.append((world.mesh(2, world.size // 2), [Partial(), Shard(3)]))
    wide = inputs.bias2.float().requires_grad_()
    o = DS4Sci_EvoformerAttention(inputs.q, inputs.k, inputs.v, [None, wide])
    (exact,) = torch.autograd.grad(o, wide, inputs.do)
    for mesh, placed in meshes:
        dims = [1] * mesh.ndim
        q, k, v, do = (distribute(x, mesh, dims) for x in (inputs.q, inputs.k, inputs.v, inputs.do))
        bias2 = partly(inputs.bias2, mesh, placed)
        o = DS4Sci_EvoformerAttention(q, k, v, [None, bias2])
        (gradient,) = torch.autograd.grad(o, bias2, do)
        assert gradient.placements == (Replicate(), *placed[1:])
        assert (gradient.full_tensor() != exact.to(BF16)).float().mean() < 0.01


def lse(world):
    """return_lse after a call without it, and the reverse: DTensor remembers its choice."""
    sizes = {"B": {}, "N": {}, "H": {"Lq": 1}, "Lq": {"H": 1}}
    for dim, (axis, one) in enumerate(sizes.items()):
        # of shapes that no other case has
        inputs = Case("", (), **{"B": 4, "Lq": 19, "Lk": 23} | one).inputs(world.device)
        q, k, v, *biases = inputs.tensors()
        whole, whole_lse = DS4Sci_EvoformerAttention(q, k, v, biases, return_lse=True)
        of_axis = zip(inputs.tensors(), PLACEMENTS[axis], strict=False)
        q, k, v, *biases = (distribute(x, world.mesh(), [place]) for x, place in of_axis)
        for _ in range(2):
            o = DS4Sci_EvoformerAttention(q, k, v, biases)
            torch.testing.assert_close(o.full_tensor(), whole)
            o, lse = DS4Sci_EvoformerAttention(q, k, v, biases, return_lse=True)
            assert lse.placements == (Shard(dim),)
            torch.testing.assert_close(lse.full_tensor(), whole_lse)


def other_ranks(world):
    """Tensors of other than five dimensions."""
    inputs = Case("", (), B=1).inputs(world.device)
    mesh = world.mesh()
    three = [x[0] for x in (inputs.q, inputs.k, inputs.v)]
    whole = DS4Sci_EvoformerAttention(*three, [inputs.bias1[0], inputs.bias2[0]])
    shards = [distribute(x, mesh, [0]) for x in (*three, inputs.bias1[0])]
    bias2 = distribute(inputs.bias2[0], mesh, [None])
    o = DS4Sci_EvoformerAttention(*shards[:3], [shards[3], bias2])
    assert o.placements == (Shard(0),)
    torch.testing.assert_close(o.full_tensor(), whole)
    six = torch.randn(4, 4, 2, 9, 2, 8, device=world.device)
    whole = DS4Sci_EvoformerAttention(six, six, six)
    for dim, placed in ((0, Shard(0)), (1, Replicate())):  # DTensor flattens no other shards
        shards = distribute(six, mesh, [dim])
        if dim == 1 and torch.__version__ < "2.12":
            with pytest.raises(RuntimeError, match="cannot be performed without redistribution"):
                DS4Sci_EvoformerAttention(shards, shards, shards)
            continue
        o = DS4Sci_EvoformerAttention(shards, shards, shards)
        assert o.placements == (placed,)
        torch.testing.assert_close(o.full_tensor(), whole)


def mixed_with_plain_tensors(world):
    inputs = Case("", ()).inputs(world.device)
    q = distribute(inputs.q, world.mesh(), [1])
    with pytest.raises(RuntimeError, match="DTensor"):
        DS4Sci_EvoformerAttention(q, inputs.k, inputs.v)


def refusals(world):
    """Errors have their own type, as for tensors."""
    inputs = Case("", ()).inputs(world.device)
    q, k, v = (distribute(x, world.mesh(), [1]) for x in inputs.tensors()[:3])
    with pytest.raises(InvalidInputError, match=r"V: expected .* to match K"):
        DS4Sci_EvoformerAttention(q, k, v[:, :, :7])
    with pytest.raises(InvalidInputError, match="Q: expected float32, bfloat16 or float16"):
        DS4Sci_EvoformerAttention(q.double(), k.double(), v.double())


ALL = {case.id: partial(run_case, case) for case in ONE_DIMENSION}
ALL |= {
    f"rule-{function.__name__}": function
    for function in (
        *(compiled, checkpointed, placements, rounded_once, partial_bias, lse, other_ranks),
        *(mixed_with_plain_tensors, refusals),
    )
}


def of(size):
    """The cases for so many processes. Compiling, the longest, is tried with two alone."""
    if size < 4:
        return ALL
    two = {case.id: partial(run_case, case) for case in TWO_DIMENSIONS}
    return {name: case for name, case in ALL.items() if case is not compiled} | two
