"""Rows sharded over GPUs, communication included: strong and weak scaling, and memory, beside one
GPU in the same run.

    torchrun --nproc-per-node 4 -m benchmarks.many_gpus --out result.json

Every process first runs the whole problem alone, all processes at the same time. A time is the
median over steps, of the slowest process. On a CPU (gloo) the benchmark only shows that the program
runs, with small tensors unless options say otherwise.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.environment import describe
from benchmarks.options import count
from benchmarks.result_file import make_result
from deepspeed4science import DS4Sci_EvoformerAttention
from deepspeed4science.distributed import apply_locally
from deepspeed4science.distributed.gather import Gather
from deepspeed4science.distributed.gathered import gathered_attention
from deepspeed4science.nn import TriangleAttentionEndingNode, TriangleAttentionStartingNode

Shape = tuple[int, int, int, int, int]  # B, N, L, H, D


class Attention:
    """The op, forward and backward: q, k, v and bias1 of local rows n, and bias2 of local rows of
    the pair representation, sharded in the same way. With one process `bias2` is whole.
    """

    def __init__(self, shape: Shape, mesh: DeviceMesh | None, device: torch.device) -> None:
        B, N, L, H, D = shape
        size = 1 if mesh is None else mesh.size()
        self.mesh, self.shape = mesh, (B, 1, H, L, L)
        rows = N // size

        def random(*of: int) -> Tensor:
            return torch.randn(*of, device=device, dtype=torch.bfloat16)

        self.leaves = [random(B, rows, L, H, D).requires_grad_() for _ in range(3)]
        self.bias1 = random(B, rows, 1, 1, L)
        self.bias2 = random(B, 1, H, L // size, L).requires_grad_()
        self.do = random(B, rows, L, H, D)

    def step(self) -> None:
        if self.mesh is None:
            o = DS4Sci_EvoformerAttention(*self.leaves, [self.bias1, self.bias2])
        else:
            gather = Gather(self.bias2, self.shape, self.mesh, [Shard(3)], 0)
            o = gathered_attention(*self.leaves, self.bias1, gather)
        gradients = torch.autograd.grad(o, [*self.leaves, self.bias2], self.do)
        gradients[-1][0, 0, 0, 0].clone()  # waits for what is still coming


class AttentionByRules(Attention):
    """The same call on DTensors, whose sharding rules do the communication."""

    def step(self) -> None:
        assert self.mesh is not None
        mesh = self.mesh
        q, k, v, bias1, do = (
            DTensor.from_local(x.detach(), mesh, [Shard(1)], run_check=False)
            for x in (*self.leaves, self.bias1, self.do)
        )
        bias2 = DTensor.from_local(self.bias2.detach(), mesh, [Shard(3)], run_check=False)
        leaves = [x.requires_grad_() for x in (q, k, v, bias2)]
        o = DS4Sci_EvoformerAttention(q, k, v, [bias1, bias2])
        gradients = torch.autograd.grad(o, leaves, do)
        gradients[-1].to_local()[0, 0, 0, 0].clone()


class Layers:
    """Triangle attention around the starting node, an all-to-all, around the ending node, an
    all-to-all; forward and backward, of 128 channels.
    """

    def __init__(self, length: int, mesh: DeviceMesh | None, device: torch.device) -> None:
        torch.manual_seed(0)
        self.start = TriangleAttentionStartingNode(128, 32, 4).to(device, torch.bfloat16)
        self.end = TriangleAttentionEndingNode(128, 32, 4).to(device, torch.bfloat16)
        size = 1 if mesh is None else mesh.size()
        shape = (1, length // size, length, 128)
        self.local = torch.randn(shape, device=device, dtype=torch.bfloat16)
        self.mesh = mesh

    def step(self) -> None:
        z: Any = self.local.detach()
        if self.mesh is not None:
            z = DTensor.from_local(z, self.mesh, [Shard(1)], run_check=False)
        z = z.requires_grad_()
        y = z + self.start(z)
        if self.mesh is not None:
            y = y.redistribute(placements=[Shard(2)])
        y = y + self.end(y)
        if self.mesh is not None:
            y = y.redistribute(placements=[Shard(1)])
        apply_locally(lambda x: x, y).backward(y.detach())


def measure(step: Callable[[], None], device: torch.device, steps: int) -> dict[str, float]:
    """Median milliseconds of a step, and the MiB that it allocates at most."""
    for _ in range(3):
        step()
    dist.barrier()
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = timed(step, device, steps)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    found = torch.tensor([statistics.median(times), peak / 2**20, before / 2**20], device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return dict(zip(("ms", "peak_mib", "inputs_mib"), found.tolist(), strict=True))


def timed(step: Callable[[], None], device: torch.device, steps: int) -> list[float]:
    """Milliseconds of each step. On a GPU the host runs ahead of the device, as in training."""
    if device.type != "cuda":
        marks = [time.perf_counter()]
        for _ in range(steps):
            step()
            marks.append(time.perf_counter())
        return [1e3 * (end - begin) for begin, end in itertools.pairwise(marks)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in itertools.pairwise(events)]


def bandwidths(mesh: DeviceMesh, device: torch.device, megabytes: int) -> dict[str, float]:
    """GB/s that a process receives in collectives as large as those of a pair bias."""
    size, count = mesh.size(), megabytes * 2**20 // 4 // mesh.size()
    part = torch.ones(count, device=device)
    whole = torch.ones(count * size, device=device)
    other = torch.empty_like(whole)
    group = mesh.get_group()
    collectives: dict[str, Callable[[], Any]] = {
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, other, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
    }
    moved = whole.nbytes * (size - 1) / size
    return {name: moved / measure(one, device, 10)["ms"] / 1e6 for name, one in collectives.items()}


def main() -> None:
    on_gpus = torch.cuda.is_available()
    length, rows = (1536, 384) if on_gpus else (96, 16)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=count, default=length)
    parser.add_argument("--rows", type=count, default=rows, help="of weak scaling, per process")
    parser.add_argument("--steps", type=count, default=15)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    dist.init_process_group("nccl" if on_gpus else "gloo")
    size = dist.get_world_size()
    if options.length % size:
        parser.error(f"--length: expected a multiple of the {size} processes; got {options.length}")
    device = torch.device("cpu")
    if on_gpus:
        device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, (size,))
    L, steps = options.length, options.steps
    strong, weak = (1, L, L, 4, 32), (1, options.rows * size, L, 4, 32)
    alone, alone_weak = None, (1, options.rows, L, 4, 32)

    def of(work: Any) -> dict[str, float]:
        return measure(work.step, device, steps)

    found: dict[str, Any] = {"processes": size, "length": L, "rows_of_a_process": options.rows}
    found["strong"] = {
        "one": of(Attention(strong, alone, device)),
        "axial": of(Attention(strong, mesh, device)),
        "rules": of(AttentionByRules(strong, mesh, device)),
    }
    found["weak"] = {
        "one": of(Attention(alone_weak, alone, device)),
        "axial": of(Attention(weak, mesh, device)),
        "rules": of(AttentionByRules(weak, mesh, device)),
    }
    found["layers"] = {"one": of(Layers(L, alone, device)), "axial": of(Layers(L, mesh, device))}
    found["gb_per_s"] = bandwidths(mesh, device, max(1, 4 * L * L * 4 // 2**20))
    found["bias2_mib"] = {"bf16": 8 * L * L / 2**20, "float32": 16 * L * L / 2**20}
    for name in ("strong", "layers"):
        one, many = found[name]["one"], found[name]["axial"]
        found[name]["speedup"] = one["ms"] / many["ms"]
    found["weak"]["efficiency"] = found["weak"]["one"]["ms"] / found["weak"]["axial"]["ms"]
    if dist.get_rank() == 0:
        text = json.dumps(make_result(describe(device), "many-gpus", **found), indent=2)
        print(text)
        if options.out:
            options.out.write_text(text + "\n")
    dist.barrier()
    dist.destroy_process_group()
    # gloo's threads free tensors under Python's lock; a process that ends meanwhile would abort.
    time.sleep(0.2)


if __name__ == "__main__":
    main()
