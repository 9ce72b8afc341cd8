"""Headers of the kernels with some replaced by stubs of tests/cpp/host."""

from __future__ import annotations

from pathlib import Path

from op_builder import paths


def with_stubs(folder: Path, stubs: Path) -> Path:
    """An include folder of links to all headers, those that `stubs` has at the same place instead
    of ours: a header finds its neighbours from where it stands, whatever the order of folders.
    It is one for -I, for GCC follows the links of -isystem.
    """
    for source in (paths.csrc_root(), stubs):
        for header in source.rglob("*.h"):
            link = folder / header.relative_to(source)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to(header)
    return folder
