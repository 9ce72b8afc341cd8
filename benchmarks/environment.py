"""The description of a machine in a result file. Every probe may fail; a failure is None."""

from __future__ import annotations

import platform
import subprocess
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch

from op_builder import EvoformerAttnBuilder

ROOT = Path(__file__).resolve().parents[1]
ISA_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16")


@dataclass(frozen=True)
class Environment:
    """Recorded in every result file."""

    date: str
    commit: str | None  # with "+changes" when tracked files differ from it
    cpu: str | None
    cpu_features: tuple[str, ...]
    num_cores: int | None
    num_threads: int
    python: str
    torch: str
    system: str
    gpu: str | None
    gpu_driver: str | None
    cuda: str | None
    cudnn: int | None
    cuda_family: str | None  # the template family that serves that GPU, or is forced


def describe(device: torch.device, *, commit: str | None = None) -> Environment:
    """Describe this machine; `commit` is for a copy of the tree without .git."""
    on_gpu = device.type == "cuda"
    cpu, features, cores = _cpu()
    return Environment(
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        commit=commit or _commit(),
        cpu=cpu,
        cpu_features=features,
        num_cores=cores,
        num_threads=torch.get_num_threads(),
        python=platform.python_version(),
        torch=torch.__version__,
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        gpu=torch.cuda.get_device_name(device) if on_gpu else None,
        gpu_driver=_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        if on_gpu
        else None,
        cuda=torch.version.cuda if on_gpu else None,
        cudnn=torch.backends.cudnn.version() if on_gpu else None,  # type: ignore[no-untyped-call]
        cuda_family=EvoformerAttnBuilder().family(torch.cuda.get_device_capability(device))
        if on_gpu
        else None,
    )


def short_machine_name(environment: Environment) -> str:
    """For file names: "h200" or "xeon-2core"."""
    if environment.gpu:
        return environment.gpu.lower().replace("nvidia", "").strip().split()[0]
    words = (environment.cpu or "cpu").lower()
    for family in ("xeon", "epyc", "ryzen", "core", "apple"):
        if family in words:
            return f"{family}-{environment.num_cores}core"
    return f"cpu-{environment.num_cores}core"


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else ""


def _commit() -> str | None:
    """Of this repository, whatever the current folder; None where there is none."""
    git = ("git", "-C", str(ROOT))
    if _output(*git, "rev-parse", "--show-toplevel") != str(ROOT):
        return None
    commit = _output(*git, "rev-parse", "--short=12", "HEAD")
    changed = _output(*git, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}+changes" if commit and changed else commit


def _cpu() -> tuple[str | None, tuple[str, ...], int | None]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or None, (), None
    fields = [line.partition(":") for line in text.splitlines()]
    models = [value.strip() for key, _, value in fields if key.strip() == "model name"]
    flags = next((value.split() for key, _, value in fields if key.strip() == "flags"), [])
    return (
        (models[0] if models else None),
        tuple(f for f in ISA_FLAGS if f in flags),
        len(models) or None,
    )
