"""A program and all that it starts, ended together: when it is told to, or when this process dies.

    program = SupervisedProcess([...], env)
    for line in program.lines(): ...      # what it says, as it comes
    program.cancel()                      # from any thread

A shell stands beside the program and reads a pipe that this process holds: the pipe closes when we
close it or when we die, however that happens, and the shell then ends the program. It is a session
of its own: Ctrl-C is for us to answer, who know what others wait for, and what does not end when it
is told to can be found and killed.
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
_GRACE_S = 2.0  # from the request to end to the killing of what is left

# $0 is the program. What ends it must not keep its output open, nor it the pipe.
_WATCHED = """\
"$0" "$@" 3<&- & program=$!
{ read -r _ <&3; kill "$program"; } > /dev/null 2>&1 & watcher=$!
exec 3<&-
wait "$program"; code=$?
kill "$watcher" 2> /dev/null
exit "$code"
"""

_pipes: set[int] = set()  # our ends, so that a forked child can let go of its copies


class SupervisedProcess:
    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Raises OSError when it cannot be started."""
        theirs, self._pipe = os.pipe()
        _pipes.add(self._pipe)
        self._asked_to_end: float | None = None
        try:
            # The shell finds the pipe as 3: numbers above 9 are not every shell's to name.
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
        """What it writes, line by line, until it has ended and with it all that it started."""
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
            self.kill()  # what it started and left behind
        self._let_go()
        self._process.wait()

    def cancel(self) -> None:
        """Ask it to end; `lines` sees to it that it does."""
        if self._asked_to_end is None:
            self._asked_to_end = time.monotonic()
            self._let_go()

    def end(self) -> None:
        """All of it, now."""
        self.cancel()
        self.kill()
        self._process.wait()

    def kill(self) -> None:
        """All that it started and that is still in its session, at once."""
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
    """In a forked child: let go of the pipes, which would outlive the parent's death."""
    for pipe in _pipes:
        with contextlib.suppress(OSError):
            os.close(pipe)
    _pipes.clear()
