"""Every lock of the package, and what a forked child must do before it uses any: the one place with fork hooks.

Except that a fork waits for imports, which :mod:`layerzero.core.import_hook` sees to from the beginning.

A child has the thread that forked and no other. A lock that another thread held stays held for ever there, so each is
made anew in the child. Where one was held, what it guards may be half changed: its owner's hook runs
(:func:`when_torn`).
"""

from __future__ import annotations

import inspect
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

_Lock = TypeVar("_Lock")

_LOCKS: weakref.WeakSet[Any] = weakref.WeakSet()
_IN_CHILD: list[Callable[[], Callable[[], None] | None]] = []
_WHEN_TORN: list[Callable[[], Callable[[], None] | None]] = []


def lock() -> threading.Lock:
    """Make a lock that a forked child finds free."""
    return _known(threading.Lock())


def rlock() -> threading.RLock:
    """Make a reentrant lock that a forked child finds free, unless the thread that forked holds it."""
    return _known(threading.RLock())


def _known(made: _Lock) -> _Lock:
    _LOCKS.add(made)
    return made


_ADDING = rlock()  # reentrant: what is collected meanwhile may end with something that adds


def in_child(method: Callable[[], None]) -> None:
    """Call a function, or a method of an object that still lives, in every forked child, with all locks free."""
    _add(_IN_CHILD, method)


def when_torn(method: Callable[[], None]) -> None:
    """The same, only where a lock was held by another thread: what it was changing may be half changed."""
    _add(_WHEN_TORN, method)


HELD_S = 1.0
"""How long a fork waits for what other threads begin under a lock that forks hold."""


def held_by_forks() -> threading.RLock:
    """Make a lock that a forking thread holds meanwhile: what is begun under it is whole in a child, or not there.

    A fork waits :data:`HELD_S` for it at most.
    """
    made = rlock()

    def before() -> None:
        made.acquire(timeout=HELD_S)

    def after() -> None:
        if made._is_owned():  # type: ignore[attr-defined]  # another thread that forks may hold it
            made.release()

    around(before, after)
    return made


def around(before: Callable[[], None], after: Callable[[], None]) -> None:
    """Call one before each fork, and the other behind it, in parent and child: for what must stand still meanwhile.

    A lock that ``before`` takes must be reentrant: it stays held in the child, and ``after`` lets go of it there.
    A fork that began before this was called, and waits for an import, calls neither.
    """
    begun = set[int]()

    def begin() -> None:
        begun.add(threading.get_ident())
        before()

    def end() -> None:
        if threading.get_ident() in begun:
            begun.discard(threading.get_ident())
            after()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=begin, after_in_parent=end, after_in_child=end)


def _add(methods: list[Callable[[], Callable[[], None] | None]], method: Callable[[], None]) -> None:
    living = weakref.WeakMethod(method) if inspect.ismethod(method) else lambda: method
    with _ADDING:  # what two threads add at once is there for both
        methods[:] = [*(each for each in methods if each() is not None), living]


_child: list[bool] = []


def forked() -> bool:
    """Whether this process was forked off one that had this package: threads that libraries had begun are not here."""
    return bool(_child)


def _after_fork() -> None:
    _child.append(True)
    torn = False
    for each in list(_LOCKS):
        if hasattr(each, "_is_owned") and each._is_owned():  # the thread that forked is inside, and goes on there
            continue
        free = each.acquire(blocking=False)
        torn |= not free
        each._at_fork_reinit()
    for reference in (*_IN_CHILD, *(_WHEN_TORN if torn else ())):
        method = reference()
        if method is not None:
            method()


if hasattr(os, "register_at_fork"):  # other systems do not fork
    os.register_at_fork(after_in_child=_after_fork)
