"""The kernels of one backend, loaded when they are first needed, and the log lines about them."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

from op_builder import OpBuilder, env
from op_builder.cache.loaded_kernel import LoadedKernel
from op_builder.errors import BuildError

logger = logging.getLogger(__name__)


def is_verbose() -> bool:
    """Whether DS4S_VERBOSE is 1; the loader refuses values that are neither 1 nor 0."""
    with contextlib.suppress(BuildError):
        return env.flag("DS4S_VERBOSE") is True
    return False


class Kernels:
    def __init__(self, builder: OpBuilder[Any]) -> None:
        self._builder = builder
        self._loaded: dict[Any, LoadedKernel] = {}
        self._prefetched: set[Any] = set()
        self._told: set[str] = set()

    def load(self, spec: Any) -> LoadedKernel:
        """The loaded kernel. Raises BuildError."""
        kernel = self._loaded.get(spec)
        if kernel is None:
            kernel = self._loaded[spec] = self._builder.load(kernels=[spec]).kernel(spec)
        return kernel

    def prefetch(self, spec: Any) -> None:
        """Begin to compile or load a kernel. Returns at once and leaves errors to `load`."""
        if spec not in self._prefetched:
            self._prefetched.add(spec)
            self._builder.prefetch([spec])

    def tell_plan(self, kernel: LoadedKernel, params: bytes) -> None:
        """Log the plan of a kernel at its first call, under DS4S_VERBOSE=1."""
        if kernel.name in self._told:
            return
        self._told.add(kernel.name)
        if is_verbose() and (plan := kernel.plan(params)):
            with contextlib.suppress(Exception):  # an error in a log handler must not fail the call
                logger.warning("%s: %s", kernel.name, plan)
