"""Functions on tensors that the object returned by `load()` has as attributes. op_builder knows no
tensors: another package registers these functions here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from .errors import BuildError

_modules: dict[str, str] = {}  # by the function's name


def offer(module: str, *functions: str) -> None:
    """Register functions of a module, which is imported when one of them is first used."""
    _modules.update(dict.fromkeys(functions, module))


def function(name: str) -> Callable[..., None]:
    """The registered function; raises BuildError when there is none of that name."""
    if name not in _modules:
        raise BuildError(
            f"{name}: expected a package that offers it, got none; import deepspeed4science first"
        )
    found: Callable[..., None] = getattr(importlib.import_module(_modules[name]), name)
    return found
