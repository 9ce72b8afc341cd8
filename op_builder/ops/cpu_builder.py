"""CPUOpBuilder: an op compiled by the host compiler for this processor's instruction set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from .. import env, paths
from ..cache.key import CompileJob
from ..errors import BuildError
from ..toolchain import cpu_isa, host_compiler, ninja
from .builder import Kernel, OpBuilder
from .status import Obstacle

# gcc 12 needs about 190 MiB for the largest unit; the rest is a margin for other compilers.
_MEMORY_BYTES = 512 << 20


class IsaKernel(Kernel, Protocol):
    @property
    def isa(self) -> str: ...  # one of cpu_isa.CPU_ISAS


IsaKernelT = TypeVar("IsaKernelT", bound=IsaKernel)


class CPUOpBuilder(OpBuilder[IsaKernelT]):
    DEVICE = "cpu"

    def sources(self) -> list[str]:
        return [f"{kernel.name}.cpp" for kernel in self.prebuilt_kernels()]

    def include_paths(self) -> list[str]:
        return [str(paths.csrc_root())]

    def cxx_args(self) -> list[str]:
        """Fused multiply-adds, but no -ffast-math: masks are infinities, and NaNs must be kept.
        It is turned off by name, since it is the default of Intel's icpx.

        No -fopenmp: cpu/parallel.h calls functions that every OpenMP runtime has; openmp.py chooses
        the runtime when a library is loaded.
        """
        arithmetic = ("-fno-fast-math", "-ffp-contract=fast")  # the first would undo the second
        return ["-std=c++17", "-O3", *arithmetic, "-fPIC", "-fvisibility=hidden"]

    def cpu_arch(self) -> str:
        """The flag for exactly this processor; units use `CpuIsa.flags`, the same everywhere."""
        return cpu_isa.cpu_arch()

    def simd_width(self) -> str:
        """The macro by which DeepSpeed's sources know this processor's vector width."""
        return cpu_isa.simd_width()

    def obstacles(self) -> list[Obstacle]:
        tools = (host_compiler.find_host_compiler(), ninja.find_ninja())
        found = [
            Obstacle(f"{tool.name}: {tool.reason}", tool.remedy) for tool in tools if not tool.ok
        ]
        try:
            paths.csrc_root()
            cpu_isa.detect()
        except BuildError as error:
            found.append(Obstacle(str(error), ""))
        return found + self.setting_obstacles()

    def jobs(self, kernels: Sequence[IsaKernelT]) -> list[CompileJob]:
        if not kernels:
            return []
        found = cpu_isa.detect()  # once: an unfit compiler is tried at each search for one
        compiler = found.compiler
        return [
            CompileJob(
                name=kernel.name,
                source=kernel.source(),
                suffix=".cpp",
                compiler=compiler.path if compiler.ok else None,
                flags=(*self.cxx_args(), *found.flags(kernel.isa)),
                include_dirs=(paths.csrc_root(),),
                link_flags=tuple(self.extra_ldflags()),
                identity=(("compiler", compiler.identity), *env.settings_of_compilers()),
                problem=""
                if compiler.ok
                else f"{compiler.name}: {compiler.reason}; {compiler.remedy}",
                memory_bytes=_MEMORY_BYTES,
                usual_seconds=kernel.usual_seconds,
                stand_ins=tuple(
                    (*self.cxx_args(), *flags) for flags in found.stand_ins(kernel.isa)
                ),
            )
            for kernel in kernels
        ]
