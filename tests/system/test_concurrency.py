"""Many processes, threads and forks on one cache, and builders that die."""

import signal
import time

import pytest

from .toys import finish, gate, open_gate, read_until, until

pytestmark = pytest.mark.parametrize("workshop", ["C++", "CUDA"], indirect=True)

NUM_PROCESSES = 8


def test_eight_processes_compile_once(workshop):
    """All want the same library at once: one compiles, seven wait and load what it published.

    The compiler stands still until all seven have said that they wait, so they really do.
    """
    door = workshop.root / "door"
    workshop.set_compiler(gate(door))
    processes = [workshop.spawn("report(**load())") for _ in range(NUM_PROCESSES)]
    waiting = [p for p in processes if "waiting" in p.stderr.readline()]
    assert len(waiting) == NUM_PROCESSES - 1
    open_gate(door)
    outcomes = [finish(process) for process in processes]
    assert workshop.num_compilations() == 1
    assert sorted(outcome.origin for outcome in outcomes) == ["built"] + ["cache"] * 7
    assert all(outcome.report["answer"] == [42] for outcome in outcomes)
    assert len(workshop.entries) == 1


def test_waiting_processes_share_the_builders_error(workshop):
    """A source that does not compile is tried once, not once for each process that waits."""
    door = workshop.root / "door"
    workshop.set_compiler(gate(door))
    workshop.include.joinpath("toy.h").write_text("#error broken on purpose\n")
    script = "try:\n    load()\nexcept CompileError as error:\n    report(error=str(error))"
    processes = [workshop.spawn(script) for _ in range(3)]
    assert sum("waiting" in p.stderr.readline() for p in processes) == 2
    open_gate(door)
    errors = [finish(process).report["error"] for process in processes]
    assert workshop.num_compilations() == 1
    assert all("broken on purpose" in error for error in errors)
    workshop.set_compiler("")
    workshop.write_header(40)
    assert workshop.run().origin == "built", "an error is not kept for those who come later"


def test_waiting_processes_do_not_share_what_may_pass(workshop):
    """A compiler killed for memory says nothing about the next attempt."""
    door = workshop.root / "door"
    workshop.set_compiler(f"{gate(door)}; kill -9 $$")
    script = "try:\n    load()\nexcept CompileError as error:\n    report(error=str(error))"
    builder = workshop.spawn(script)
    read_until(builder.stderr, "compiling")
    until(lambda: workshop.num_compilations() == 1)
    successor = workshop.spawn("report(**load())")
    read_until(successor.stderr, "waiting")
    workshop.set_compiler("")
    open_gate(door)
    assert "ran out of memory" in finish(builder).report["error"]
    assert finish(successor).report["answer"] == [42]


def test_killed_builder_blocks_nobody(workshop):
    """SIGKILL while compiling: who waits goes on at once, and the compiler is stopped."""
    door = workshop.root / "door"
    workshop.set_compiler(gate(door))
    builder = workshop.spawn("load()")
    read_until(builder.stderr, "compiling")
    until(lambda: workshop.num_compilations() == 1)
    compiler = int((workshop.root / "compilations").read_text())
    successor = workshop.spawn("report(**load())")
    read_until(successor.stderr, "waiting")
    workshop.set_compiler("")
    killed = time.monotonic()
    builder.kill()
    outcome = finish(successor)
    assert time.monotonic() - killed < 20, "bounded by compiling, not by anybody's patience"
    assert (outcome.origin, outcome.report["answer"]) == ("built", [42])
    builder.communicate()
    until(lambda: not alive(compiler))
    workshop.write_header(50)
    assert workshop.run().origin == "built"
    assert list(workshop.build_root.iterdir()) == [], "the next build removes what was left"


def test_stopped_builder_loses_patience_only(workshop):
    """A builder that was stopped keeps its lock: who waits compiles by himself in the end."""
    door = workshop.root / "door"
    workshop.set_compiler(gate(door))
    builder = workshop.spawn("report(**load())")
    read_until(builder.stderr, "compiling")
    until(lambda: workshop.num_compilations() == 1)
    builder.send_signal(signal.SIGSTOP)
    workshop.set_compiler("")
    impatient = "from op_builder.build import build\nbuild._PATIENCE_S = 0.1\nreport(**load())"
    outcome = workshop.run(impatient)
    assert outcome.origin == "built"
    assert "compiling without it" in outcome.messages
    builder.send_signal(signal.SIGCONT)
    open_gate(door)
    loser = finish(builder)
    assert loser.report["path"] == outcome.report["path"], "the loser uses the winner's"
    assert len(workshop.entries) == 1
    assert not (workshop.cache / "aside").exists(), "and leaves it alone"


def test_file_system_without_locks(workshop):
    """Two hosts on a network file system whose flock fails: both compile, one entry, both run."""
    door = workshop.root / "door"
    workshop.set_compiler(gate(door))
    script = """
import errno, fcntl
def refuse(*arguments): raise OSError(errno.ENOLCK, "No locks available")
fcntl.flock = refuse
report(**load())
"""
    processes = [workshop.spawn(script) for _ in range(2)]
    until(lambda: workshop.num_compilations() == 2)
    open_gate(door, 2)
    outcomes = [finish(process) for process in processes]
    assert {outcome.origin for outcome in outcomes} == {"built"}
    assert outcomes[0].report["path"] == outcomes[1].report["path"]
    assert len(workshop.entries) == 1
    assert not (workshop.cache / "aside").exists()


def test_a_unit_is_there_as_soon_as_it_is_linked(workshop):
    """Not when all are compiled: a forward does not wait for others, and a killed build of many
    kernels keeps those that were finished.
    """
    door = workshop.root / "door"
    waits = gate(door)
    workshop.set_compiler(f'case " $* " in *" toy2."*) {waits};; esac')
    process = workshop.spawn("report(**load('toy1', 'toy2'))", MAX_JOBS="1")
    until(lambda: any(entry.name.startswith("toy1-") for entry in workshop.entries))
    open_gate(door)
    assert finish(process).report["answer"] == [42, 42]


def test_two_threads_load_the_same_kernel(workshop):
    script = """
answers = []
threads = [threading.Thread(target=lambda: answers.append(load())) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
report(answers=answers)
"""
    answers = workshop.run(script).report["answers"]
    assert len(answers) == 8
    assert all(answer == answers[0] for answer in answers)
    assert workshop.num_compilations() == 1


def test_background_build_is_joined_by_a_later_load(workshop):
    """`start` returns while the compiler stands still; `load` waits for that same build."""
    door = workshop.root / "door"
    workshop.set_compiler(gate(door))
    script = f"""
jit.start([toy("toy"), toy("other")])
jit.start([toy("toy")])
sys.stderr.write("started\\n")
from tests.system.toys import open_gate
open_gate({str(door)!r}, 2)
report(**load("toy", "other"))
"""
    outcome = workshop.run(script, MAX_JOBS="1")
    assert outcome.messages.startswith("started\n"), "silent until somebody waits"
    assert outcome.report["answer"] == [42, 42]
    assert workshop.num_compilations() == 2


def test_background_error_is_raised_by_the_load(workshop):
    """Raised once, by whoever asks for the kernel; asking again tries again."""
    workshop.include.joinpath("toy.h").write_text("#error broken on purpose\n")
    script = """
jit.start([toy()])
try:
    load()
except CompileError as error:
    first = str(error)
workshop.write_header(40)
report(first=first, **load())
"""
    outcome = workshop.run(script)
    assert "broken on purpose" in outcome.report["first"]
    assert outcome.report["answer"] == [42]


@pytest.mark.parametrize("ending", ["", "sys.exit(3)", "raise RuntimeError"])
def test_process_that_ends_during_a_background_build(workshop, ending):
    """It ends at once, stops its compiler and leaves nothing behind."""
    door = workshop.root / "door"
    workshop.set_compiler(gate(door))
    process = workshop.spawn(f"jit.start([toy()])\nsys.stdin.readline()\n{ending}\n")
    until(lambda: workshop.num_compilations() == 1)
    compiler = int((workshop.root / "compilations").read_text())
    process.communicate("end\n", timeout=20)
    until(lambda: not alive(compiler))
    assert list(workshop.build_root.iterdir()) == []
    assert workshop.entries == []


def test_interrupted_load(workshop):
    """Ctrl-C while compiling raises KeyboardInterrupt at once; loading again works."""
    door = workshop.root / "door"
    workshop.set_compiler(gate(door))
    script = """
try:
    load()
except KeyboardInterrupt:
    workshop.set_compiler("")
    report(**load())
"""
    process = workshop.spawn(script)
    read_until(process.stderr, "compiling")
    until(lambda: workshop.num_compilations() == 1)
    process.send_signal(signal.SIGINT)
    assert finish(process).report["answer"] == [42]


def test_interrupt_that_the_program_survives(workshop):
    """A terminal sends Ctrl-C to all its processes; a notebook catches it and goes on.

    The build in the background goes on, too: its compiler is not among those that are told.
    """
    door = workshop.root / "door"
    workshop.set_compiler(gate(door))
    script = """
os.setpgid(0, 0)
jit.start([toy()])
try:
    while workshop.num_compilations() == 0:
        os.sched_yield()
    os.killpg(0, 2)
    sys.stdin.read()
except KeyboardInterrupt:
    pass
from tests.system.toys import open_gate
open_gate(workshop.root / "door")
report(**load())
"""
    assert workshop.run(script).report["answer"] == [42]
    assert workshop.num_compilations() == 1


FORK = """
def in_child(what):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, json.dumps(what()).encode())
        os._exit(0)
    os.close(writing)
    answer = json.loads(os.fdopen(reading).read() or "null")
    os.waitpid(child, 0)
    return answer
"""


def test_fork_after_load(workshop):
    """The child uses what the parent has loaded, and can load what it has not."""
    script = (
        FORK
        + """
load()
report(child=in_child(lambda: load("toy", "other")), parent=load("toy", "other"))
"""
    )
    report = workshop.run(script).report
    assert report["child"]["answer"] == report["parent"]["answer"] == [42, 42]
    assert report["child"]["origin"] == ["built", "built"]
    assert report["parent"]["origin"] == ["built", "cache"]


def test_fork_during_a_background_build(workshop):
    """The child waits for no thread it does not have, and keeps no lock of a dead parent."""
    door = workshop.root / "door"
    workshop.set_compiler(gate(door))
    script = (
        FORK
        + """
jit.start([toy()])
while workshop.num_compilations() == 0:
    os.sched_yield()
reading, writing = os.pipe()
if os.fork():
    os.kill(os.getpid(), 9)
os.read(0, 1)  # the parent is gone when the test has closed our stdin
workshop.set_compiler("")
report(**load())
"""
    )
    process = workshop.spawn(script)
    process.stdin.close()
    assert process.wait(timeout=20) == -signal.SIGKILL
    outcome = process.stdout.read()
    assert '"answer": [42]' in outcome, process.stderr.read()


def test_spawned_workers(workshop):
    """multiprocessing's spawn: each worker finds the cache."""
    script = """
import multiprocessing, subprocess
code = "from tests.system.toys import PRELUDE; exec(PRELUDE); report(**load())"
workers = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(3)]
report(answers=[json.loads(worker.communicate()[0])["answer"] for worker in workers])
"""
    assert workshop.run(script).report["answers"] == [[42]] * 3
    assert workshop.num_compilations() == 1


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stream:
            return stream.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
