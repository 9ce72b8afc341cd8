"""Starts a model's command line so that every process of it uses this op.

A script of `launch/` is `__main__`, followed in sys.argv by the model's own arguments. Processes
that are started again from these (Lightning's launcher, one for each rank) therefore switch too,
and so do those that multiprocessing spawns, which import the parent's script.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import runpy
import sys
from collections.abc import Sequence
from typing import Any

from deepspeed4science import __version__
from deepspeed4science.drop_in import clients
from deepspeed4science.drop_in.import_hook import Switch


def start(client: str, arguments: Sequence[str]) -> None:
    """Run the command line of `client` in this process; it mostly ends by SystemExit."""
    script = str(clients.LAUNCHERS / f"run_{client}.py")
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def switch_and_tell(client: str) -> Switch:
    """Switch and print one line, in a process of the model; the version was checked before."""
    if sys.path[:1] == [os.path.dirname(os.path.abspath(sys.argv[0]))]:
        # Started by path: a clone of the model is found as by `python -m`, first where it is
        # started, so that all processes run the same code.
        sys.path[0] = os.getcwd()
    print(line(client), file=sys.stderr)
    return clients.switch(client, any_version=True)


def line(client: str) -> str:
    """The line that says what is switched."""
    chosen = clients.find(client)
    names = [f"{module}.{name}" for module, name, _ in clients.functions(chosen)]
    return (
        f"deepspeed4science {__version__} in "
        f"{' '.join(clients.installed(chosen) or (client, '(a clone)'))}: "
        f"{', '.join(names)}{f' ({chosen.hint})' if chosen.hint else ''}"
    )


def run(client: str) -> None:
    """Run the model's console script in this process."""
    chosen = clients.find(client)
    scripts = importlib.metadata.entry_points(group="console_scripts", name=chosen.command)
    entry = next((script.value for script in scripts), chosen.entry_point)
    module, _, name = entry.partition(":")
    function: Any = getattr(importlib.import_module(module), name)
    sys.exit(function())
