"""The report on a machine without a GPU: the kernels for GPUs that are compiled, or can be."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any


def note(builder: Any) -> str:
    """A line for the CUDA op's row; empty if no kernel is compiled and none can be."""
    parts = [*_held(), _makes(builder)]
    return "; ".join(part for part in parts if part)


def _held() -> list[str]:
    """The kernels in each folder, counted by architecture."""
    from op_builder.cache import cache, search

    parts = []
    for root in search.roots():
        targets = (target for entry in cache.entries(root.path) for target in entry.targets)
        counts = Counter(targets)
        told = ", ".join(f"{counts[one]} for {_capability(one)}" for one in sorted(counts))
        where = "installed" if root.origin == "prebuilt" else f"in {root.path}"
        parts += [f"kernels {where}: {told}"] * bool(told)
    return parts


def _makes(builder: Any) -> str:
    """The architectures for which kernels can be compiled here; empty if none can."""
    from op_builder import CUDAOpBuilder

    if not isinstance(builder, CUDAOpBuilder) or builder.tool_obstacles():
        return ""
    major, minor = builder.OLDEST
    served = [one for one in builder.supported_archs() if _number(one) >= 10 * major + minor]
    plain = [_capability(one) for one in sorted(served, key=_number) if one[-1].isdecimal()]
    return f"can be compiled for {', '.join(plain)} (TORCH_CUDA_ARCH_LIST)" if plain else ""


def _number(target: str) -> int:
    return int(re.sub(r"\D", "", target) or 0)


def _capability(target: str) -> str:
    """ "sm_90a" -> "9.0a"."""
    return re.sub(r"^\w+_(\d+)(\d)(\w*)$", r"\1.\2\3", target)
