"""Whether dicts, lists, classes and names hold the very objects that they held: in C where the extension was built."""

from __future__ import annotations

from collections.abc import Callable
from operator import is_
from typing import Any

from torch.nn import Module

from layerzero.engine import accelerator


def of_class(cls: Any) -> tuple[Any, ...]:
    """What calls of a module of this class read from it and its bases, torch's own class aside."""
    own = [each for each in cls.__mro__ if each is not Module and each is not object]
    return getattr(cls, "forward", None), cls.__call__, *[value for each in own for value in vars(each).values()]


def python_version(cls: Any) -> Any:
    """Identities; what they belong to is kept by whoever compares them with a class as it was."""
    return tuple(map(id, of_class(cls)))


def python_unchanged(
    objects: tuple[Any, ...],
    classes: tuple[Any, ...],
    dicts: tuple[Any, ...],
    keys: tuple[Any, ...],
    lists: tuple[Any, ...],
    names: tuple[Any, ...],
) -> bool:
    """What ``_native/stamp.c`` does."""
    if not all(map(is_, map(type, objects[::2]), objects[1::2])):
        return False
    for made, size, items in zip(dicts[::3], dicts[1::3], dicts[2::3], strict=True):
        if len(made) != size or not all(map(is_, map(made.get, items[::2]), items[1::2])):
            return False
    for made, items in zip(keys[::2], keys[1::2], strict=True):
        if (*made,) != items:
            return False
    for made, items in zip(lists[::2], lists[1::2], strict=True):
        if len(made) != len(items) or not all(map(is_, made, items)):
            return False
    for made, name, value in zip(names[::3], names[1::3], names[2::3], strict=True):
        if made.get(name) is not value:
            return False
    return all(python_version(cls) == wanted for cls, wanted in zip(classes[::2], classes[1::2], strict=True))


_IN_C = accelerator.HOT if hasattr(accelerator.HOT, "unchanged") else None

version: Callable[[type], Any] = python_version if _IN_C is None else _IN_C.version
"""What changes with anything of a class or of its bases; 0 where nothing tells."""

places: Callable[[Any, Any], Any] = (lambda made, _: len(made)) if _IN_C is None else _IN_C.places
"""How large a dict is, and where some of its items stand: keys and values one after the other, in its own order."""

unchanged: Callable[..., bool] = python_unchanged if _IN_C is None else _IN_C.unchanged
"""Whether all are what they were.

Pairs of an object and its class, and of a class and its version; triples of a dict, places and items; pairs of a dict
and its keys, and of a list and its items; triples of a dict, a name and its value.
"""
