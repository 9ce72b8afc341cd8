"""EvoformerAttnBuilder: Evoformer attention on NVIDIA GPUs, from the Sm70, Sm75, Sm80 and Sm90
templates.
"""

from __future__ import annotations

from collections.abc import Iterable

from . import arch, env, gpu, toolchain
from .arch import Arch
from .cuda_builder import CUDAOpBuilder
from .errors import ToolchainError
from .instantiations import (
    CUDA_FAMILIES,
    CUDA_ROWS,
    DIRECTIONS,
    CudaKernel,
    has_row,
    head_dim_tier,
)

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
        return self.families(device)[0]

    def families(self, device: tuple[int, int]) -> tuple[str, ...]:
        """`family`, and behind it the one that takes what it has no kernels for: Sm80 after Sm90.

        Raises as `family`.
        """
        own = arch.family(device)
        if own is None:
            raise ToolchainError(
                f"compute capability {device[0]}.{device[1]} is below 7.0, where the templates "
                "begin; use the CPU"
            )
        obstacle = self.sm90_obstacle() if own == "sm90" else ""
        if obstacle:
            own = "sm80"
        forced = env.text("DS4S_CUDA_FAMILY")
        possible = CUDA_FAMILIES[: CUDA_FAMILIES.index(own) + 1]
        if forced is not None and forced not in possible:
            raise ToolchainError(
                f"DS4S_CUDA_FAMILY: expected one of {', '.join(possible)} on compute capability "
                f"{device[0]}.{device[1]}; got {forced}; name one of these or unset it"
                + (f" (not sm90: {obstacle})" if obstacle else "")
            )
        return _with_deputy(forced or own)

    def sm90_obstacle(self) -> str:
        """Why the Sm90 templates cannot be compiled here; empty when they can."""
        tool = toolchain.find_nvcc()
        supported = toolchain.targets(tool).real if tool.ok else None
        return arch.hopper_obstacle(self.requested_archs(), supported)

    def family_note(self, device: tuple[int, int]) -> str:
        """What `family` does not tell: which calls go to the next, or why it is not sm90."""
        families = self.families(device)
        if len(families) > 1:
            rest = "float32 and what TMA cannot read"
            if not CUDA_ROWS[families[0]]["bwd"]:
                rest = f"the backward, {rest}"
            return f"{families[1]} for {rest}"
        if arch.family(device) == "sm90" and (obstacle := self.sm90_obstacle()):
            return f"not sm90: {obstacle}"
        return ""

    def kernel(
        self,
        *,
        family: str,
        direction: str,
        dtype: str,
        head_dim: int,
        bias: str,
        aligned: bool,
        device: tuple[int, int],
    ) -> CudaKernel:
        """The kernel for a call: `family` one of `families`, `head_dim` the larger of D and Dv,
        `device` a compute capability.

        Raises ToolchainError when nvcc cannot compile for the device.
        """
        target = arch.HOPPER if family == "sm90" else self.arch_for(device)
        return CudaKernel(
            family=family,
            direction=direction,
            dtype=dtype,
            head_dim=head_dim_tier(head_dim),
            bias=_compiled_bias(direction, bias),
            aligned=aligned,
            arch=str(target),
        )

    def default_kernels(self) -> list[CudaKernel]:
        """Forward and backward in float32 with both biases, for the best GPU here."""
        capabilities = gpu.detect().capabilities
        if not capabilities:
            raise ToolchainError(f"no GPU to choose kernels for: {gpu.detect().reason}")
        families = self.families(capabilities[0])
        return [
            self.kernel(
                family=next(one for one in families if has_row(one, direction, "fp32")),
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
        rows = [row for target in self.target_archs() for row in self._prebuilt_for(target)]
        return list(dict.fromkeys(rows))  # 9.0 and 9.0a share their Sm90 kernels

    def _prebuilt_for(self, target: Arch) -> Iterable[CudaKernel]:
        own = arch.family((target.major, target.minor))
        if own is None:
            return
        if own == "sm90" and self.sm90_obstacle():
            own = "sm80"
        for dtype in _PREBUILT_DTYPES:
            for direction in DIRECTIONS:
                having = [one for one in _with_deputy(own) if has_row(one, direction, dtype)]
                # PTX also serves later GPUs, and those have no Sm90 kernels.
                for family in having if target.ptx else having[:1]:
                    compiled_for = arch.HOPPER if family == "sm90" else target
                    for bias in _PREBUILT_BIASES:
                        yield CudaKernel(
                            family,
                            direction,
                            dtype,
                            _PREBUILT_HEAD_DIM,
                            _compiled_bias(direction, bias),
                            True,
                            str(compiled_for),
                        )


def _with_deputy(family: str) -> tuple[str, ...]:
    return ("sm90", "sm80") if family == "sm90" else (family,)


def _compiled_bias(direction: str, bias: str) -> str:
    """The biases that a kernel is compiled for; a backward finds out about bias1 at run time."""
    if direction == "fwd":
        return bias
    return "bias2" if bias in ("bias2", "both") else "none"
