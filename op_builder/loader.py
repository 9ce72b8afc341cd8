"""The state behind jit.py: one thread claims a job, finds or makes its library; others wait.

A loader searches and writes one list of folders. The process has one (jit.py); prebuild.py makes
its own, which writes elsewhere.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from . import env, progress, search
from .build import Build, Order, Unit
from .key import CompileJob, Hashes
from .loaded import LoadedKernel
from .search import Root

# Stopped compilers are gone in well under a second, but publishing on a slow disk takes longer.
_LAST_WAIT_S = 5.0


class Loader:
    def __init__(self, roots: Callable[[], tuple[Root, ...]]) -> None:
        """`roots()`: the folders to search, in order; the last one is written."""
        self._roots = roots
        self._loaded: dict[str, LoadedKernel] = {}
        self.forget_threads()

    def forget_threads(self) -> None:
        """At the start, and in a forked child, which has the libraries but not the threads."""
        self._guard = threading.Lock()
        self._pending: dict[str, Unit] = {}  # being made, or failed in the background and unasked
        self._builds: set[Build] = set()

    def load(
        self, jobs: Sequence[CompileJob], *, verbose: bool = True, skip_prebuilt: bool = False
    ) -> list[LoadedKernel]:
        try:
            return [self._loaded[job.ident] for job in jobs]
        except KeyError:
            pass
        units, mine = self._claim(jobs, Order(skip_prebuilt=skip_prebuilt))
        hashes = Hashes()
        missing = [unit for unit in mine if not self._try_existing(unit, hashes)]
        build = self._begin(missing, search_first=False) if missing else None
        try:
            self._follow(units, progress.display(_wants_messages(verbose)))
        except BaseException:  # Ctrl-C: nobody else wants what this call began
            if build is not None:
                build.cancel()
                build.join(_LAST_WAIT_S)
            raise
        for unit in units:
            if unit.error is not None:
                self._forget(unit)
                raise unit.error
        return [self._loaded[job.ident] for job in jobs]

    def loaded(self) -> tuple[LoadedKernel, ...]:
        return tuple(self._loaded.values())

    def start(self, jobs: Sequence[CompileJob]) -> None:
        _, mine = self._claim(jobs, Order(background=True))
        if mine:
            self._begin(mine, search_first=True)

    def stop(self) -> None:
        """Stop what runs in the background, and wait for it shortly."""
        with self._guard:
            builds = list(self._builds)
        for build in builds:
            build.cancel()
        for build in builds:
            build.join(_LAST_WAIT_S)

    def _claim(self, jobs: Sequence[CompileJob], order: Order) -> tuple[list[Unit], list[Unit]]:
        """The units of what is not loaded yet, and those among them that the caller has to make."""
        units: dict[str, Unit] = {}
        mine = []
        with self._guard:
            for job in jobs:
                if job.ident in self._loaded or job.ident in units:
                    continue
                unit = self._pending.get(job.ident)
                if unit is None:
                    unit = self._pending[job.ident] = Unit(job, order)
                    mine.append(unit)
                units[job.ident] = unit
        return list(units.values()), mine

    def _try_existing(self, unit: Unit, hashes: Hashes) -> bool:
        try:
            kernel = search.load_existing(unit.job, self._searched(unit.order), hashes)
        except BaseException as error:
            self._fail(unit, error)
            return True
        if kernel is not None:
            self._succeed(unit, kernel)
        return kernel is not None

    def _begin(self, units: list[Unit], *, search_first: bool) -> Build:
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
        build.start()
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
        """After `start` the error stays for the next `load`; otherwise those who wait have it."""
        unit.error = error
        if not unit.order.background:
            self._forget(unit)
        unit.done.set()

    def _forget(self, unit: Unit) -> None:
        with self._guard:
            if self._pending.get(unit.job.ident) is unit:
                del self._pending[unit.job.ident]

    def _follow(self, units: list[Unit], display: progress.Silent) -> None:
        """Until all units are done, showing what happens to them."""
        told: dict[str, int] = {}
        begun: set[str] = set()
        finished: set[str] = set()
        while True:
            waiting = next((unit for unit in units if not unit.done.is_set()), None)
            for unit in units:
                name = unit.job.title
                for message in unit.messages[told.get(name, 0) :]:
                    display.note(message)
                told[name] = len(unit.messages)
            fresh = [unit for unit in units if unit.compiling and unit.job.title not in begun]
            if fresh:
                display.begin([progress.Unit(unit.job.title, unit.last_seconds) for unit in fresh])
                begun.update(unit.job.title for unit in fresh)
            for unit in units:
                name = unit.job.title
                if unit.seconds is not None and unit.done.is_set() and name not in finished:
                    finished.add(name)
                    display.finished(name, unit.seconds)
            if waiting is None:
                display.end()
                return
            waiting.done.wait(display.interval_s)
            display.tick()


def _wants_messages(verbose: bool) -> bool:
    forced = env.flag("DS4S_VERBOSE")
    return verbose if forced is None else forced
