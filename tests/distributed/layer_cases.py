"""Layers whose rows are sharded, beside the same layers in one process."""

import gc
import weakref
from dataclasses import dataclass, replace
from functools import partial
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from deepspeed4science import DS4Sci_EvoformerAttention
from deepspeed4science.distributed import apply_locally, ring_attention
from deepspeed4science.errors import InvalidInputError
from deepspeed4science.nn import (
    AttentionPairBias,
    EvoformerAttention,
    TriangleAttentionEndingNode,
    TriangleAttentionStartingNode,
    fused,
)
from tests.numeric.law import plain, relative_error, violations

from .sharded import partly, stacked

START, END = TriangleAttentionStartingNode, TriangleAttentionEndingNode
C, WIDTH, HEADS = 32, 8, 4
DRAWS = 8


@dataclass(frozen=True)
class Layer:
    id: str
    kind: type
    placements: tuple
    shape: tuple = (1, 21, 21, C)
    dtype: torch.dtype = torch.float32
    masked: bool = True
    transpose_bias: bool = False

    def layer(self, world):
        torch.manual_seed(world.seed)
        if self.kind is EvoformerAttention:
            layer = EvoformerAttention(C, C, C, WIDTH, HEADS)
        else:
            layer = self.kind(C, WIDTH, HEADS, transpose_bias=self.transpose_bias)
        for parameter in layer.parameters():  # some begin at 0
            torch.nn.init.normal_(parameter, std=0.3)
        return layer.to(world.device)

    def inputs(self, world):
        x, dy = (torch.randn(self.shape, device=world.device).to(self.dtype) for _ in range(2))
        mask = torch.rand(self.shape[:-1], device=world.device) < 0.8 if self.masked else None
        return x, mask, dy


def gradients(layer, x, mask, dy):
    """Of x and of each parameter, behind the result."""
    x = x.detach().requires_grad_()
    y = layer(x, mask)
    y.backward(dy)
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


def own_gradients(layer, *inputs):
    layer.zero_grad()
    return [one.clone() for one in gradients(layer, *inputs)]


def reference(case, world, inputs, dtype):
    layer = case.layer(world).to(dtype)
    x, mask, dy = inputs
    with (
        mock.patch("deepspeed4science.nn.attention.DS4Sci_EvoformerAttention", plain),
        mock.patch("deepspeed4science.nn.triangle.can_be_recorded", return_value=False),
        mock.patch.object(fused, "serves", return_value=False),
    ):
        return gradients(layer, x.to(dtype), mask, dy.to(dtype))


def check(world, case, draws, found, alone=None):
    """The law, for all draws as one: some parameters have three dozen elements.

    alone   a layer in one process that takes eager's place
    """
    if world.rank:
        return
    names = ["y", "dx", *(name for name, _ in case.layer(world).named_parameters())]
    exact = stacked(reference(case, world, inputs, torch.float64) for inputs in draws)
    if alone is None:
        eager = stacked(reference(case, world, inputs, case.dtype) for inputs in draws)
    else:
        eager = stacked(own_gradients(alone, *inputs) for inputs in draws)
    ulps = [torch.finfo(case.dtype).eps] * len(names)
    broken = violations(stacked(found), eager, exact, ulps, names)
    assert not broken, "; ".join(broken)


def summed(world, tensors):
    """Parameters' gradients, each process having found its own rows' part."""
    for tensor in tensors:
        torch.distributed.all_reduce(tensor)
    return tensors


def mesh_of(world, placements):
    return world.mesh() if len(placements) == 1 else world.mesh(2, world.size // 2)


def distribute(inputs, mesh, placements):
    return [None if one is None else distribute_tensor(one, mesh, placements) for one in inputs]


def run_case(case, world, wrap=lambda layer: layer, reduces=False, beside_itself=False):
    """
    reduces         what `wrap` made adds up gradients of parameters itself
    beside_itself   it is compared with what `wrap` makes in one process
    """
    mesh = mesh_of(world, case.placements)
    draws = [case.inputs(world) for _ in range(DRAWS)]
    layer = wrap(case.layer(world).to(case.dtype))
    found = []
    for inputs in draws:
        layer.zero_grad()
        y, dx, *rest = gradients(layer, *distribute(inputs, mesh, case.placements))
        assert y.placements == case.placements
        if not reduces:
            rest = summed(world, rest)
        found.append([whole(one) for one in (y, dx, *rest)])
    alone = wrap(case.layer(world).to(case.dtype)) if beside_itself else None
    check(world, case, draws, found, alone)


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x.clone()


ROWS, COLUMNS = (Shard(1),), (Shard(2),)
CASES = [
    Layer("layer-start", START, ROWS),
    Layer("layer-start-even", START, ROWS, (1, 16, 16, C)),
    Layer("layer-start-bf16", START, ROWS, (1, 24, 24, C), torch.bfloat16),
    Layer("layer-start-no-mask", START, ROWS, masked=False),
    Layer("layer-start-moved", START, COLUMNS),
    Layer("layer-start-batch", START, ROWS, (3, 9, 9, C)),
    Layer("layer-start-three-dimensions", START, (Shard(0),), (13, 13, C)),
    Layer("layer-end", END, COLUMNS),
    Layer("layer-end-moved", END, ROWS),
    Layer("layer-end-bf16", END, COLUMNS, (1, 24, 24, C), torch.bfloat16),
    Layer("layer-start-transposed", START, ROWS, transpose_bias=True),
    Layer("layer-end-transposed", END, COLUMNS, (2, 9, 9, C), transpose_bias=True),
]
FUSED = [  # in few passes, as GPUs take them in 16 bits
    Layer("layer-start-fused", START, ROWS),
    Layer("layer-start-fused-batch", START, ROWS, (2, 12, 12, C)),
    Layer("layer-end-fused", END, COLUMNS),
    Layer("layer-end-fused-moved", END, ROWS),
    Layer("layer-end-fused-transposed", END, COLUMNS, transpose_bias=True),
    Layer("layer-end-fused-bf16", END, COLUMNS, (1, 24, 24, C), torch.bfloat16),
]
TWO_DIMENSIONS = [
    Layer("layer-start-batches-and-rows", START, (Shard(0), Shard(1)), (2, 9, 9, C)),
    Layer("layer-end-batches-and-columns", END, (Shard(0), Shard(2)), (2, 9, 9, C)),
    Layer("layer-end-two-transposed", END, (Shard(0), Shard(2)), (2, 9, 9, C), transpose_bias=True),
]


def run_fused(case, world):
    if world.device == "cuda":  # layers in float32 do not get there: Triton's products are of TF32
        case = replace(case, dtype=torch.bfloat16)
    with mock.patch.object(fused, "serves", return_value=True):
        run_case(case, world)


def block(world):
    """Start, one all-to-all, end: what a PairFormer does."""
    start, end = (Layer("", kind, ROWS).layer(world) for kind in (START, END))
    x = torch.randn(1, 13, 13, C, device=world.device)
    expected = x + start(x)
    expected = expected + end(expected)
    z = distribute_tensor(x, world.mesh(), ROWS)
    z = z + start(z)
    z = z.redistribute(placements=COLUMNS)
    z = z + end(z)
    assert z.placements == COLUMNS
    torch.testing.assert_close(z.full_tensor(), expected, rtol=1e-4, atol=1e-4)


def reshaped(world):
    """Results have other strides in memory than x: those of transposed pairs, or of a module."""
    x = torch.randn(2, 12, 12, C, device=world.device)
    z = distribute_tensor(x, world.mesh(), COLUMNS)
    layer = Layer("", END, COLUMNS).layer(world)
    with mock.patch.object(fused, "serves", return_value=False):
        calls = [layer, lambda z: apply_locally(torch.nn.GELU(), z.transpose(0, 1))]
        calls.append(partial(apply_locally, torch.nn.Linear(C, 3).to(world.device)))
        for call in calls:
            expected = call(x).flatten(0, 1)
            torch.testing.assert_close(call(z).flatten(0, 1).full_tensor(), expected)


def msa(world):
    """Row attention with sequences sharded and a pair bias, column attention with columns."""
    layer = Layer("", EvoformerAttention, ROWS).layer(world)
    m = torch.randn(2, 9, 12, C, device=world.device)
    bias = torch.randn(2, 1, HEADS, 12, 12, device=world.device)
    mask = torch.rand(2, 9, 1, 1, 12, device=world.device) < 0.8
    mask[..., 0] = True
    dy = torch.randn_like(m)

    def run(m, bias, mask, dy, move):
        for parameter in layer.parameters():
            parameter.grad = None
        m, bias = m.detach().requires_grad_(), bias.detach().requires_grad_()
        rows = m + layer(m, biases=[mask, bias])
        columns = move(rows).transpose(1, 2)
        y = columns + layer(columns)
        y.backward(move(dy).transpose(1, 2))
        return [y.detach(), m.grad, bias.grad]

    expected = run(m, bias, mask, dy, lambda x: x)
    own = [p.grad.clone() for p in layer.parameters()]
    mesh = world.mesh()
    for placed in (Shard(3), Replicate()):
        shards = [distribute_tensor(m, mesh, ROWS), distribute_tensor(bias, mesh, [placed])]
        shards += [distribute_tensor(one, mesh, ROWS) for one in (mask, dy)]
        found = run(*shards, lambda x: x.redistribute(placements=COLUMNS))
        assert found[2].placements == (placed if placed.is_shard() else Partial(),)
        found = [one.full_tensor() for one in found]
        found += summed(world, [p.grad for p in layer.parameters()])
        for one, other in zip(found, [*expected, *own], strict=True):
            assert relative_error(one, other) < 1e-5


def row_attention(
    world, mesh, of_x, of_bias1, of_bias2, batches=4, rows=8, wrap=lambda layer: layer
):
    """In every process the results of one process, however the biases are placed, whose gradients
    keep the placements.

    batches   of the biases
    """
    layer = Layer("", EvoformerAttention, ROWS).layer(world)
    x, dy = (torch.randn(4, rows, 12, C, device=world.device) for _ in range(2))
    bias1 = torch.randn(batches, rows if batches > 1 else 1, 1, 1, 12, device=world.device)
    bias2 = torch.randn(batches, 1, HEADS, 12, 12, device=world.device)
    whole = [one.requires_grad_() for one in (x, bias1, bias2)]
    y = layer(x, biases=whole[1:])
    expected = [y, *torch.autograd.grad(y, whole, dy)]
    placements = (of_x, of_bias1, of_bias2)
    shards = [partly(one.detach(), mesh, of) for one, of in zip(whole, placements, strict=True)]
    y = wrap(layer)(shards[0], biases=shards[1:])
    found = [y, *torch.autograd.grad(y, shards, distribute_tensor(dy, mesh, of_x))]
    for one, other in zip(found, expected, strict=True):
        assert relative_error(one.full_tensor(), other) < 1e-5
    assert found[0].placements == tuple(of_x)
    for one, of in zip(found[2:], placements[1:], strict=True):
        for own, given in zip(one.placements, of, strict=True):
            assert own == given or not given.is_shard()


def biases_placed_otherwise(world):
    """Sharded by batches, heads or keys, or sums."""
    mesh, R = world.mesh(), Replicate()
    placed = [(Shard(0), Shard(0)), (Shard(4), Shard(2)), (R, Shard(4)), (Partial(), Partial())]
    for of_x in (Shard(1), Shard(2)):
        for of_bias1, of_bias2 in placed:
            row_attention(world, mesh, [of_x], [of_bias1], [of_bias2])


def batches_of_two_dimensions(world):
    """The second of them shares the pair bias."""
    layer = Layer("", EvoformerAttention, ROWS).layer(world)
    x, dy = (torch.randn(2, 3, 9, 12, C, device=world.device) for _ in range(2))
    bias2 = torch.randn(2, 1, 1, HEADS, 12, 12, device=world.device)
    dims = (2, 4, 2)  # rows n, queries, rows n
    whole = [one.requires_grad_() for one in (x, bias2, dy)]
    shards = [
        distribute_tensor(one.detach(), world.mesh(), [Shard(dim)]).requires_grad_()
        for one, dim in zip(whole, dims, strict=True)
    ]
    results = []
    for m, bias, of_y in (whole, shards):
        y = layer(m, biases=[None, bias])
        results.append([y, *torch.autograd.grad(y, [m, bias], of_y)])
    for expected, found in zip(*results, strict=True):
        assert relative_error(found.full_tensor(), expected) < 1e-5


def single_row(world):
    """All processes but one have no row."""
    for of_bias2 in (Replicate(), Shard(2), Shard(3)):
        row_attention(world, world.mesh(), ROWS, ROWS, [of_bias2], rows=1)


BATCHES_AND_ROWS = (Shard(0), Shard(1))


def biases_over_two_dimensions(world):
    """bias2 gathered beside further shards: of batches, which may share it, and others."""
    mesh, R = world.mesh(2, world.size // 2), Replicate()
    shared = partial(row_attention, world, mesh, BATCHES_AND_ROWS, [R, R], batches=1)
    for first in (R, Shard(2), Shard(3), Partial()):
        shared([first, Shard(3)])
    shared([R, R])
    for first in (R, Shard(0), Shard(2), Shard(3)):
        row_attention(world, mesh, BATCHES_AND_ROWS, [R, Shard(4)], [first, Shard(3)])


def shared_bias_compiled(world):
    mesh, R = world.mesh(2, world.size // 2), Replicate()
    wrap = partial(torch.compile, fullgraph=True, backend="aot_eager")
    options = {"batches": 1, "wrap": wrap}
    row_attention(world, mesh, BATCHES_AND_ROWS, [R, R], [R, Shard(3)], **options)


def dtypes_on_their_way(world):
    """The pair bias travels in 16 bits, its gradient in float32, where parts are added up."""
    from deepspeed4science.distributed.gather import Gather

    seen = []
    real = Gather._redistribute

    def note(self, local, *placements):
        seen.append(local.dtype)
        return real(self, local, *placements)

    case = Layer("", END, COLUMNS, dtype=torch.bfloat16)
    triangle = distribute(case.inputs(world), world.mesh(), COLUMNS)
    attention = Layer("", EvoformerAttention, ROWS).layer(world).to(torch.bfloat16)
    m = torch.randn(2, 9, 12, C, device=world.device, dtype=torch.bfloat16)
    bias = torch.randn(2, 1, HEADS, 12, 12, device=world.device, dtype=torch.bfloat16)
    m = distribute_tensor(m, world.mesh(), ROWS)
    bias = distribute_tensor(bias, world.mesh(), [Shard(3)]).requires_grad_()
    with mock.patch.object(Gather, "_redistribute", note):
        gradients(case.layer(world).to(torch.bfloat16), *triangle)
        attention(m, biases=[None, bias]).sum().backward()
    assert seen == [torch.bfloat16, torch.float32] * 2
    assert bias.grad.dtype == torch.bfloat16


def freed_by_the_backward(world):
    """The gathered pair bias does not live until the loss is given up."""
    from deepspeed4science.distributed.gather import Gather

    kept = []
    whole = Gather.whole

    def note(self):
        kept.extend(map(weakref.ref, (self.shard, self._coming)))
        return whole(self)

    case = Layer("", START, ROWS)
    triangle = distribute(case.inputs(world)[:2], world.mesh(), ROWS)
    m = distribute_tensor(torch.randn(2, 9, 12, C, device=world.device), world.mesh(), ROWS)
    bias = torch.randn(2, 1, HEADS, 12, 12, device=world.device)
    bias = distribute_tensor(bias, world.mesh(), [Shard(3)])
    attention = Layer("", EvoformerAttention, ROWS).layer(world)
    with mock.patch.object(Gather, "whole", note):
        losses = [case.layer(world)(*triangle).sum()]
        losses.append(attention(m, biases=[None, bias.detach().requires_grad_()]).sum())
        with mock.patch.object(fused, "serves", return_value=True):
            losses.append(case.layer(world)(*triangle).sum())
    for loss in losses:
        loss.backward(retain_graph=True)
        loss.backward()
    gc.collect()
    assert len(kept) == 6 and not any(one() is not None for one in kept)


def refusals(world):
    layer = Layer("", START, ROWS).layer(world)
    x = distribute_tensor(torch.randn(1, 8, 8, C, device=world.device), world.mesh(), [Replicate()])
    with pytest.raises(InvalidInputError, match="x: expected one dimension of the mesh to shard"):
        layer(x)
    with pytest.raises(InvalidInputError, match="with only batches sharded"):
        layer(x.redistribute(placements=[Shard(0)]))
    two = world.mesh(2, world.size // 2)
    for placed in ((Shard(1), Shard(2)), (Partial(), Shard(1)), (Shard(3), Shard(1))):
        with pytest.raises(InvalidInputError, match="x: expected one dimension of the mesh"):
            layer(partly(x.full_tensor(), two, placed))
    x = x.redistribute(placements=ROWS)
    mask = torch.ones(1, 8, 8, device=world.device)
    with pytest.raises(InvalidInputError, match=r"mask: expected a DTensor, .* distribute_tensor"):
        layer(x, mask)
    for wrong in (mask[0], mask[:, :7]):
        placed = distribute_tensor(wrong, world.mesh(), [Replicate()])
        with pytest.raises(InvalidInputError, match=r"mask: expected 3 dimensions, .* unsqueeze"):
            layer(x, placed)
    other = DeviceMesh(world.device, list(reversed(range(world.size))))
    with pytest.raises(InvalidInputError, match=r"mask: expected .* on the mesh of x"):
        layer(x, distribute_tensor(mask, other, ROWS))
    ungated = TriangleAttentionStartingNode(C, WIDTH, HEADS)
    ungated.mha = EvoformerAttention(C, C, C, WIDTH, HEADS, gating=False)
    with pytest.raises(InvalidInputError, match="mha: expected a gated EvoformerAttention"):
        ungated(x)
    attention = Layer("", EvoformerAttention, ROWS).layer(world)
    bias = torch.zeros(1, 1, HEADS, 8, 8, device=world.device)
    with pytest.raises(InvalidInputError, match="bias2: expected a DTensor"):
        attention(x, biases=[None, bias])
    with pytest.raises(InvalidInputError, match="bias2: expected 5 dimensions"):
        attention(x, biases=[None, distribute_tensor(bias[0], world.mesh(), [Replicate()])])
    with pytest.raises(InvalidInputError, match=r"kv_x: expected None where .* q_x.to_local"):
        attention(x, x.clone())
    with pytest.raises(InvalidInputError, match=r"a: expected a tensor; .* a.to_local"):
        AttentionPairBias(C, C, WIDTH, HEADS)(x[0], x)
    for placement in (Partial(), Shard(3)):
        with pytest.raises(InvalidInputError, match="x: expected a DTensor that is not sharded"):
            apply_locally(torch.nn.GELU(), partly(mask[..., None], world.mesh(), [placement]))


def processes_outside_of_the_mesh(world):
    """They have no part of a tensor; PyTorch's own operators do nothing there."""
    mesh = DeviceMesh(world.device, [0])
    layer = Layer("", START, ROWS).layer(world)
    attention = Layer("", EvoformerAttention, ROWS).layer(world)
    x = distribute_tensor(torch.randn(1, 8, 8, C, device=world.device), mesh, ROWS)
    q = distribute_tensor(torch.randn(1, 2, 8, 2, 8, device=world.device), mesh, COLUMNS)
    calls = [partial(layer, x), partial(attention, x), partial(apply_locally, torch.nn.GELU(), x)]
    for call in (*calls, partial(ring_attention, q, q, q)):
        if world.rank == 0:
            call()
            continue
        with pytest.raises(InvalidInputError, match="expected the mesh of this process; got"):
            call()
    if torch.__version__ >= "2.11":  # DTensor of 2.10 has an AssertionError there
        assert DS4Sci_EvoformerAttention(q, q, q).shape == q.shape


def mask_for_all_batches(world):
    layer = Layer("", START, (Shard(0), Shard(1))).layer(world)
    mesh = world.mesh(2, world.size // 2)
    x = torch.randn(2, 8, 8, C, device=world.device)
    mask = torch.rand(1, 8, 8, device=world.device) < 0.8
    placed = distribute_tensor(mask, mesh, [Replicate(), Shard(2)])
    y = layer(distribute_tensor(x, mesh, BATCHES_AND_ROWS), placed)
    torch.testing.assert_close(y.full_tensor(), layer(x, mask), rtol=1e-4, atol=1e-4)


ONE = {case.id: partial(run_case, case) for case in CASES}
ONE |= {case.id: partial(run_fused, case) for case in FUSED}
ONE |= {
    f"layer-{function.__name__}": function
    for function in (
        *(block, reshaped, msa, dtypes_on_their_way, refusals),
        *(biases_placed_otherwise, single_row, processes_outside_of_the_mesh),
        *(freed_by_the_backward, batches_of_two_dimensions),
    )
}


def of(size):
    if size < 4:
        return ONE
    two = {case.id: partial(run_case, case) for case in TWO_DIMENSIONS}
    functions = biases_over_two_dimensions, shared_bias_compiled, mask_for_all_batches
    return ONE | two | {f"layer-{function.__name__}": function for function in functions}
