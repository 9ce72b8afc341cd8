"""Functions on tensors that what `load()` returns has, too. Nothing here knows tensors: a package
that does offers them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from .errors import BuildError

_modules: dict[str, str] = {}  # by the function's name


def offer(module: str, *functions: str) -> None:
    """Functions of a module, which is imported when one of them is asked for."""
    _modules.update(dict.fromkeys(functions, module))


def function(name: str) -> Callable[..., None]:
    """Raises BuildError when nobody offers it."""
    if name not in _modules:
        raise BuildError(
            f"{name}: expected a package that offers it, got none; import deepspeed4science first"
        )
    found: Callable[..., None] = getattr(importlib.import_module(_modules[name]), name)
    return found
