"""From a compiler's log to an error a person can act on: first error, command, log, hint."""

from __future__ import annotations

import contextlib
import re
import tempfile
from pathlib import Path

from .errors import CompileError
from .ninja_run import Failed

_LINES_AROUND = 5

# The first line that matches is the cause; what follows it is mostly its consequence.
_ERROR = re.compile(
    r"\b(error|fatal)\b\s*[:#]|undefined reference|multiple definition|cannot find -l"
    r"|\bKilled\b|internal compiler error|No space left|not found$|: command not found"
    r"|Permission denied|^exit status",
    re.MULTILINE,
)

# (what the log says, what to do). The first that matches counts: the specific ones come first.
_HINTS: tuple[tuple[str, str], ...] = (
    (  # _LACKS matches these two
        r"\bKilled\b|exit status 137|died due to signal 9|out of memory|cannot allocate memory"
        r"|virtual memory exhausted",
        "the machine ran out of memory: close other programs or set MAX_JOBS=1",
    ),
    (
        r"No space left on device|Disk quota exceeded",
        "the disk is full: free some space, or set TMPDIR to a folder on another one",
    ),
    (
        r"(cutlass|cute)/[\w/.]+: No such file",
        "CUTLASS's headers are missing or too old: pip install --no-deps nvidia-cutlass==4.2.0.0, "
        "or set CUTLASS_PATH",
    ),
    (
        r"(cstdint|cstring|vector|cmath|omp\.h): No such file",
        "the compiler has no C++ standard library: install it whole (g++ on Debian and Ubuntu, "
        "gcc-c++ on Fedora) or name another compiler in CXX",
    ),
    (
        r"cannot find -l",
        "a library to link with is missing: see its name above",
    ),
    (
        r"No such file or directory",
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
)


# Failures of this moment and machine: trying again may succeed.
_LACKS = re.compile("|".join(pattern for pattern, _ in _HINTS[:2]), re.IGNORECASE | re.MULTILINE)

# nvcc says nothing of a full disk and removes its temporary files before it ends. A unit needs less
# than this.
_SMALL_DISK_BYTES = 64 << 20


def is_lasting(failed: Failed) -> bool:
    """Whether others would fail at the same source in the same way."""
    return _LACKS.search(failed.log) is None and not _small_disk(failed)


def _small_disk(failed: Failed) -> bool:
    return failed.free_bytes is not None and failed.free_bytes < _SMALL_DISK_BYTES


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
    return "\n".join(f"  {'>' if index == at else ' '} {lines[index]}" for index in shown)


def _hint(failed: Failed) -> str:
    for pattern, hint in _HINTS:
        if re.search(pattern, failed.log, re.IGNORECASE | re.MULTILINE):
            return hint
    if _small_disk(failed):
        return (
            f"the disk may be full, {(failed.free_bytes or 0) / 2**20:.1f} MiB are left in "
            f"{failed.folder}: free some space, or set TMPDIR to a folder on another one"
        )
    return (
        "the compiler and our source disagree: another compiler in CXX may do; "
        "otherwise report it with the log"
    )


def _keep(failed: Failed, logs: Path) -> str:
    text = f"$ {failed.command}\n{failed.log}"
    with contextlib.suppress(OSError):
        logs.mkdir(parents=True, exist_ok=True)
        path = logs / f"{failed.job.ident}.log"
        path.write_text(text)
        return str(path)
    with contextlib.suppress(OSError):
        with tempfile.NamedTemporaryFile(
            "w", prefix=f"{failed.job.name}-", suffix=".log", delete=False
        ) as stream:
            stream.write(text)
        return stream.name
    return "could not be written anywhere"
