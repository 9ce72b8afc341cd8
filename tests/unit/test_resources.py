"""How many compilers at once: control groups of both versions, as a container sees them."""

import os

import pytest

from op_builder.build import resources
from op_builder.build.supervised_process import SupervisedProcess

GIB = 1 << 30


@pytest.fixture
def system(tmp_path, monkeypatch):
    """A make-believe /sys/fs/cgroup and /proc; `write(name, text)` adds files."""
    real = resources._text

    def read(path):
        place = path if path.is_relative_to(tmp_path) else tmp_path / str(path).lstrip("/")
        return real(place) if place.exists() else ""

    def write(name, text):
        place = tmp_path / name.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)

    monkeypatch.setattr(resources, "_text", read)
    monkeypatch.setattr(resources, "_CGROUP", tmp_path / "sys/fs/cgroup")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.delenv("MAX_JOBS", raising=False)
    write("/proc/meminfo", f"MemTotal: 999999999 kB\nMemAvailable: {256 * GIB // 1024} kB\n")
    write("/proc/self/cgroup", "0::/pod/container\n")
    return write


def test_bare_machine(system):
    assert resources.cores() == 64
    assert resources.free_memory_bytes() == 256 * GIB
    assert resources.parallel_jobs(GIB) == 64
    assert resources.parallel_jobs(8 * GIB) == 32


def test_sandbox_that_refuses_the_affinity_mask(system, monkeypatch):
    def refuse(pid):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.sched_getaffinity", refuse)
    for count, cores in ((8, 8), (None, 1)):
        monkeypatch.setattr("os.cpu_count", lambda count=count: count)
        assert resources.cores() == cores


def test_version_2_group_and_its_parents(system):
    """A limit of the pod binds its containers."""
    base = "/sys/fs/cgroup"
    system(f"{base}/pod/container/cpu.max", "max 100000")
    system(f"{base}/pod/cpu.max", "250000 100000")
    system(f"{base}/pod/container/memory.max", "max")
    system(f"{base}/pod/memory.max", str(8 * GIB))
    system(f"{base}/pod/memory.current", str(6 * GIB))
    system(f"{base}/pod/memory.stat", f"anon 1\ninactive_file {4 * GIB}\n")
    assert resources.cores() == 2
    assert resources.free_memory_bytes() == 6 * GIB
    assert resources.parallel_jobs(GIB) == 2
    assert resources.parallel_jobs(4 * GIB) == 1


def test_version_1(system):
    system("/proc/self/cgroup", "5:memory:/job\n4:cpu,cpuacct:/job\n")
    system("/sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "300000")
    system("/sys/fs/cgroup/cpu/job/cpu.cfs_period_us", "100000")
    system("/sys/fs/cgroup/memory/job/memory.limit_in_bytes", str(4 * GIB))
    system("/sys/fs/cgroup/memory/job/memory.usage_in_bytes", str(GIB))
    assert resources.cores() == 3
    assert resources.free_memory_bytes() == 3 * GIB


def test_version_1_in_a_container_that_sees_the_hosts_path(system):
    """Without a name space of its own, the group's path is the host's and its files are not."""
    system("/proc/self/cgroup", "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n")
    system("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "200000")
    system("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000")
    system("/sys/fs/cgroup/memory/memory.limit_in_bytes", str(2 * GIB))
    system("/sys/fs/cgroup/memory/memory.usage_in_bytes", str(GIB // 2))
    assert resources.cores() == 2
    assert resources.free_memory_bytes() == 3 * GIB // 2


def test_version_2_in_a_name_space_of_its_own(system):
    system("/proc/self/cgroup", "0::/\n")
    system("/sys/fs/cgroup/cpu.max", "300000 100000")
    system("/sys/fs/cgroup/memory.max", str(8 * GIB))
    system("/sys/fs/cgroup/memory.high", str(4 * GIB))
    system("/sys/fs/cgroup/memory.current", str(GIB))
    assert resources.cores() == 3
    assert resources.free_memory_bytes() == 3 * GIB


def test_both_versions_at_once(system):
    """A hybrid host: limits in version 1, an empty version 2 beside it."""
    system("/proc/self/cgroup", "5:memory:/slurm/job_7\n3:cpuset,cpu:/slurm/job_7\n0::/user\n")
    system("/sys/fs/cgroup/cpuset,cpu/slurm/cpu.cfs_quota_us", "400000")
    system("/sys/fs/cgroup/cpuset,cpu/slurm/cpu.cfs_period_us", "100000")
    system("/sys/fs/cgroup/memory/slurm/job_7/memory.limit_in_bytes", str(6 * GIB))
    system("/sys/fs/cgroup/memory/slurm/job_7/memory.usage_in_bytes", str(5 * GIB))
    system("/sys/fs/cgroup/memory/slurm/job_7/memory.stat", f"total_inactive_file {2 * GIB}\n")
    assert resources.cores() == 4
    assert resources.free_memory_bytes() == 3 * GIB


def test_no_limit_of_memory_in_version_1(system):
    """The largest number that is a whole number of pages stands for none."""
    system("/proc/self/cgroup", "5:memory:/\n")
    system("/sys/fs/cgroup/memory/memory.limit_in_bytes", str(2**63 - 4096))
    system("/sys/fs/cgroup/memory/memory.usage_in_bytes", str(GIB))
    assert resources.free_memory_bytes() == 256 * GIB


def test_half_a_core_is_one(system):
    system("/sys/fs/cgroup/pod/cpu.max", "50000 100000")
    assert resources.cores() == 1


def test_no_limit_in_version_1(system):
    system("/proc/self/cgroup", "4:cpu:/job\n")
    system("/sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "-1")
    system("/sys/fs/cgroup/cpu/job/cpu.cfs_period_us", "100000")
    assert resources.cores() == 64


def test_max_jobs_counts_but_memory_limits(system, monkeypatch):
    monkeypatch.setenv("MAX_JOBS", "5")
    assert resources.parallel_jobs(GIB) == 5
    monkeypatch.setenv("MAX_JOBS", "500")
    assert resources.parallel_jobs(2 * GIB) == 128


def test_at_least_one(system):
    system("/proc/meminfo", "MemAvailable: 1000 kB\n")
    assert resources.parallel_jobs(8 * GIB) == 1


def test_system_that_says_nothing(system):
    system("/proc/meminfo", "")
    system("/proc/self/cgroup", "")
    assert resources.free_memory_bytes() is None
    assert resources.parallel_jobs(GIB) == 64


def test_where_memory_runs_out_the_compiler_ends_first():
    """The process that waits for it has more memory; the system would end that one."""
    program = SupervisedProcess(["cat", "/proc/self/oom_score_adj"], os.environ)
    assert list(program.lines()) == ["1000"]
