"""Whatever is raised inside a first call, the next one works, in every thread."""

import os

import pytest

# Raises `what` in the main thread at the `place`-th line of op_builder, in a forked child; then
# loads again there, in another thread as well. `in_child` is its exit code.
RAISE = """
import linecache, signal
def raised(place, what, load):
    seen = 0
    def tracer(frame, event, argument):
        nonlocal seen
        if "op_builder" not in frame.f_code.co_filename:
            return None
        # Where a lock is let go, Python raises nothing.
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if event == "line" and not line.startswith("with "):
            seen += 1
            if seen == place:
                sys.settrace(None)
                raise what
        return tracer
    sys.settrace(tracer)
    try:
        load()
        return seen
    except what:
        return -1
    finally:
        sys.settrace(None)
def in_child(place, what, load):
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        code = 1
        try:
            raised(place, what, load)
            answers = []
            thread = threading.Thread(target=lambda: answers.append(load()["answer"]))
            thread.start()
            thread.join()
            assert load()["answer"] == answers[0] == [42], answers
            code = 0
        except BaseException as error:
            sys.stderr.write(f"place {place}: {error!r}\\n")
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
def all_places(what, load, step=1):
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.write(writing, str(raised(0, what, load)).encode())
        os._exit(0)
    total = int(os.read(reading, 20))
    places = range(1, total + 1, step)
    return {"total": total, "failed": [place for place in places if in_child(place, what, load)]}
"""


@pytest.mark.parametrize("what", ["KeyboardInterrupt", "MemoryError"])
def test_raised_anywhere_in_a_warm_first_call(workshop, what):
    """At every line between the call and the kernel that is found."""
    workshop.run()
    outcome = workshop.run(RAISE + f"report(**all_places({what}, load))")
    assert outcome.report["total"] > 100, "the lines were not seen"
    assert outcome.report["failed"] == [], outcome.messages


def test_raised_anywhere_while_something_is_compiled(workshop):
    script = """
import shutil
def fresh():
    os.environ["DS4S_CACHE_DIR"] = os.environ["TMPDIR"] + f"/cache-{os.getpid()}"
    return load()
report(**all_places(KeyboardInterrupt, fresh, step=int(os.environ["STEP"])))
"""
    outcome = workshop.run(RAISE + script, STEP="10", DS4S_VERBOSE="0")
    assert outcome.report["total"] > 100, "the lines were not seen"
    assert outcome.report["failed"] == [], outcome.messages


def test_no_more_threads(his):
    """The caller's own thread compiles then, where a process may still be started."""
    script = """
def refuse(*arguments, **how): raise RuntimeError("can't start new thread")
threading._start_new_thread, start = refuse, threading._start_new_thread
jit.start([toy("early")])
threading._start_new_thread = start
first = load("early")
threading._start_new_thread = refuse
report(first=first, **load())
"""
    outcome = his.run(script)
    assert outcome.report["answer"] == outcome.report["first"]["answer"] == [42]


def test_who_waits_for_an_interrupted_call_begins_anew(workshop):
    """Two threads want a kernel, the one that compiles is interrupted: the other gets it."""
    script = """
import signal
answers = []
other = threading.Thread(target=lambda: answers.append(load()["answer"]))
def interrupt():
    while workshop.num_compilations() == 0:
        os.sched_yield()
    other.start()
    while "other" not in waiting:
        os.sched_yield()
    workshop.set_compiler("")
    os.kill(os.getpid(), signal.SIGINT)
from op_builder.build import loader
waiting = []
wait_for = loader.wait_for
def announced(*arguments):
    waiting.append("other" if threading.current_thread() is other else "main")
    wait_for(*arguments)
loader.wait_for = announced
threading.Thread(target=interrupt).start()
try:
    load()
except KeyboardInterrupt:
    other.join()
    report(answers=answers)
"""
    workshop.set_compiler("sleep 60")
    outcome = workshop.run(script)
    assert outcome.report["answers"] == [[42]]


def test_who_waits_for_a_thread_that_is_gone_begins_anew(workshop):
    """A thread that ended without a word, as by an error in what should have given up for it."""
    script = """
from op_builder.build import loader
from op_builder.cache import search
give_up, loader.Loader._give_up = loader.Loader._give_up, lambda *arguments: None
existing = search.load_existing
def end(*arguments): raise SystemExit
search.load_existing = end
loader.search = search
thread = threading.Thread(target=load)
thread.start()
thread.join()
search.load_existing, loader.Loader._give_up = existing, give_up
report(**load())
"""
    assert workshop.run(script).report["answer"] == [42]


OP = """
import torch
from deepspeed4science import DS4Sci_EvoformerAttention as attention
q = torch.randn(1, 1, 4, 1, 8, requires_grad=True)
def call():
    torch.autograd.grad(attention(q, q, q).sum(), q)
    return {"answer": [42]}
"""


def test_interrupt_in_a_warm_first_call_of_the_op(workshop):
    """Ctrl-C at 50 places of our own files, from the call to the gradient."""
    cache = os.environ.get("DS4S_CACHE_DIR", "")  # the one that has kernels of other tests
    fill = "from op_builder import EvoformerAttnCPUBuilder as B\nB().load()\nreport()"
    workshop.run(fill, DS4S_CACHE_DIR=cache)
    script = RAISE.replace('"op_builder" not', '"op_builder/" not') + OP
    script = script.replace(
        'if "op_builder/" not in frame.f_code.co_filename:',
        'if not any(p in frame.f_code.co_filename for p in ("op_builder/", "deepspeed4science/")):',
    )
    script += """
reading, writing = os.pipe()
if os.fork() == 0:
    os.write(writing, str(raised(0, KeyboardInterrupt, call)).encode())
    os._exit(0)
total = int(os.read(reading, 20))
report(**all_places(KeyboardInterrupt, call, step=total // 50))
"""
    outcome = workshop.run(script, DS4S_CACHE_DIR=cache)
    assert outcome.report["total"] > 500, "the lines were not seen"
    assert outcome.report["failed"] == [], outcome.messages
