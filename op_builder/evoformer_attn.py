"""EvoformerAttnBuilder: Evoformer attention on NVIDIA GPUs, from the Sm70, Sm75 and Sm80
templates.
"""

from __future__ import annotations

from . import arch, env, gpu
from .cuda_builder import CUDAOpBuilder
from .errors import ToolchainError
from .instantiations import CUDA_FAMILIES, DIRECTIONS, CudaKernel, head_dim_tier

# What an install compiles for each architecture: the shapes that models train with (head dimension
# 32, both biases for triangle and MSA row attention, bias1 alone for MSA column attention).
_PREBUILT_DTYPES = ("bf16", "fp16", "fp32")
_PREBUILT_BIASES = ("both", "bias1")
_PREBUILT_HEAD_DIM = 32


class EvoformerAttnBuilder(CUDAOpBuilder):
    NAME = "evoformer_attn"
    BUILD_VAR = "DS_BUILD_EVOFORMER_ATTN"

    def family(self, device: tuple[int, int]) -> str:
        """The template family for a compute capability: its own, or what DS4S_CUDA_FAMILY forces.

        Raises ToolchainError for a device below 7.0 and for a family that the device cannot run.
        """
        own = arch.family(device)
        if own is None:
            raise ToolchainError(
                f"compute capability {device[0]}.{device[1]} is below 7.0, where the templates "
                "begin; use the CPU"
            )
        forced = env.text("DS4S_CUDA_FAMILY")
        if forced is None:
            return own
        possible = CUDA_FAMILIES[: CUDA_FAMILIES.index(own) + 1]
        if forced not in possible:
            raise ToolchainError(
                f"DS4S_CUDA_FAMILY: expected one of {', '.join(possible)} on compute capability "
                f"{device[0]}.{device[1]}; got {forced}; name one of these or unset it"
            )
        return forced

    def kernel(
        self,
        *,
        direction: str,
        dtype: str,
        head_dim: int,
        bias: str,
        aligned: bool,
        device: tuple[int, int],
    ) -> CudaKernel:
        """The kernel for a call: `head_dim` is the larger of D and Dv, `device` a compute
        capability.

        Raises ToolchainError when the device has no family or nvcc cannot compile for it.
        """
        return CudaKernel(
            family=self.family(device),
            direction=direction,
            dtype=dtype,
            head_dim=head_dim_tier(head_dim),
            bias=_compiled_bias(direction, bias),
            aligned=aligned,
            arch=str(self.arch_for(device)),
        )

    def default_kernels(self) -> list[CudaKernel]:
        """Forward and backward in float32 with both biases, for the best GPU here."""
        capabilities = gpu.detect().capabilities
        if not capabilities:
            raise ToolchainError(f"no GPU to choose kernels for: {gpu.detect().reason}")
        return [
            self.kernel(
                direction=direction,
                dtype="fp32",
                head_dim=_PREBUILT_HEAD_DIM,
                bias="both",
                aligned=True,
                device=capabilities[0],
            )
            for direction in DIRECTIONS
        ]

    def prebuilt_kernels(self) -> list[CudaKernel]:
        """The table above, for every architecture that an install compiles for."""
        kernels = []
        for target in self.target_archs():
            family = arch.family((target.major, target.minor))
            if family is None:
                continue
            kernels += [
                CudaKernel(
                    family,
                    direction,
                    dtype,
                    _PREBUILT_HEAD_DIM,
                    _compiled_bias(direction, bias),
                    True,
                    str(target),
                )
                for dtype in _PREBUILT_DTYPES
                if dtype != "bf16" or family == "sm80"
                for bias in _PREBUILT_BIASES
                for direction in DIRECTIONS
            ]
        return kernels


def _compiled_bias(direction: str, bias: str) -> str:
    """The biases that a kernel is compiled for; a backward finds out about bias1 at run time."""
    if direction == "fwd":
        return bias
    return "bias2" if bias in ("bias2", "both") else "none"
