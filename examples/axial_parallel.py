"""A small PairFormer stack, trained with its pair representation sharded over all GPUs (gloo on a
CPU where there are none), beside the same training in one process:

    torchrun --nproc-per-node 4 examples/axial_parallel.py

It learns distances of points from noisy ones. Both trainings begin with the same parameters and
see the same data: their losses are equal up to rounding. docs/many-gpus.md explains the rest.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from deepspeed4science.distributed import apply_locally, sum_gradients
from deepspeed4science.nn import TriangleAttentionEndingNode, TriangleAttentionStartingNode

BINS = 16  # of a distance, which a pair begins as


class Block(nn.Module):
    """Triangle attention around both nodes and a transition. Takes a tensor or a DTensor."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.start = TriangleAttentionStartingNode(channels, channels // heads, heads)
        self.end = TriangleAttentionEndingNode(channels, channels // heads, heads)
        self.transition = nn.Sequential(
            nn.LayerNorm(channels),
            nn.Linear(channels, 4 * channels),
            nn.ReLU(),
            nn.Linear(4 * channels, channels),
        )

    def forward(self, z: Any) -> Any:
        z = z + self.start(z)
        z = sharded_by(z, dim=2)  # the all-to-all
        z = z + self.end(z)
        z = z + apply_locally(self.transition, z)
        return sharded_by(z, dim=1)


class Stack(nn.Module):
    def __init__(self, blocks: int, channels: int, heads: int) -> None:
        super().__init__()
        self.embed = nn.Linear(BINS, channels)
        self.blocks = nn.ModuleList(Block(channels, heads) for _ in range(blocks))
        self.head = nn.Linear(channels, 1)

    def forward(self, x: Any) -> Any:
        z = apply_locally(self.embed, x)
        for block in self.blocks:
            z = block(z)
        return apply_locally(self.head, z)


def sharded_by(z: Any, dim: int) -> Any:
    return z.redistribute(placements=[Shard(dim)]) if isinstance(z, DTensor) else z


def local(x: Any) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def batch(length: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Noisy distances in bins `[1, L, L, BINS]`, and the true ones `[1, L, L, 1]`."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(length, 3, generator=generator)
    noise = 0.3 * torch.randn(length, length, generator=generator)
    true = torch.cdist(points, points)
    centers = torch.linspace(0.0, 4.0, BINS)
    bins = (-(((true + noise)[..., None] - centers) ** 2) * 8).exp()
    return bins[None].to(device), true[None, ..., None].to(device)


def train(
    stack: nn.Module,
    options: argparse.Namespace,
    device: torch.device,
    place: Callable[[Tensor], Any],
    add_up: Callable[[Tensor], None],
) -> tuple[list[float], float, float]:
    """Losses, seconds of a step (the first one aside), and MiB at the peak."""
    optimizer = torch.optim.AdamW(stack.parameters(), lr=2e-3)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    losses = []
    begin = now(device)
    for step in range(options.steps):
        if step == 1:
            begin = now(device)
        x, y = (place(one) for one in batch(options.length, step, device))
        difference = local(stack(x)) - local(y)
        loss = difference.square().sum() / options.length**2
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach().clone()
        add_up(loss)
        losses.append(loss.item())
    seconds = (now(device) - begin) / max(1, options.steps - 1)
    return losses, seconds, peak(device)


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def peak(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # all of the process's


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in {
        "length": 64,
        "blocks": 2,
        "channels": 32,
        "heads": 4,
        "steps": 8,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    on_gpus = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpus else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    device = (
        torch.device("cuda", rank % torch.cuda.device_count()) if on_gpus else torch.device("cpu")
    )
    if on_gpus:
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, (size,))

    def stack() -> nn.Module:
        torch.manual_seed(0)
        return Stack(options.blocks, options.channels, options.heads).to(device)

    many = train_sharded(stack(), options, device, mesh)
    if rank == 0:
        one = train(stack(), options, device, lambda x: x, lambda loss: None)
        report(size, one, many)
    dist.barrier()
    dist.destroy_process_group()
    # gloo's threads give up tensors under Python's lock, and a process that ends meanwhile aborts.
    time.sleep(0.2)


def train_sharded(
    stack: nn.Module, options: argparse.Namespace, device: torch.device, mesh: DeviceMesh
) -> tuple[list[float], float, float]:
    parallel = DistributedDataParallel(stack)
    parallel.register_comm_hook(None, sum_gradients)
    place = lambda x: distribute_tensor(x, mesh, [Shard(1)])  # noqa: E731
    return train(parallel, options, device, place, dist.all_reduce)


def report(size: int, one: tuple[Any, ...], many: tuple[Any, ...]) -> None:
    print(f"step   loss, {size} processes   loss, 1 process")
    for step, (loss, other) in enumerate(zip(many[0], one[0], strict=True)):
        print(f"{step:4}   {loss:18.6f}   {other:15.6f}")
    print(f"time of a step: {many[1]:.4f} s, {one[1]:.4f} s in one process")
    print(f"peak memory of a process: {many[2]:.0f} MiB, {one[2]:.0f} MiB")


if __name__ == "__main__":
    main()
