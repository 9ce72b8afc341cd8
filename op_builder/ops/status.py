"""The state of an op on this machine, found without loading or compiling anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ..cache import cache, search
from ..cache.cache import Entry
from ..cache.key import CompileJob, Hashes
from ..cache.search import Root
from ..toolchain import elf

STATES = ("prebuilt", "cached", "buildable", "not")


@dataclass(frozen=True)
class Obstacle:
    """One reason why an op cannot be compiled here, and its remedy: a command or a setting."""

    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.reason}; {self.remedy}" if self.remedy else self.reason


@dataclass(frozen=True)
class OpStatus:
    state: str  # one of STATES
    num_ready: int = 0  # how many of the kernels that an install would compile are compiled
    num_kernels: int = 0
    obstacles: tuple[Obstacle, ...] = ()  # why no (more) kernels can be compiled, with remedies
    unfit: str = ""  # libraries of the same names that do not serve here, and why
    ready: tuple[Entry, ...] = ()  # the kernels that are compiled already

    @property
    def usable(self) -> bool:
        return self.state != "not"


def of(jobs: Sequence[CompileJob], obstacles: Sequence[Obstacle]) -> OpStatus:
    """Prebuilt or cached as soon as one kernel is; the obstacles then concern the others."""
    hashes = Hashes()
    found = {job: place for job in jobs if (place := _find(job, hashes))}
    unfit = _unfit([job for job in jobs if job not in found])
    if found:
        origins = {root.origin for root, _ in found.values()}
        state = "prebuilt" if "prebuilt" in origins else "cached"
    else:
        state = "not" if obstacles else "buildable"
    ready = tuple(entry for _, entry in found.values())
    return OpStatus(state, len(found), len(jobs), tuple(obstacles), unfit, ready)


def _find(job: CompileJob, hashes: Hashes) -> tuple[Root, Entry] | None:
    """The place and entry of a sound library for `job`; None where there is none."""
    for root in search.roots():
        if search.distrust(root):
            continue
        for entry in search.fitting(root, job, hashes):
            if not search.distrust(root, entry) and entry.damage() is None:
                return root, entry
    return None


def _unfit(missing: Sequence[CompileJob]) -> str:
    """Why libraries with the names of `missing` do not serve; empty where there are none."""
    reasons: Counter[str] = Counter()
    for root in search.roots():
        for entry in cache.entries(root.path):
            job = next((job for job in missing if job.name == entry.name), None)
            if job and (reason := _why_not(entry, job, root)):
                reasons[reason] += 1
    return "; ".join(f"{count} unfit: {reason}" for reason, count in sorted(reasons.items()))


def _why_not(entry: Entry, job: CompileJob, root: Root) -> str:
    """Why an entry does not fit. For the cache's own entries only reasons that a user can remove
    are
    given: other entries come and go.
    """
    if tuple(entry.meta["glibc"]) > elf.own_glibc():
        needed, own = (".".join(map(str, two)) for two in (entry.meta["glibc"], elf.own_glibc()))
        return f"needs glibc {needed}, this system has {own} ({root.path})"
    if not root.shared:
        return ""
    if damage := entry.damage():
        return f"{damage} ({root.path})"
    if entry.key.startswith(job.accepted):
        return f"its sources have changed since ({root.path})"
    targets = ", ".join(sorted(entry.targets)) or "another processor"
    return f"compiled for {targets} ({root.path})"
