"""What a lock's file tells those who wait: op_builder/cache/lock.py."""

import json

import pytest

from op_builder.cache.lock import Failure, Holder, UnitLock, _held

FAILURE = Failure("compiling toy failed", ("/usr/bin/c++", "/src/csrc"), 17.5)


@pytest.fixture
def lock(tmp_path):
    held = UnitLock(tmp_path, "toy-1")
    assert held.try_acquire()
    yield held
    held.release()


def test_a_holder_is_told(lock):
    holder = lock.read()
    assert isinstance(holder, Holder)
    assert str(holder) == f"process {holder.pid} on {holder.host}"
    assert lock.previous is None


def test_a_forked_child_closes_what_is_held_and_no_more(lock):
    """Of a released lock, the descriptor's number may be another file's by now."""
    handle = lock._handle
    assert handle in _held
    lock.release()
    assert handle not in _held


def test_a_failure_is_left_for_the_next(lock, tmp_path):
    lock.write(FAILURE)
    assert lock.read() == FAILURE
    lock.release()
    following = UnitLock(tmp_path, "toy-1")
    assert following.try_acquire()
    assert following.previous == FAILURE
    assert isinstance(following.read(), Holder)
    following.release()


@pytest.mark.parametrize(
    "content",
    [
        *("", "nonsense", "[1]", "{}", "null", '{"pid": 1}', "[" * 100_000),
        json.dumps({"pid": "1", "host": "here", "since": 1.0}),
        json.dumps({"pid": 1, "host": None, "since": 1.0}),
        json.dumps({"failed": ["words"], "of": [], "at": 1.0}),
        json.dumps({"failed": "words", "of": "c++", "at": 1.0}),
        json.dumps({"failed": "words", "of": ["c++"], "at": "now"}),
    ],
)
def test_nonsense_is_no_note(lock, content):
    lock.path.write_text(content)
    assert lock.read() is None
