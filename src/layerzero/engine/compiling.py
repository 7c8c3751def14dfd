"""Tell Dynamo, once it is imported, which operator stands in for a public function: fullgraph at no eager cost.

Importing Dynamo takes seconds, so nothing here imports it. Where it is not loaded yet, a finder waits for its import
and leaves ``sys.meta_path`` again when that came.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

log = logging.getLogger("layerzero")

_DYNAMO = "torch._dynamo"

_waiting: list[tuple[Any, Callable[..., Any], Callable[..., Any]]] = []


def substitute(native: Any, builtin: Callable[..., Any], traced: Callable[..., Any]) -> None:
    """Let Dynamo trace ``traced``, the generated Python, where it meets a builtin, which it cannot see through."""
    _waiting.append((native, builtin, traced))
    if _DYNAMO in sys.modules and not getattr(sys.modules[_DYNAMO].__spec__, "_initializing", False):
        _register()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _register() -> None:
    import torch

    from layerzero.engine import accelerator

    while _waiting:
        native, builtin, traced = _waiting.pop()
        try:
            torch.compiler.substitute_in_graph(builtin, skip_signature_check=True)(traced)
            # after a graph break the builtin runs while Dynamo listens, and it would compile the kernels' own Python
            native.unwatched(torch.compiler.disable(builtin))  # type: ignore[no-untyped-call]
            accelerator.HOT.watch(torch._C._dynamo.eval_frame.get_eval_frame_callback)
        except Exception as error:  # noqa: BLE001  # Dynamo's import, and with it the user's program, must not fail here
            log.warning("torch.compile will break graphs at lz.%s: %s", builtin.__name__, error)


class _Finder(importlib.abc.MetaPathFinder):
    """Waits for the import of Dynamo."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002  # the import system passes both
        target: ModuleType | None = None,  # noqa: ARG002
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
