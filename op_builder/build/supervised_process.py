"""A program that ends, with all processes that it has started, on request or when this process
dies.

    program = SupervisedProcess([...], env)
    for line in program.lines(): ...      # its output, line by line
    program.cancel()                      # from any thread

A shell beside the program reads a pipe whose other end this process holds. The pipe closes when
this process closes it or dies, in whatever way, and the shell then ends the program. Both run in a
session of their own: Ctrl-C does not reach them, since this process decides what to stop, and
processes that do not end on request can be found there and killed.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence

_LISTEN_S = 0.2
_GRACE_S = 2.0  # from the request to end until remaining processes are killed

# $0 is the program. The watching shell must not keep the program's output open, nor the program the
# pipe. Where memory runs out, the system ends a compiler and not this process, which has more.
_WATCHED = """\
{ echo 1000 > /proc/self/oom_score_adj; } 2> /dev/null
"$0" "$@" 3<&- & program=$!
{ read -r _ <&3; kill "$program"; } > /dev/null 2>&1 & watcher=$!
exec 3<&-
wait "$program"; code=$?
kill "$watcher" 2> /dev/null
exit "$code"
"""

_pipes: set[int] = set()  # our ends, so that a forked child can close its copies


class SupervisedProcess:
    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Raises OSError when it cannot be started."""
        theirs, self._pipe = os.pipe()
        _pipes.add(self._pipe)
        self._asked_to_end: float | None = None
        try:
            # The pipe is descriptor 3 of the shell: not every shell can name numbers above 9.
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", f"exec 3<&0 0</dev/null\n{_WATCHED}", *command],
                stdin=theirs,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        except BaseException:
            self._let_go()
            raise
        finally:
            os.close(theirs)

    def lines(self) -> Iterator[str]:
        """Its output, line by line, until it and all processes that it started have ended."""
        stream = self._process.stdout
        assert stream is not None
        rest = b""
        with stream, selectors.DefaultSelector() as selector:
            selector.register(stream, selectors.EVENT_READ)
            while True:
                if selector.select(_LISTEN_S):
                    block = os.read(stream.fileno(), 1 << 16)
                    if not block:
                        break
                    *whole, rest = (rest + block).split(b"\n")
                    for line in whole:
                        yield line.decode(errors="replace")
                self._kill_what_does_not_end()
        if self._asked_to_end is not None:
            self.kill()  # processes that it started and left behind
        self._let_go()
        self._process.wait()

    @property
    def code(self) -> int | None:
        """Exit code: above 128, or below 0, where a signal ended it; None until `lines` ends."""
        return self._process.returncode

    def cancel(self) -> None:
        """Request its end; `lines` enforces it."""
        if self._asked_to_end is None:
            self._asked_to_end = time.monotonic()
            self._let_go()

    def end(self) -> None:
        """End the program and all that it started, now."""
        self.cancel()
        self.kill()
        self._process.wait()

    def kill(self) -> None:
        """Kill all processes that are still in its session."""
        for process in _session(self._process.pid):
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)

    def _kill_what_does_not_end(self) -> None:
        asked = self._asked_to_end
        if asked is not None and time.monotonic() - asked > _GRACE_S:
            self.kill()

    def _let_go(self) -> None:
        if self._pipe in _pipes:
            _pipes.discard(self._pipe)
            os.close(self._pipe)


def _session(leader: int) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError, ValueError, IndexError):
                with open(f"/proc/{name}/stat", "rb") as stream:
                    fields = stream.read().rpartition(b")")[2].split()
                if int(fields[3]) == leader:
                    found.append(int(name))
    return found


def forget_after_fork() -> None:
    """In a forked child: close the pipes, which would otherwise stay open when the parent dies."""
    for pipe in _pipes:
        with contextlib.suppress(OSError):
            os.close(pipe)
    _pipes.clear()
