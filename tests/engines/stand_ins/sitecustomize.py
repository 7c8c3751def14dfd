"""A torchvision that imports and computes nothing: SGLang imports it, and serving text calls none of it.

Its wheels hold operators for CUDA builds of torch: with torch for CPUs, "operator torchvision::nms does not exist".
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

NAME = "torchvision"


class Nothing(type):
    """A class whose every attribute is such a class."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing(name, (), {})

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__


class Empty(types.ModuleType):
    """A module whose every name is such a class."""

    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing(name, (), {"__init__": lambda self, *given, **named: None})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the package and all below it."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != NAME:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.append(Finder())
