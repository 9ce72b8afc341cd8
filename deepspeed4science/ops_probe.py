"""The report's rows on ops: the state of each, tried as far as is possible without compiling."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepspeed4science import load_probe, no_gpu_probe
from deepspeed4science.report import OpRow, Why
from deepspeed4science.torch_probe import TorchAnswer

if TYPE_CHECKING:
    from deepspeed4science.probes import Probes


def rows(probes: Probes, torch: TorchAnswer, no_gpu: str) -> tuple[OpRow, ...]:
    from op_builder import ALL_OPS

    return tuple(
        probes.ask(
            name,
            partial(_op, name, _on(builder, torch), no_gpu, probes),
            OpRow(name, _device(builder), "not", "", (Why("see the warnings", ""),)),
        )
        for name, builder in ALL_OPS.items()
    )


def _on(builder: Any, torch: TorchAnswer) -> Any:
    """A CUDA builder for the GPUs that PyTorch sees, which may be fewer than the driver lists."""
    from op_builder import CUDAOpBuilder
    from op_builder.toolchain.gpu import Gpu, Gpus

    if not torch.gpus or not isinstance(builder, CUDAOpBuilder):
        return builder
    gpus = (Gpu(gpu["name"], tuple(gpu["capability"])) for gpu in torch.gpus)
    return type(builder)(Gpus(tuple(gpus)))


def _device(builder: Any) -> str:
    """The builder's device. One that does not say counts as a CUDA builder, so that the report errs
    on the side of bad news.
    """
    return str(getattr(builder, "DEVICE", "cuda"))


def _op(name: str, builder: Any, no_gpu: str, probes: Probes) -> OpRow:
    device = _device(builder)
    status = builder.status()
    whys = tuple(Why(obstacle.reason, obstacle.remedy) for obstacle in status.obstacles)
    if device == "cuda" and no_gpu:
        if not any(why.reason.startswith("no GPU") for why in whys):
            remedy = (
                "run it on a machine with an NVIDIA GPU and a PyTorch built for CUDA and that GPU"
            )
            whys = (Why(f"no GPU: {no_gpu}", remedy), *whys)
        return OpRow(name, device, "not", no_gpu_probe.note(builder), whys)
    broken = load_probe.problems(status.ready)
    ready = status.num_ready - len(broken)
    detail = f"{ready} of {status.num_kernels} kernels compiled"
    detail += f"; {status.unfit}" if status.unfit else ""
    detail += f"; {len(broken)} cannot be loaded: {next(iter(broken.values()))}" if broken else ""
    state = status.state
    if broken and not ready:
        state = "not" if whys else "buildable"
    if state == "buildable":
        whys = _nowhere_to_load_from()
        state = "not" if whys else state
    if state == "not":
        return OpRow(name, device, state, detail if broken else "", whys or _NO_REASON)
    for why in whys:
        obstacle = "; ".join(filter(None, (why.reason, why.remedy)))
        probes.warn(f"{name}: no other kernel can be compiled: {obstacle}")
    return OpRow(name, device, state, detail)


_NO_REASON = (Why("its builder gives no reason", ""),)


def _nowhere_to_load_from() -> tuple[Why, ...]:
    """Obstacles where libraries can be loaded neither from the cache nor from where they are
    compiled.
    """
    from op_builder import paths
    from op_builder.system import shortages

    folders = (paths.cache_root(), paths.build_root())
    if any(shortages.runs_programs(_existing(folder)) for folder in folders):
        return ()
    reason = f"nothing can be loaded from {folders[0]} nor from {folders[1]}: mounted noexec"
    return (Why(reason, "set DS4S_CACHE_DIR to a folder on a file system without noexec"),)


def _existing(folder: Path) -> Path:
    return next((place for place in (folder, *folder.parents) if os.path.isdir(place)), folder)
