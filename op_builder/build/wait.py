"""Waits for units that are being made, and shows their progress meanwhile."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from ..system import process_exit
from . import progress
from .build import GivenUpError, Unit

# A unit that still compiles after so many seconds, and after so many times its usual duration, is
# reported.
_SILENCE_S, _SILENCE_TIMES = 60.0, 3.0
_SILENCE_OF_UNKNOWN_S = 180.0


def wait_for(units: Sequence[Unit], display: progress.Silent) -> None:
    """Returns once all units are done; raises GivenUpError when no thread makes one any more."""
    watched = [_Watched(unit, display) for unit in units]
    while True:
        waiting = next((unit for unit in units if not unit.done.is_set()), None)
        for one in watched:
            one.tell_messages()
        fresh = [one.begin() for one in watched if one.unit.compiling and not one.is_shown]
        if fresh:
            display.begin(fresh)
        for one in watched:
            one.tell_end()
            one.tell_delay()
        if waiting is None:
            display.end()
            return
        waiting.done.wait(display.interval_s)
        process_exit.stop_if_ending()
        if waiting.is_abandoned():
            raise GivenUpError
        display.tick()


class _Watched:
    """One unit and what has been reported about it."""

    def __init__(self, unit: Unit, display: progress.Silent) -> None:
        self.unit = unit
        self.is_shown = False
        self._running_since: float | None = None
        self._display = display
        self._num_told = 0
        self._ended = False
        self._shown = progress.ShownUnit(unit.job.title, None)
        self._patience_s = _patience_s(None)

    def begin(self) -> progress.ShownUnit:
        self.is_shown = True
        job = self.unit.job
        self._shown = progress.ShownUnit(
            job.title, self.unit.last_seconds, job.usual_seconds, job.memory_bytes
        )
        self._patience_s = _patience_s(self._shown.expected_seconds)
        return self._shown

    def tell_messages(self) -> None:
        for message in self.unit.messages[self._num_told :]:
            self._display.note(message)
            self._num_told += 1

    def tell_end(self) -> None:
        if self.unit.seconds is not None and self.unit.done.is_set() and not self._ended:
            self._ended = True
            self._display.finished(self.unit.job.title, self.unit.seconds)

    def tell_delay(self) -> None:
        """Report a unit that takes much longer than usual: its compiler is slow, or hangs. Units
        that wait for a free core do not.
        """
        if self.unit.done.is_set() or self.unit.begun_file is None:
            return
        if self._running_since is None:
            if not os.path.exists(self.unit.begun_file):
                return
            self._running_since = time.monotonic()
        seconds = time.monotonic() - self._running_since
        if seconds < self._patience_s:
            return
        self._patience_s = 2 * seconds
        expected = self._shown.expected_seconds
        usual = "not known" if expected is None else f"{expected:.1f} s"
        self._display.note(
            f"still compiling {self.unit.job.title} after {seconds:.0f} s (usual: {usual}) with "
            f"{self.unit.job.compiler}; to stop it, interrupt this process (Ctrl-C)"
        )


def _patience_s(usual_s: float | None) -> float:
    if usual_s is None:
        return _SILENCE_OF_UNKNOWN_S
    return max(_SILENCE_S, _SILENCE_TIMES * usual_s)
