"""The probes of the report. Each is guarded: a failure is a value.

PyTorch is probed in a process of its own, where a broken installation may raise, crash or hang, and
no CUDA context is created in this one.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from deepspeed4science import ops_probe, software_probe
from deepspeed4science.report import CacheRow, CpuRow, GpuRow, OpRow, Report, judge
from deepspeed4science.torch_probe import TorchAnswer, TorchProbe

Answer = TypeVar("Answer")


class Probes:
    """Runs probes, and keeps failures and notes for the end of the report."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def ask(self, what: str, question: Callable[[], Answer], otherwise: Answer) -> Answer:
        try:
            return question()
        except Exception as error:
            self.warn(f"{what} could not be found out: {type(error).__name__}: {error}")
            return otherwise

    def warn(self, warning: str) -> None:
        flat = " ".join(warning.split())
        if flat not in self.warnings:
            self.warnings.append(flat)


def collect() -> Report:
    probes = Probes()
    torch_probe = TorchProbe()  # runs beside the other probes
    software = software_probe.rows(probes)
    cpu = probes.ask("the processor", _cpu, CpuRow("", {}))
    probes.ask("the settings", partial(_check_settings, probes), None)
    torch = torch_probe.answer()
    if mismatch := software_probe.driver_warning(software, torch):
        probes.warn(mismatch)
    note = probes.ask(
        "what PyTorch's CUDA means", partial(software_probe.cuda_difference, torch, software), ""
    )
    for warning in torch.warnings:
        probes.warn(f"torch: {warning}")
    gpus = tuple(
        probes.ask(
            "a GPU's template family",
            partial(_gpu, gpu),
            GpuRow(gpu["name"], "unknown", "unknown"),
        )
        for gpu in torch.gpus
    )
    if gpus and torch.unserved:
        probes.warn(_unserved(torch))
    no_gpu = "" if gpus else probes.ask("GPUs", partial(_no_gpu, torch), "unknown")
    no_ops: tuple[OpRow, ...] = ()
    ops = probes.ask("the ops", partial(ops_probe.rows, probes, torch, no_gpu), no_ops)
    # Last: other probes keep their answers in this folder.
    cache = probes.ask("the cache", partial(_cache, probes), CacheRow("unknown", 0, 0))
    usable, verdict = judge(torch.ok, gpus, ops)
    told = {why.reason for op in ops for why in op.whys}
    return Report(
        version=probes.ask("our version", _version, "unknown"),
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        ops=ops,
        software=(*software_probe.torch_rows(torch, note), *software),
        gpus=gpus,
        no_gpu=no_gpu,
        cpu=cpu,
        cache=cache,
        variables=probes.ask("the environment's variables", _variables, {}),
        usable=usable,
        verdict=verdict,
        warnings=tuple(warning for warning in probes.warnings if warning not in told),
    )


def _version() -> str:
    from deepspeed4science import __version__

    return __version__


def _variables() -> dict[str, str]:
    from op_builder import env

    return env.in_force()


def _cpu() -> CpuRow:
    from op_builder.toolchain import cpu_isa

    name = cpu_isa.processor().brand
    try:
        found = cpu_isa.detect()
    except RuntimeError as error:
        # DS4S_CPU_ISA names a set that cannot be used; the op's row says so.
        return CpuRow(name, {}, str(error))
    notes = [f"not {isa}: {why}" for isa, why in found.refused]
    isas = {dtype: found.best(dtype) for dtype in ("fp32", "fp16", "bf16")}
    return CpuRow(name, isas, "; ".join(notes))


def _cache(probes: Probes) -> CacheRow:
    from op_builder import paths
    from op_builder.cache import search
    from op_builder.system import shortages

    root = paths.cache_root()
    size, kernels = 0, 0
    for folder, _, files in os.walk(root):
        for file in files:
            path = Path(folder, file)
            size += path.lstat().st_size if os.path.exists(path) else 0
            kernels += path.suffix == ".so" and path.parent.parent.name == "units"
    existing = next((place for place in (root, *root.parents) if os.path.isdir(place)), Path("/"))
    note = ""
    if substitute := paths.cache_note():
        note = "a temporary folder; see the warnings"
        probes.warn(substitute)
    if not _can_write(existing):
        note = "it cannot be written: every process compiles again what no read-only cache holds"
        probes.warn(
            f"the cache {root} cannot be written; set DS4S_CACHE_DIR to a folder that can be"
        )
    elif not shortages.runs_programs(existing):
        note = "nothing can be loaded from it (mounted noexec): every process compiles again"
        probes.warn(
            f"the cache {root} is mounted noexec; set DS4S_CACHE_DIR to a folder that is not"
        )
    elif shutil.disk_usage(existing).free < shortages.SMALL_DISK_BYTES:
        probes.warn(f"the disk of the cache {root} is nearly full; free some space")
    for shared in paths.readonly_roots():
        if not os.path.isdir(shared):
            probes.warn(f"DS4S_CACHE_PATH names {shared}, which is not a folder")
        elif not all(
            os.access(folder, os.R_OK | os.X_OK)
            for folder in (shared, shared / "units")
            if os.path.isdir(folder)
        ):
            probes.warn(f"{shared} cannot be read by this user: chmod -R a+rX {shared}")
    for place in search.roots():
        if doubt := search.distrust(place):
            probes.warn(f"compiled kernels in {place.path} are passed over: {doubt}")
    return CacheRow(str(root), kernels, size, note)


def _can_write(folder: Path) -> bool:
    """Tries to write: permissions say nothing about read-only mounts, quotas and root."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _check_settings(probes: Probes) -> None:
    """Reads the settings now, so that the report tells what a later call would refuse."""
    from op_builder import ALL_OPS, env
    from op_builder.ops.instantiations import CUDA_FAMILIES
    from op_builder.toolchain import arch

    flags = (
        *("DS_BUILD_OPS", "DS4S_VERBOSE", "DS_SKIP_CUDA_CHECK", "DS_IGNORE_CUDA_DETECTION"),
        *(op.BUILD_VAR for op in ALL_OPS.values()),
    )
    checks: tuple[Callable[[], object], ...] = (
        lambda: arch.parse(env.text("TORCH_CUDA_ARCH_LIST")),
        lambda: env.positive_int("MAX_JOBS"),
        lambda: env.whole_number("DS4S_CACHE_MAX_MB"),
        lambda: env.choice("DS4S_CUDA_FAMILY", CUDA_FAMILIES),
        *(partial(env.flag, name) for name in flags),
    )
    for check in checks:
        try:
            check()
        except RuntimeError as error:  # op_builder's errors are such
            probes.warn(str(error))


def _gpu(gpu: dict[str, Any]) -> GpuRow:
    """The GPU's row. The op's own builder chooses the family: it knows whether one is forced."""
    from op_builder import ALL_OPS, env

    device = tuple(gpu["capability"])
    builder: Any = ALL_OPS["evoformer_attn"]
    try:
        family = builder.family(device)
        target = str(builder.compiled_for(family, device))
        family += " (DS4S_CUDA_FAMILY)" if env.text("DS4S_CUDA_FAMILY") else ""
        note = builder.family_note(device)
    except RuntimeError as error:  # op_builder's errors are such
        family, target, note = f"none: {error}", "", ""
    return GpuRow(gpu["name"], ".".join(map(str, device)), family, target, note)


def _unserved(torch: TorchAnswer) -> str:
    return f"this PyTorch has no kernels for {', '.join(torch.unserved)}"


def _no_gpu(torch: TorchAnswer) -> str:
    """Why PyTorch sees no GPU; only then is nvidia-smi run."""
    if torch.rocm:
        return f"PyTorch is built for AMD's (ROCm {torch.rocm}); the kernels are for NVIDIA's"
    if torch.unserved:
        return _unserved(torch)
    try:
        answer = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
        present = answer.stdout.split("\n")[0].strip() if answer.returncode == 0 else ""
    except (OSError, subprocess.SubprocessError):
        present = ""
    if not torch.version:
        return "PyTorch could not be asked" + (f"; the driver has {present}" if present else "")
    if present and not torch.cuda:
        return f"the driver has {present}, but this PyTorch is built for the CPU only"
    if present:
        return f"the driver has {present}, but PyTorch cannot use it"
    return "neither PyTorch nor the driver sees one"
