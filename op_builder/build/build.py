"""Makes libraries that do not exist yet, in a thread: lock, compile, verify, publish, load."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from .. import paths
from ..cache import evict, lock, search
from ..cache.cache import last_seconds
from ..cache.key import CompileJob, Hashes
from ..cache.loaded_kernel import LoadedKernel
from ..cache.lock import Failure, Holder, Note, UnitLock
from ..cache.publish import Built
from ..cache.search import Root
from ..errors import BuildError, CompileError, ToolchainError
from ..system import log, process_exit, shortages
from ..toolchain import ninja
from . import workdir
from .compile_error import explain, is_lasting
from .ninja_run import NinjaRun, begun_file
from .verify import verify_and_publish

# Seconds between attempts at a lock that another process holds. They grow: hundreds of processes
# may be waiting on one file server.
_POLL_S, _POLL_GROWTH, _POLL_MOST_S = 0.01, 1.25, 0.25

# Seconds to wait for another process that compiles the same unit before compiling it here: a
# stopped builder, or a lock that a file server has not freed, must not block others for ever.
_PATIENCE_S = 300.0
_PATIENCE_TIMES = 10.0  # and at least so many times the duration of the last compilation


class GivenUpError(BuildError):
    """The thread that was making a unit stopped before it was done: others may start over."""

    def __init__(self) -> None:
        super().__init__("compiling was interrupted; call again to go on")


@dataclass(frozen=True)
class Order:
    """How a job was requested."""

    background: bool = False  # by `start`: perhaps nobody waits
    skip_prebuilt: bool = False


@dataclass(eq=False)
class Unit:
    """One job in progress; written by the building thread, read by threads that wait for `done`."""

    job: CompileJob
    order: Order = Order()
    maker: threading.Thread = field(default_factory=threading.current_thread)
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    together: threading.Event | None = None  # set once all that are compiled at once begin
    begun_file: Path | None = None  # appears when its own compiler is started
    last_seconds: float | None = None  # duration of its last compilation
    seconds: float | None = None  # set when it was compiled here
    messages: list[str] = field(default_factory=list)

    @property
    def compiling(self) -> bool:
        return self.together is not None and self.together.is_set()

    def is_abandoned(self) -> bool:
        """Whether no thread makes it any more: its thread is gone, or is the calling one."""
        if self.done.is_set():
            return False
        return self.maker is threading.current_thread() or (
            self.maker.ident is not None and not self.maker.is_alive() and not self.done.is_set()
        )


class Build:
    """One thread's work: each unit is handed to `succeed` or `fail` as early as possible."""

    def __init__(
        self,
        target: Callable[[Build], None],
        roots: tuple[Root, ...],
        succeed: Callable[[Unit, LoadedKernel], None],
        fail: Callable[[Unit, BaseException], None],
    ) -> None:
        self._target = target
        self.thread = threading.Thread(target=self._run, name="ds4s-build", daemon=True)
        self._succeed, self._fail = succeed, fail
        self._roots, self._root = roots, roots[-1].path
        self._cancelled = threading.Event()
        self._ninja_run: NinjaRun | None = None
        self._held: dict[str, UnitLock] = {}

    def start(self) -> bool:
        """False when no more threads may be started."""
        try:
            self.thread.start()
        except RuntimeError:
            return False
        return True

    def _run(self) -> None:
        with process_exit.exempt():  # the loader cancels it
            self._target(self)

    def run_here(self) -> None:
        """Build in the calling thread, which then cannot show progress."""
        self._target(self)

    def join(self, timeout_s: float) -> None:
        if self.thread.is_alive():  # it may never have been started
            self.thread.join(timeout_s)

    def cancel(self) -> None:
        """Stop soon; units not finished yet fail."""
        self._cancelled.set()
        running = self._ninja_run
        if running is not None:
            running.cancel()

    def make(self, units: list[Unit]) -> None:
        """Never waits for a lock while holding another: no two processes wait for each other."""
        notes: dict[str, Note | None] = {}  # what each contended lock said when first met
        began = time.monotonic()
        remaining = list(units)
        pause = _POLL_S
        try:
            while remaining:
                self._check_cancelled()
                ready = [unit for unit in remaining if self._may_build(unit, notes, began)]
                remaining = [u for u in remaining if u not in ready and not u.done.is_set()]
                if ready:
                    self._make([unit for unit in ready if not unit.done.is_set()])
                elif remaining:
                    self._cancelled.wait(pause)
                    pause = min(pause * _POLL_GROWTH, _POLL_MOST_S)
        finally:
            for held in self._held.values():
                held.release()
            self._make_room()  # also when the process ends just now: it waits for us

    def _make_room(self) -> None:
        """Keep the cache within its limit. Installs and shared folders are left as they are."""
        root = self._roots[-1]
        if root.origin == "cache" and not root.shared:
            try:
                evict.make_room(root.path)
            except BuildError as error:
                log.warn_once(str(error))

    def _may_build(self, unit: Unit, notes: dict[str, Note | None], began: float) -> bool:
        """Whether to compile the unit now: its lock is ours, or locks do not work here, or its
        holder took too long.
        """
        ident = unit.job.ident
        held = UnitLock(self._root, ident)
        try:
            if not held.try_acquire():
                return self._wait_longer(unit, held, notes, began)
        except lock.NoLockError:
            return True
        self._held[ident] = held
        left = held.previous
        tried = ident in notes and left != notes[ident]  # by another process, while we waited
        if tried and isinstance(left, Failure) and left.files == _files(unit.job):
            held.write(left)
            self._finish(unit, CompileError(left.message))
            return False
        kernel = search.load_existing(unit.job, self._roots, Hashes())
        if kernel is not None:
            self._finish(unit, kernel)
        return kernel is None

    def _wait_longer(
        self, unit: Unit, held: UnitLock, notes: dict[str, Note | None], began: float
    ) -> bool:
        if unit.job.ident not in notes:
            note = notes[unit.job.ident] = held.read()
            who = note if isinstance(note, Holder) else "another process"
            unit.messages.append(f"waiting for {who}, which is compiling {unit.job.title}")
        if time.monotonic() - began < _PATIENCE_S:
            return False
        usual = last_seconds(self._root, unit.job.name) or 0.0
        patience = max(_PATIENCE_S, _PATIENCE_TIMES * usual)
        if time.monotonic() - began < patience:
            return False
        log.warn_once(f"{held.path} was held for {patience:.0f} s; compiling without it")
        return True

    def _make(self, units: list[Unit]) -> None:
        if not units:
            return
        for unit in units:
            search.tell_uncovered(unit.job, self._roots)
            try:
                _require_compiler(unit.job)
            except ToolchainError as lack:
                self._finish(unit, lack)
        units = [unit for unit in units if not unit.done.is_set()]
        if not units:
            return
        if self._roots[-1].origin == "cache" and (note := paths.cache_note()):
            log.warn_once(note)
        folder = workdir.create()
        by_ident = {unit.job.ident: unit for unit in units}
        private: list[Path] = []
        together = threading.Event()

        def on_built(built: Built) -> None:
            unit = by_ident[built.job.ident]
            try:
                unit.seconds = built.seconds
                kernel = verify_and_publish(built, self._roots[-1])
                if kernel.path == built.library:
                    private.append(kernel.path)
                self._finish(unit, kernel)
            except (OSError, BuildError) as error:
                self._finish(unit, error)

        for unit in units:
            unit.last_seconds = last_seconds(self._root, unit.job.name)
            unit.begun_file = begun_file(folder, unit.job)
            unit.together = together
        together.set()
        try:
            self._ninja_run = NinjaRun(folder, [unit.job for unit in units], _ninja())
            self._check_cancelled()
            failures = self._ninja_run.run(on_built)
            self._check_cancelled()
            for failed in failures:
                error = explain(failed, self._root / "failed")
                held = self._held.get(failed.job.ident)
                if held is not None and is_lasting(failed):
                    held.write(Failure(str(error), _files(failed.job), time.time()))
                self._finish(by_ident[failed.job.ident], error)
        except OSError as error:
            remedy = shortages.remedy(str(error)) or "free some space there or set TMPDIR"
            raise BuildError(f"compiling in {folder} failed: {error}; {remedy}") from error
        finally:
            self._ninja_run = None
            if not private:
                workdir.remove(folder)

    def _finish(self, unit: Unit, outcome: LoadedKernel | BaseException) -> None:
        held = self._held.pop(unit.job.ident, None)
        if isinstance(outcome, LoadedKernel):
            self._succeed(unit, outcome)
        else:
            self._fail(unit, outcome)
        if held is not None:
            held.release()

    def _check_cancelled(self) -> None:
        if self._cancelled.is_set():
            raise GivenUpError


def _require_compiler(job: CompileJob) -> None:
    if job.compiler is None:
        raise ToolchainError(job.problem)
    if job.prove is not None:
        job.prove()


def _files(job: CompileJob) -> tuple[str, ...]:
    """The files of which a job is made here: an error is shared by processes with the same ones."""
    return (str(job.compiler), *map(str, job.include_dirs))


def _ninja() -> Path:
    tool = ninja.find_ninja()
    if not tool.ok or tool.path is None:
        raise ToolchainError(f"{tool.reason}; {tool.remedy}")
    return Path(tool.path)
