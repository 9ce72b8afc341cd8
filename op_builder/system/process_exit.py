"""Ends a process safely while threads are in the middle of a call.

Python ends a daemon thread by unwinding its stack as soon as it wants to run again. Our calls are
below PyTorch's dispatcher, whose C++ frames abort the process when they are unwound. So the end of
the process waits until no other thread is inside a call: briefly for quick sections, longer for
those that may compile. A thread that calls again and again is stopped when it enters the next call;
between two calls it may be in PyTorch too (to free a result, say), so daemon threads that are under
way get a moment to come to their next call. A thread that loops over PyTorch's own operators is not
stopped, and aborts. A thread that waits inside a call for an event that cannot come any more is
stopped for good: a thread that never wants to run again is left alone.
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
_LOOKS_WITHOUT_A_MOVE = 10  # a thread at the same instruction that often waits for something else
_LOOK_EVERY_S = 0.005
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_OURS = (f"{_PACKAGE}/", f"{os.path.dirname(_PACKAGE)}/deepspeed4science/")

_slow: set[int] = set()  # threads in a slow section
_stopped: set[int] = set()
_exempt: set[int] = set()  # threads that are ended elsewhere
_ending = False


@contextmanager
def slow_section() -> Iterator[None]:
    """Encloses work that may take long; sections may be nested."""
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
    """The process begins to end: from now on threads in slow sections stop."""
    global _ending
    _ending = True


@contextmanager
def exempt() -> Iterator[None]:
    """Encloses all work of a thread that is ended elsewhere: it is not stopped or waited for."""
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
    """Called at the beginning of every call; never returns in a daemon thread of a process that is
    ending. Threads that Python did not start (autograd's) go on: the main thread may be waiting for
    them.
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
    """A forked child has only the thread that forked."""
    _slow.intersection_update({threading.get_ident()})


atexit.register(_wait)  # registered before jit.py's and workdir.py's, which are called first
os.register_at_fork(after_in_child=_after_fork)
