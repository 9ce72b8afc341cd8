"""How ready an op is on this machine, without loading or compiling anything: what reports show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import cache, search
from .errors import BuildError
from .key import CompileJob, Hashes

if TYPE_CHECKING:
    from .builder import Obstacle, OpBuilder

STATES = ("prebuilt", "cached", "buildable", "not")


@dataclass(frozen=True)
class OpStatus:
    state: str  # one of STATES
    num_ready: int = 0  # kernels that are compiled already, of those an install would compile
    num_kernels: int = 0
    obstacles: tuple[Obstacle, ...] = ()  # why nothing (more) can be compiled, each with its remedy

    @property
    def usable(self) -> bool:
        return self.state != "not"


def of(builder: OpBuilder[Any]) -> OpStatus:
    """Prebuilt or cached as soon as one kernel is; obstacles then concern only the others.

    Never raises for a machine that lacks something: that is an obstacle.
    """
    from .builder import Obstacle

    obstacles = builder.obstacles()
    try:
        jobs = builder.jobs(builder.prebuilt_kernels())
    except BuildError as error:
        return OpStatus("not", obstacles=tuple(obstacles) or (Obstacle(str(error), ""),))
    hashes = Hashes()
    found = [origin for job in jobs if (origin := _origin(job, hashes))]
    if found:
        state = "prebuilt" if "prebuilt" in found else "cached"
    else:
        state = "not" if obstacles else "buildable"
    return OpStatus(state, len(found), len(jobs), tuple(obstacles))


def _origin(job: CompileJob, hashes: Hashes) -> str | None:
    """Where a sound library for `job` is: "prebuilt" or "cached"; None when there is none."""
    for root in search.roots():
        any_toolchain = root.shared or job.compiler is None
        entry = cache.find(root.path, job, hashes, any_toolchain=any_toolchain)
        if entry is not None and entry.damage() is None:
            return "prebuilt" if root.origin == "prebuilt" else "cached"
    return None
