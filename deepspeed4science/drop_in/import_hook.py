"""Changes modules when they are imported, and serves modules that do not exist; both end."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType, TracebackType
from typing import Any

from deepspeed4science.errors import DropInError

# Gives the attributes that a module gets; called with the module after its import.
Attributes = Callable[[ModuleType], Mapping[str, Any]]
_ABSENT = object()


@dataclass
class _Change:
    """An attribute of a module that a switch has set."""

    module: ModuleType
    name: str
    before: Any
    value: Any

    def follows(self, other: _Change) -> bool:
        """Whether it replaced what `other` set."""
        place = self.module is other.module and self.name == other.name
        return place and self.before is other.value


class Switch(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules that are changed and served from now on until `back()`, or to the end of a `with`.

    A function is switched for code that imports it, or looks it up in its module, while this is on.
    Code that imported it earlier keeps what it has.

    Args:
        changed: by name of a module, attributes that it gets as soon as it is imported, or now if
            it is imported already. If another thread is importing it, this waits for the end.
        served: by name, attributes of a module that does not exist. Its parent packages must be
            served too.

    Raises:
        DropInError: this runs within the import of a module of `changed`.
    """

    def __init__(
        self, *, changed: Mapping[str, Attributes], served: Mapping[str, Attributes]
    ) -> None:
        self._changed, self._served = changed, served
        self._done: list[_Change] = []
        sys.meta_path.insert(0, self)
        try:
            for name in changed:
                if sys.modules.get(name) is not None:
                    self.change(_whole(name))
        except BaseException:
            self.back()
            raise

    def __enter__(self) -> Switch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.back()

    def back(self) -> None:
        """Switch back; a second call does nothing. What another switch has changed since stays as
        it is until that one is switched back.
        """
        since: list[_Change] = []
        if self in sys.meta_path:
            later = sys.meta_path[: sys.meta_path.index(self)]
            since = [
                done for one in reversed(later) if isinstance(one, Switch) for done in one._done
            ]
            sys.meta_path.remove(self)
        while self._done:
            done = self._done.pop()
            if following := next((change for change in since if change.follows(done)), None):
                following.before = done.before
            elif done.before is _ABSENT:
                delattr(done.module, done.name)
            else:
                setattr(done.module, done.name, done.before)
        for name in self._served:
            if getattr(sys.modules.get(name), "__loader__", None) is self:
                del sys.modules[name]

    def change(self, module: ModuleType) -> None:
        for name, value in self._changed[module.__name__](module).items():
            before = getattr(module, name, _ABSENT)
            if before is value:  # it was imported from a module that was changed before
                same = (done.before for done in self._done if done.name == name)
                before = next(same, before)
            self._done.append(_Change(module, name, before, value))
            setattr(module, name, value)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in self._served:
            is_package = bool(self._children(fullname))
            return ModuleSpec(fullname, self, origin=__name__, is_package=is_package)
        finders = list(sys.meta_path)
        if fullname not in self._changed or self not in finders:  # another thread has ended it
            return None
        # Those before it, such as a later switch, have been asked, or are asking now.
        others = finders[finders.index(self) + 1 :]
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _LoaderThen(spec.loader, self.change)  # type: ignore[assignment]
        return spec

    def exec_module(self, module: ModuleType) -> None:
        for child in self._children(module.__name__):
            importlib.import_module(child)  # users of a package read its modules as attributes
        vars(module).update(self._served[module.__name__](module))

    def _children(self, package: str) -> list[str]:
        return [name for name in self._served if name.rpartition(".")[0] == package]


class _LoaderThen:
    """A module's loader that afterwards calls `then(module)`."""

    def __init__(self, loader: Any, then: Callable[[ModuleType], None]) -> None:
        self._loader, self._then = loader, then

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._then(module)


def _whole(name: str) -> ModuleType:
    """The imported module."""
    module = importlib.import_module(name)  # waits while another thread imports it
    if getattr(getattr(module, "__spec__", None), "_initializing", False):
        raise DropInError(
            f"{name}: expected it to be imported, or not yet; got a call within its import, by a "
            f"module that it imports. Switch before the first import of {name.split('.')[0]}."
        )
    return module


def is_installed(package: str) -> bool:
    """Whether a package can be imported. A module without a spec, such as a stub, counts as one;
    None, which blocks an import, does not, nor does what a switch serves, nor a folder without
    __init__.py, such as one of results named boltz where Python was started: it has no loader.
    """
    if package in sys.modules:
        module = sys.modules[package]
        loader = getattr(module, "__loader__", None)
        return module is not None and not isinstance(loader, Switch)
    spec = importlib.util.find_spec(package)
    return spec is not None and not isinstance(spec.loader, Switch | None)
