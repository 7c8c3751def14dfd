"""Every ``:mod:``, ``:class:``, ``:func:``, ``:data:`` and ``:meth:`` in a docstring leads to something that exists."""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import re
from functools import cache
from pathlib import Path

import layerzero

ROOT = Path(layerzero.__file__).parent
TARGET = re.compile(r":(mod|class|func|data|meth|attr|exc):`~?([^`]+)`")


def module_of(path):
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def found(name):
    """What a full name stands for: the longest part that is a module, then attributes. Raises: LookupError."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        place = ".".join(parts[:count])
        try:
            if importlib.util.find_spec(place) is None:
                continue
        except (ImportError, ValueError):
            continue
        value = importlib.import_module(place)
        for part in parts[count:]:
            if part in getattr(value, "__annotations__", {}):
                return value  # a field without a default
            if not hasattr(value, part):
                raise LookupError(name)
            value = getattr(value, part)
        return value
    raise LookupError(name)


def leads_somewhere(role, target, module):
    """Whether a target is a full name, one of the module or a class of it, or one of layerzero (``lz.NAME``)."""
    short = target.removeprefix("lz.")
    places = [target, f"{module}.{target}", f"layerzero.{short}"]
    if role in ("meth", "attr") and "." not in target:
        owners = [each for each in vars(importlib.import_module(module)).values() if isinstance(each, type)]
        if any(hasattr(each, target) or target in getattr(each, "__annotations__", {}) for each in owners):
            return True
    for place in places:
        try:
            value = found(place)
        except LookupError:
            continue
        return role != "mod" or type(value).__name__ == "module"
    return hasattr(builtins, target)


def test_every_target_exists():
    missing = []
    for path in ROOT.rglob("*.py"):
        targets = TARGET.findall(path.read_text())
        try:
            module = importlib.import_module(module_of(path)).__name__ if targets else ""
        except ImportError:  # of a library whose classes it derives from
            continue
        missing += [f"{path}: :{role}:`{name}`" for role, name in targets if not leads_somewhere(role, name, module)]
    assert not missing, f"wanted targets that exist, got {', '.join(missing)}"


def test_a_target_that_is_gone_is_found():
    assert not leads_somewhere("mod", "layerzero.core.gone", "layerzero.core.facts")
    assert not leads_somewhere("meth", "gone", "layerzero.core.facts")
    assert not leads_somewhere("mod", "layerzero.core.facts.Facts", "layerzero.core.facts")
    assert leads_somewhere("meth", "size", "layerzero.core.facts")
    assert leads_somewhere("class", "Facts", "layerzero.core.facts")
