"""Copies of the repository as in a clone, and the calls that build front ends make on them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from .toys import REPOSITORY


def tracked() -> list[str]:
    """The files that git tracks, and new ones that it does not ignore."""
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return [name for name in names.split("\0") if name and (REPOSITORY / name).is_file()]


def clone(copy: Path, *, without: tuple[str, ...] = ()) -> Path:
    for name in tracked():
        if name.split("/")[0] not in without:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, copy / name)
    return copy


def environment(home: Path, **changes: str) -> dict[str, str]:
    """This process's environment without variables for builds, and with a home of its own."""
    ours = ("DS_", "DS4S_", "TORCH_", "PYTHONPATH")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return kept | {"HOME": str(home), "DS4S_CPU_ISA": "portable"} | changes


def pip(*arguments: str, home: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pip", *arguments],
        cwd=home,
        env=environment(home, **changes),
        capture_output=True,
        text=True,
        check=False,
    )


def backend(
    call: str, tree: Path, python: str = sys.executable, **changes: str
) -> subprocess.CompletedProcess[str]:
    """A build front end's call of setuptools, without the front end."""
    script = f"import sys; from setuptools import build_meta; print(build_meta.{call})"
    return subprocess.run(
        [python, "-c", script],
        cwd=tree,
        env=environment(tree.parent, **changes),
        capture_output=True,
        text=True,
        check=False,
    )
