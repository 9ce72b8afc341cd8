"""Compares one call on DTensors with the same call in one process."""

from dataclasses import dataclass, field

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from deepspeed4science import DS4Sci_EvoformerAttention
from deepspeed4science.reference import evoformer_attention
from tests.numeric.law import Inputs, run, ulps, violations

# The dimension of each axis of the problem in q, k, v, bias1, bias2, dO.
PLACEMENTS = {
    "B": (0, 0, 0, 0, 0, 0),
    "N": (1, 1, 1, 1, None, 1),
    "H": (3, 3, 3, None, 2, 3),
    "Lq": (2, None, None, None, 3, 2),
    "Lk": (None, 2, 2, 4, 4, None),  # no rule: DTensor moves keys
    "D": (4, 4, 4, None, None, 4),  # likewise
    "-": (None,) * 6,
}


@dataclass(frozen=True)
class Case:
    """One case; `axes` are the axes that the mesh's dimensions shard."""

    id: str
    axes: tuple
    B: int = 2
    N: int = 8
    Lq: int = 21
    Lk: int = 0
    H: int = 4
    D: int = 16
    dtype: torch.dtype = torch.float32
    bias1: tuple | None = ("B", "N", 1, 1, "Lk")
    bias2: tuple | None = ("B", 1, "H", "Lq", "Lk")
    bias_dtype: torch.dtype | None = None
    needs: tuple = (True,) * 5
    row_mask: bool = False
    options: dict = field(default_factory=dict)
    draws: int = 1  # more where a gradient has few elements

    def inputs(self, device):
        sizes = {"B": self.B, "N": self.N, "Lq": self.Lq, "Lk": self.Lk or self.Lq, "H": self.H}

        def random(*shape, dtype=self.dtype):
            return torch.randn([sizes.get(x, x) for x in shape], device=device).to(dtype)

        def bias(shape):
            return None if shape is None else random(*shape, dtype=self.bias_dtype or self.dtype)

        q, do = (random("B", "N", "Lq", "H", self.D) for _ in range(2))
        k, v = (random("B", "N", "Lk", "H", self.D) for _ in range(2))
        row_mask = torch.rand(self.B, self.N, device=device) < 0.6 if self.row_mask else None
        bias1, bias2 = bias(self.bias1), bias(self.bias2)
        return Inputs(q, k, v, bias1, bias2, do, self.needs, row_mask, self.options.get("scale"))


def distribute(tensor, mesh, dims):
    """The tensor as a DTensor, sharded on each dimension of the mesh whose axis it has."""
    if tensor is None:
        return None
    whole = [dim is None or tensor.shape[dim] == 1 for dim in dims]
    placements = [Replicate() if r else Shard(dim) for r, dim in zip(whole, dims, strict=True)]
    return distribute_tensor(tensor, mesh, placements)


def partly(tensor, mesh, placements):
    """The tensor as a leaf, placed so. Where that is `Partial`, each process has an equal part."""
    whole = [Replicate() if one.is_partial() else one for one in placements]
    local = distribute_tensor(tensor, mesh, whole).to_local()
    for i, one in enumerate(placements):
        local = local / mesh.size(i) if one.is_partial() else local
    shape, stride = tensor.shape, tensor.stride()
    made = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=shape, stride=stride
    ).detach()
    return made.requires_grad_(tensor.is_floating_point())


def run_sharded(inputs, mesh, axes, function=None):
    """(O, dq, dk, dv, dbias1, dbias2) as whole tensors, and as the DTensors that they were."""
    dims = list(zip(*(PLACEMENTS[axis] for axis in axes), strict=True))
    leaves = []
    for tensor, of, need in zip(inputs.tensors(), dims, inputs.needs, strict=False):
        leaf = distribute(tensor, mesh, of)
        leaves.append(None if leaf is None else leaf.requires_grad_(need))
    rows = [1 if axis == "N" else 0 if axis == "B" else None for axis in axes]
    options = {"scale": inputs.scale, "row_mask": distribute(inputs.row_mask, mesh, rows)}
    options = {name: value for name, value in options.items() if value is not None}
    o = (function or DS4Sci_EvoformerAttention)(*leaves[:3], leaves[3:], **options)
    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    gradients = iter(torch.autograd.grad(o, wanted, distribute(inputs.do, mesh, dims[5])))
    result = [o.detach()]
    result += [next(gradients) if x is not None and x.requires_grad else None for x in leaves]
    return [None if x is None else x.full_tensor() for x in result], result


def check(world, *draws, more=0.0):
    """The law, in the first process, for the results of all draws (ours, inputs) as one; `more` is
    allowed on top of it. `ours` is whole everywhere.
    """
    if world.rank:
        return
    for ours, inputs in draws:
        for x, tensor in zip(ours, (inputs.q, *inputs.tensors()), strict=True):
            assert not isinstance(x, DTensor)
            assert x is None or x.dtype == tensor.dtype, "another dtype than its input"
    ours = stacked(ours for ours, _ in draws)
    eager = stacked(run(evoformer_attention, inputs, inputs.q.dtype) for _, inputs in draws)
    reference = stacked(run(evoformer_attention, inputs, torch.float64) for _, inputs in draws)
    broken = violations(ours, eager, reference, [ulp + more for ulp in ulps(ours)])
    assert not broken, "; ".join(broken)


def stacked(results):
    """Several results, each a sequence of tensors, as one."""
    found = []
    for of_draws in zip(*results, strict=True):
        absent = of_draws[0] is None
        found.append(None if absent else torch.stack([x.detach() for x in of_draws]))
    return found
