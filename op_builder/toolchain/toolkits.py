"""Chooses the CUDA toolkit that compiles, for each architecture.

Of several (nvcc.py says where they are searched) the one that `CUDA_HOME` or `CUDA_PATH` names is
chosen, since naming one is an instruction; else the newest that compiles for the architecture, of a
CUDA version that the driver serves. A toolkit that cannot compile a small kernel with the host
compiler (smoke.py) is skipped and reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..errors import UnfitToolkitError
from . import nvcc, nvcc_targets, nvcc_wheels, smoke
from .host_compiler import find_host_compiler
from .tool import Tool


def find_nvcc(real: str = "", *, prove: bool = False) -> Tool:
    """The nvcc that compiles for `real` ("sm_90a"); where none does, the best of all.

    prove: as for `nvccs`.
    """
    best = None
    for tool in nvccs(prove=prove):
        if not real or real in nvcc_targets.targets(tool).real:
            return tool
        best = best or tool
    return best or _no_nvcc(prove)


def nvccs(*, prove: bool = False) -> Iterator[Tool]:
    """Every nvcc that compiles here, best first.

    prove: test each one that was not tested before when the iterator reaches it, which takes about
        a second. Otherwise they count as fit, which is enough for callers that compile nothing.
    """
    return (tool for tool in _tried(prove) if tool.ok)


def prove(nvcc: Tool, host: Tool) -> None:
    """Raises UnfitToolkitError where nvcc cannot compile a small kernel; tested once for each."""
    if problem := smoke.problem(nvcc, host, prove=True):
        raise UnfitToolkitError(f"nvcc: {problem.reason}; {problem.remedy}")


def installed_cuda_version() -> tuple[int, int]:
    """(major, minor) of the toolkit that would compile; raises ToolchainError without one."""
    tool = find_nvcc()
    tool.require()  # raises
    return nvcc.two(tool.version)


def _tried(prove: bool) -> Iterator[Tool]:
    """The fit toolkits, then the incomplete ones; `passed_over` of each lists those before it."""
    found = nvcc.survey()
    host = find_host_compiler()
    passed_over = list(found.passed_over)
    for tool in found.fit:
        problem = smoke.problem(tool, host, prove=prove) if host.ok else None
        if problem is None:
            yield replace(tool, passed_over=tuple(passed_over))
        else:
            passed_over.append(f"{tool.where_found}: {problem.reason}")
            yield replace(tool, ok=False, reason=problem.reason, remedy=problem.remedy)
    for tool in found.unfit:
        yield replace(tool, passed_over=tuple(passed_over))


def _no_nvcc(prove: bool) -> Tool:
    tried = list(_tried(prove))
    if not tried:
        return Tool(
            "nvcc",
            reason="no CUDA compiler was found",
            remedy=nvcc_wheels.install(),
            passed_over=nvcc.survey().passed_over,
        )
    return replace(
        tried[0], passed_over=tuple(dict.fromkeys(p for t in tried for p in t.passed_over))
    )
