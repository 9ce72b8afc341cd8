"""The display of a compilation on stderr: a bar on a terminal, lines otherwise.

The waiting thread draws, never the building one: a build in the background is silent until a thread
waits for it. Lines go through `logging` at level INFO. Where the program has not set up logging,
they are shown on stderr nevertheless, since minutes of silence look like a hang.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from . import resources

logger = logging.getLogger("op_builder")

_BAR_WIDTH = 24
_USUAL_COLUMNS = 80
_REDRAW_S = 0.1
_LINES_AT_ONCE = 4


@dataclass(frozen=True)
class ShownUnit:
    name: str
    last_seconds: float | None  # None: never compiled into this cache
    usual_seconds: float | None = None  # duration on an ordinary machine
    memory_bytes: int = 0  # that compiling it may need, which limits how many run at once

    @property
    def expected_seconds(self) -> float | None:
        return self.usual_seconds if self.last_seconds is None else self.last_seconds

    def __str__(self) -> str:
        return self.name + self.expectation

    @property
    def expectation(self) -> str:
        if self.last_seconds is not None:
            return f" (took {self.last_seconds:.1f} s last time)"
        return f" (usually about {self.usual_seconds:.0f} s)" if self.usual_seconds else ""


class Silent:
    """Shows nothing."""

    interval_s = 0.2

    def begin(self, units: Sequence[ShownUnit]) -> None: ...

    def finished(self, name: str, seconds: float) -> None: ...

    def note(self, message: str) -> None: ...

    def tick(self) -> None: ...

    def end(self) -> None: ...


class Safe(Silent):
    """Wraps another display, and drops it when it fails: a display never fails a build."""

    def __init__(self, shown: Silent) -> None:
        self._shown = shown

    @property
    def interval_s(self) -> float:  # type: ignore[override]
        return self._shown.interval_s

    def begin(self, units: Sequence[ShownUnit]) -> None:
        self._try(lambda: self._shown.begin(units))

    def finished(self, name: str, seconds: float) -> None:
        self._try(lambda: self._shown.finished(name, seconds))

    def note(self, message: str) -> None:
        self._try(lambda: self._shown.note(message))

    def tick(self) -> None:
        self._try(self._shown.tick)

    def end(self) -> None:
        self._try(self._shown.end)

    def _try(self, show: Callable[[], None]) -> None:
        try:
            show()
        except Exception:  # a full disk, a closed pipe, a stream that raises
            self._shown = Silent()


class Lines(Silent):
    """A line for each unit when compiling begins, and one, counted, when it is finished."""

    def __init__(self) -> None:
        self._num_units = self._num_done = 0
        self._start = time.monotonic()

    def begin(self, units: Sequence[ShownUnit]) -> None:
        self._num_units += len(units)
        for unit in units[:_LINES_AT_ONCE]:
            self.note(f"compiling {unit} ...")
        if len(units) > _LINES_AT_ONCE:
            self.note(f"compiling {len(units) - _LINES_AT_ONCE} more ...")

    def finished(self, name: str, seconds: float) -> None:
        self._num_done += 1
        line = f"compiled {name} in {seconds:.1f} s"
        if self._num_units > _LINES_AT_ONCE:  # this may take minutes: show how far it is
            elapsed = time.monotonic() - self._start
            line = f"[{self._num_done}/{self._num_units}, {elapsed:.0f} s] {line}"
        self.note(line)

    def note(self, message: str) -> None:
        if logger.hasHandlers():
            logger.info("%s", message)
        else:
            sys.stderr.write(f"{message}\n")


class Bar(Silent):
    """One line, redrawn: progress, the unit that compiles, and the estimated remaining time."""

    interval_s = _REDRAW_S

    def __init__(self) -> None:
        self._units: dict[str, ShownUnit] = {}
        self._done: set[str] = set()
        self._start = time.monotonic()
        self._expected_s: float | None = None  # for all units; None: unknown
        self._width = 0

    def begin(self, units: Sequence[ShownUnit]) -> None:
        self._units.update((unit.name, unit) for unit in units)
        self._expected_s = _expected_seconds(list(self._units.values()))
        self.tick()

    def finished(self, name: str, seconds: float) -> None:
        self._done.add(name)
        self.tick()

    def note(self, message: str) -> None:
        self._draw("")
        sys.stderr.write(f"\r{message}\n")
        self.tick()

    def tick(self) -> None:
        if self._units:
            self._draw(self._line(time.monotonic() - self._start, _columns() - 1))

    def end(self) -> None:
        if self._width:
            sys.stderr.write("\n")
            sys.stderr.flush()
            self._width = 0

    def _line(self, elapsed: float, room: int) -> str:
        """The line, as much of it as fits, first the name and the remaining time: a line that wraps
        would be repeated instead of redrawn.
        """
        missing = [unit for name, unit in self._units.items() if name not in self._done]
        counts = f"{len(self._done)}/{len(self._units)} {elapsed:4.1f} s"
        if not missing:
            return f"{self._bar(elapsed, _BAR_WIDTH)} {counts}  compiled"[-room:]
        left = (self._expected_s or 0.0) - elapsed
        counts += f", {left:.0f} s left" if left >= 1.0 else ""
        name, expectation = missing[0].name, missing[0].expectation
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        for width, what in (
            (_BAR_WIDTH, f"compiling {name}{expectation}{more}"),
            (_BAR_WIDTH, f"compiling {name}{more}"),
            (_BAR_WIDTH // 2, f"compiling {name}{more}"),
            (_BAR_WIDTH // 2, name),
            (_BAR_WIDTH // 4, name),
        ):
            line = f"{self._bar(elapsed, width)} {counts}  {what}"
            if len(line) <= room:
                return line
        return f"{counts}  {name}"[:room]

    def _bar(self, elapsed: float, width: int) -> str:
        """The bar, by finished units and, between them, by elapsed time up to 95 %."""
        share = len(self._done) / len(self._units)
        if self._expected_s and share < 1.0:
            share = max(share, min(elapsed / self._expected_s, 0.95))
        full = int(share * width)
        return f"[{'#' * full}{'.' * (width - full)}]"

    def _draw(self, line: str) -> None:
        sys.stderr.write("\r" + line.ljust(self._width))
        sys.stderr.flush()
        self._width = len(line)


def _expected_seconds(units: Sequence[ShownUnit]) -> float | None:
    """The time for all units, as many at once as this machine can compile; None when one is
    unknown.
    """
    each = [unit.expected_seconds for unit in units]
    known = [seconds for seconds in each if seconds is not None]
    if len(known) < len(each):
        return None
    at_once = resources.parallel_jobs(max(unit.memory_bytes for unit in units))
    return max([*known, sum(known) / at_once])


def _columns() -> int:
    """Width of the terminal on stderr."""
    try:
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
        return max(columns, 20) if columns else _USUAL_COLUMNS
    except (OSError, ValueError, AttributeError):
        return _USUAL_COLUMNS


def display(verbose: bool) -> Silent:
    """The display for `verbose` and this stderr."""
    if not verbose:
        return Silent()
    try:
        on_terminal = sys.stderr.isatty()
    except Exception:  # no stderr, a closed one, or one of the program's own
        return Silent()
    return Safe(Bar() if on_terminal else Lines())
