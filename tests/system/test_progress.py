"""What a person sees while kernels compile: a bar on a terminal, lines elsewhere."""

import fcntl
import os
import pty
import re
import struct
import termios

import pytest

from .toys import finish, gate, open_gate, read_until, time_told, until

LOAD = "report(**load())"


def on_terminal(workshop, script, columns, **changes):
    """Run with stderr on a terminal; what was drawn there, and the report."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = workshop.spawn(script, stderr=theirs, **changes)
    os.close(theirs)
    drawn = b""
    try:
        while block := os.read(ours, 4096):
            drawn += block
    except OSError:  # EIO: the last writer has gone
        pass
    os.close(ours)
    return drawn.decode(), finish(process)


def test_lines_where_there_is_no_terminal(workshop):
    """Shown even when the program has not set up logging: minutes of silence look like a hang."""
    messages = workshop.run(LOAD).messages.splitlines()
    assert messages[0] == "compiling toy ..."
    assert messages[1].startswith("compiled toy in ")
    assert len(messages) == 2


def test_many_units_are_counted(workshop):
    """An install takes minutes: how far it is, and not a line for each that waits its turn."""
    names = [f"toy{number}" for number in range(6)]
    messages = workshop.run(f"report(**load(*{names}))").messages.splitlines()
    assert messages[:5] == [
        *(f"compiling {name} ..." for name in names[:4]),
        "compiling 2 more ...",
    ]
    counts = [re.match(r"\[(\d)/6, \d+ s\] compiled toy\d in ", line) for line in messages[5:]]
    assert [count and count[1] for count in counts] == ["1", "2", "3", "4", "5", "6"]


def test_a_unit_that_waits_its_turn_does_not_take_long(workshop):
    """Of many units on few cores, the last ones begin minutes after the first."""
    workshop.set_compiler("sleep 60")
    script = "from op_builder.build import wait\nwait._SILENCE_OF_UNKNOWN_S = 0.3\nload('a', 'b')"
    process = workshop.spawn(script, stderr=-1, MAX_JOBS="1")
    said = [read_until(process.stderr, "still compiling").splitlines()[-1] for _ in range(2)]
    process.kill()
    assert said[0].split()[2] == said[1].split()[2], said


@pytest.mark.parametrize("seconds", [None, 0.0498, 2.3498])
def test_last_time_is_remembered(workshop, seconds):
    """As it was told: rounded once, not to milliseconds before (0.0498, 0.050, 0.1)."""
    script = LOAD
    if seconds is not None:
        fixed = "from op_builder.build.ninja_run import NinjaRun\n"
        script = f"{fixed}NinjaRun._seconds = lambda *_: {seconds}\n{LOAD}"
    took = time_told(workshop.run(script))
    workshop.write_header(50)
    messages = workshop.run(LOAD).messages.splitlines()
    assert messages[0] == f"compiling toy (took {took} last time) ..."


def test_bar_on_a_terminal(workshop):
    """One line, redrawn: what compiles and how long it took last time; a newline at the end."""
    took = time_told(workshop.run(LOAD))
    workshop.write_header(50)
    drawn, outcome = on_terminal(workshop, "report(**load('toy', 'other'))", columns=100)
    assert outcome.report["answer"] == [52, 52]
    assert "0/2" in drawn and "2/2" in drawn
    assert f"compiling toy (took {took}" in drawn
    assert drawn.count("\n") == 1 and drawn.endswith("\n")
    assert all(len(line) < 100 for line in drawn.split("\r"))


KERNEL = "sm80_bwd_bf16_d128_bias2_unaligned"  # as long as names get


def test_bar_on_a_narrow_terminal(workshop):
    """80 columns hold the name, how many there are, and in a first build how long it takes."""
    script = "jobs = [toy(name, usual_seconds=40.0, label=name + ' for 8.0')"
    script += f" for name in ({KERNEL!r}, 'other')]\n"
    script += "report(origin=[kernel.origin for kernel in jit.load(jobs)])"
    drawn, _ = on_terminal(workshop, script, columns=80)
    lines = [line.rstrip() for line in drawn.split("\r") if "0/2" in line]
    assert lines
    for line in lines:
        assert len(line) < 80
        told = rf"\[\.+\] 0/2 +\d\.\d s, \d+ s left  {KERNEL} for 8\.0"
        assert re.fullmatch(told, line), line


def test_the_usual_time_is_told_in_a_first_build(workshop):
    script = "jobs = [toy(usual_seconds=7.0)]\nreport(origin=[jit.load(jobs)[0].origin])"
    first = workshop.run(script)
    assert first.messages.splitlines()[0] == "compiling toy (usually about 7 s) ..."
    workshop.write_header(50)
    messages = workshop.run(script).messages.splitlines()
    assert messages[0].startswith(f"compiling toy (took {time_told(first)}"), "its own is better"


def test_bar_moves_while_the_compiler_is_silent(workshop):
    """Somebody who looks at it sees that the clock still runs."""
    door = workshop.root / "door"
    workshop.set_compiler(gate(door))
    ours, theirs = pty.openpty()
    process = workshop.spawn(LOAD, stderr=theirs)
    os.close(theirs)
    until(lambda: workshop.num_compilations() == 1)
    seen = set()
    while len(seen) < 4:
        seen.update(os.read(ours, 4096).decode().split("\r"))
    open_gate(door)
    os.close(ours)
    process.stdin.close()
    process.stdout.read()
    process.wait(timeout=20)


def test_quiet(workshop):
    """verbose=False says nothing, nor does DS4S_VERBOSE=0; DS4S_VERBOSE=1 overrules the caller."""
    assert workshop.run("report(**load(verbose=False))").messages == ""
    workshop.write_header(50)
    assert workshop.run(LOAD, DS4S_VERBOSE="0").messages == ""
    workshop.write_header(60)
    shown = workshop.run("report(**load(verbose=False))", DS4S_VERBOSE="1").messages
    assert "compiling toy" in shown


def test_lines_go_to_logging_where_it_is_set_up(workshop):
    script = "import logging\nlogging.basicConfig(level=logging.INFO, format='LOG %(message)s')\n"
    messages = workshop.run(script + LOAD).messages.splitlines()
    assert messages[0] == "LOG compiling toy ..."
    workshop.write_header(50)
    script = "import logging\nlogging.basicConfig(level=logging.ERROR)\n"
    assert workshop.run(script + LOAD).messages == ""


def test_no_stderr(workshop):
    """A daemon without stderr is no reason to fail."""
    assert workshop.run("sys.stderr = None\n" + LOAD).report["answer"] == [42]
