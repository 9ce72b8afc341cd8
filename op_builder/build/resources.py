"""The number of compilers that may run at once, by the cores and memory that the control group
grants.

The usual functions report 128 cores in a container that has 2 cores and 4 GB on a host of 128
cores, and 128 compilers in 4 GB are killed one by one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from .. import env

_CGROUP = Path("/sys/fs/cgroup")


def parallel_jobs(memory_bytes_per_job: int) -> int:
    """At least 1; `MAX_JOBS` lowers or raises what cores allow, memory always limits."""
    wanted = env.positive_int("MAX_JOBS") or cores()
    memory = free_memory_bytes()
    if memory is not None:
        wanted = min(wanted, memory // max(memory_bytes_per_job, 1))
    return max(wanted, 1)


def cores() -> int:
    """Whole cores: the affinity mask, cut by the control groups' quota."""
    try:
        count = len(os.sched_getaffinity(0))
    except OSError:  # a sandbox refuses the question
        count = os.cpu_count() or 1
    for folder in _groups("cpu"):
        quota = _cpu_quota(folder)
        if quota is not None:
            count = min(count, max(int(quota), 1))
    return count


def free_memory_bytes() -> int | None:
    """Memory that can be allocated without swapping; None where the system does not say."""
    amounts = []
    for line in _text(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            amounts.append(int(line.split()[1]) * 1024)
    for folder in _groups("memory"):
        for limit, used in (
            ("memory.max", "memory.current"),
            ("memory.high", "memory.current"),  # above it the system throttles the processes
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            granted, taken = _text(folder / limit), _text(folder / used)
            if granted.isdecimal() and taken.isdecimal():
                # Cached file pages count as used, but are freed on demand.
                amounts.append(int(granted) - int(taken) + _reclaimable(folder))
    return max(min(amounts), 0) if amounts else None


def _reclaimable(folder: Path) -> int:
    for line in _text(folder / "memory.stat").splitlines():
        name, _, amount = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file") and amount.isdecimal():
            return int(amount)
    return 0


def _cpu_quota(folder: Path) -> float | None:
    words = _text(folder / "cpu.max").split()
    if len(words) == 2 and words[0].isdecimal():
        return int(words[0]) / int(words[1])
    quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
    if quota.isdecimal() and period.isdecimal():  # "-1" means no limit and is not decimal
        return int(quota) / int(period)
    return None


def _groups(controller: str) -> Iterator[Path]:
    """This process's group and its parents, for both versions of control groups."""
    for line in _text(Path("/proc/self/cgroup")).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            base = _CGROUP
        elif controller in controllers.split(","):
            together = _CGROUP / controllers  # "cpu,cpuacct"; most systems link "cpu" to it
            base = together if os.path.isdir(together) else _CGROUP / controller
        else:
            continue
        folder = base / path.lstrip("/")
        yield folder
        for parent in folder.parents:
            if not parent.is_relative_to(base):
                break
            yield parent


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
