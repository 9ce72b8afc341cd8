"""`python -m deepspeed4science run CLIENT ARGS...`: a model's command line, with this op."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from deepspeed4science.drop_in import clients, launching
from deepspeed4science.drop_in.import_hook import is_installed
from deepspeed4science.errors import DropInError


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    try:
        _check_installed(options.client)
        switched = clients.switch(options.client, any_version=options.any_version)
        if options.dry_run:
            with switched:
                return _dry_run(options.client)
        switched.back()  # the launcher switches, so that processes which it starts again switch too
    except DropInError as error:
        print(error, file=sys.stderr)
        return 1
    launching.start(options.client, options.arguments)
    return 0


def _check_installed(client: str) -> None:
    chosen = clients.find(client)
    package = clients.package(chosen)
    if not is_installed(package):
        raise DropInError(
            f"{client}: expected it to be installed; {sys.executable} finds no package {package}. "
            f"Install it (pip install {clients.requirement(chosen)}), or run this with the Python "
            "that has it."
        )


def _dry_run(client: str) -> int:
    print(launching.line(client))
    for module, name, replacement in clients.functions(clients.find(client)):
        try:
            importlib.import_module(module)
        except ImportError as error:
            print(f"{module} cannot be imported: {error}. Install {client} whole.", file=sys.stderr)
            return 1
        except DropInError:
            raise
        except Exception as error:  # such as Protenix's, which compiles a layer norm when imported
            print(f"{module} cannot be imported: {type(error).__name__}: {error}", file=sys.stderr)
            return 1
        print(f"  {module}.{name} -> {replacement.replace(':', '.')}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m deepspeed4science run",
        description="Run a model's own command line with this op in place of the kernels it calls.",
        epilog="Example: python -m deepspeed4science run boltz predict input.yaml",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="say what would be switched, and check that it is there",
    )
    parser.add_argument(
        "--any-version", action="store_true", help="also of versions that this was not tried with"
    )
    parser.add_argument(
        "client",
        choices=sorted(clients.CLIENTS),
        metavar="CLIENT",
        help=", ".join(sorted(clients.CLIENTS)),
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="its arguments")
    return parser
