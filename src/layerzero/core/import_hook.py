"""Do something once another module is imported: at once if it is, else as soon as its own code has run.

A fork waits for imports here, too: the first call of all imports most, and its forks need the hook by then.
"""

from __future__ import annotations

import _frozen_importlib
import _imp
import _thread
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def when_imported(name: str, then: Callable[[], None]) -> None:
    """Call ``then`` when a module is there; a finder waits for it, and leaves ``sys.meta_path`` again then.

    What ``then`` raises is logged: it must break neither the import that it waits for nor this package's own.
    """
    finder = _Finder(name, then)
    sys.meta_path.insert(0, finder)
    finder.look()


def is_imported(name: str) -> bool:
    """Whether a module is imported as a whole, and not just being imported."""
    module = sys.modules.get(name)
    return module is not None and not _is_loading(module)


def importable(name: str) -> bool:
    """Whether an import would find a module."""
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):  # not even the package that would hold it; a stand-in without a spec
        return False


def _is_loading(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


class _Finder:
    """Waits for the import of one module. Without the base class: `importlib.abc` takes as long as all else here.

    To ask where a module lies is not to import it (``importlib.util.find_spec``), so the finder stays until the import
    system says, at the module's specification, that the module is complete.
    """

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name, self._then = name, then
        self._watched: ModuleSpec | None = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            self.look()  # another thread may be importing the module since before this finder was there
            return None
        finders = list(sys.meta_path)
        for finder in finders[finders.index(self) + 1 :] if self in finders else []:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                self._watch(spec)
                return spec
        return None

    def look(self) -> None:
        """Tell if the module is there; watch its specification where it is just being imported."""
        module = sys.modules.get(self._name)
        if module is not None and _is_loading(module) and module.__spec__ is not self._watched:
            self._watch(module.__spec__)
        if is_imported(self._name):
            self._tell()

    def _watch(self, spec: Any) -> None:
        kind, look = type(spec), self.look

        class Watched(kind):  # type: ignore[misc, valid-type]
            def __setattr__(self, name: str, value: object) -> None:
                super().__setattr__(name, value)
                if name == "_initializing" and not value:
                    if type(self) is Watched:
                        self.__class__ = kind
                    look()

        Watched.__name__, Watched.__qualname__ = kind.__name__, kind.__qualname__
        self._watched = spec
        spec.__class__ = Watched

    def _tell(self) -> None:
        try:
            sys.meta_path.remove(self)
        except ValueError:  # another thread tells
            return
        try:
            self._then()
        except Exception as error:  # the import that was waited for, a user's, must not fail
            import logging

            text = "%s is imported, and what layerzero adds to it is missing: %s: %s. It works without; please report"
            logging.getLogger("layerzero").warning(text, self._name, type(error).__name__, error, exc_info=True)


# Forks


IMPORTS_S = 10.0
"""How long a fork waits for what other threads import. The first operation on meta tensors imports torch._dynamo: 0.9 s
on an idle AMD EPYC of two cores; among busy processes it took longer than the second that was waited for, and the child
hung in its own import of it (2026-11-23)."""

_PAUSE_S = 0.001
_MODULE_LOCKS: Mapping[str, Callable[[], Any]] = getattr(_frozen_importlib, "_module_locks", {})
_holding: list[int] = []
"""The thread that forks and holds the lock of imports: one that gave up waiting for it must not let go of it."""


_BEGUN = {name for name, reference in [*_MODULE_LOCKS.items()] if getattr(reference(), "owner", None) is not None}
"""Modules that import layerzero, and may serve in that import: a fork would wait for their end in vain."""


def _others_import() -> bool:
    """Whether another thread is amid an import: the lock of that module would stay locked in the child."""
    here = _thread.get_ident()
    locks = [reference() for name, reference in [*_MODULE_LOCKS.items()] if name not in _BEGUN]
    return any(getattr(lock, "owner", None) not in (None, here) for lock in locks)


def _let_imports_end() -> None:
    """Fork between imports: CPython makes the lock of all imports anew in a child, but not those of single modules."""
    until = time.monotonic() + IMPORTS_S
    while True:
        _imp.acquire_lock()  # no import begins while it is held
        if not _others_import():
            _holding.append(_thread.get_ident())
            return
        _imp.release_lock()
        if time.monotonic() >= until:
            return
        time.sleep(_PAUSE_S)


def _let_imports_begin() -> None:
    if _thread.get_ident() in _holding:
        _holding.clear()
        _imp.release_lock()


if hasattr(os, "register_at_fork"):  # before any other: so it is the last that is called before a fork
    os.register_at_fork(before=_let_imports_end, after_in_parent=_let_imports_begin, after_in_child=_let_imports_begin)
