"""`python -m deepspeed4science COMMAND`: each command's own `--help` says more."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    module: str  # its `main(argv)` returns the exit code
    meaning: str


COMMANDS = {
    "report": Command("deepspeed4science.report", "what runs here, and what mends the rest"),
    "cache": Command("deepspeed4science.cache_command", "list, explain, clear compiled kernels"),
    "build": Command("deepspeed4science.build_command", "compile kernels before they are needed"),
    "run": Command("deepspeed4science.run_command", "a model's own command line on this op"),
    "demo": Command("deepspeed4science.demo", "a real protein family through all four attentions"),
}


def main(argv: Sequence[str]) -> int:
    name = argv[0] if argv else ""
    if name == "--version":
        from deepspeed4science import __version__

        print(f"deepspeed4science {__version__}")
        return 0
    if name not in COMMANDS:
        wanted = name in ("-h", "--help")
        lines = [f"  {key:<8} {command.meaning}" for key, command in COMMANDS.items()]
        usage = "\n".join(
            ["usage: python -m deepspeed4science COMMAND [OPTIONS] | --version", "", *lines]
        )
        if name and not wanted:
            usage += f"\n\nerror: expected one of these commands, got {name!r}"
        print(usage, file=sys.stdout if wanted else sys.stderr)
        return 0 if wanted else 2
    try:
        module = importlib.import_module(COMMANDS[name].module)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        print(
            f"{name}: expected PyTorch; {sys.executable} has none. pip install 'torch>=2.10', or "
            "name the Python that has it.",
            file=sys.stderr,
        )
        return 1
    return int(module.main(list(argv[1:])) or 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
