"""CUDAOpBuilder: an op compiled by nvcc, each unit for the architecture of its device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import ClassVar, Protocol, TypeVar

from .. import env, paths
from ..cache.key import CompileJob
from ..errors import BuildError, ToolchainError
from ..toolchain import arch, cutlass, gpu, host_compiler, ninja, nvcc, nvcc_targets, toolkits
from ..toolchain.arch import Arch
from ..toolchain.cutlass import Cutlass
from ..toolchain.gpu import Gpus
from ..toolchain.tool import Tool
from .builder import Kernel, OpBuilder
from .status import Obstacle

# Memory that nvcc needs for the largest unit, about.
_MEMORY_BYTES = 3 << 30


class ArchKernel(Kernel, Protocol):
    @property
    def arch(self) -> str: ...  # nvcc's target: "9.0a"

    @property
    def first(self) -> tuple[int, int]: ...  # the lowest compute capability of a target


ArchKernelT = TypeVar("ArchKernelT", bound=ArchKernel)


class CUDAOpBuilder(OpBuilder[ArchKernelT]):
    DEVICE = "cuda"
    OLDEST: ClassVar[tuple[int, int]]  # the lowest compute capability with kernels

    def __init__(self, gpus: Gpus | None = None) -> None:
        """gpus: the GPUs to serve; None: this machine's, which are queried when first needed."""
        self._gpus = gpus

    def gpus(self) -> Gpus:
        return gpu.detect() if self._gpus is None else self._gpus

    def sources(self) -> list[str]:
        return [f"{kernel.name}.cu" for kernel in self.prebuilt_kernels()]

    def include_paths(self) -> list[str]:
        """Our include folder and CUTLASS's; raises ToolchainError, with the remedy, without
        CUTLASS.
        """
        return [str(paths.csrc_root()), str(cutlass.find_cutlass().require())]

    def cxx_args(self) -> list[str]:
        """Flags that nvcc passes to the host compiler."""
        return list(nvcc.HOST_FLAGS)

    def nvcc_args(self) -> list[str]:
        return list(nvcc.FLAGS)

    def extra_ldflags(self) -> list[str]:
        return list(nvcc.LINK_FLAGS)

    def filter_ccs(self, ccs: Sequence[str]) -> list[str]:
        """Those of `ccs` from OLDEST on for which nvcc compiles."""
        supported = self.supported_archs()
        wanted = [one for text in ccs for one in arch.parse(text, source="compute capability")]
        return [str(one) for one in wanted if not self._is_too_old(one) and one.real in supported]

    def compute_capability_args(self) -> list[str]:
        return list(arch.gencode(self.target_archs()))

    def requested_archs(self) -> tuple[Arch, ...]:
        """The architectures in TORCH_CUDA_ARCH_LIST; empty: the device's own."""
        return arch.parse(env.text("TORCH_CUDA_ARCH_LIST"))

    def supported_archs(self) -> tuple[str, ...]:
        """The architectures for which the toolkits here compile, "sm_80" and so on."""
        real = (name for tool in toolkits.nvccs() for name in nvcc_targets.targets(tool).real)
        return tuple(dict.fromkeys(real))

    def target_archs(self) -> tuple[Arch, ...]:
        """The targets of an install: the requested ones, else this machine's GPUs, else one of each
        family.

        Raises ToolchainError, naming all lists, when none is left.
        """
        supported = self.supported_archs()
        requested = self._requested_not_too_old("name newer ones")
        capabilities = self.gpus().capabilities
        if requested or not capabilities:
            return arch.intersect(requested, None, supported)
        return tuple(
            dict.fromkeys(arch.intersect((), device, supported)[0] for device in capabilities)
        )

    def archs_here(self) -> tuple[Arch, ...]:
        """The targets of calls on the GPUs here; without a GPU, `target_archs`.

        Raises ToolchainError when none of them can be served.
        """
        capabilities = self.gpus().capabilities
        if not capabilities:
            return self.target_archs()
        served = [device for device in capabilities if not self.refusal(device)]
        if not served:
            raise ToolchainError(self.refusal(capabilities[0]))
        return tuple(dict.fromkeys(self.arch_for(device) for device in served))

    def refusal(self, device: tuple[int, int]) -> str:
        """Why no kernel is compiled for a device of this compute capability; empty where one is."""
        try:
            self.arch_for(device)
        except BuildError as error:
            return str(error)
        return ""

    def arch_for(self, device: tuple[int, int]) -> Arch:
        """The target for a device of this compute capability, with the best toolkit that has one.

        Raises ToolchainError, naming the requested architectures, the device's and the toolkits'.
        """
        requested = self._requested_not_too_old(f"add {Arch(*device)} to it")
        supported: list[str] = []
        for tool in toolkits.nvccs():
            own = nvcc_targets.targets(tool).real
            try:
                return arch.intersect(requested, device, own)[0]
            except ToolchainError:
                supported += own
        fit = [one for one in requested if one.runs_on(device)]
        if supported or (requested and not fit):
            return arch.intersect(requested, device, supported)[0]  # raises
        # Without a toolkit: kernels compiled earlier, for the device's own unless one is asked for.
        return fit[0] if len(fit) == 1 else Arch(*device)

    def _requested_not_too_old(self, remedy: str) -> tuple[Arch, ...]:
        """`requested_archs` from OLDEST on; raises ToolchainError where all of them are older."""
        asked = self.requested_archs()
        kept = tuple(one for one in asked if not self._is_too_old(one))
        if asked and not kept:
            raise ToolchainError(
                f"TORCH_CUDA_ARCH_LIST asks for {'; '.join(map(str, asked))}, and the templates "
                f"begin at {Arch(*self.OLDEST)}; {remedy}, or unset it"
            )
        return kept

    def _is_too_old(self, target: Arch) -> bool:
        return (target.major, target.minor) < self.OLDEST

    def obstacles(self) -> list[Obstacle]:
        found = self.tool_obstacles()
        if not self.gpus().found:
            found += self._obstacles_without_gpu()
        if not found:
            try:
                self.archs_here()
            except BuildError as error:
                found.append(Obstacle(str(error), ""))
        return found + self.setting_obstacles()

    def _obstacles_without_gpu(self) -> list[Obstacle]:
        """Nothing where kernels are compiled for another machine."""
        try:
            if env.flag("DS_IGNORE_CUDA_DETECTION"):
                return []
        except BuildError as error:
            return [Obstacle(str(error), "")]
        with contextlib.suppress(BuildError):  # a list that cannot be parsed counts as none here
            if self.requested_archs():
                return []
        remedy = (
            "run on a machine with an NVIDIA GPU; to compile for another machine, set "
            "TORCH_CUDA_ARCH_LIST to its architecture"
        )
        return [Obstacle(f"no GPU: {self.gpus().reason}", remedy)]

    def builder(self) -> list[CompileJob]:
        """Unlike a first call, an install compiles for all requested targets, or raises."""
        requested = self.requested_archs()
        if not requested:
            return super().builder()
        self.require(requested)  # whatever GPUs are here
        return self.jobs(self.prebuilt_kernels())

    def require(self, targets: Sequence[Arch]) -> None:
        """Raises BuildError, with reasons and remedies, unless every target can be compiled for."""
        missing = self.tool_obstacles()
        if missing:
            raise BuildError(
                f"{self.absolute_name()} cannot be compiled here: {'; '.join(map(str, missing))}"
            )
        supported = self.supported_archs()
        refused = [one for one in targets if self._is_too_old(one) or one.real not in supported]
        if refused:
            possible = ";".join(str(one) for one in targets if one not in refused)
            raise ToolchainError(
                f"{self.absolute_name()} cannot be compiled for {', '.join(map(str, refused))}: "
                f"the templates begin at {Arch(*self.OLDEST)}, and nvcc {_versions()} can do "
                f"{arch.as_written(supported)}; ask for {possible or 'one of these'}, or set "
                "CUDA_HOME to a toolkit that can (7.0 and 7.2 need CUDA 12.9 or older)"
            )

    def tool_obstacles(self) -> list[Obstacle]:
        """The missing tools, which compiling for any target needs."""
        tools = (
            toolkits.find_nvcc(prove=True),
            host_compiler.find_host_compiler(),
            ninja.find_ninja(),
        )
        found = [
            Obstacle(f"{tool.name}: {tool.reason}", tool.remedy) for tool in tools if not tool.ok
        ]
        headers = cutlass.find_cutlass()
        if not headers.ok:
            found.append(Obstacle(f"CUTLASS: {headers.reason}", headers.remedy))
        try:
            paths.csrc_root()
        except BuildError as error:
            found.append(Obstacle(str(error), ""))
        return found

    def jobs(self, kernels: Sequence[ArchKernelT]) -> list[CompileJob]:
        host, headers = host_compiler.find_host_compiler(), cutlass.find_cutlass()
        targets = [_target(kernel) for kernel in kernels]
        compilers = {real: toolkits.find_nvcc(real) for real in {one.real for one in targets}}
        return [
            self._job(kernel, target, compilers[target.real], host, headers)
            for kernel, target in zip(kernels, targets, strict=True)
        ]

    def _job(
        self, kernel: ArchKernel, target: Arch, compiler: Tool, host: Tool, headers: Cutlass
    ) -> CompileJob:
        missing = [
            f"{what.name}: {what.reason}; {what.remedy}" for what in (compiler, host) if not what.ok
        ]
        if not headers.ok:
            missing.append(f"CUTLASS: {headers.reason}; {headers.remedy}")
        return CompileJob(
            name=kernel.name,
            source=kernel.source(),
            suffix=".cu",
            compiler=None if missing else compiler.path,
            flags=(*self.nvcc_args(), *target.unit_flags()),
            include_dirs=(
                paths.csrc_root(),
                *([headers.include_dir] if headers.include_dir else []),
            ),
            link_flags=tuple(self.extra_ldflags()),
            identity=(
                ("compiler", compiler.identity),
                ("host compiler", host.identity),
                *env.settings_of_compilers(),
            ),
            local_flags=nvcc.local_flags(compiler, host) if host.ok else (),
            problem="; ".join(missing),
            memory_bytes=_MEMORY_BYTES,
            usual_seconds=kernel.usual_seconds,
            label=f"{kernel.name} for {kernel.arch}",
            stand_ins=tuple(
                (*self.nvcc_args(), *other.unit_flags())
                for other in arch.stand_ins(target)
                if (other.major, other.minor) >= kernel.first
            ),
            prove=functools.partial(toolkits.prove, compiler, host),
        )


def _versions() -> str:
    return " and ".join(tool.version for tool in toolkits.nvccs())


def _target(kernel: ArchKernel) -> Arch:
    (one,) = arch.parse(kernel.arch, source="architecture of a kernel")
    return one
