"""Ring attention, forward and all gradients."""

import math
from functools import partial
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Shard

from deepspeed4science import DS4Sci_EvoformerAttention, dispatch
from deepspeed4science.distributed import exchange, ring_attention
from deepspeed4science.distributed import ring as ring_module
from deepspeed4science.errors import InvalidInputError, NoBackendError
from tests.numeric.law import relative_error

from .sharded import PLACEMENTS, Case, check, distribute, partly, run_sharded

PLACEMENTS["ring"] = (2, 2, 2, 4, 3, 2)
# Tensors that another dimension of the mesh shards otherwise than q.
OTHERWISE = {
    "N-biases-by-batch": (1, 1, 1, 0, 0, 1),
    "N-biases-by-keys": (1, 1, 1, 4, 4, 1),
    "N-bias2-by-heads": (1, 1, 1, 1, 2, 1),
    "N-keys-otherwise": (1, 0, 3, None, None, 1),
    "N-keys-whole": (1, None, None, None, None, 1),
    "H-biases-by-rows": (3, 3, 3, 1, 3, 3),
    "H-bias2-whole": (3, 3, 3, None, None, 3),
    "whole-biases-not": (None, None, 2, 1, 2, None),
}
PLACEMENTS |= OTHERWISE
HALVES = (torch.bfloat16, torch.float16)

CASES = [
    Case("ring", ("ring",)),
    Case("ring-bf16", ("ring",), dtype=torch.bfloat16, Lq=40),
    Case("ring-fp16", ("ring",), dtype=torch.float16, N=1, H=1, Lq=129),
    Case("ring-389", ("ring",), B=1, N=1, H=1, Lq=389),
    Case("ring-Lq-Lk", ("ring",), N=3, Lq=13, Lk=70),
    Case("ring-no-bias", ("ring",), bias1=None, bias2=None),
    Case("ring-bias1-for-all", ("ring",), bias1=(1, 1, 1, 1, "Lk"), bias2=None, draws=10),
    Case("ring-bias2-for-all", ("ring",), bias1=None, bias2=(1, 1, 1, "Lq", "Lk")),
    Case("ring-some-gradients", ("ring",), needs=(True, False, True, False, True)),
    Case("ring-one-key-each", ("ring",), N=40, Lk=4),
    Case("ring-scale", ("ring",), options={"scale": 0.7}),
    Case("ring-scale-negative", ("ring",), options={"scale": -0.7}),
]
# A ring of each process, with all keys: nothing is sent.
ALONE = Case("ring-of-one", ("N", "ring"))
TWO_DIMENSIONS = [Case(f"ring-{axis}", (axis, "ring")) for axis in ("B", "N", "H")]
TWO_DIMENSIONS.append(Case("ring-B-of-one", ("B", "ring"), B=1))


def ring(q, k, v, biases, scale=None, mesh_dim=0):
    return ring_attention(q, k, v, *biases, scale=scale, mesh_dim=mesh_dim)


def rounding_of_lse(inputs):
    """The error allowed beyond the law in float32: parts are merged by their lse, one float32 each,
    half of whose last place is a relative error of P; the lse of all keys adds another half.
    """
    if inputs.q.dtype != torch.float32:
        return 0.0
    biases = [inputs.bias1, inputs.bias2]
    _, lse = DS4Sci_EvoformerAttention(
        inputs.q, inputs.k, inputs.v, biases, scale=inputs.scale, return_lse=True
    )
    lse = lse.abs()
    largest = lse[lse < 1e4].max()  # of the shifted scores: a mask of -1e9 is no part of it
    return float(torch.finfo(torch.float32).eps * 2 ** largest.log2().floor())


def run_case(case, world):
    two = len(case.axes) == 2
    rings = world.size if case is ALONE else 2
    mesh = world.mesh(rings, world.size // rings) if two else world.mesh()
    draws, more = [], 0.0
    for _ in range(case.draws):
        inputs = case.inputs(world.device)
        # -1: the second of two dimensions
        ours, placed = run_sharded(inputs, mesh, case.axes, partial(ring, mesh_dim=-int(two)))
        assert not any(x is not None and x.placements[-1].is_partial() for x in placed)
        draws.append((ours, inputs))
        more = max(more, rounding_of_lse(inputs))
    check(world, *draws, more=more)


def masks(world):
    """Hides all keys of a process, or all keys of a row n, by a finite number or by -inf."""
    inputs = Case("", ()).inputs(world.device)
    part = -(-21 // world.size)
    inputs.bias1[0, 0, ..., :part] = -math.inf
    inputs.bias1[0, 1, ..., -3:] = -1e9
    inputs.bias1[0, 2] = -1e9
    inputs.bias1[0, 3, ..., part:] = -1e9
    inputs.bias1[1, 0] = -math.inf
    inputs.bias1[1, 1] += 1000.0
    ours, _ = run_sharded(inputs, world.mesh(), ("ring",), ring)
    check(world, (ours, inputs), more=rounding_of_lse(inputs))
    # Two rings: where one has [0, 2], of which no key is seen, the other has [0, 6].
    rings = world.mesh(2, world.size // 2)
    ours, _ = run_sharded(inputs, rings, ("N", "ring"), partial(ring, mesh_dim=1))
    check(world, (ours, inputs), more=rounding_of_lse(inputs))


def hidden_part(world):
    """Keys that are hidden beside those of other processes are not computed: the operators get -inf
    for them. On Hopper, dq of such a part was computed twice. Keys of the same number are not
    hidden, however large it is.
    """
    of_last = 21 - (world.size - 1) * -(-21 // world.size)
    names = ("forward_op", "backward_op")
    real = [getattr(ring_module, name) for name in names]

    def note(operator, position, *arguments, **options):
        seen.append(arguments[position].clone())
        return operator(*arguments, **options)

    forward, backward = partial(note, real[0], 3), partial(note, real[1], 6)
    for dtype, threshold in ((torch.float32, 1e8), (torch.float16, 1e4)):
        inputs = Case("", (), bias_dtype=dtype).inputs(world.device)
        inputs.bias1[:, :4] = 0.0
        inputs.bias1[:, :4, ..., -of_last:] = -threshold
        inputs.bias1[:, 4] = -10 * threshold if dtype == torch.float32 else -threshold
        inputs.bias1[:, 5] = torch.finfo(dtype).min
        seen = []
        with mock.patch.multiple(ring_module, forward_op=forward, backward_op=backward):
            ours, _ = run_sharded(inputs, world.mesh(), ("ring",), ring)
        check(world, (ours, inputs), more=rounding_of_lse(inputs))
        assert len(seen) == 2 * world.size
        hidden = torch.cat(seen, -1)
        assert (hidden[:, :4].isinf().sum(-1) == 2 * of_last).all()
        assert hidden[:, 4:].isfinite().all()


def large_scores(world):
    """lse far from 0, by a finite bias2: it leaves a backward few digits of the scores."""
    inputs = Case("", ()).inputs(world.device)
    inputs.bias2[:, :, 1] += 300.0
    ours, _ = run_sharded(inputs, world.mesh(), ("ring",), ring)
    check(world, (ours, inputs), more=rounding_of_lse(inputs))


def otherwise(name, world):
    """Gradients stay sharded as their tensors are."""
    case = Case("", (name, "ring"))
    inputs = case.inputs(world.device)
    mesh = world.mesh(2, world.size // 2)
    ours, placed = run_sharded(inputs, mesh, case.axes, partial(ring, mesh_dim=1))
    check(world, (ours, inputs), more=rounding_of_lse(inputs))
    for x, first, second in zip(
        placed[1:], PLACEMENTS[name][:5], PLACEMENTS["ring"][:5], strict=True
    ):
        assert first is None or x.placements == (Shard(first), Shard(second))


def beside_one_process(tensors, mesh, placements, mesh_dim=0):
    """The law is that of one dtype; here are several, or parts that `distribute` does not make."""

    def gradients(function, leaves):
        o = function(*leaves)
        loss = (o.sin() if o.dtype == torch.float32 else o.float().sin()).sum()
        floats = [x for x in leaves if x is not None and x.requires_grad]
        return [o, *torch.autograd.grad(loss, floats)]

    leaves = [x if x is None else x.clone().requires_grad_(x.is_floating_point()) for x in tensors]
    shards = [
        x if x is None else partly(x, mesh, of) for x, of in zip(tensors, placements, strict=True)
    ]
    expected = gradients(lambda q, k, v, *two: DS4Sci_EvoformerAttention(q, k, v, two), leaves)
    found = gradients(partial(ring_attention, mesh_dim=mesh_dim), shards)
    for one, other in zip(expected, found, strict=True):
        assert one.dtype == other.dtype
        eps = max(torch.finfo(x.dtype).eps for x in (one, expected[0]))
        assert relative_error(other.full_tensor(), one) < max(1e-5, eps)


RING = [[Shard(2)]] * 3 + [[Shard(4)], [Shard(3)]]


def reshaped(world):
    """q, k and v are parts of one projection; heads and channels of O are flattened."""
    product = torch.randn(2, 8, 21, 3 * 4 * 16, device=world.device)

    def attend(product, attention):
        return attention(*product.unflatten(-1, (3, 4, 16)).unbind(-3)).flatten(-2)

    ours = attend(distribute(product, world.mesh(), [2]), ring_attention)
    expected = attend(product, DS4Sci_EvoformerAttention)
    torch.testing.assert_close(ours.full_tensor(), expected)


def masks_of_keys(world):
    """Of booleans and integers, as in the op."""
    inputs = Case("", ()).inputs(world.device)
    mask = torch.rand_like(inputs.bias1) < 0.7
    for own in (mask, mask.long()):
        tensors = [inputs.q, inputs.k, inputs.v, own, inputs.bias2]
        beside_one_process(tensors, world.mesh(), RING)


def promoted(world):
    inputs = Case("", ()).inputs(world.device)
    for dtypes in ((torch.bfloat16, torch.float32, torch.float16), (torch.float32, *HALVES)):
        qkv = [x.to(dtype) for x, dtype in zip(inputs.tensors()[:3], dtypes, strict=True)]
        beside_one_process([*qkv, inputs.bias1, inputs.bias2], world.mesh(), RING)


def narrow_values(world):
    """Dv is not D."""
    q, k, v, *biases = Case("", ()).inputs(world.device).tensors()
    beside_one_process([q, k, v[..., :8], *biases], world.mesh(), RING)


def autocast(world):
    inputs = Case("", ()).inputs(world.device)
    with torch.autocast(world.device, torch.bfloat16):
        beside_one_process(inputs.tensors()[:5], world.mesh(), RING)


def dtypes_on_their_way(world):
    """k and v travel in 16 bits, dk and dv, sums over processes, in float32. O and dq are sums of
    parts in float32, too.
    """
    inputs = Case("", (), dtype=torch.bfloat16).inputs(world.device)
    q, k, v = (distribute(x, world.mesh(), [2]).requires_grad_() for x in inputs.tensors()[:3])
    seen = []
    real = exchange.Transfer.__init__

    def note(self, group, part, extent):
        seen.append({x.dtype for x in part if x is not None})
        real(self, group, part, extent)

    merge = mock.Mock(side_effect=ring_module.merge_attention)
    backward = ring_module.backward_op
    dq = []

    def note_dq(*arguments, **options):
        gradients = backward(*arguments, **options)
        dq.append(gradients[0].float())
        return gradients

    with (
        mock.patch.object(exchange.Transfer, "__init__", note),
        mock.patch.multiple(ring_module, merge_attention=merge, backward_op=note_dq),
    ):
        o = ring_attention(q, k, v)
        assert seen == [{torch.bfloat16}] * (world.size - 1)
        # Before PyTorch 2.12, `backward` gathers gradients of uneven shards.
        found = torch.autograd.grad(o.float().sin().sum(), (q, k, v))
    assert seen.count({torch.float32}) == world.size
    assert len(seen) == 3 * world.size - 2
    assert torch.equal(found[0].to_local(), sum(dq).to(q.dtype))
    assert {call.args[0].dtype for call in merge.call_args_list} == {torch.float32}


def partial_sums(world):
    """Biases and keys that are sums over another dimension of the mesh."""
    mesh = world.mesh(2, world.size // 2)
    tensors = Case("", ()).inputs(world.device).tensors()[:5]
    placements = [[Shard(1), Shard(2)], *([Partial(), *of] for of in RING[1:])]
    beside_one_process(tensors, mesh, placements, mesh_dim=1)


def refusals(world):
    """None of them leaves a transfer behind, for which the next collective would wait."""
    inputs = Case("", ()).inputs(world.device)
    mesh = world.mesh()
    q, k, v = (distribute(x, mesh, [2]) for x in (inputs.q, inputs.k, inputs.v))

    def refused(match, *arguments, error=InvalidInputError, **options):
        with pytest.raises(error, match=match):
            ring_attention(*arguments, **options)
        torch.distributed.barrier()

    wrong = distribute(inputs.k, mesh, [1])
    refused("k: expected 21 elements in dimension 2, sharded", q, wrong, v)
    refused("q: expected a DTensor; got Tensor", inputs.q, k, v)
    refused("Q, K, V: expected a tensor for each", q, k, None)
    refused("q: expected .B, N, Lq, H, D., of", *(distribute(inputs.q[0], mesh, [1]),) * 3)
    refused("scale: expected a finite number", q, k, v, scale=math.inf)
    refused("bias2: expected 21 elements", q, k, v, None, distribute(inputs.bias2, mesh, [4]))
    refused("mesh_dim: expected one of the 1 dimensions", q, k, v, mesh_dim=1)
    other = DeviceMesh(world.device, list(reversed(range(world.size))))
    refused("k: expected the mesh of q", q, distribute(inputs.k, other, [2]), v)
    fewer = [distribute(x[..., :2, :], mesh, [2]) for x in (inputs.k, inputs.v)]
    refused("K: expected .* to match Q", q, *fewer)
    refused("V: expected .* to match K", q, k, fewer[1])
    refused(
        "K: expected .* to match Q",
        q,
        *(distribute(x[:, :7], mesh, [2]) for x in inputs.tensors()[1:3]),
    )
    refused("Q: expected float32, bfloat16", q.double(), k, v)
    rows = distribute(inputs.bias1[:, :7], mesh, [4])
    refused("bias1: expected a shape broadcastable", q, k, v, rows)
    pairs = distribute(inputs.bias2, mesh, [3])
    refused("bias2: expected float32, bfloat16", q, k, v, None, pairs > 0)
    with mock.patch.object(dispatch, "BACKENDS", ()):
        refused("no backend takes this call", q, k, v, error=NoBackendError)
    few = distribute(inputs.q[:, :, : world.size + 1], mesh, [2])
    if world.size == 4:  # 5 over 4 processes
        refused("some get none", few, k, v)


def refusals_of_queries(world):
    inputs = Case("", ()).inputs(world.device)
    mesh = world.mesh(2, world.size // 2)
    k, v = (distribute(x, mesh, [None, 2]) for x in (inputs.k, inputs.v))
    for placement in (Partial(), Shard(4), Shard(2)):
        q = partly(inputs.q, mesh, [placement, Shard(2)])
        with pytest.raises(
            InvalidInputError, match=r"q: expected .* shard B, N, H or nothing; got"
        ):
            ring_attention(q, k, v, mesh_dim=1)
        torch.distributed.barrier()


ONE = {case.id: partial(run_case, case) for case in [*CASES, ALONE]}
ONE |= {
    f"ring-{function.__name__}": function
    for function in (masks, hidden_part, large_scores, dtypes_on_their_way, refusals)
}
ONE |= {
    f"ring-{function.__name__}": function
    for function in (masks_of_keys, promoted, narrow_values, reshaped, autocast)
}


def of(size):
    two = {case.id: partial(run_case, case) for case in TWO_DIMENSIONS}
    two |= {f"ring-{name}": partial(otherwise, name) for name in OTHERWISE}
    two |= {
        f"ring-{function.__name__}": function for function in (partial_sums, refusals_of_queries)
    }
    return ONE | two if size >= 4 else ONE
