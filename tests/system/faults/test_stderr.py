"""A stderr that cannot be written costs what would have been shown, never the kernel."""

import os

import pytest

from ..toys import PRELUDE

RAISES = """
class Tee:
    encoding = "utf-8"
    def isatty(self): return {on_terminal}
    def write(self, text): raise {error}
    def flush(self): pass  # Python's own last one, whose failure would be its exit code
sys.stderr = Tee()
"""
HANDLER = """\

import logging
class Handler(logging.Handler):
    def emit(self, record): raise RuntimeError("a log server that does not answer")
logging.basicConfig(level="INFO", handlers=[Handler()])
"""


def kept(workshop) -> bool:
    return workshop.num_compilations() == 1 and len(workshop.entries) == 1


@pytest.mark.parametrize("on_terminal", [False, True], ids=["lines", "bar"])
@pytest.mark.parametrize(
    "error", ["OSError(28, 'full')", "RuntimeError('tee')", "ValueError('closed')"]
)
def test_stream_that_raises(workshop, error, on_terminal):
    script = RAISES.format(error=error, on_terminal=on_terminal) + "report(**load())"
    assert workshop.run(script).report["answer"] == [42]
    assert kept(workshop)


def test_log_handler_that_raises(workshop):
    assert workshop.run(HANDLER + "report(**load())").report["answer"] == [42]
    assert kept(workshop)


@pytest.mark.parametrize("before", [RAISES.format(error="OSError", on_terminal=False), HANDLER])
def test_warning_that_cannot_be_told(workshop, before):
    """Of a damaged entry: set aside and compiled again, whether or not anybody hears of it."""
    workshop.run()
    (workshop.entries[0] / "toy.so").write_bytes(b"")
    assert workshop.run(before + "report(**load())").origin == "built"
    assert workshop.run().origin == "cache"


def test_full_disk_behind_stderr(workshop):
    """What Python itself could not write makes its exit code 120; the work was done."""
    with open("/dev/full", "w") as full:
        process = workshop.spawn("report(**load())", stderr=full)
    stdout, _ = process.communicate(timeout=60)
    assert '"answer": [42]' in stdout
    assert kept(workshop)


def test_pipe_that_nobody_reads(workshop):
    reading, writing = os.pipe()
    os.close(reading)
    process = workshop.spawn("report(**load())", stderr=writing)
    os.close(writing)
    stdout, _ = process.communicate(timeout=60)
    assert '"answer": [42]' in stdout
    assert kept(workshop)


def test_no_stderr_at_all(workshop):
    """As for programs without a console: sys.stderr is None."""
    script = "os.close(2)\nos.execve(sys.executable, [sys.executable, '-c', inner], os.environ)"
    inner = PRELUDE + "assert sys.stderr is None\nreport(**load())"
    assert workshop.run(f"inner = {inner!r}\n{script}").report["answer"] == [42]
    assert kept(workshop)
