"""What a compiler said, as much of it as anybody reads: a hundred megabytes are no rarity."""

from __future__ import annotations

import os
from pathlib import Path

_MOST_BYTES = 1 << 20  # of the beginning, and of the end


def read(path: Path) -> str:
    """The beginning and the end of a log; empty when it cannot be read."""
    try:
        with open(path, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            head = stream.read(_MOST_BYTES)
            left_out = size - 2 * _MOST_BYTES
            if left_out > 0:
                stream.seek(-_MOST_BYTES, os.SEEK_END)
            tail = stream.read()
    except OSError:
        return ""
    gap = f"\n... {left_out / 2**20:.0f} MiB left out ...\n".encode() if left_out > 0 else b""
    return (head + gap + tail).decode(errors="replace")
