"""Faults that only CUDA builds have, really done with the real nvcc on a machine without a GPU."""

import subprocess

import pytest

from op_builder.toolchain import toolkits
from tests import fakes

from .toys import finish

pytestmark = pytest.mark.parametrize("workshop", ["CUDA"], indirect=True)

NUM_PROCESSES = 64

# Stands in for the driver's library: tells of being loaded, and would tell of any call.
FAKE_DRIVER = """\
#include <cstdio>
#include <cstdlib>
static void told(const char* what) {
  if (FILE* stream = std::fopen(std::getenv("TOLD"), "a")) {
    std::fprintf(stream, "%s\\n", what);
    std::fclose(stream);
  }
}
__attribute__((constructor)) static void loaded() { told("loaded"); }
extern "C" int cuInit(unsigned) { told("cuInit"); return 100; }
"""


@pytest.mark.parametrize("part", ["nvvm/bin/cicc", "bin/ptxas", "bin/cudafe++"])
def test_a_part_of_nvcc_killed_for_memory_gets_the_hint(workshop, tmp_path, part):
    """The system kills what takes most, which is never nvcc itself."""
    nvcc = toolkits.find_nvcc()
    damaged = fakes.changed_toolkit(nvcc.root, tmp_path / "toolkit", part, "kill -9 $$")
    script = f"""
from pathlib import Path
try:
    jit.load([toy(compiler=Path({str(damaged)!r}))])
except CompileError as error:
    report(error=str(error))
"""
    error = workshop.run(script).report["error"]
    assert "hint: the machine ran out of memory" in error
    assert "MAX_JOBS=1" in error
    assert workshop.entries == []


def test_sixty_four_processes_compile_once(workshop):
    """A whole node of ranks on a cold cache: one compiles, all others load what it published."""
    log = (workshop.root / "stderr").open("w+")
    processes = [
        workshop.spawn("report(**load())", stderr=log.fileno()) for _ in range(NUM_PROCESSES)
    ]
    outcomes = [finish(process, timeout=300) for process in processes]
    assert workshop.num_compilations() == 1
    origins = sorted(outcome.origin for outcome in outcomes)
    assert origins == ["built"] + ["cache"] * (NUM_PROCESSES - 1)
    assert all(outcome.report["answer"] == [42] for outcome in outcomes)
    assert len(workshop.entries) == 1


@pytest.mark.parametrize("holder", ["dead", "of another host"])
def test_a_stale_lock_file_holds_up_nobody(workshop, holder):
    """What DeepSpeed's users delete by hand: a lock file that outlived its process."""
    locks = workshop.cache / "locks"
    locks.mkdir(parents=True)
    host = "elsewhere" if holder == "of another host" else "here"
    note = f'{{"pid": 1, "host": "{host}", "since": 0}}'
    (locks / f"{workshop.job().ident}.lock").write_text(note)
    (locks / "lock").write_text(note)
    outcome = workshop.run()
    assert (outcome.origin, outcome.report["answer"]) == ("built", [42])
    assert "waiting" not in outcome.messages


@pytest.fixture
def driver(tmp_path):
    """Variables with which a process finds a driver, and the file that says what it did to it."""
    folder = tmp_path / "driver"
    source = fakes.file(folder / "driver.cpp", FAKE_DRIVER)
    command = ["c++", "-shared", "-fPIC", str(source), "-o", str(folder / "libcuda.so.1")]
    subprocess.run(command, check=True)
    told = fakes.file(folder / "told")
    return {"LD_LIBRARY_PATH": str(folder), "TOLD": str(told)}, told


def test_importing_leaves_the_driver_alone(workshop, driver):
    """A CUDA context made at import breaks every fork that follows: data loaders, servers."""
    variables, told = driver
    script = """
import ctypes
import deepspeed4science, op_builder
from op_builder.toolchain import gpu
gpus = gpu.detect()
with open("/proc/self/maps") as maps:
    mapped = "libcuda.so" in maps.read()
load()
with open("/proc/self/maps") as maps:
    report(mapped=mapped, mapped_later="libcuda.so" in maps.read())
"""
    assert workshop.run(script, **variables).report == {"mapped": False, "mapped_later": False}
    assert told.read_text() == "", "nobody touched it"
    # The stand-in does tell, when somebody does what must not be done.
    workshop.run("import ctypes\nctypes.CDLL('libcuda.so.1').cuInit(0)\nreport()", **variables)
    assert told.read_text() == "loaded\ncuInit\n"


def test_workers_of_a_spawn_pool(workshop):
    """multiprocessing's `spawn`, as data loaders use it: each worker imports and loads anew."""
    module = fakes.file(
        workshop.root / "worker.py",
        "from tests.system.toys import PRELUDE\nexec(PRELUDE)\n"
        "def work(_): return load()['origin'] + load()['answer']\n",
    )
    script = f"""
import multiprocessing
sys.path.insert(0, {str(module.parent)!r})
import worker
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        report(answers=pool.map(worker.work, range(3), chunksize=1))
"""
    answers = workshop.run(script).report["answers"]
    assert all(answer[1:] == [42] for answer in answers)
    assert workshop.num_compilations() == 1


def test_a_library_made_for_a_newer_glibc_is_a_miss(workshop):
    """An image's cache on an older host: compiled again, and the other's entry stays."""
    workshop.run()
    (entry,) = workshop.entries
    from op_builder.toolchain import elf

    needs = elf.read(entry / "toy.so").glibc
    assert needs > (2, 0), "a CUDA library holds the static runtime, which needs glibc"
    older = f"""
from op_builder.toolchain import elf
elf.own_glibc = lambda: {(needs[0], needs[1] - 1)!r}
report(**load())
"""
    outcome = workshop.run(older)
    assert (outcome.origin, outcome.report["answer"]) == ("built", [42])
    assert entry.is_dir()
    assert workshop.run().origin == "cache"
