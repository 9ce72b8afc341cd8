"""Options that list names, with commas; a name that there is not ends the program with 2."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection


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
