"""The kernels of one backend, loaded when they are first asked for."""

from __future__ import annotations

from typing import Any

from op_builder import OpBuilder
from op_builder.cache.loaded_kernel import LoadedKernel


class Kernels:
    def __init__(self, builder: OpBuilder[Any]) -> None:
        self._builder = builder
        self._loaded: dict[Any, LoadedKernel] = {}
        self._prefetched: set[Any] = set()

    def load(self, spec: Any) -> LoadedKernel:
        """Raises BuildError."""
        kernel = self._loaded.get(spec)
        if kernel is None:
            kernel = self._loaded[spec] = self._builder.load(kernels=[spec]).kernel(spec)
        return kernel

    def prefetch(self, spec: Any) -> None:
        """Begin to make a kernel ready. Returns at once and leaves errors to `load`."""
        if spec not in self._prefetched:
            self._prefetched.add(spec)
            self._builder.prefetch([spec])
