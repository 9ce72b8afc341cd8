"""OpBuilder: the interface by which every op is compiled, found and loaded."""

from __future__ import annotations

import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Generic, Protocol, TypeVar

from .. import env, offered
from ..cache.key import CompileJob
from ..cache.loaded_kernel import LoadedKernel
from ..errors import BuildError, UnfitToolkitError
from ..system import log, process_exit
from . import status
from .status import Obstacle, OpStatus


class Kernel(Protocol):
    """The interface of a kernel to its builder. Kernels are hashable by content: equal ones are
    one.
    """

    @property
    def name(self) -> str: ...

    @property
    def usual_seconds(self) -> float: ...

    def source(self) -> str: ...


KernelT = TypeVar("KernelT", bound=Kernel)

_MOST_UNFIT_TOOLKITS = 4  # tried before giving up

# Every kernel that a builder has loaded in this process, for a fast answer to later loads.
_ready: dict[object, LoadedKernel] = {}


class LoadedOp(Generic[KernelT]):
    """The kernels that one `load` has loaded."""

    def __init__(self, kernels: dict[KernelT, LoadedKernel]) -> None:
        self._kernels = kernels

    def kernel(self, kernel: KernelT) -> LoadedKernel:
        """The loaded kernel; raises KeyError for one that was not passed to `load`."""
        return self._kernels[kernel]

    @property
    def attention(self) -> Callable[..., None]:
        """`attention(q, k, v, bias1, bias2, o, lse)`, as in the module that DeepSpeed's `load`
        returns. Uses any kernel that the tensors need, not only the loaded ones. Raises BuildError
        unless deepspeed4science has been imported.
        """
        return offered.function("attention")

    @property
    def attention_bwd(self) -> Callable[..., None]:
        """`attention_bwd(go, q, k, v, o, lse, delta, bias1, bias2, gq, gk, gv, gb1, gb2)`."""
        return offered.function("attention_bwd")


class OpBuilder(ABC, Generic[KernelT]):
    """One op. Constructing a builder does nothing; its methods may run programs."""

    NAME: ClassVar[str]
    DEVICE: ClassVar[str]  # "cpu" or "cuda"
    BUILD_VAR: ClassVar[str]  # the variable that makes an install compile this op

    def absolute_name(self) -> str:
        """The op's dotted name in reports and messages."""
        return f"deepspeed4science.{self.NAME}"

    @abstractmethod
    def sources(self) -> list[str]:
        """File names of the generated units that `builder` compiles, one for each kernel."""

    @abstractmethod
    def include_paths(self) -> list[str]:
        """Include folders of the units, in order."""

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
        """nvcc's -gencode flags for those of the requested capabilities that op and nvcc support.
        The request itself is never changed.
        """
        return []

    @abstractmethod
    def obstacles(self) -> list[Obstacle]:
        """Why the op cannot be compiled here, with remedies; empty when it can. Never raises."""

    def setting_obstacles(self) -> list[Obstacle]:
        """The settings of builds that every compilation would refuse."""
        try:
            env.positive_int("MAX_JOBS")
        except BuildError as error:
            return [Obstacle(str(error), "")]
        return []

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether the op can be compiled here; `verbose`: log each obstacle as a warning."""
        obstacles = self.obstacles()
        if verbose:
            for obstacle in obstacles:
                log.warn(f"{self.NAME}: {obstacle}")
        return not obstacles

    def status(self) -> OpStatus:
        """The op's state on this machine: compiled, compilable, or not and why. Compiles nothing.

        A missing program or GPU is an obstacle in the result, not an exception.
        """
        obstacles = self.obstacles()
        try:
            env.flag("DS4S_VERBOSE")  # every load reads it, whatever is compiled already
            jobs = self.jobs(self.kernels_here())
        except BuildError as error:
            return OpStatus("not", obstacles=tuple(obstacles) or (Obstacle(str(error), ""),))
        return status.of(jobs, obstacles)

    @abstractmethod
    def default_kernels(self) -> list[KernelT]:
        """The kernels that a first call in float32 on this machine would need."""

    @abstractmethod
    def prebuilt_kernels(self) -> list[KernelT]:
        """The kernels that an install compiles."""

    def kernels_here(self) -> list[KernelT]:
        """Those of `prebuilt_kernels` that calls on this machine choose; the report counts them."""
        return self.prebuilt_kernels()

    @abstractmethod
    def jobs(self, kernels: Sequence[KernelT]) -> list[CompileJob]:
        """How to compile each of `kernels` here.

        A missing compiler is no error yet: the library may exist already.
        """

    def builder(self) -> list[CompileJob]:
        """The jobs of an install, for `prebuild.build_into`.

        Raises BuildError, with every reason and remedy, where they cannot be compiled here.
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
        """Load kernels: loaded in this process -> compiled at install -> cache -> compiled now.

        kernels   the kernels to load; None: `default_kernels()`
        verbose   show progress on stderr while kernels are compiled

        Raises CompileError, ToolchainError or BuildError when a kernel can be neither found nor
        compiled.
        """
        return self._load(verbose, kernels, skip_prebuilt=False)

    def jit_load(
        self, verbose: bool = True, kernels: Sequence[KernelT] | None = None
    ) -> LoadedOp[KernelT]:
        """As `load`, but without kernels compiled at install, unless they are loaded already."""
        return self._load(verbose, kernels, skip_prebuilt=True)

    def prefetch(self, kernels: Sequence[KernelT]) -> None:
        """Begin to load `kernels` in the background; a later `load` waits and raises errors."""
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
                    # An unfit one is remembered, so that the next one is chosen.
                    with contextlib.suppress(UnfitToolkitError):
                        loaded = load(self.jobs(missing))
                        break
                else:
                    loaded = load(self.jobs(missing))
            _ready.update(zip(missing, loaded, strict=True))
        return LoadedOp({kernel: _ready[kernel] for kernel in wanted})
