"""Do something once another module is imported: at once if it is, else as soon as its own code has run."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def when_imported(name: str, told: Callable[[], None]) -> None:
    """Call ``told`` when a module is there; a finder waits for it, and leaves ``sys.meta_path`` again then."""
    if is_imported(name):
        told()
    else:
        sys.meta_path.insert(0, _Finder(name, told))


def is_imported(name: str) -> bool:
    """Whether a module is imported as a whole, and not just being imported."""
    return name in sys.modules and not getattr(sys.modules[name].__spec__, "_initializing", False)


class _Finder:
    """Waits for the import of one module. Without the base class: `importlib.abc` takes as long as all else here."""

    def __init__(self, name: str, told: Callable[[], None]) -> None:
        self._name, self._told = name, told

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002  # the import system passes both
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._told)  # type: ignore[assignment]
        return spec


class _Loader:
    """Loads as the real one does, then tells."""

    def __init__(self, loader: Any, told: Callable[[], None]) -> None:
        self._loader, self._told = loader, told

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._told()
