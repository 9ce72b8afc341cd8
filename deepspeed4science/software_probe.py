"""The report's rows on programs, headers and packages: where, which version, or why not used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from deepspeed4science.report import SoftwareRow
from deepspeed4science.torch_probe import TorchAnswer

if TYPE_CHECKING:
    from deepspeed4science.probes import Probes
    from op_builder.toolchain.cutlass import Cutlass
    from op_builder.toolchain.tool import Tool

_ONLY_CUDA = "only CUDA ops need it"


def rows(probes: Probes) -> tuple[SoftwareRow, ...]:
    questions = {
        "nvcc": _nvcc,
        "host compiler": _host_compiler,
        "ninja": _ninja,
        "CUTLASS": _cutlass,
    }
    return tuple(
        probes.ask(name, partial(find, probes), SoftwareRow(name, False, reason="see the warnings"))
        for name, find in questions.items()
    )


def driver_warning(software: Sequence[SoftwareRow], torch: TorchAnswer) -> str:
    """A warning where the driver is older than nvcc's CUDA major version, which kernels need."""
    nvcc = next((row.version for row in software if row.name == "nvcc" and row.ok), "")
    if not nvcc or not torch.driver or _major(nvcc) <= _major(torch.driver):
        return ""
    return (
        f"nvcc is of CUDA {nvcc} but the driver serves CUDA up to {torch.driver}: what is compiled "
        f"here will not run; update the driver or set CUDA_HOME to a toolkit of its version"
    )


def _major(version: str) -> int:
    return int(version.partition(".")[0])


def torch_rows(torch: TorchAnswer, note: str) -> tuple[SoftwareRow, ...]:
    cuda = torch.cuda or "none"
    built_for = "AMD's GPUs (ROCm)" if torch.rocm else "the CPU only"
    where = "" if torch.cuda else f"this PyTorch is built for {built_for}"
    return (
        SoftwareRow("torch", torch.ok, torch.version, torch.where, torch.reason, torch.remedy),
        *([SoftwareRow("CUDA of torch", True, cuda, where, note=note)] if torch.ok else []),
        *([SoftwareRow("CUDA driver", True, torch.driver)] if torch.driver else []),
    )


def cuda_difference(torch: TorchAnswer, software: Sequence[SoftwareRow]) -> str:
    """A note where PyTorch's CUDA differs from nvcc's, which is often taken for a fault."""
    from op_builder import env

    nvcc = next((row.version for row in software if row.name == "nvcc" and row.ok), "")
    two = ".".join(nvcc.split(".")[:2])
    if not torch.cuda or not nvcc or two == torch.cuda or env.flag("DS_SKIP_CUDA_CHECK"):
        return ""
    return f"nvcc is of CUDA {two}; that is of no concern, kernels bring their own runtime"


def _nvcc(probes: Probes) -> SoftwareRow:
    from op_builder.toolchain import toolkits

    row = _tool_row(toolkits.find_nvcc(prove=True), probes, absent=_ONLY_CUDA)
    return replace(row, note=_other_toolkits())


def _other_toolkits() -> str:
    """The toolkits after the best one, each with the architectures that only it compiles for."""
    from op_builder.toolchain import nvcc_targets, toolkits

    notes = []
    known: set[str] = set()
    for tool in toolkits.nvccs(prove=True):
        own = [name for name in nvcc_targets.targets(tool).real if name not in known]
        known.update(own)
        serves = f", for {', '.join(own)}" if own else ""
        notes.append(f"{tool.version} in {tool.root}{serves}")
    return f"also here: {'; '.join(notes[1:])}" if len(notes) > 1 else ""


def _host_compiler(probes: Probes) -> SoftwareRow:
    from op_builder.toolchain import host_compiler

    return _tool_row(host_compiler.find_host_compiler(), probes)


def _ninja(probes: Probes) -> SoftwareRow:
    from op_builder.toolchain import ninja

    return _tool_row(ninja.find_ninja(), probes)


def _tool_row(tool: Tool, probes: Probes, absent: str = "") -> SoftwareRow:
    _warn_passed_over(tool.name, tool, probes)
    where = f"{tool.path} ({tool.where_found})" if tool.path else absent
    return SoftwareRow(tool.name, tool.ok, tool.version, where, tool.reason, tool.remedy)


def _cutlass(probes: Probes) -> SoftwareRow:
    from op_builder.toolchain.cutlass import find_cutlass

    found = find_cutlass()
    _warn_passed_over("CUTLASS", found, probes)
    where = f"{found.include_dir} ({found.where_found})" if found.include_dir else _ONLY_CUDA
    return SoftwareRow("CUTLASS", found.ok, found.version, where, found.reason, found.remedy)


def _warn_passed_over(name: str, found: Tool | Cutlass, probes: Probes) -> None:
    """Warns of candidates that were passed over where another one is used; otherwise the row itself
    gives the reason.
    """
    for place in found.passed_over:
        if found.ok:
            probes.warn(f"{name}: passed over {place}")
