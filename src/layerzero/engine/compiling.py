"""Tell Dynamo, once it is imported, which operator stands in for a public function: fullgraph at no eager cost.

Importing Dynamo takes seconds, so nothing here imports it. Where it is not loaded yet, a finder waits for its import
and leaves ``sys.meta_path`` again when that came.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import BuiltinFunctionType, ModuleType
from typing import Any

_DYNAMO = "torch._dynamo"

_waiting: list[tuple[Callable[..., Any], Callable[..., Any]]] = []


def substitute(function: Callable[..., Any], traced: Callable[..., Any]) -> None:
    """Let Dynamo trace ``traced`` where it meets ``function``, a builtin; Python functions it sees through."""
    if not isinstance(function, BuiltinFunctionType):
        return
    _waiting.append((function, traced))
    if _DYNAMO in sys.modules:
        _register()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _register() -> None:
    import torch

    while _waiting:
        function, traced = _waiting.pop()
        torch.compiler.substitute_in_graph(function, skip_signature_check=True)(traced)  # type: ignore[no-untyped-call]


class _Finder(importlib.abc.MetaPathFinder):
    """Waits for the import of Dynamo."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _DYNAMO:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """Loads as the real one does, then tells Dynamo."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _register()
