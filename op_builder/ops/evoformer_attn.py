"""EvoformerAttnBuilder: Evoformer attention on NVIDIA GPUs, from the templates of every family in
instantiations.py.
"""

from __future__ import annotations

import contextlib
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
    DIRECTIONS,
    FAMILIES,
    OLDEST,
    CudaKernel,
    Family,
    device_head_dim,
    has_row,
    head_dim_tier,
    serving,
)
from .presets import Call


class EvoformerAttnBuilder(CUDAOpBuilder[CudaKernel]):
    NAME = "evoformer_attn"
    BUILD_VAR = "DS_BUILD_EVOFORMER_ATTN"
    OLDEST = OLDEST

    def family(self, device: tuple[int, int]) -> str:
        """The template family for a compute capability: its own, or what DS4S_CUDA_FAMILY forces.

        Raises ToolchainError for a device below OLDEST and for a family that the device cannot run.
        """
        return self.families(device)[0]

    def families(self, device: tuple[int, int]) -> tuple[str, ...]:
        """`family`, followed by those that serve the calls it has no kernels for: Sm80 after Sm90.

        Raises as `family`.
        """
        lower = self._lower_target(device)
        own = serving(device)
        own += serving((lower.major, lower.minor)) if lower else ()
        if not own:
            raise ToolchainError(
                f"compute capability {Arch(*device)} is below {Arch(*OLDEST)}, where the "
                "templates begin; use the CPU"
            )
        able = [one for one in FAMILIES.values() if one.runs_on(device)]
        obstacles = {one.name: self._obstacle(one, lower) for one in able}
        chain = tuple(one.name for one in own if not obstacles[one.name])
        forced = env.text("DS4S_CUDA_FAMILY")
        if forced is None or forced in chain:
            return chain[chain.index(forced) if forced else 0 :]
        possible = [name for name, reason in obstacles.items() if not reason]
        if forced not in possible:
            reasons = [f" (not {name}: {reason})" for name, reason in obstacles.items() if reason]
            raise ToolchainError(
                f"DS4S_CUDA_FAMILY: expected one of {', '.join(possible)} on compute capability "
                f"{Arch(*device)}; got {forced}; name one of these or unset it{''.join(reasons)}"
            )
        return (forced,)

    def _lower_target(self, device: tuple[int, int]) -> Arch | None:
        """The target of calls on a device where a list leaves one below its families: 7.5+PTX on
        8.0.
        """
        if not env.text("TORCH_CUDA_ARCH_LIST") or not (own := serving(device)):
            return None
        with contextlib.suppress(ToolchainError):  # whoever asks for a kernel is told
            target = self.arch_for(device)
            if (target.major, target.minor) < own[-1].first:
                return target
        return None

    def _obstacle(self, family: Family, lower: Arch | None) -> str:
        """Why a family does not serve a device whose `_lower_target` is `lower`; empty where it
        does.
        """
        if lower and (lower.major, lower.minor) < family.first:
            return f"TORCH_CUDA_ARCH_LIST asks for {lower}, below {Arch(*family.first)}"
        return self.target_obstacle(family)

    def target_obstacle(self, family: Family, requested: Sequence[Arch] | None = None) -> str:
        """Why a family cannot be compiled here for the `requested` targets (None: the
        environment's); empty where it can. Families without a target of their own always can.
        """
        if not family.target:
            return ""
        target = _own_target(family)
        tool = toolkits.find_nvcc(target.real)
        if not tool.ok and requested is None and not search.holds(f"{family.name}_"):
            # PTX, or code of another family, that was compiled beforehand still serves.
            return f"there is no nvcc for {target.real} here, and nothing compiled for it"
        return arch.target_obstacle(
            target,
            self.requested_archs() if requested is None else requested,
            nvcc_targets.targets(tool).real if tool.ok else None,
            family.first_cuda,
        )

    def family_note(self, device: tuple[int, int]) -> str:
        """A note on `family`: which calls the next family serves, or why it is not a newer one."""
        families = self.families(device)
        if len(families) > 1:
            return f"{families[1]} for {FAMILIES[families[0]].leaves}"
        lower = self._lower_target(device)
        for newer in serving(device):
            if obstacle := self._obstacle(newer, lower):
                return f"not {newer.name}: {obstacle}"
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
        """The kernel for a call. `family` is one of `families`, `head_dim` the larger of D and Dv,
        `device` a compute capability, `target` an architecture (None: `arch_for` the device).

        Raises ToolchainError where nvcc cannot compile for the device.
        """
        if target is None or FAMILIES[family].target:
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
        """The target of the kernels of one of `families` on a device."""
        row = FAMILIES[family]
        return _own_target(row) if row.target else _plain(self.arch_for(device))

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

        A dtype or head dimension without kernels on an architecture is left out; before 8.0,
        bfloat16 has float32's.
        Raises ToolchainError where an architecture cannot run the family of DS4S_CUDA_FAMILY.
        """
        calls_ = tuple(wanted)
        rows = [row for target in targets for row in self._rows(calls_, target, aligned)]
        return list(dict.fromkeys(rows))  # 9.0 and 9.0a share theirs

    def _rows(self, wanted: Iterable[Call], target: Arch, aligned: bool) -> Iterable[CudaKernel]:
        device = (target.major, target.minor)
        own = serving(device)
        if own and env.text("DS4S_CUDA_FAMILY"):
            own = tuple(FAMILIES[name] for name in self.families(device))
        families = [
            one
            for one in own
            if (aligned or not one.aligned_only) and not self.target_obstacle(one, (target,))
        ]
        for call in wanted:
            having = [
                (one.name, dtype)
                for one in families
                if (dtype := one.dtype_for(call.direction, call.dtype))
                and call.head_dim <= one.largest_head_dim(call.direction, call.dtype)
                and call.head_dim <= device_head_dim(device, dtype)
            ]
            # PTX also serves later GPUs, which run no code for one target.
            for family, dtype in having if target.ptx else having[:1]:
                yield self.kernel(
                    family=family,
                    direction=call.direction,
                    dtype=dtype,
                    head_dim=call.head_dim,
                    bias=call.bias,
                    aligned=aligned,
                    device=device,
                    target=target,
                )


def _plain(target: Arch) -> Arch:
    """The target without its suffix. Templates without a target of their own use no instruction
    that needs one: 9.0a and 9.0 give one library.
    """
    return replace(target, suffix="")


def _own_target(family: Family) -> Arch:
    (target,) = arch.parse(family.target, source="target of a family")
    return target


def _compiled_bias(direction: str, bias: str) -> str:
    """The biases of a compiled kernel; a backward looks for bias1 at run time."""
    if direction == "fwd":
        return bias
    return "bias2" if bias in ("bias2", "both") else "none"
