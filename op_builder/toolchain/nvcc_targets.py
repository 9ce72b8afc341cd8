"""The architectures that an nvcc compiles for."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from . import memo
from .nvcc import two
from .tool import Tool, UnfitError, run


@dataclass(frozen=True)
class Targets:
    """The architectures an nvcc compiles for."""

    real: tuple[str, ...] = ()  # "sm_80"; with the suffixed ones it accepts but does not list
    virtual: tuple[str, ...] = ()  # "compute_80"


def targets(tool: Tool) -> Targets:
    """The architectures of this nvcc; empty where it does not list them."""
    if tool.path is None:
        return Targets()
    path = str(tool.path)

    def ask() -> list[list[str]]:
        answers = [run([path, flag]) for flag in ("--list-gpu-code", "--list-gpu-arch")]
        if problem := answers[0].problem or answers[1].problem:
            raise UnfitError(problem)
        texts = (answer.answer for answer in answers)
        return [re.findall(r"^(?:sm|compute)_\d+\w*$", text, re.MULTILINE) for text in texts]

    try:
        real, virtual = memo.remember("nvcc-targets-1", memo.file_stamp(path), ask)
    except UnfitError:
        return Targets()
    suffixed = [name for name in _suffixed(real, two(tool.version)) if name not in real]
    return Targets((*real, *suffixed), tuple(virtual))


def _suffixed(real: Iterable[str], version: tuple[int, int]) -> Iterable[str]:
    """Suffixed targets, which nvcc accepts but does not list: `a` from 9.0 on, `f` from 10.0 and
    CUDA 12.9 on. CUDA 12.0 has sm_90a, too, but not all instructions of its kernels (PTX ISA 8.1).
    """
    for name in real:
        number = int(name[3:]) if name[3:].isdecimal() else 0
        if number >= 90 and version >= (12, 1):
            yield name + "a"
        if number >= 100 and version >= (12, 9):
            yield name + "f"
