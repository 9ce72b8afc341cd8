"""Processes that run cases together and record the outcome of each.

A case is a function of the World, called in every process; its name is its id. An exception in any
process is its failure. All cases share the processes, since starting them takes longer than running
all cases.
"""

import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
SECONDS = {"gloo": 400, "nccl": 400}  # for all cases
PATIENCE = 60  # seconds that a process waits for another one


@dataclass
class World:
    """A process's rank, group and device."""

    rank: int
    size: int
    device: str
    seed: int
    meshes: dict = field(default_factory=dict)

    def mesh(self, *shape, names=None):
        """A device mesh over all processes; by default of one dimension."""
        from torch.distributed.device_mesh import init_device_mesh

        shape = shape or (self.size,)
        if (shape, names) not in self.meshes:
            self.meshes[shape, names] = init_device_mesh(self.device, shape, mesh_dim_names=names)
        return self.meshes[shape, names]


def launch(backend, size, seed, cases="tests.distributed.cases:of"):
    """Start `size` processes; return {case: its failure, or None} and the processes' output.
    `cases`: a module and its function that returns them.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.distributed.world", backend, str(size), folder]
        command += [str(seed), cases]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "NCCL_NVLS_ENABLE": "0"}
        logs = [open(Path(folder) / f"log{rank}", "w+") for rank in range(size)]  # noqa: SIM115
        processes = [
            subprocess.Popen(
                [*command, str(rank)], cwd=REPOSITORY, env=environment, stdout=log, stderr=log
            )
            for rank, log in enumerate(logs)
        ]
        try:
            for process in processes:
                process.wait(SECONDS[backend])
        except subprocess.TimeoutExpired:
            pass
        finally:
            for process in processes:
                process.kill()
                process.wait()
        output = ""
        for rank, log in enumerate(logs):
            log.seek(0)
            output += f"process {rank}, status {processes[rank].returncode}:\n{log.read()}\n"
            log.close()
        return _gather([_read(Path(folder) / f"found{rank}") for rank in range(size)]), output


def _read(path):
    """The outcomes of the cases that a process has reached."""
    found = {}
    if path.exists():
        with path.open("rb") as file:
            while True:
                try:
                    name, problem = pickle.load(file)
                except EOFError:
                    return found
                found[name] = problem
    return found


def _gather(found):
    together = {}
    for name in set().union(*found):
        problems = [f"process {i}: {one[name]}" for i, one in enumerate(found) if one.get(name)]
        missing = [str(i) for i, one in enumerate(found) if name not in one]
        if missing:
            problems.append(f"processes {', '.join(missing)} did not end it")
        together[name] = "\n".join(problems) or None
    return together


def _run(backend, size, folder, seed, cases, rank):
    import importlib

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    device = "cpu" if backend == "gloo" else "cuda"
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=PATIENCE),
        device_id=torch.device("cuda", rank) if device == "cuda" else None,
    )
    world = World(rank, size, device, seed)
    with open(f"{folder}/found{rank}", "wb") as file:
        module, _, function = cases.partition(":")
        for name, case in getattr(importlib.import_module(module), function)(size).items():
            torch.manual_seed(seed)
            try:
                case(world)
                problem = None
                lost = False
            except Exception as error:
                problem = traceback.format_exc()
                lost = not isinstance(error, AssertionError)  # they come last in a case
            pickle.dump((name, problem), file)
            file.flush()
            if lost:  # the others wait for it in vain
                print(name, problem, flush=True)
                os._exit(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    backend, size, folder, seed, cases, rank = sys.argv[1:]
    _run(backend, int(size), folder, int(seed), cases, int(rank))
