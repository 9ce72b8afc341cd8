"""Compilers that hang, flood or are started from an odd process; ninja's own program."""

import signal
import time

from ..test_concurrency import alive
from ..toys import finish, read_until, time_told, until

FAILS = "\ntry:\n    load()\nexcept {error} as error:\n    report(error=str(error))\n"
IMPATIENT = "from op_builder.build import wait\nwait._SILENCE_OF_UNKNOWN_S = 0.5\n"
# Ignores requests to end, and has a child that does.
STUBBORN = "trap '' TERM INT HUP; sleep 600 & echo $! >> {pids}; echo $$ >> {pids}; wait; wait"


def test_hanging_compiler_is_announced_and_ended_whole(workshop):
    """Silence for ever helps nobody; Ctrl-C leaves nothing of it running."""
    pids = workshop.root / "pids"
    workshop.set_compiler(STUBBORN.format(pids=pids))
    script = IMPATIENT + "try:\n    load()\nexcept KeyboardInterrupt:\n    report(ended=True)"
    pids.touch()  # the compiler may be slower to write them than silence is to be announced
    process = workshop.spawn(script)
    said = read_until(process.stderr, "still compiling")
    assert f"(usual: not known) with {workshop.compiler}; to stop it, interrupt" in said
    until(lambda: len(pids.read_text().split()) == 2)
    process.send_signal(signal.SIGINT)
    assert finish(process).report == {"ended": True}
    until(lambda: not any(alive(int(pid)) for pid in pids.read_text().split()))


def test_hanging_compiler_is_compared_with_what_is_usual(workshop):
    told = time_told(workshop.run())
    workshop.write_header(50)
    workshop.set_compiler("sleep 60")
    process = workshop.spawn(
        "from op_builder.build import wait\nwait._SILENCE_S = 0.1\nload()", stderr=-1
    )
    said = read_until(process.stderr, "still compiling")
    assert f"(usual: {told})" in said
    process.kill()


def test_hanging_compiler_of_a_killed_process(workshop):
    """The process is killed, and asks nobody to end any more."""
    workshop.set_compiler("sleep 600; :")
    process = workshop.spawn("load()")
    until(lambda: workshop.num_compilations() == 1)
    compiler = int((workshop.root / "compilations").read_text())
    process.kill()
    until(lambda: not alive(compiler))


def test_hundred_megabytes_of_output(workshop):
    """The first error and the end are kept; searching them takes no time worth mentioning."""
    flood = "yes 'warning: one of very many' | head -c 60000000 >&2"
    workshop.set_compiler(f"echo 'x.h:1: error: the first' >&2; {flood}; echo the end >&2; exit 1")
    began = time.monotonic()
    error = workshop.run(FAILS.format(error="CompileError")).report["error"]
    assert time.monotonic() - began < 20
    assert "> x.h:1: error: the first" in error
    (log,) = (workshop.cache / "failed").iterdir()
    text = log.read_text()
    assert len(text) < 3 << 20
    assert "MiB left out" in text and "the end" in text


def test_one_endless_line_of_output(workshop):
    line = "head -c 5000000 /dev/zero | tr '\\0' e >&2; echo ' error: x' >&2"
    workshop.set_compiler(f"{line}; exit 1")
    error = workshop.run(FAILS.format(error="CompileError")).report["error"]
    assert len(error) < 10_000


def test_python_inside_an_application(workshop):
    """sys.executable is ChimeraX or Blender there: it is not started."""
    application = workshop.root / "application"
    application.write_text(f"#!/bin/sh\ntouch {workshop.root}/started\n")
    application.chmod(0o755)
    script = f"sys.executable = {str(application)!r}\nreport(**load())"
    assert workshop.run(script).report["answer"] == [42]
    assert not (workshop.root / "started").exists()


def test_nobody_hears_how_children_end(workshop):
    """SIGCHLD is ignored, as by some servers: exit codes are lost, kernels are not."""
    ignore = "import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
    assert workshop.run(ignore + "report(**load())").report["answer"] == [42]
    workshop.set_compiler("echo 'error: on purpose' >&2; exit 1")
    workshop.write_header(50)
    error = workshop.run(ignore + FAILS.format(error="CompileError")).report["error"]
    assert "error: on purpose" in error
    ask = "from op_builder.toolchain import tool\n"
    told = workshop.run(ignore + ask + "report(told=tool.run(['sh', '-c', 'exit 3']).problem)")
    assert told.report["told"] == "sh ended with 3: no word"


def test_a_first_call_of_the_op_where_nobody_hears_how_children_end(workshop):
    script = """
import signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
from op_builder import EvoformerAttnCPUBuilder
builder = EvoformerAttnCPUBuilder()
report(flags=builder.jobs(builder.default_kernels())[0].flags)
"""
    ignored = workshop.run(script).report["flags"]
    assert ignored == workshop.run(script.replace("SIG_IGN", "SIG_DFL")).report["flags"]
