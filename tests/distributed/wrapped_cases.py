"""Layers within what PyTorch wraps around them: DDP, FSDP2, checkpoints, torch.compile, and its own
tensor parallelism.
"""

from functools import partial

import torch
from torch.distributed.tensor import Replicate, Shard

from deepspeed4science.distributed import sum_gradients
from deepspeed4science.nn import AttentionPairBias, EvoformerAttention
from tests.numeric.law import relative_error

from .layer_cases import (
    COLUMNS,
    END,
    HEADS,
    ROWS,
    START,
    WIDTH,
    C,
    Layer,
    gradients,
    run_case,
    whole,
)


def ddp(world):
    from torch.nn.parallel import DistributedDataParallel

    def wrap(layer):
        layer = DistributedDataParallel(layer)
        layer.register_comm_hook(None, sum_gradients)
        return layer

    run_case(Layer("", START, ROWS), world, wrap, reduces=True)


def ddp_of_a_group(world):
    """Every process of the first dimension has all rows of the second one's processes."""
    from torch.nn.parallel import DistributedDataParallel

    mesh = world.mesh(2, world.size // 2, names=("copies", "rows"))

    def wrap(layer):
        layer = DistributedDataParallel(layer)
        layer.register_comm_hook(mesh.get_group("rows"), sum_gradients)
        return layer

    run_case(Layer("", START, (Replicate(), Shard(1))), world, wrap, reduces=True)


def fsdp(world):
    from torch.distributed.fsdp import fully_shard

    def wrap(layer):
        layer = fully_shard(layer, mesh=world.mesh())
        layer.set_gradient_divide_factor(1.0)
        layer.set_force_sum_reduction_for_comms(True)  # gloo has no other
        return layer

    run_case(Layer("", START, ROWS), world, wrap, reduces=True)


def checkpointed(world):
    run_case(Layer("", END, COLUMNS), world, Checkpointed)


class Checkpointed(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, mask):
        from torch.utils.checkpoint import checkpoint

        return checkpoint(self.layer, x, mask, use_reentrant=False)


def compiled(world):
    """Inductor's sums round more than eager's."""
    wrap = partial(torch.compile, fullgraph=True)
    run_case(Layer("", START, ROWS), world, wrap, beside_itself=True)


def divided_heads(world):
    """Tensor parallelism: the maps to q, k, v, the gate and the pair bias give each process its
    heads.
    """
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    x, pairs = torch.randn(2, 9, C, device=world.device), (torch.randn(9, 9, C), torch.rand(9, 9))
    pairs, mask = (one.to(world.device) for one in pairs)
    calls = [
        (partial(START, C, WIDTH, HEADS), pairs, mask < 0.8),
        (partial(END, C, WIDTH, HEADS), pairs, mask < 0.8),
        (partial(AttentionPairBias, C, C, WIDTH, HEADS, norm_z=False), x, pairs.expand(2, 9, 9, C)),
    ]
    plan = {f"mha.linear_{name}": ColwiseParallel() for name in "qkvg"}
    plan |= {"linear_z": ColwiseParallel(), "mha.linear_o": RowwiseParallel()}
    for kind, first, second in calls:
        results = []
        for divided in (False, True):
            torch.manual_seed(world.seed)
            layer = kind().to(world.device)
            for parameter in layer.parameters():
                torch.nn.init.normal_(parameter, std=0.3)
            if divided:
                parallelize_module(layer, world.mesh(), plan)
            results.append(gradients(layer, first, second, torch.cos(first)))
        for one, other in zip(*results, strict=True):
            assert relative_error(whole(other), one) < 1e-5


def distributed_parameters(world):
    """Parameters that are DTensors, and batches of x sharded: DTensor's own data parallelism."""
    from torch.distributed.tensor import distribute_module, distribute_tensor

    x, dy = torch.randn(2, 4, 9, 9, C, device=world.device)
    for case in (Layer("", START, ROWS), Layer("", EvoformerAttention, ROWS)):
        layer = case.layer(world)
        expected = gradients(layer, x, None, dy)
        layer.zero_grad()
        distribute_module(layer, world.mesh())
        shards = [distribute_tensor(one, world.mesh(), [Shard(0)]) for one in (x, dy)]
        found = gradients(layer, shards[0], None, shards[1])
        for one, other in zip(found, expected, strict=True):
            assert relative_error(whole(one), other) < 1e-5


def of(size):
    functions = [distributed_parameters]
    functions += [ddp, fsdp, checkpointed, divided_heads, compiled if size < 4 else ddp_of_a_group]
    return {f"layer-{function.__name__}": function for function in functions}
