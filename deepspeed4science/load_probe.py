"""Whether compiled kernels can be loaded here; tried in a process of its own: one may end it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from op_builder.cache.cache import Entry

TIMEOUT_S = 60.0
_MARK = "deepspeed4science-load-probe "

# Prints a line for each kernel at once, since the next one may end the process. Without an OpenMP
# runtime of the system nothing is known: PyTorch will bring one.
_PROGRAM = """\
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from pathlib import Path
import deepspeed4science  # finds its own op_builder
from op_builder.errors import BuildError
from op_builder.cache.loaded_kernel import LoadedKernel
for path, name in json.loads(sys.argv[2]):
    said = ""
    try:
        LoadedKernel(Path(path), name, "cache")
    except BuildError:
        pass
    except Exception as error:
        said = str(error) or type(error).__name__
    print(sys.argv[3] + json.dumps([path, said]), flush=True)
"""


def problems(entries: Sequence[Entry]) -> dict[str, str]:
    """For each library that cannot be loaded, the reason."""
    if not entries:
        return {}
    asked = [(str(entry.library), entry.name) for entry in entries]
    command = [sys.executable, "-c", _PROGRAM, json.dumps(sys.path), json.dumps(asked), _MARK]
    try:
        done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=False)
        output, ended = done.stdout, f"loading it ended the process with {done.returncode}"
    except subprocess.TimeoutExpired as error:
        output, ended = error.stdout or b"", f"loading it did not end within {TIMEOUT_S:.0f} s"
    answers: dict[str, str] = {}
    for line in output.decode(errors="replace").splitlines():
        if line.startswith(_MARK):
            path, said = json.loads(line[len(_MARK) :])
            answers[path] = said
    unanswered = [path for path, _ in asked if path not in answers]
    if unanswered:
        answers[unanswered[0]] = ended  # those after it remain unknown
    return {path: said for path, said in answers.items() if said}
