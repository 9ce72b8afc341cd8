"""OpBuilder: what every op must tell so that it can be compiled, found and loaded."""

from __future__ import annotations

import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Generic, Protocol, TypeVar

from .. import offered
from ..cache.key import CompileJob
from ..cache.loaded_kernel import LoadedKernel
from ..errors import BuildError, UnfitToolkitError
from ..system import log, process_exit
from . import status
from .status import Obstacle, OpStatus


class Kernel(Protocol):
    """What a builder must know of a kernel. Equal ones are one kernel: hashable by content."""

    @property
    def name(self) -> str: ...

    @property
    def usual_seconds(self) -> float: ...

    def source(self) -> str: ...


KernelT = TypeVar("KernelT", bound=Kernel)

_MOST_UNFIT_TOOLKITS = 4  # to pass over before giving up

# Every kernel that a builder has loaded in this process: asking again costs a look into this.
_ready: dict[object, LoadedKernel] = {}


class LoadedOp(Generic[KernelT]):
    """The kernels of one op that have been loaded so far by one `load`."""

    def __init__(self, kernels: dict[KernelT, LoadedKernel]) -> None:
        self._kernels = kernels

    def kernel(self, kernel: KernelT) -> LoadedKernel:
        """Raises KeyError for a kernel that the `load` was not asked for."""
        return self._kernels[kernel]

    @property
    def attention(self) -> Callable[..., None]:
        """`attention(q, k, v, bias1, bias2, o, lse)`, as on what DeepSpeed's `load` returns. With
        any kernel that the tensors need, not only the loaded ones. Raises BuildError unless
        deepspeed4science has been imported.
        """
        return offered.function("attention")

    @property
    def attention_bwd(self) -> Callable[..., None]:
        """`attention_bwd(go, q, k, v, o, lse, delta, bias1, bias2, gq, gk, gv, gb1, gb2)`."""
        return offered.function("attention_bwd")


class OpBuilder(ABC, Generic[KernelT]):
    """One op. Constructing a builder does nothing; its methods may run programs."""

    NAME: ClassVar[str]
    DEVICE: ClassVar[str]  # "cpu" or "cuda": what the op runs on
    BUILD_VAR: ClassVar[str]  # the variable that asks for this op while installing

    def absolute_name(self) -> str:
        """The op's dotted name, by which reports and messages speak of it."""
        return f"deepspeed4science.{self.NAME}"

    @abstractmethod
    def sources(self) -> list[str]:
        """File names of the generated units that `builder` compiles, one for each kernel."""

    @abstractmethod
    def include_paths(self) -> list[str]:
        """Folders in which the units' headers are looked for, in order."""

    @abstractmethod
    def cxx_args(self) -> list[str]:
        """Flags for the host compiler that all units share; none names a folder."""

    def nvcc_args(self) -> list[str]:
        """Flags for nvcc that all units share; empty for an op that nvcc does not compile."""
        return []

    def extra_ldflags(self) -> list[str]:
        """Flags for linking a unit; none names a folder."""
        return []

    def filter_ccs(self, ccs: Sequence[str]) -> list[str]:
        """Those of `ccs` ("8.0", "9.0a", "8.6+PTX") that the op can be compiled for."""
        return []

    def compute_capability_args(self) -> list[str]:
        """nvcc's -gencode flags for the requested capabilities, cut to what op and nvcc can do;
        never written back.
        """
        return []

    @abstractmethod
    def obstacles(self) -> list[Obstacle]:
        """Why nothing can be compiled here, with remedies; empty when it can. Never raises."""

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether the op can be compiled here; `verbose`: log each obstacle as a warning."""
        obstacles = self.obstacles()
        if verbose:
            for obstacle in obstacles:
                log.warn(f"{self.NAME}: {obstacle}")
        return not obstacles

    def status(self) -> OpStatus:
        """How ready the op is here: compiled, compilable, or not and why. Compiles nothing.

        Never raises for a machine that lacks something: that is an obstacle.
        """
        obstacles = self.obstacles()
        try:
            jobs = self.jobs(self.kernels_here())
        except BuildError as error:
            return OpStatus("not", obstacles=tuple(obstacles) or (Obstacle(str(error), ""),))
        return status.of(jobs, obstacles)

    @abstractmethod
    def default_kernels(self) -> list[KernelT]:
        """What a first call on this machine would need in float32."""

    @abstractmethod
    def prebuilt_kernels(self) -> list[KernelT]:
        """What an install compiles beforehand."""

    def kernels_here(self) -> list[KernelT]:
        """Those of `prebuilt_kernels` that calls on this machine choose: what a report counts."""
        return self.prebuilt_kernels()

    @abstractmethod
    def jobs(self, kernels: Sequence[KernelT]) -> list[CompileJob]:
        """How to compile each of `kernels` here.

        A missing compiler is no error yet: the library may exist already.
        """

    def builder(self) -> list[CompileJob]:
        """What an install has to compile, for `prebuild.build_into`.

        Raises BuildError, with every reason and remedy, when that is not possible here.
        """
        obstacles = self.obstacles()
        if obstacles:
            raise BuildError(
                f"{self.absolute_name()} cannot be compiled here: "
                + "; ".join(str(obstacle) for obstacle in obstacles)
            )
        return self.jobs(self.prebuilt_kernels())

    def load(
        self, verbose: bool = True, kernels: Sequence[KernelT] | None = None
    ) -> LoadedOp[KernelT]:
        """Loaded in this process -> compiled at install -> cache -> compiled now.

        kernels   which ones; None: `default_kernels()`
        verbose   show progress on stderr while something is compiled

        Raises CompileError, ToolchainError or BuildError when a kernel can be neither found nor
        compiled.
        """
        return self._load(verbose, kernels, skip_prebuilt=False)

    def jit_load(
        self, verbose: bool = True, kernels: Sequence[KernelT] | None = None
    ) -> LoadedOp[KernelT]:
        """As `load`, without what was compiled at install (unless it is loaded already)."""
        return self._load(verbose, kernels, skip_prebuilt=True)

    def prefetch(self, kernels: Sequence[KernelT]) -> None:
        """Make `kernels` ready in the background; a later `load` waits and raises errors."""
        from ..build import jit

        with process_exit.slow_section():
            jit.start(self.jobs(kernels))

    def _load(
        self, verbose: bool, kernels: Sequence[KernelT] | None, *, skip_prebuilt: bool
    ) -> LoadedOp[KernelT]:
        wanted = list(self.default_kernels() if kernels is None else kernels)
        missing = [kernel for kernel in wanted if kernel not in _ready]
        if missing:
            from ..build import jit

            load = functools.partial(jit.load, verbose=verbose, skip_prebuilt=skip_prebuilt)
            loaded: list[LoadedKernel] = []
            with process_exit.slow_section():
                for _ in range(_MOST_UNFIT_TOOLKITS):
                    with contextlib.suppress(UnfitToolkitError):  # known now, and passed over
                        loaded = load(self.jobs(missing))
                        break
                else:
                    loaded = load(self.jobs(missing))
            _ready.update(zip(missing, loaded, strict=True))
        return LoadedOp({kernel: _ready[kernel] for kernel in wanted})
