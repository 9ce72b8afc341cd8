"""Somebody without rights: these tests run as root on many machines, and root may do anything."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from ..toys import REPOSITORY

NOBODY = 65534


@dataclass(frozen=True)
class Person:
    """Who runs the processes of a test, and with which Python."""

    uid: int
    python: tuple[str, ...]  # the command up to Python's own arguments
    packages: str  # for PYTHONPATH

    @property
    def is_somebody_else(self) -> bool:
        return self.uid != os.geteuid()

    def give(self, *places: Path) -> None:
        """Make files and folders his own, with all that is in them."""
        for place in places:
            for path in (place, *place.rglob("*")):
                os.chown(path, self.uid, self.uid, follow_symlinks=False)


@contextmanager
def nobody(folder: Path) -> Iterator[Person]:
    """A user without rights; `folder` is for a view of a Python that root keeps for himself."""
    packages = os.pathsep.join([str(REPOSITORY), *site.getsitepackages()])
    if os.geteuid() != 0:
        yield Person(os.geteuid(), (sys.executable,), packages)
        return
    if shutil.which("setpriv") is None:
        pytest.skip("needs setpriv, to become a user without rights")
    become = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
    real = Path(os.path.realpath(sys.executable))
    own = (*become, str(real))
    if _works(own):
        yield Person(NOBODY, own, packages)
        return
    view = folder / "python"
    view.mkdir()
    mounted = subprocess.run(["mount", "--bind", sys.base_prefix, str(view)], capture_output=True)
    if mounted.returncode != 0:
        view.rmdir()
        pytest.skip(f"{real} is for root only, and nothing can be mounted here")
    try:
        # Read-only: whoever removes what a killed test left must not remove that Python.
        subprocess.run(["mount", "-o", "remount,bind,ro", str(view)], check=True)
        seen = (*become, str(view / real.relative_to(sys.base_prefix)))
        if not _works(seen):
            pytest.skip(f"another user cannot run {real}")
        yield Person(NOBODY, seen, packages)
    finally:
        subprocess.run(["umount", "-l", str(view)], check=True)
        view.rmdir()


def _works(python: tuple[str, ...]) -> bool:
    """It starts, and can start itself: setpriv's own rights last until the first program runs."""
    again = "import subprocess, sys; subprocess.run([sys.executable, '-c', ''], check=True)"
    return subprocess.run([*python, "-c", again], capture_output=True).returncode == 0
