"""The state behind jit.py: one thread claims a job and finds or makes its library; others wait.

A loader searches a list of folders and writes to the last one. The process has one loader (jit.py);
prebuild.py makes its own, which writes elsewhere.

A claim ends with the call that made it: any exception, Ctrl-C included, gives the units up. A
thread that waits for a unit that was given up, or whose thread is gone, claims it itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from .. import env
from ..cache import search
from ..cache.key import CompileJob, Hashes
from ..cache.loaded_kernel import LoadedKernel
from ..cache.search import Root
from ..system import process_exit
from . import progress
from .build import Build, GivenUpError, Order, Unit
from .wait import wait_for

# Stopped compilers are gone in well under a second, but publishing on a slow disk takes longer.
_LAST_WAIT_S = 5.0


class Loader:
    def __init__(self, roots: Callable[[], tuple[Root, ...]]) -> None:
        """`roots()`: the folders to search, in order; the last one is written."""
        self._roots = roots
        self._loaded: dict[str, LoadedKernel] = {}
        self._ending = False
        self.forget_threads()

    def forget_threads(self) -> None:
        """Reset the state of threads: at the start, and in a forked child, which has none."""
        self._guard = threading.Lock()
        # In progress, or failed in the background and not loaded since.
        self._pending: dict[str, Unit] = {}
        self._builds: set[Build] = set()

    def load(
        self, jobs: Sequence[CompileJob], *, verbose: bool = True, skip_prebuilt: bool = False
    ) -> list[LoadedKernel]:
        try:
            return [self._loaded[job.ident] for job in jobs]
        except KeyError:
            pass
        display = progress.display(_wants_messages(verbose))
        with process_exit.slow_section():
            while True:
                try:
                    self._load(jobs, Order(skip_prebuilt=skip_prebuilt), display)
                except GivenUpError:  # by another thread: claimed again, here or by a third thread
                    if self._ending:
                        raise
                else:
                    return [self._loaded[job.ident] for job in jobs]

    def _load(self, jobs: Sequence[CompileJob], order: Order, display: progress.Silent) -> None:
        units: list[Unit] = []
        mine: list[Unit] = []
        build: Build | None = None
        try:
            self._claim(jobs, order, units, mine)
            hashes = Hashes()
            missing = [unit for unit in mine if not self._try_existing(unit, hashes)]
            if missing:
                build = self._build(missing, search_first=False)
                if not build.start():
                    build.run_here()
            wait_for(units, display)
        except BaseException:  # Ctrl-C: the units of this call are given up
            self._give_up(mine, build)
            raise
        for unit in units:
            if unit.error is not None:
                self._forget(unit)
                raise unit.error

    def loaded(self) -> tuple[LoadedKernel, ...]:
        return tuple(self._loaded.values())

    def start(self, jobs: Sequence[CompileJob]) -> None:
        mine: list[Unit] = []
        build: Build | None = None
        try:
            self._claim(jobs, Order(background=True), [], mine)
            if mine:
                build = self._build(mine, search_first=True)
                if not build.start():
                    self._give_up(mine, build)
        except BaseException as error:
            self._give_up(mine, build)
            if not isinstance(error, Exception):
                raise

    def stop(self) -> None:
        """Stop background builds, and wait for them briefly."""
        self._ending = True
        process_exit.begin()
        with self._guard:
            builds = list(self._builds)
        for build in builds:
            build.cancel()
        for build in builds:
            build.join(_LAST_WAIT_S)

    def _claim(
        self, jobs: Sequence[CompileJob], order: Order, units: list[Unit], mine: list[Unit]
    ) -> None:
        """Fills `units` with the units of the jobs that are not loaded yet, and `mine` with those
        that the caller has to make. Each is entered before another thread can wait for it.
        """
        with self._guard:
            for job in jobs:
                if job.ident in self._loaded or any(job.ident == u.job.ident for u in units):
                    continue
                unit = self._pending.get(job.ident)
                if unit is None or unit.is_abandoned():
                    unit = Unit(job, order)
                    mine.append(unit)
                    self._pending[job.ident] = unit
                units.append(unit)

    def _give_up(self, mine: list[Unit], build: Build | None) -> None:
        if build is not None:
            build.cancel()
            build.join(_LAST_WAIT_S)
            with self._guard:
                self._builds.discard(build)
        for unit in mine:
            self._forget(unit)
            if not unit.done.is_set():
                unit.error = GivenUpError()
                unit.done.set()

    def _try_existing(self, unit: Unit, hashes: Hashes) -> bool:
        try:
            kernel = search.load_existing(unit.job, self._searched(unit.order), hashes)
        except Exception as error:
            self._fail(unit, error)
            return True
        if kernel is not None:
            self._succeed(unit, kernel)
        return kernel is not None

    def _build(self, units: list[Unit], *, search_first: bool) -> Build:
        """A build of these units, not started yet."""

        def run(build: Build) -> None:
            left = units
            try:
                if search_first:
                    hashes = Hashes()
                    left = [unit for unit in units if not self._try_existing(unit, hashes)]
                if left:
                    build.make(left)
            except BaseException as error:
                for unit in left:
                    if not unit.done.is_set():
                        self._fail(unit, error)
            finally:
                with self._guard:
                    self._builds.discard(build)

        build = Build(run, self._searched(units[0].order), self._succeed, self._fail)
        with self._guard:
            self._builds.add(build)
        for unit in units:
            unit.maker = build.thread
        return build

    def _searched(self, order: Order) -> tuple[Root, ...]:
        roots = self._roots()
        return tuple(root for root in roots if not order.skip_prebuilt or root.origin != "prebuilt")

    def _succeed(self, unit: Unit, kernel: LoadedKernel) -> None:
        with self._guard:
            self._loaded[unit.job.ident] = kernel
        self._forget(unit)
        unit.done.set()

    def _fail(self, unit: Unit, error: BaseException) -> None:
        """Hand out an error: after `start` it is kept for the next `load`, otherwise the waiting
        threads raise it.
        """
        unit.error = error
        if not unit.order.background:
            self._forget(unit)
        unit.done.set()

    def _forget(self, unit: Unit) -> None:
        with self._guard:
            if self._pending.get(unit.job.ident) is unit:
                del self._pending[unit.job.ident]


def _wants_messages(verbose: bool) -> bool:
    forced = env.flag("DS4S_VERBOSE")
    return verbose if forced is None else forced
