"""The command that installs a CUDA toolkit from the package index, and where that is no remedy."""

from __future__ import annotations

import contextlib
from importlib import metadata

from . import gpu
from .tool import numbers

PARTS = "cuda-toolkit[nvcc,nvvm,crt,cudart,cccl]"  # pip would take missing parts from any release
TRIED = "13.0.2"
FIRST_CUDA = "13.0"  # of the wheels
LOWEST_CAPABILITY = "7.5"  # that it compiles for


def wheels() -> str:
    """The command that installs a toolkit. It names the release of PyTorch's own parts, where there
    are any: for another release, pip would replace those.
    """
    version = TRIED
    with contextlib.suppress(metadata.PackageNotFoundError):
        installed = metadata.version("cuda-toolkit")
        version = installed if numbers(installed) >= numbers(TRIED) else TRIED
    return f'pip install "{PARTS}=={version}"'


def install() -> str:
    """The remedy where no toolkit serves."""
    gpus = gpu.detect()
    why = ""
    if (0, 0) < gpus.driver < numbers(FIRST_CUDA):
        why = f"the driver here serves CUDA up to {gpus.driver[0]}.{gpus.driver[1]}"
    elif gpus.found and gpus.capabilities[0] < numbers(LOWEST_CAPABILITY):
        why = "CUDA 12.9 is the last that compiles for the GPU here"
    if not why:
        return f"{wheels()}, or set CUDA_HOME to a CUDA toolkit's folder"
    return (
        f"install a CUDA 12 toolkit from conda or NVIDIA, and set CUDA_HOME to its folder: {why}, "
        "and nvcc's wheels begin with CUDA 13"
    )
