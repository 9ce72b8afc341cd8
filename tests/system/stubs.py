"""Headers of the kernels with some replaced by stubs of tests/cpp/host."""

from __future__ import annotations

from pathlib import Path

from op_builder import paths


def with_stubs(folder: Path, stubs: Path) -> Path:
    """An include folder of links to all headers, in which those of `stubs` replace ours of the same
    path. A header finds its neighbours relative to itself, so the order of include folders would
    not suffice. Use it with -I: GCC resolves links below -isystem.
    """
    for source in (paths.csrc_root(), stubs):
        for header in source.rglob("*.h"):
            link = folder / header.relative_to(source)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to(header)
    return folder
