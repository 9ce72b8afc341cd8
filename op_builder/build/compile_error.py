"""Turns a compiler's log into an error to act on: first error, command, log, hint."""

from __future__ import annotations

import contextlib
import re
import tempfile
from pathlib import Path

from .. import paths
from ..errors import CompileError
from ..system import files, ownership, shortages
from .ninja_run import Failed

_LINES_AROUND = 5
_MOST_COLUMNS = 500

# The first line that matches is the cause; later errors mostly follow from it.
_ERROR = re.compile(
    r"\b(error|fatal)\b\s*[:#]|undefined reference|multiple definition|cannot find -l"
    r"|\bKilled\b|internal compiler error|No space left|not found$|: command not found"
    r"|Permission denied|^exit status",
    re.MULTILINE,
)

_ABSENT = "(: No such file|' file not found)"  # of a header, as gcc and clang say it

# (what the log says, what to do). The first that matches counts: the specific ones come first.
_HINTS: tuple[tuple[str, str], ...] = (
    (
        rf"(cutlass|cute)/[\w/.]+{_ABSENT}",
        "CUTLASS's headers are missing or too old: pip install --no-deps nvidia-cutlass==4.2.0.0, "
        "or set CUTLASS_PATH",
    ),
    (
        rf"(cstdint|cstring|vector|cmath){_ABSENT}",
        "the compiler has no C++ standard library: install it whole (g++ on Debian and Ubuntu, "
        "gcc-c++ on Fedora) or name another compiler in CXX",
    ),
    (
        r"cannot find -l",
        "a library to link with is missing: see its name above",
    ),
    (
        rf"No such file or directory|{_ABSENT}",
        "a header is missing: see its name above",
    ),
    (
        r"unrecognized command[- ]line option|unknown argument|unsupported option|bad value .* for",
        "the compiler is too old for these flags: name a newer one in CXX (GCC 9 or Clang 10)",
    ),
    (
        r"exit status 127|not found$",
        "a program is missing: see its name above; ds_report lists what was looked for and where",
    ),
    (
        r"internal compiler error",
        "the compiler itself failed: name another one, or another version, in CXX",
    ),
    (
        r"/evoformer_attn/[\w/.]+[(:].*static(_assert| assertion) failed",
        "the assertion's sentence says what this source does not support (docs/adding-a-kernel.md)",
    ),
)


def is_lasting(failed: Failed) -> bool:
    """Whether other processes would fail with the same source in the same way."""
    return not _lack(failed)


def _lack(failed: Failed) -> str:
    """The remedy for a temporary shortage of the machine; empty where that is not the cause."""
    told = shortages.remedy(failed.log)
    if told or failed.folder is None or failed.free_bytes is None:
        return told
    return shortages.disk_remedy(failed.folder, failed.free_bytes)


def explain(failed: Failed, logs: Path) -> CompileError:
    """The error to raise; the log is kept under `logs`, else in the temporary folder."""
    kept = _keep(failed, logs)
    return CompileError(
        f"compiling {failed.job.name} failed; the compiler's first error, in its surroundings:\n\n"
        f"{_first_error(failed.log)}\n\n"
        f"command: {failed.command}\n"
        f"log: {kept}\n"
        f"hint: {_hint(failed)}"
    )


def _first_error(log: str) -> str:
    lines = log.strip().splitlines()
    if not lines:
        return "    (the compiler said nothing)"
    at = next((index for index, line in enumerate(lines) if _ERROR.search(line)), len(lines) - 1)
    shown = range(max(at - _LINES_AROUND, 0), min(at + _LINES_AROUND + 1, len(lines)))
    return "\n".join(f"  {'>' if i == at else ' '} {lines[i][:_MOST_COLUMNS]}" for i in shown)


def _hint(failed: Failed) -> str:
    if lack := _lack(failed):
        return lack
    for pattern, hint in _HINTS:
        if re.search(pattern, failed.log, re.IGNORECASE | re.MULTILINE):
            return hint
    return (
        "the compiler and our source disagree: another compiler in CXX may do; "
        "otherwise report it with the log"
    )


def _keep(failed: Failed, logs: Path) -> str:
    text = f"$ {failed.command}\n{failed.log}"
    with contextlib.suppress(OSError):
        paths.make_root(logs.parent)
        if not ownership.doubt_about(logs.parent):
            path = files.make_part(logs.parent, logs.name) / f"{failed.job.ident}.log"
            files.replace(path, text.encode())
            return str(path)
    with contextlib.suppress(OSError):
        with tempfile.NamedTemporaryFile(
            "w", prefix=f"{failed.job.name}-", suffix=".log", delete=False
        ) as stream:
            stream.write(text)
        return stream.name
    return "could not be written anywhere"
