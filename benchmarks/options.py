"""Options that list names, with commas, and counts; a name that there is not, or no count, ends the
program with 2.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def known(check: Callable[[list[str]], object]) -> Callable[[str], str]:
    """The type of such an option; `check` raises ValueError for a name that it does not know."""

    def names(text: str) -> str:
        try:
            check(text.split(","))
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return text

    return names


def among(what: str, there: Collection[str]) -> Callable[[str], str]:
    """The type of an option whose names are those that are `there`."""

    def check(names: list[str]) -> None:
        if unknown := [name for name in names if name not in there]:
            raise ValueError(f"no {what} is called {unknown[0]!r}; there are: {', '.join(there)}")

    return known(check)


def count(text: str) -> int:
    """Of runs, rounds, residues."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def counts(text: str) -> list[int]:
    return [count(one) for one in text.split(",")]
