"""What Transformers calls the cache of a call: ``cache`` since 5.24, ``past_key_values`` before.

Later versions take the old name, too, with a warning; so whoever reads a call looks for both, and whoever makes one
gives the name that the model has.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

NAMES = frozenset({"cache", "past_key_values"})


def cache_in(named: Mapping[str, Any]) -> Any:
    """The cache among a call's arguments by name; None without one."""
    found = named.get("cache")
    return named.get("past_key_values") if found is None else found


def name_in(named: Mapping[str, Any]) -> str:
    """What a call that was made by Transformers calls it."""
    return "cache" if "cache" in named else "past_key_values"


def name_of(model: Any) -> str:
    """What a model calls it."""
    return _name_of(getattr(type(model), "forward", None))


@functools.lru_cache(maxsize=64)  # a signature takes 30 us, and a step asks for it
def _name_of(forward: Callable[..., Any] | None) -> str:
    if forward is None:
        return "past_key_values"
    try:
        known = inspect.signature(forward).parameters
    except (TypeError, ValueError):  # a model's own kind of callable
        return "past_key_values"
    return "cache" if "cache" in known else "past_key_values"
