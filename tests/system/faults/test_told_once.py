"""What is told once is told once, also when two threads find it out at the same time."""

import threading

import pytest

from op_builder.cache import cache, search
from op_builder.system import log


@pytest.fixture
def told(monkeypatch):
    messages: list[str] = []
    monkeypatch.setattr(log, "_seen", {})
    monkeypatch.setattr(log, "warn", messages.append)
    return messages


def test_uncovered_kernels_found_by_two_threads(workshop, monkeypatch, told):
    """The caller's forward and the backward that is compiled ahead are both not in the wheel."""
    workshop.run()
    both_look = threading.Barrier(2)
    entries = cache.entries

    def together(root):
        found = entries(root)
        both_look.wait(10)
        return found

    monkeypatch.setattr(cache, "entries", together)
    where = (
        search.Root(workshop.cache, "prebuilt", shared=True),
        search.Root(workshop.cache / "own", "cache", shared=False),
    )
    threads = [
        threading.Thread(target=search.tell_uncovered, args=(workshop.job(name), where))
        for name in ("forward", "backward")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(told) == 1
    assert "is not among the 1 kernels compiled while installing" in told[0]


def test_the_same_warning_of_many_threads(told):
    threads = [threading.Thread(target=log.warn_once, args=("lost",)) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert told == ["lost"]
