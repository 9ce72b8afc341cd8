"""Ends a process safely while other threads are in the middle of a call.

The problem: when a process ends, Python unwinds the stack of a daemon thread as soon as the thread
needs the interpreter's lock again. If PyTorch's dispatcher is on that stack, its C++ frames abort
the process. Our calls are below the dispatcher.

The remedy: the end of the process waits until no other thread is inside a call of this package, up
to 1 s, or up to 5 s where it may be compiling. Further cases:

- A thread that calls again and again is stopped for good when it enters its next call. Between two
  calls it may be in PyTorch, too (to free a result, say). Daemon threads that are running
  therefore get up to 0.25 s to come to their next call.
- A stopped thread waits for a lock that is never released. It never needs the interpreter again, so
  Python leaves it alone.
- A thread that loops over PyTorch's own operators is not stopped, and aborts the process.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_LONGEST_QUICK_S, _LONGEST_SLOW_S = 1.0, 5.0
_LONGEST_BETWEEN_CALLS_S = 0.25
_LOOKS_WITHOUT_A_MOVE = 10  # threads seen so often at the same instructions wait for something else
_LOOK_EVERY_S = 0.005
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_OURS = (f"{_PACKAGE}/", f"{os.path.dirname(_PACKAGE)}/deepspeed4science/")

# Identifiers of threads.
_slow: set[int] = set()  # in a slow section
_stopped: set[int] = set()
_exempt: set[int] = set()  # their owner ends them
_ending = False


@contextmanager
def slow_section() -> Iterator[None]:
    """Encloses work that may take long, such as compiling. Sections may be nested."""
    me = threading.get_ident()
    if me in _slow:
        yield
        return
    stop_if_ending()
    _slow.add(me)
    try:
        yield
    finally:
        stop_if_ending()
        _slow.discard(me)


def begin() -> None:
    """Marks that the process is ending: from now on threads stop at the next check."""
    global _ending
    _ending = True


@contextmanager
def exempt() -> Iterator[None]:
    """Encloses all work of a thread whose owner ends it: it is neither stopped nor waited for."""
    me = threading.get_ident()
    _exempt.add(me)
    try:
        yield
    finally:
        _exempt.discard(me)


def stop_if_ending() -> None:
    """Never returns in a process that is ending."""
    me = threading.get_ident()
    if _ending and me not in _exempt and me != threading.main_thread().ident:
        _stop(me)


def stop_daemon_if_ending() -> None:
    """To be called at the beginning of every call. Never returns in a daemon thread of a process
    that is ending. Threads that Python did not start (autograd's) continue, since the main thread
    may be waiting for them.
    """
    if not _ending:
        return
    me = threading.current_thread()
    if me.daemon and not isinstance(me, threading._DummyThread):
        _stop(threading.get_ident())


def _stop(me: int) -> None:
    _stopped.add(me)
    forever = threading.Lock()
    forever.acquire()
    forever.acquire()


def _wait() -> None:
    begin()
    began = outside_since = time.monotonic()
    before, looks_without_a_move = None, 0
    while others := _others():
        inside = {thread for thread, frame in others.items() if _is_inside(frame)}
        position = {thread: (id(frame), frame.f_lasti) for thread, frame in others.items()}
        looks_without_a_move = looks_without_a_move + 1 if position == before else 0
        before = position
        now = time.monotonic()
        if inside:
            outside_since = now
            is_enough = now - began > (_LONGEST_SLOW_S if inside & _slow else _LONGEST_QUICK_S)
        else:
            is_enough = (
                looks_without_a_move >= _LOOKS_WITHOUT_A_MOVE
                or now - outside_since > _LONGEST_BETWEEN_CALLS_S
            )
        if is_enough:
            return
        time.sleep(_LOOK_EVERY_S)


def _others() -> dict[int, FrameType]:
    """Other threads that run Python, except those that have stopped."""
    known = _stopped | _exempt | {threading.get_ident()}
    return {thread: frame for thread, frame in sys._current_frames().items() if thread not in known}


def _is_inside(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith(_OURS):
            return True
        frame = frame.f_back
    return False


def _after_fork() -> None:
    """A forked child has only the thread that called fork."""
    _slow.intersection_update({threading.get_ident()})


# Registered before the functions of jit.py and workdir.py, and therefore called after them.
atexit.register(_wait)
os.register_at_fork(after_in_child=_after_fork)
