"""Ring attention, forward and all gradients."""

import math
from functools import partial

import pytest
import torch

from deepspeed4science import DS4Sci_EvoformerAttention
from deepspeed4science.distributed import ring_attention
from deepspeed4science.errors import InvalidInputError

from .sharded import PLACEMENTS, Case, check, distribute, run_sharded

PLACEMENTS["ring"] = (2, 2, 2, 4, 3, 2)

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
        ours, placed = run_sharded(inputs, mesh, case.axes, partial(ring, mesh_dim=int(two)))
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


def large_scores(world):
    """lse far from 0, by a finite bias2: it leaves a backward few digits of the scores."""
    inputs = Case("", ()).inputs(world.device)
    inputs.bias2[:, :, 1] += 300.0
    ours, _ = run_sharded(inputs, world.mesh(), ("ring",), ring)
    check(world, (ours, inputs), more=rounding_of_lse(inputs))


def refusals(world):
    inputs = Case("", ()).inputs(world.device)
    mesh = world.mesh()
    q, k, v = (distribute(x, mesh, [2]) for x in (inputs.q, inputs.k, inputs.v))
    with pytest.raises(InvalidInputError, match="k: expected 21 elements in dimension 2, sharded"):
        ring_attention(q, distribute(inputs.k, mesh, [1]), v)
    with pytest.raises(InvalidInputError, match="q: expected a DTensor; got Tensor"):
        ring_attention(inputs.q, k, v)
    with pytest.raises(InvalidInputError, match="scale: expected a finite number"):
        ring_attention(q, k, v, scale=math.inf)
    with pytest.raises(InvalidInputError, match="bias2: expected 21 elements"):
        ring_attention(q, k, v, None, distribute(inputs.bias2, mesh, [4]))
    few = distribute(inputs.q[:, :, : world.size + 1], mesh, [2])
    if world.size == 4:  # 5 over 4 processes
        with pytest.raises(InvalidInputError, match="some get none"):
            ring_attention(few, k, v)


ONE = {case.id: partial(run_case, case) for case in [*CASES, ALONE]}
ONE |= {f"ring-{function.__name__}": function for function in (masks, large_scores, refusals)}


def of(size):
    two = {case.id: partial(run_case, case) for case in TWO_DIMENSIONS}
    return ONE | two if size >= 4 else ONE
