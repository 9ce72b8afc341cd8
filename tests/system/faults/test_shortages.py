"""What a machine lacks is called by its name, with what mends it; another compiler does not."""

import re
import subprocess

import pytest

FAILS = "\ntry:\n    load()\nexcept {error} as error:\n    report(error=str(error))\n"


@pytest.fixture
def mount_noexec(mount_tmpfs):
    def mount(folder):
        mount_tmpfs(folder, "64m")
        subprocess.run(["mount", "-o", "remount,noexec", str(folder)], check=True)

    return mount


def test_no_programs_may_run_from_either_folder(workshop, mount_noexec):
    mount_noexec(workshop.build_root)
    mount_noexec(workshop.cache)
    error = workshop.run(FAILS.format(error="BuildError")).report["error"]
    assert "mounted noexec" in error
    assert "another compiler" not in error


def test_no_programs_may_run_from_the_cache(workshop, mount_noexec):
    """A private copy serves, and the warning says why."""
    mount_noexec(workshop.cache)
    outcome = workshop.run()
    assert outcome.report["answer"] == [42]
    assert "mounted noexec" in outcome.messages


LIMITED = """
import resource
from op_builder.toolchain import ninja
ninja.find_ninja()
resource.setrlimit(resource.RLIMIT_NPROC, ({limit}, resource.getrlimit(resource.RLIMIT_NPROC)[1]))
"""


@pytest.mark.parametrize("limit", [1, 2, 3, 4])
def test_limit_on_processes_and_threads(his, limit):
    """Wherever it is met: at our thread, our shell, ninja or the compiler; raising it helps."""
    script = (
        LIMITED.format(limit=f"running + {limit}")
        + FAILS.format(error="BuildError")
        + "else:\n    report(error='')"
    )
    count = """
running = 0
for process in filter(str.isdecimal, os.listdir("/proc")):
    try:
        running += os.stat(f"/proc/{process}").st_uid == os.getuid()
    except FileNotFoundError:
        pass
"""
    error = his.run(count + script).report["error"]
    assert error == "" or "no more processes or threads may be started" in error


def test_full_disk_below_the_trial_of_a_compiler(workshop, mount_tmpfs):
    mount_tmpfs(workshop.build_root, "12k")
    script = """
from op_builder.toolchain import host_compiler
report(reason=host_compiler.find_host_compiler().reason,
       remedy=host_compiler.find_host_compiler().remedy)
"""
    told = workshop.run(script).report
    assert told["reason"] != ""
    assert re.search("the disk (is|may be) full", told["remedy"])
