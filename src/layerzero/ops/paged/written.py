"""In which layout caches are written: what is said of their memory counts for as long as whoever said it lives.

A cache of ``(pages, 16, 16, 128)`` reads as well in the other layout, and gives other numbers. Whoever keeps a cache in
an object that knows its layout is told where a call names another one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping

from torch import Tensor

from layerzero.core import forking, outdated
from layerzero.core.errors import InvalidCallError
from layerzero.core.reasons import ReasonCode
from layerzero.ops.paged import on_demand

_LAYOUTS: dict[int, dict[int, str]] = {}
"""By the address of a storage, and by who said so."""

_DECLARED: set[str] = set()
"""Every layout that anybody ever said: a call in the only one of them needs no look at its memory."""

_lock = forking.rlock()


def declare(owner: object, tensors: Mapping[str, Tensor], layout: str) -> None:
    """Say that memory is written in a layout while an object lives.

    Raises: InvalidCallError where another object that lives says otherwise.
    """
    for name, tensor in tensors.items():
        check("PagedCache", {name: tensor}, layout)
    for address in {tensor.untyped_storage().data_ptr() for tensor in tensors.values() if tensor.numel()}:
        with _lock:
            _LAYOUTS.setdefault(address, {})[id(owner)] = layout
        weakref.finalize(owner, _forget, address, id(owner))
    if layout not in _DECLARED:
        _DECLARED.add(layout)
        outdated.tell()  # plans of the other layout look from now on


def withdraw(owner: object, tensors: Mapping[str, Tensor]) -> None:
    """Say nothing more of memory that the object gives back while it lives on."""
    for tensor in tensors.values():
        _forget(tensor.untyped_storage().data_ptr(), id(owner))


def guard(function: str, layout: str | None) -> Callable[..., None] | None:
    """What refuses caches that somebody says are written in another layout, and places that have no memory yet.

    None where all caches say this layout and are there from the beginning.
    """
    if layout is None or not (_DECLARED - {layout} or on_demand.on_cpu()):
        return None

    def look(key_cache: Tensor, value_cache: Tensor, **tensors: Tensor) -> None:
        if _LAYOUTS:
            check(function, {"key_cache": key_cache, "value_cache": value_cache}, layout)
        on_demand.look(function, key_cache, **tensors)

    return look


def _forget(address: int, owner: int) -> None:
    with _lock:
        said = _LAYOUTS.get(address, {})
        said.pop(owner, None)
        if not said:
            _LAYOUTS.pop(address, None)


def check(function: str, tensors: Mapping[str, Tensor], layout: str) -> None:
    """Refuse a layout that memory is not written in. Raises: InvalidCallError with KV_CACHE_LAYOUT_MISMATCH."""
    for problem in problems(tensors, layout):
        raise InvalidCallError(function, [problem], ReasonCode.KV_CACHE_LAYOUT_MISMATCH)


def problems(tensors: Mapping[str, Tensor], layout: str) -> list[str]:
    """What is wrong with reading or writing memory in a layout; nothing where nobody said which it has."""
    if not _LAYOUTS:  # nearly always
        return []
    found = []
    for name, tensor in tensors.items():
        if tensor.is_meta or not tensor.numel():
            continue
        try:
            said = _LAYOUTS.get(tensor.untyped_storage().data_ptr(), {})
        except (NotImplementedError, RuntimeError):  # a fake tensor, or one of a transform: no memory to speak of
            continue
        other = next((each for each in said.values() if each != layout), None)
        if other is not None:
            found.append(f"{name}: wanted layout={other!r}, which its memory is written in, got {layout!r}")
    return found
