"""Caches of Transformers: what they are called, which are known, and memory with room for tokens to come.

Transformers' DynamicLayer joins old and new tokens in new memory, in every layer and step: for 16 sequences of 2048
tokens, 8 heads of 128 in bfloat16, it reads and writes 134 MB a layer for the 64 KB that are new. Here a layer gets
views of memory with room, and a step writes its own tokens alone. The layer stays Transformers' own, and what it holds
are plain tensors: others that are put in their place (a crop, a reordering, a copy of the cache) are copied once.
Tensors that a caller kept of earlier steps lie in the same memory.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import layerzero as lz
from layerzero.core.arguments import signature_of
from layerzero.core.system import forking

SHARE, LEAST = 8, 128
"""New memory has room for an eighth more tokens, and for no fewer than so many: stock has copied them all by then."""

FROM_BYTES = 32 * 2**20
"""On a GPU, keys of a layer that take less are joined by stock: its two launches cost a host less than what is looked
at here, and the device waits meanwhile. A layer of 8 heads of 128 over 2048 tokens took 494 us a token grown and 455
joined for one sequence, 483 and 437 for 4, 458 and 623 for 16 (67 MB; H200, bfloat16, 2026-11-24)."""


class _Room:
    """The memory of a layer's tokens: what it looks like, and which views of it the layer got last.

    It is let go with these views, so that dropping them (a reset, another update, a move to the host) gives it back.
    They have version counters of their own: what is written behind their ends is no change of them, and autograd may
    keep them or write into them as into any tensor.
    """

    __slots__ = ("__weakref__", "_about", "_at_once", "_gone", "_memory", "_pages", "_views", "places")

    def __init__(self) -> None:
        self._at_once: bool | None = None
        self._memory: tuple[Tensor, Tensor] | None = None
        self._pages: tuple[Tensor, ...] = ()
        self._about: tuple[Any, ...] = ()
        self._views: tuple[Callable[[], Tensor | None], ...] = ()
        self._gone = functools.partial(_let_go, weakref.ref(self))  # no cycle: the memory goes with the layer at once
        self.places = 0

    def serves(self, keys: Tensor, values: Tensor, count: int) -> bool:
        """Whether these are the views that the layer got, nothing stands behind them, and so many tokens fit there."""
        if self._memory is None or self._views[0]() is not keys or self._views[1]() is not values:
            return False
        if self._about != _about(keys, values):  # a tensor got other data: `keys.data = ...`
            return False
        if keys.is_inference() and not torch.is_inference_mode_enabled():
            return False  # may not be written into
        return bool(keys.shape[2] + count <= self.places)

    def made(self, keys: Tensor, values: Tensor, more: int) -> None:
        """Copy tokens into new memory that has room for more."""
        tokens = keys.shape[2] + more
        self.places = -(-(tokens + max(tokens // SHARE, LEAST)) // LEAST) * LEAST
        self._memory = self._filled(keys), self._filled(values)

    def _filled(self, tokens: Tensor) -> Tensor:
        batch, heads, length, width = tokens.shape
        places = tokens.new_empty((batch, self.places, heads, width)).transpose(1, 2)
        places[:, :, :length].copy_(tokens)
        return places

    def write(self, first: int, fresh: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
        """Write new tokens (B, H, S, D) behind the first ones, and give views of all (B, H, length, D)."""
        assert self._memory is not None
        keys, values = self._memory
        count = fresh.shape[2]
        if self._at_once is False or count != 1 or not self._written_at_once(keys, values, first, fresh, others):
            keys.narrow(2, first, count).copy_(fresh)
            values.narrow(2, first, count).copy_(others)
        return self.views(first + count)

    def views(self, length: int) -> tuple[Tensor, Tensor]:
        """The first tokens (B, H, length, D), which the layer gets."""
        assert self._memory is not None
        keys, values = self._memory
        # .data: detach() would share the counters of versions
        grown = keys.narrow(2, 0, length).data, values.narrow(2, 0, length).data
        self._views = weakref.ref(grown[0], self._gone), weakref.ref(grown[1], self._gone)
        self._about = _about(*grown)
        return grown

    def _written_at_once(self, keys: Tensor, values: Tensor, first: int, fresh: Tensor, others: Tensor) -> bool:
        """Write a token of each sequence by one launch, where a library has such a kernel; whether it did.

        A launch costs slow hosts 35 us, and a step has two for each layer without it (H200, 2026-11-22).
        """
        if not self._pages:
            self._pages = tuple(  # pages of so many tokens lie as the memory does: room is made in multiples of them
                each.transpose(1, 2).view(each.shape[0] * self.places // LEAST, LEAST, each.shape[1], each.shape[3])
                for each in (keys, values)
            )
        slots = _slots(keys.device, keys.shape[0], self.places, first)
        given = fresh.select(2, 0), others.select(2, 0), *self._pages, slots
        if self._at_once is None:
            self._at_once = runs_a_library("append_paged_kv_", *given)
        if self._at_once:
            lz.append_paged_kv_(*given)
        return self._at_once

    @property
    def addresses(self) -> tuple[int, int]:
        """Where keys and values of the first token lie."""
        assert self._memory is not None
        return self._memory[0].data_ptr(), self._memory[1].data_ptr()

    def let_go(self, view: object) -> None:
        """Forget the memory with a view of it, unless the layer got others since."""
        if any(each is view for each in self._views):
            self._memory, self._pages = None, ()


def _let_go(room: Callable[[], _Room | None], view: object) -> None:
    """What runs once a view is gone."""
    mine = room()
    if mine is not None:
        mine.let_go(view)


def _about(keys: Tensor, values: Tensor) -> tuple[Any, ...]:
    return keys.data_ptr(), values.data_ptr(), keys.shape, values.shape, keys.stride(), values.stride()


def _slots(device: torch.device, batch: int, places: int, first: int) -> Tensor:
    """Where a token of each sequence goes, int64: made once a step, for the layers of which it is the same.

    In a capture each layer has its own: what is captured holds no numbers before a replay, and what was made before
    would be gone by then.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return _made(device, batch, places, first)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    about = device, stream, batch, places, first, torch.is_inference_mode_enabled()
    last = _LAST.get(device)
    if last is None or last[0] != about:
        last = _LAST[device] = about, _made(device, batch, places, first)
    return last[1]


def _made(device: torch.device, batch: int, places: int, first: int) -> Tensor:
    return torch.arange(first, first + batch * places, places, device=device)


_LAST: dict[torch.device, tuple[tuple[Any, ...], Tensor]] = {}
"""The slots of the last step on each device."""

_ROOMS: weakref.WeakKeyDictionary[Any, _Room] = weakref.WeakKeyDictionary()
"""By layer of a cache; they keep no memory themselves."""


@functools.cache
def _plain() -> tuple[Any, Any]:
    from transformers.cache_utils import DynamicCache, DynamicLayer

    return DynamicCache, DynamicLayer


def appended(cache: Any, keys: Tensor, values: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """What ``cache.update(keys, values, number)`` gives: all keys and values (B, H, length, D) of a layer.

    Transformers' own update runs where the cache or its layer is another one, holds nothing yet, or is to be
    differentiated or compiled.
    """
    layer = None if torch.compiler.is_compiling() else _grows(cache, keys, values, number)
    if layer is None:
        first, second = cache.update(keys, values, number)
        return first, second
    held, others = layer.keys, layer.values
    room = _ROOMS.get(layer)
    first = held.shape[2]
    if room is not None and room.serves(held, others, keys.shape[2]):
        grown = room.write(first, keys, values)
    else:
        room = _Room()
        room.made(held, others, keys.shape[2])
        grown = room.write(first, keys, values)
        _ROOMS[layer] = room  # once it has views: memory may have been short
    layer.keys, layer.values = grown
    return grown


def reserved(cache: Any, count: int, width: int) -> tuple[int, int, list[tuple[Any, _Room]]] | None:
    """Memory for a token of one sequence behind those that a cache has in float32, the same number in every layer.

    Args:
        cache: of any kind.
        count, width: of a token, what its keys lie in: so many rows of so many numbers.

    Returns: the tokens that are there, those that fit, and of each layer its memory, whose views it gets once the token
        is written; None where Transformers should see to it.
    """
    of_cache, of_layer = _plain()
    if type(cache) is not of_cache or cache.offloading or not cache.layers:
        return None
    found, length, places = [], 0, 0
    for layer in cache.layers:
        if type(layer) is not of_layer or not layer.is_initialized:
            return None
        held, others = layer.keys, layer.values
        length = length or held.shape[2]
        if held.shape != (1, count, length, width) or others.shape != held.shape or not length:
            return None
        if any(each.dtype is not torch.float32 or not each.is_cpu or each.requires_grad for each in (held, others)):
            return None
        room = _ROOMS.get(layer)
        if room is None or not room.serves(held, others, 1):
            room = _Room()
            room.made(held, others, 1)
        places = places or room.places
        if room.places != places:
            return None
        found.append((layer, room))
    return length, places, found


def grow(layers: Iterable[tuple[Any, _Room]], length: int) -> None:
    """Give layers views of their memory, with so many tokens."""
    for layer, room in layers:
        layer.keys, layer.values = room.views(length)
        _ROOMS[layer] = room


def _grows(cache: Any, keys: Tensor, values: Tensor, number: int) -> Any:
    """The layer of the cache that may be written into as it stands; None where Transformers should see to it."""
    of_cache, of_layer = _plain()
    if type(cache) is not of_cache or cache.offloading or number >= len(cache.layers):
        return None
    layer = cache.layers[number]
    if type(layer) is not of_layer or not layer.is_initialized:
        return None
    held, others = layer.keys, layer.values
    if held.is_cuda and held.nbytes < FROM_BYTES:
        return None
    if held.ndim != 4 or others.ndim != 4 or held.shape[2] == 0 or held.shape[2] != others.shape[2]:
        return None
    if keys.requires_grad or values.requires_grad or held.requires_grad or others.requires_grad:
        return None
    return layer if _fit(held, keys, others, values) else None


def _fit(held: Tensor, keys: Tensor, others: Tensor, values: Tensor) -> bool:
    """Whether new tokens go behind those that are there: as many sequences and heads, of one dtype and device."""
    for one, two in ((held, keys), (others, values)):  # each call comes here: no generator
        if one.dtype is not two.dtype or one.device != two.device or two.ndim != 4:
            return False
        (batch, heads, _, width), (rows, others_heads, _, others_width) = one.shape, two.shape
        if batch != rows or heads != others_heads or width != others_width:
            return False
    return True


NAMES = frozenset({"cache", "past_key_values"})


def cache_in(named: Mapping[str, Any]) -> Any:
    """The cache among a call's arguments by name; None without one."""
    found = named.get("cache")
    return named.get("past_key_values") if found is None else found


def name_in(named: Mapping[str, Any]) -> str:
    """What a call that was made by Transformers calls it."""
    return "cache" if "cache" in named else "past_key_values"


def name_of(model: Any) -> str:
    """What a model calls it; one that only hands it on (ColPali) calls it as Transformers' outputs do."""
    library = sys.modules.get("transformers")
    if library is not None and isinstance(model, library.PreTrainedModel):
        outputs = library.modeling_outputs.BaseModelOutputWithPast.__dataclass_fields__
        return _name_of(type(model).forward, "cache" if "cache" in outputs else "past_key_values")
    return _name_of(getattr(type(model), "forward", None))


@functools.lru_cache(maxsize=64)  # a signature takes 30 us, and a step asks for it
def _name_of(forward: Callable[..., Any] | None, other: str = "past_key_values") -> str:
    if forward is None:
        return other
    try:
        known = signature_of(forward).parameters
    except (TypeError, ValueError):  # a model's own kind of callable
        return other
    return "cache" if "cache" in known else "past_key_values" if "past_key_values" in known else other


def runs_a_library(function: str, first: Tensor, *others: Any) -> bool:
    """Whether the kernel that LayerZero chooses for a call is another's than torch's."""
    if not first.is_cuda:
        return False
    chosen = lz.explain(function, first, *others).kernel_id
    return chosen is not None and not chosen.startswith(("torch.", "reference."))


class Turns:
    """A lock for threads, and for each device an event behind what was launched last."""

    def __init__(self) -> None:
        self._lock = forking.rlock()
        self._last: dict[torch.device, tuple[torch.cuda.Event, torch.cuda.Stream]] = {}

    @contextmanager
    def turn(self, device: torch.device) -> Iterator[None]:
        """Wait for the turn before, as a thread and on the stream that is current; the next one waits for this.

        Turns within a turn are of the same thread and wait for nothing more. A caller that captures a graph has
        synchronised before: in a capture no event from outside may be waited for.
        """
        with self._lock:
            if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
                yield
                return
            stream = torch.cuda.current_stream(device)
            event, before = self._last.get(device, (None, stream))
            if event is None:
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            elif before != stream:
                stream.wait_event(event)
            try:
                yield
            finally:
                event.record(stream)
                self._last[device] = event, stream


def stream_of(device: torch.device) -> torch.cuda.Stream | None:
    """The stream that is current; None where a device has none."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


@contextmanager
def on(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Compute on another stream, if one is given; the current one goes on behind it."""
    if stream is None or stream == (current := torch.cuda.current_stream(stream.device)):
        yield
        return
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


def used_here(tensors: Iterable[Tensor]) -> None:
    """Tell torch's allocator that the current stream reads tensors that may be of another one's memory."""
    for each in tensors:
        if each.is_cuda:
            each.record_stream(torch.cuda.current_stream(each.device))


def windows_of(cache: Any) -> list[tuple[bool, int | None]]:
    """Of each layer, whether it has a window, and which; those with a state in place of tokens know of none."""
    return [(getattr(each, "is_sliding", False), getattr(each, "sliding_window", None)) for each in cache.layers]


def kinds_of(model: Any) -> list[tuple[bool, int | None]]:
    """Of each layer of a model's cache, whether it has a window, and which."""
    from transformers import DynamicCache

    return windows_of(DynamicCache(config=model.config))


def longest_of(layer: Any, length: int) -> int:
    """Tokens that a layer of a cache keeps of so many."""
    return int(layer.sliding_window) - 1 if layer.is_sliding else length


def known_layers() -> tuple[type, ...]:
    """The layers of Transformers' caches that are followed: one that keeps all tokens, one with a window."""
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    return DynamicLayer, DynamicSlidingWindowLayer
