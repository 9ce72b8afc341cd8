"""CUDAOpBuilder: an op whose units nvcc compiles, each for the architecture of the device it will
run on.
"""

from __future__ import annotations

from collections.abc import Sequence

from . import arch, cutlass, env, gpu, paths, toolchain
from .arch import Arch
from .builder import Obstacle, OpBuilder
from .errors import BuildError, ToolchainError
from .instantiations import CudaKernel
from .key import CompileJob

# nvcc needs about this for the largest unit.
_MEMORY_BYTES = 3 << 30


class CUDAOpBuilder(OpBuilder[CudaKernel]):
    DEVICE = "cuda"

    def sources(self) -> list[str]:
        return [f"{kernel.name}.cu" for kernel in self.prebuilt_kernels()]

    def include_paths(self) -> list[str]:
        """Ours and CUTLASS's; raises ToolchainError, with the remedy, without CUTLASS."""
        return [str(paths.csrc_root()), str(cutlass.find_cutlass().require())]

    def cxx_args(self) -> list[str]:
        """What nvcc hands to the host compiler; hidden symbols keep many units apart in one
        process.
        """
        return ["-fPIC", "-fvisibility=hidden"]

    def nvcc_args(self) -> list[str]:
        """-use_fast_math is not wanted: masks are infinities, and the exponential is ours
        already.
        """
        host = [word for flag in self.cxx_args() for word in ("-Xcompiler", flag)]
        # 20014: CUTLASS's host-device helpers called from our device functions are meant to be.
        return ["-std=c++17", "-O3", "--expt-relaxed-constexpr", "-diag-suppress=20014", *host]

    def extra_ldflags(self) -> list[str]:
        """The static runtime: one library serves every torch, and needs no libcudart.so."""
        return ["-cudart", "static", "-Xlinker", "--exclude-libs=ALL"]

    def filter_ccs(self, ccs: Sequence[str]) -> list[str]:
        """The templates begin at 7.0; what nvcc cannot do goes too."""
        supported = toolchain.targets(toolchain.find_nvcc()).real
        wanted = [one for text in ccs for one in arch.parse(text, source="compute capability")]
        return [str(one) for one in wanted if one.major >= 7 and one.real in supported]

    def compute_capability_args(self) -> list[str]:
        return list(arch.gencode(self.target_archs()))

    def requested_archs(self) -> tuple[Arch, ...]:
        """What TORCH_CUDA_ARCH_LIST asks for; empty: the device's own."""
        return arch.parse(env.text("TORCH_CUDA_ARCH_LIST"))

    def target_archs(self) -> tuple[Arch, ...]:
        """What an install compiles for: the list, else this machine's GPUs, else one of each
        family.

        Raises ToolchainError, naming all lists, when nothing is left.
        """
        supported = toolchain.targets(toolchain.find_nvcc()).real
        requested = self.requested_archs()
        capabilities = gpu.detect().capabilities
        if requested or not capabilities:
            return arch.intersect(requested, None, supported)
        return tuple(
            dict.fromkeys(arch.intersect((), device, supported)[0] for device in capabilities)
        )

    def arch_for(self, device: tuple[int, int]) -> Arch:
        """What to compile for on a device of this compute capability.

        Raises ToolchainError, naming what is requested, the device's and nvcc's own lists.
        """
        tool = toolchain.find_nvcc()
        if (
            not tool.ok
        ):  # nothing can be compiled; what was compiled earlier was for the device's own
            requested = self.requested_archs() or (Arch(*device),)
            return requested[0] if len(requested) == 1 else Arch(*device)
        return arch.intersect(self.requested_archs(), device, toolchain.targets(tool).real)[0]

    def obstacles(self) -> list[Obstacle]:
        found = self._lacks()
        devices = gpu.detect()
        try:
            elsewhere = bool(self.requested_archs()) or env.flag("DS_IGNORE_CUDA_DETECTION")
            if not devices.found and not elsewhere:
                remedy = (
                    "run on a machine with an NVIDIA GPU; to compile for another machine, set "
                    "TORCH_CUDA_ARCH_LIST to its architecture"
                )
                found.append(Obstacle(f"no GPU: {devices.reason}", remedy))
            if not found:
                self.target_archs()
        except BuildError as error:
            found.append(Obstacle(str(error), ""))
        return found

    def builder(self) -> list[CompileJob]:
        """Unlike a first call, an install compiles for all that was asked for, or says why not."""
        if requested := self.requested_archs():
            self.require(requested)
        return super().builder()

    def require(self, targets: Sequence[Arch]) -> None:
        """Raises BuildError, with reasons and remedies, unless all is here to compile for these."""
        lacks = self._lacks()
        if lacks:
            raise BuildError(
                f"{self.absolute_name()} cannot be compiled here: {'; '.join(map(str, lacks))}"
            )
        tool = toolchain.find_nvcc()
        supported = toolchain.targets(tool).real
        refused = [one for one in targets if one.major < 7 or one.real not in supported]
        if refused:
            possible = ";".join(str(one) for one in targets if one not in refused)
            raise ToolchainError(
                f"{self.absolute_name()} cannot be compiled for {', '.join(map(str, refused))}: "
                f"the templates begin at 7.0, and nvcc {tool.version} can do "
                f"{', '.join(supported)}; ask for {possible or 'one of these'}, or set CUDA_HOME "
                "to a toolkit that can (7.0 and 7.2 need CUDA 12.9 or older)"
            )

    def _lacks(self) -> list[Obstacle]:
        """What compiling needs and this machine does not have, whatever it is compiled for."""
        tools = (
            toolchain.find_nvcc(),
            toolchain.find_host_compiler(),
            toolchain.find_ninja(),
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

    def jobs(self, kernels: Sequence[CudaKernel]) -> list[CompileJob]:
        compiler, host = toolchain.find_nvcc(), toolchain.find_host_compiler()
        headers = cutlass.find_cutlass()
        lacks = [
            f"{what.name}: {what.reason}; {what.remedy}" for what in (compiler, host) if not what.ok
        ]
        if not headers.ok:
            lacks.append(f"CUTLASS: {headers.reason}; {headers.remedy}")
        local = ("-ccbin", str(host.path)) if host.ok else ()
        identity = (
            ("compiler", compiler.identity),
            ("host compiler", host.identity),
            *((name, env.text(name) or "") for name in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")),
        )
        include_dirs = (paths.csrc_root(), *([headers.include_dir] if headers.include_dir else []))
        return [
            CompileJob(
                name=kernel.name,
                source=kernel.source(),
                suffix=".cu",
                compiler=None if lacks else compiler.path,
                flags=(*self.nvcc_args(), *target.gencode()),
                include_dirs=include_dirs,
                link_flags=tuple(self.extra_ldflags()),
                identity=identity,
                local_flags=local,
                problem="; ".join(lacks),
                memory_bytes=_MEMORY_BYTES,
                label=f"{kernel.name} for {kernel.arch}",
                stand_ins=tuple(
                    (*self.nvcc_args(), *other.gencode()) for other in arch.stand_ins(target)
                ),
            )
            for kernel, target in zip(kernels, map(_target, kernels), strict=True)
        ]


def _target(kernel: CudaKernel) -> Arch:
    (one,) = arch.parse(kernel.arch, source="architecture of a kernel")
    return one
