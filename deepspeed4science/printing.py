"""Printing of whole texts by commands."""

from __future__ import annotations

import contextlib
import os
import sys


def show(text: str) -> None:
    """Prints although a path may hold characters outside the terminal's encoding, and although the
    reader may have closed the pipe. Ends the program, with 1, where the output cannot be written.
    """
    if sys.stdout is None:  # closed (>&-): nobody reads it
        return
    encoding = sys.stdout.encoding or "ascii"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except OSError as error:
        with contextlib.suppress(OSError):  # else the interpreter complains while it ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # a full disk
            sys.exit(f"error: the output cannot be written: {error.strerror}")
