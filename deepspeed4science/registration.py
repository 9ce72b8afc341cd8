"""Registers the operators with PyTorch once in a process, however often this package is imported.

PyTorch keeps an operator until the process ends and accepts no second one of its name. It therefore
gets functions that look up those of the last import: after a reload, or an import behind
`del sys.modules[...]`, the operators are the same and run the new code.

Registering is all or nothing. It runs in a thread of its own, since Ctrl-C interrupts the main
thread only: it may end an import, and the next import finds everything registered.
"""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

try:  # names outside of PyTorch's public interface, which a later release may lack
    from torch._C._dynamo.eval_frame import (
        _FrameAction,
        _FrameExecStrategy,
        set_code_exec_strategy,
    )

    _SKIP: Any = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)  # a frame; those it calls
except ImportError:
    _SKIP = None

_NAMESPACE = "deepspeed4science"
_STATE = "_registered"  # an attribute of torch.ops.deepspeed4science, which is never re-imported


Functions = dict[str, dict[str, Callable[..., Any]]]  # by operator, then by role


@dataclass(frozen=True)
class Operator:
    """One operator: its schema and the functions that PyTorch calls."""

    schema: str
    kernels: Mapping[str, Callable[..., Any]]  # by dispatch key: "CompositeExplicitAutograd", ...
    fake: Callable[..., Any]  # results without values
    vmap: Callable[..., Any] | None = None

    @property
    def name(self) -> str:
        return self.schema.partition("(")[0]

    @property
    def functions(self) -> dict[str, Callable[..., Any]]:
        """The functions by role: a dispatch key, or one of the names above."""
        found = {"fake": self.fake, **self.kernels}
        return found | ({"vmap": self.vmap} if self.vmap else {})


@dataclass
class _State:
    """The registered operators; kept in torch's modules, so that there is only one in a process."""

    guard: threading.Lock = field(default_factory=threading.Lock)
    library: torch.library.Library | None = None
    # By operator: the roles for which torch has a function.
    known: dict[str, set[str]] = field(default_factory=dict)
    functions: Functions = field(default_factory=dict)


def register(*operators: Operator) -> list[Any]:
    """The operators' overloads in `torch.ops`, registered now or before.

    Raises ImportError where an operator of that name has another signature.
    """
    state: _State = vars(_namespace()).setdefault(_STATE, _State())
    problems: list[BaseException] = []
    finished = threading.Lock()
    finished.acquire()

    def run() -> None:
        try:
            with state.guard:
                _register(state, operators)
        except BaseException as problem:
            problems.append(problem)
        finally:
            finished.release()

    try:
        _thread.start_new_thread(run, ())  # an interrupt may leave a threading.Thread half started
    except RuntimeError:  # no more threads can be started
        run()
    finished.acquire()
    if problems:
        raise problems[0]
    for operator in operators:
        state.functions[operator.name] = operator.functions
    return [_overload(operator) for operator in operators]


def _register(state: _State, operators: tuple[Operator, ...]) -> None:
    """Define the operators that are not defined yet, with functions that call the latest ones."""
    if state.library is None:
        state.library = torch.library.Library(_NAMESPACE, "FRAGMENT")
    for operator in operators:
        if hasattr(_namespace(), operator.name):
            _require_same(state, operator)
        else:
            state.library.define(operator.schema, tags=(torch.Tag.pt2_compliant_tag,))
            state.known[operator.name] = set()
    for operator in operators:
        known = state.known[operator.name]
        for role in operator.functions.keys() - known:
            _bind(state.library, state.functions, operator, role)
            known.add(role)


def _require_same(state: _State, operator: Operator) -> None:
    wanted = str(torch._C.parse_schema(f"{_NAMESPACE}::{operator.schema}"))
    got = str(_overload(operator)._schema)
    if got != wanted or operator.name not in state.known:
        raise ImportError(
            f"another version of deepspeed4science is in this process already: expected its "
            f"operator to be {wanted}, got {got}; restart the process"
        )


def _bind(library: torch.library.Library, table: Functions, operator: Operator, role: str) -> None:
    """Give torch a function for `role` that calls the one that `table` then has."""
    name = operator.name  # found in the schema, which takes time
    qualified = f"{_NAMESPACE}::{name}"

    def latest(role: str) -> Callable[..., Any]:
        return _untraced(lambda *args, **kwargs: table[name][role](*args, **kwargs))

    if role in operator.kernels:
        library.impl(name, latest(role), role)
    elif role == "fake":
        torch.library.register_fake(qualified, latest(role), lib=library)
    elif role == "vmap":
        torch.library.register_vmap(qualified, latest(role), lib=library)


def _untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, such that torch.compile compiles neither it nor anything that it calls. Otherwise
    torch.compile would try the operators' own Python where it could not compile their caller.
    """
    if _SKIP is not None:
        set_code_exec_strategy(function.__code__, _SKIP)
    return function


def _overload(operator: Operator) -> Any:
    return getattr(_namespace(), operator.name).default


def _namespace() -> Any:
    return getattr(torch.ops, _NAMESPACE)
