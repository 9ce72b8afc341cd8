"""What a person sees while kernels compile, on stderr: a bar on a terminal, lines otherwise.

The waiting thread draws, never the one that builds: a build that runs in the background is silent
until somebody waits for it. Lines go through `logging` at level INFO; where the program has not set
up logging, they are shown on stderr nevertheless, since minutes of silence look like a hang.
"""

from __future__ import annotations

import logging
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

logger = logging.getLogger("op_builder")

_BAR_WIDTH = 24
_REDRAW_S = 0.1
_LINES_AT_ONCE = 4


@dataclass(frozen=True)
class Unit:
    name: str
    last_seconds: float | None  # None: never compiled into this cache

    def __str__(self) -> str:
        if self.last_seconds is None:
            return self.name
        return f"{self.name} (took {self.last_seconds:.1f} s last time)"


class Silent:
    """Shows nothing."""

    interval_s = 0.2

    def begin(self, units: Sequence[Unit]) -> None: ...

    def finished(self, name: str, seconds: float) -> None: ...

    def note(self, message: str) -> None: ...

    def tick(self) -> None: ...

    def end(self) -> None: ...


class Safe(Silent):
    """Another display for as long as it works: what can be shown never decides over a build."""

    def __init__(self, shown: Silent) -> None:
        self._shown = shown

    @property
    def interval_s(self) -> float:  # type: ignore[override]
        return self._shown.interval_s

    def begin(self, units: Sequence[Unit]) -> None:
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

    def begin(self, units: Sequence[Unit]) -> None:
        self._num_units += len(units)
        for unit in units[:_LINES_AT_ONCE]:
            self.note(f"compiling {unit} ...")
        if len(units) > _LINES_AT_ONCE:
            self.note(f"compiling {len(units) - _LINES_AT_ONCE} more ...")

    def finished(self, name: str, seconds: float) -> None:
        self._num_done += 1
        line = f"compiled {name} in {seconds:.1f} s"
        if self._num_units > _LINES_AT_ONCE:  # minutes, perhaps: how far it is
            elapsed = time.monotonic() - self._start
            line = f"[{self._num_done}/{self._num_units}, {elapsed:.0f} s] {line}"
        self.note(line)

    def note(self, message: str) -> None:
        if logger.hasHandlers():
            logger.info("%s", message)
        else:
            sys.stderr.write(f"{message}\n")


class Bar(Silent):
    """One line, redrawn: how far it is, going by how long it took last time, and what is left."""

    interval_s = _REDRAW_S

    def __init__(self) -> None:
        self._units: dict[str, Unit] = {}
        self._done: set[str] = set()
        self._start = time.monotonic()
        self._width = 0

    def begin(self, units: Sequence[Unit]) -> None:
        self._units.update((unit.name, unit) for unit in units)
        self.tick()

    def finished(self, name: str, seconds: float) -> None:
        self._done.add(name)
        self.tick()

    def note(self, message: str) -> None:
        self._draw("")
        sys.stderr.write(f"\r{message}\n")
        self.tick()

    def tick(self) -> None:
        if not self._units:
            return
        elapsed = time.monotonic() - self._start
        share = self._share(elapsed)
        full = int(share * _BAR_WIDTH)
        bar = "#" * full + "." * (_BAR_WIDTH - full)
        missing = [str(unit) for name, unit in self._units.items() if name not in self._done]
        what = f"compiling {missing[0]}" if missing else "compiled"
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        counts = f"{len(self._done)}/{len(self._units)}"
        self._draw(f"[{bar}] {counts} {elapsed:4.1f} s  {what}{more}")

    def end(self) -> None:
        if self._width:
            sys.stderr.write("\n")
            sys.stderr.flush()
            self._width = 0

    def _share(self, elapsed: float) -> float:
        """Finished units count whole; others by the clock and last time, up to 95 %."""
        total = 0.0
        for name, unit in self._units.items():
            if name in self._done:
                total += 1.0
            elif unit.last_seconds:
                total += min(elapsed / unit.last_seconds, 0.95)
        return total / len(self._units)

    def _draw(self, line: str) -> None:
        line = line[
            : max(shutil.get_terminal_size().columns - 1, 20)
        ]  # a wrapped line is not redrawn
        sys.stderr.write("\r" + line.ljust(self._width))
        sys.stderr.flush()
        self._width = len(line)


def display(verbose: bool) -> Silent:
    """The display for `verbose` and this stderr."""
    if not verbose:
        return Silent()
    try:
        on_terminal = sys.stderr.isatty()
    except Exception:  # no stderr, a closed one, or one of the program's own
        return Silent()
    return Safe(Bar() if on_terminal else Lines())
