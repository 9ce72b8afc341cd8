"""`ds_report`: what runs on this machine, and beside every "no" the reason and the remedy.

    ds_report [--json | --version]          python -m deepspeed4science report [--json]

Always prints, whatever is missing or broken: only the standard library is imported here, and every
probe is guarded (probes.py). Exit code 0: usable; 1: not.

Usable means that PyTorch works, and that the op for the best hardware that it can use here is
compiled or can be compiled. With a GPU, a CUDA op that cannot be compiled gives 1 although the CPU
op works, since jobs are sent to such a machine for its GPU. Without a GPU the CPU op decides.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Why:
    reason: str
    remedy: str  # empty where there is none


@dataclass(frozen=True)
class OpRow:
    name: str
    device: str  # "cpu" or "cuda"
    state: str  # "prebuilt", "cached", "buildable" or "not"
    # Such as "4 of 6 kernels compiled"; without a GPU, what is here for machines with one.
    detail: str
    whys: tuple[Why, ...] = ()  # with the state "not": all obstacles

    @property
    def ok(self) -> bool:
        return self.state != "not"


@dataclass(frozen=True)
class SoftwareRow:
    name: str
    ok: bool
    version: str = ""
    where: str = ""
    reason: str = ""
    remedy: str = ""
    note: str = ""  # worth knowing, but no fault


@dataclass(frozen=True)
class GpuRow:
    name: str
    capability: str  # "9.0"
    family: str  # its template family, "sm80"; or why it has none
    arch: str = ""  # the architecture that kernels are compiled for, "9.0a"
    note: str = ""  # which calls another family serves, or why the GPU's own does not


@dataclass(frozen=True)
class CpuRow:
    name: str
    isa: dict[str, str]  # dtype -> instruction set
    note: str = ""


@dataclass(frozen=True)
class CacheRow:
    folder: str
    kernels: int
    size_bytes: int
    note: str = ""


@dataclass(frozen=True)
class Report:
    version: str
    system: str
    python: str
    ops: tuple[OpRow, ...]
    software: tuple[SoftwareRow, ...]
    gpus: tuple[GpuRow, ...]
    no_gpu: str  # without a GPU: the reason that PyTorch or the driver gives
    cpu: CpuRow
    cache: CacheRow
    variables: dict[str, str]  # those of `env.VARIABLES` that are set
    usable: bool
    verdict: str
    warnings: tuple[str, ...]


def judge(torch_works: bool, gpus: Sequence[GpuRow], ops: Sequence[OpRow]) -> tuple[bool, str]:
    """Whether this machine can be used, and why."""
    if not torch_works:
        return False, "not usable: the op needs a working PyTorch"
    cuda = [op for op in ops if op.device == "cuda"]
    cpu = [op for op in ops if op.device == "cpu"]
    if gpus and cuda:
        failed = [op.name for op in cuda if not op.ok]
        if failed:
            return False, f"not usable: there is a GPU, but not {', '.join(failed)}"
        return True, "usable on the GPU"
    if any(op.ok for op in cpu):
        return True, "usable on the CPU"
    return False, "not usable: no op can be compiled or loaded here"


def render(report: Report) -> str:
    lines = [
        f"deepspeed4science {report.version} on {report.system}, Python {report.python}",
        "",
        *_op_lines(report.ops),
        "",
        *_software_lines(report.software),
        "",
        *_machine_lines(report),
        "",
        report.verdict,
    ]
    if report.warnings:
        lines += ["", "Warnings:", *(f"  - {warning}" for warning in report.warnings)]
    return "\n".join(lines)


def _op_lines(ops: Sequence[OpRow]) -> list[str]:
    lines = [f"{'op':<20} {'for':<5} {'':<6} state"]
    for op in ops:
        mark = "[OKAY]" if op.ok else "[NO]"
        row = f"{op.name:<20} {op.device:<5} {mark:<6} {op.state:<10} {op.detail}"
        lines.append(row.rstrip())
        for why in op.whys:
            lines += _why(why.reason, why.remedy)
    return lines if ops else [*lines, "none could be asked"]


def _software_lines(software: Sequence[SoftwareRow]) -> list[str]:
    lines = [f"{'needs':<20} {'':<6} {'version':<16} where"]
    for row in software:
        mark = "[OKAY]" if row.ok else "[NO]"
        line = f"{row.name:<20} {mark:<6} {row.version or '-':<16} {row.where}"
        lines += [line.rstrip(), *_why(row.reason, row.remedy)]
        lines += [f"    note: {row.note}"] * bool(row.note)
    return lines


def _machine_lines(report: Report) -> list[str]:
    lines = [
        f"GPU    {gpu.name}, compute capability {gpu.capability}, templates {gpu.family}"
        + (f", compiled for {gpu.arch}" if gpu.arch else "")
        + (f"; {gpu.note}" if gpu.note else "")
        for gpu in report.gpus
    ] or [f"GPU    none: {report.no_gpu}"]
    isas = ", ".join(f"{dtype} {isa}" for dtype, isa in report.cpu.isa.items())
    lines.append(f"CPU    {report.cpu.name or 'unknown'}: {isas or 'unknown'}")
    lines += [f"       {report.cpu.note}"] * bool(report.cpu.note)
    size = f"{report.cache.size_bytes / 2**20:.1f} MiB ({report.cache.size_bytes} bytes)"
    lines.append(f"cache  {report.cache.folder}: {report.cache.kernels} kernels, {size}")
    lines += [f"       {report.cache.note}"] * bool(report.cache.note)
    return lines + [f"set    {name}={value}" for name, value in report.variables.items()]


def _why(reason: str, remedy: str) -> list[str]:
    texts = (("reason", reason), ("remedy", remedy))
    return [f"    {label}: {text}" for label, text in texts if text]


def to_json(report: Report) -> str:
    return json.dumps(asdict(report), indent=1)


def main(argv: Sequence[str] | None = None) -> int:
    from deepspeed4science import __version__

    parser = argparse.ArgumentParser(
        prog="ds_report",
        description="What runs on this machine; exit code 0: usable, 1: not.",
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--version", action="version", version=f"deepspeed4science {__version__}")
    options = parser.parse_args(argv)
    from deepspeed4science import probes
    from deepspeed4science.printing import show

    report = probes.collect()
    show(to_json(report) if options.json else render(report))
    return 0 if report.usable else 1


if __name__ == "__main__":
    sys.exit(main())
