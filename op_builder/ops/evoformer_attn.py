"""EvoformerAttnBuilder: Evoformer attention on NVIDIA GPUs, from the Sm70, Sm75, Sm80 and Sm90
templates.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from .. import env
from ..cache import search
from ..errors import ToolchainError
from ..toolchain import arch, nvcc_targets, toolkits
from ..toolchain.arch import Arch
from . import presets
from .cuda_builder import CUDAOpBuilder
from .instantiations import (
    CUDA_FAMILIES,
    DIRECTIONS,
    CudaKernel,
    has_row,
    head_dim_tier,
    serving_dtype,
)
from .presets import Call


class EvoformerAttnBuilder(CUDAOpBuilder[CudaKernel]):
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

    def sm90_obstacle(self, requested: Sequence[Arch] | None = None) -> str:
        """Why the Sm90 templates cannot be compiled here for what is `requested` (None: by the
        environment); empty when they can.
        """
        tool = toolkits.find_nvcc(arch.HOPPER.real)
        if not tool.ok and requested is None and not search.holds("sm90_"):
            # PTX or code of Sm80's that somebody compiled beforehand still serves.
            return "there is no nvcc for sm_90a here, and nothing compiled for it"
        supported = nvcc_targets.targets(tool).real if tool.ok else None
        return arch.hopper_obstacle(
            self.requested_archs() if requested is None else requested, supported
        )

    def family_note(self, device: tuple[int, int]) -> str:
        """What `family` does not tell: which calls go to the next, or why it is not sm90."""
        families = self.families(device)
        if len(families) > 1:
            return f"{families[1]} for float32 and what TMA cannot read"
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
        target: Arch | None = None,
    ) -> CudaKernel:
        """The kernel for a call: `family` one of `families`, `head_dim` the larger of D and Dv,
        `device` a compute capability, `target` what to compile for (None: `arch_for` the device).

        Raises ToolchainError when nvcc cannot compile for the device.
        """
        if target is None or family == "sm90":
            target = self.compiled_for(family, device)
        else:
            target = _plain(target)
        return CudaKernel(
            family=family,
            direction=direction,
            dtype=dtype,
            head_dim=head_dim_tier(head_dim),
            bias=_compiled_bias(direction, bias),
            aligned=aligned,
            arch=str(target),
        )

    def compiled_for(self, family: str, device: tuple[int, int]) -> Arch:
        """What the kernels of one of `families` are compiled for on a device."""
        return arch.HOPPER if family == "sm90" else _plain(self.arch_for(device))

    def default_kernels(self) -> list[CudaKernel]:
        """Forward and backward in float32 with both biases, for the best GPU here."""
        capabilities = self.gpus().capabilities
        if not capabilities:
            raise ToolchainError(f"no GPU to choose kernels for: {self.gpus().reason}")
        device = next((one for one in capabilities if not self.refusal(one)), capabilities[0])
        families = self.families(device)
        return [
            self.kernel(
                family=next(one for one in families if has_row(one, direction, "fp32")),
                direction=direction,
                dtype="fp32",
                head_dim=32,
                bias="both",
                aligned=True,
                device=device,
            )
            for direction in DIRECTIONS
        ]

    def prebuilt_kernels(self) -> list[CudaKernel]:
        """`presets.INSTALL`, for every architecture that an install compiles for."""
        return self.kernels_for(presets.INSTALL, self.target_archs())

    def kernels_here(self) -> list[CudaKernel]:
        return self.kernels_for(presets.INSTALL, self.archs_here())

    def refusal(self, device: tuple[int, int]) -> str:
        try:
            self.families(device)
        except ToolchainError as error:
            return str(error)
        return super().refusal(device)

    def kernels_for(
        self, wanted: Iterable[Call], targets: Iterable[Arch], *, aligned: bool = True
    ) -> list[CudaKernel]:
        """The kernels that these calls choose on devices of these architectures, each once.

        A dtype that an architecture does not have is left out; bfloat16 before 8.0 is float32's.
        """
        calls_ = tuple(wanted)
        rows = [row for target in targets for row in self._rows(calls_, target, aligned)]
        return list(dict.fromkeys(rows))  # 9.0 and 9.0a share theirs

    def _rows(self, wanted: Iterable[Call], target: Arch, aligned: bool) -> Iterable[CudaKernel]:
        device = (target.major, target.minor)
        own = arch.family(device)
        if own is None:
            return
        if own == "sm90" and (not aligned or self.sm90_obstacle((target,))):
            own = "sm80"
        for call in wanted:
            families = _with_deputy(own)
            dtypes = {one: serving_dtype(one, call.dtype) for one in families}
            having = [one for one in families if has_row(one, call.direction, dtypes[one])]
            # PTX also serves later GPUs, and those have no Sm90 kernels.
            for family in having if target.ptx else having[:1]:
                yield self.kernel(
                    family=family,
                    direction=call.direction,
                    dtype=dtypes[family],
                    head_dim=call.head_dim,
                    bias=call.bias,
                    aligned=aligned,
                    device=device,
                    target=target,
                )


def _plain(target: Arch) -> Arch:
    """Nothing in the other templates is what a suffix stands for: 9.0a and 9.0 are one library."""
    return replace(target, suffix="")


def _with_deputy(family: str) -> tuple[str, ...]:
    return ("sm90", "sm80") if family == "sm90" else (family,)


def _compiled_bias(direction: str, bias: str) -> str:
    """The biases that a kernel is compiled for; a backward finds out about bias1 at run time."""
    if direction == "fwd":
        return bias
    return "bias2" if bias in ("bias2", "both") else "none"
