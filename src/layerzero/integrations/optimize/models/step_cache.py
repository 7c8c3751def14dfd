"""A Transformers cache whose keys and values lie in memory that stays where it is, as a CUDA graph needs them.

The caller's cache and its layers stay the objects that they were; the layers' class becomes one that knows of the
common memory. Code that reads tokens of a layer, assigns to it, copies or pickles it (a crop, a reordering, a longer
input) takes them out: the layer is Transformers' own again, with tensors that are the caller's to write into. The next
step takes them back.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

import layerzero as lz
from layerzero.core.errors import InvalidCallError
from layerzero.integrations.optimize.attention import dynamic_cache

OF_TOKENS = "position_ids", "mm_token_type_ids", "token_type_ids"
"""What a model may be given of each token. M-RoPE's positions are (3 or 4, B, 1): of text and of a picture's axes."""

PAGE = 256
"""Places of a page: FlashAttention 2 wants no fewer, and pages lie one after the other here."""


def bucket(length: int) -> int:
    """Places for a length: so many pages that at most a half is unused, in as few different numbers."""
    pages = -(-length // PAGE)
    power = 1 << max(pages - 1, 0).bit_length()
    return PAGE * (3 * power // 4 if power >= 4 and pages <= 3 * power // 4 else power)


class Memory:
    """Keys and values of all layers for one number of sequences.

    Attributes:
        keys, values: of each layer (B, capacity, heads, entries).
        index: (1,) int64, where the next token is written; slots: (B,) int64, its slots in ``pages``.
        lengths: (B,) int32, tokens of each sequence, that one included.
        held: the cache that has them now.
        given: what the model is given of the token besides its id, by name; every call copies it to the same places.
    """

    def __init__(self, cache: Any, capacity: int, turns: dynamic_cache.Turns) -> None:
        first = seen(cache.layers[0], "keys")
        self.batch, self.capacity, device = first.shape[0], capacity, first.device
        self._turns = turns
        self.keys = [self._empty(seen(each, "keys")) for each in cache.layers]
        self.values = [self._empty(seen(each, "values")) for each in cache.layers]
        self.index = torch.zeros(1, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(self.batch, dtype=torch.int32, device=device)
        self.ids = torch.zeros(self.batch, 1, dtype=torch.int64, device=device)
        self.given: dict[str, Tensor] = {}
        self._given: dict[tuple[Any, ...], Tensor] = {}
        pages = torch.arange(self.batch * capacity // PAGE, dtype=torch.int32, device=device)
        self.table = pages.view(self.batch, -1)
        self._first = torch.arange(0, self.batch * capacity, capacity, dtype=torch.int64, device=device)
        self.slots = self._first.clone()
        self._appends: bool | None = None
        self.held: Held | None = None

    def _empty(self, like: Tensor) -> Tensor:
        """Zeros: what lies beyond a sequence's end is multiplied by 0 in some kernels."""
        batch, heads, _, width = like.shape
        return torch.zeros(batch, self.capacity, heads, width, dtype=like.dtype, device=like.device)

    def place(self, length: int, named: Mapping[str, Any]) -> None:
        """Say where the token behind so many others goes, and what else the call says of it."""
        self.index.fill_(length)
        self.given = {name: self._copied(name, named[name]) for name in OF_TOKENS if named.get(name) is not None}
        if "position_ids" not in self.given:
            self.given["position_ids"] = self._copied("position_ids", self.index[None])
        self.lengths.fill_(length + 1)
        torch.add(self._first, length, out=self.slots)

    def _copied(self, name: str, value: Tensor) -> Tensor:
        """What a call gives of its token (..., B or 1, 1), where a captured step reads it."""
        key = name, value.shape[:-2], value.dtype
        place = self._given.get(key)
        if place is None:
            shape = *value.shape[:-2], self.batch, 1
            place = self._given[key] = torch.empty(shape, dtype=value.dtype, device=self.index.device)
        return place.copy_(value)

    def pages(self, number: int) -> tuple[Tensor, Tensor]:
        """A layer's keys and values as pages (P, PAGE, heads, entries)."""
        keys, values = self.keys[number], self.values[number]
        return keys.view(-1, PAGE, *keys.shape[2:]), values.view(-1, PAGE, *values.shape[2:])

    def write(self, number: int, keys: Tensor, values: Tensor) -> None:
        """Write a token of each sequence (B, heads, 1, entries): by one launch of a library, or by two of torch.

        On an H200 two took 4.7 us a layer in a captured step (torch 2.11, 2026-11-22).
        """
        key, value = keys[:, :, 0], values[:, :, 0]
        given = key, value, *self.pages(number), self.slots
        if self._appends is None:
            self._appends = dynamic_cache.runs_a_library("append_paged_kv_", *given)
        if self._appends:
            lz.append_paged_kv_(*given)
            return
        for place, each in ((self.keys[number], keys), (self.values[number], values)):
            place.index_copy_(1, self.index, each.transpose(1, 2))

    @property
    def bytes(self) -> int:
        return sum(each.nbytes for each in (*self.keys, *self.values))

    def turn(self) -> AbstractContextManager[None]:
        """Wait until no other thread computes with it."""
        return self._turns.turn(self.index.device)

    def serves(self, cache: Any) -> bool:
        if len(cache.layers) != len(self.keys):
            return False
        pairs = [(seen(each, "keys"), mine) for each, mine in zip(cache.layers, self.keys, strict=True)]
        pairs += [(seen(each, "values"), mine) for each, mine in zip(cache.layers, self.values, strict=True)]
        return all(
            each.shape[0] == self.batch
            and (each.shape[1], each.shape[3]) == tuple(mine.shape[2:])
            and (each.dtype, each.device) == (mine.dtype, mine.device)
            for each, mine in pairs
        )

    def take(self, cache: Any) -> Held:
        """Copy a cache's tokens here and let it read them from here; another cache that is here takes its own out."""
        with self.turn():
            length = cache.get_seq_length()
            if self.held is not None:
                self.held.release()
            for each in cache.layers:  # of another memory
                release(each)
                dynamic_cache.used_here((each.keys, each.values))
            for number, each in enumerate(cache.layers):
                for place, tokens in ((self.keys[number], each.keys), (self.values[number], each.values)):
                    first = length - tokens.shape[2]  # a window keeps the last tokens alone
                    place[:, :first].zero_()  # and nothing stays of the cache before: 0 times infinity is no 0
                    place[:, length:].zero_()
                    place[:, first:length].copy_(tokens.transpose(1, 2))
            self.held = Held(self, cache, length)
            return self.held


class Held:
    """A cache in a memory.

    Attributes:
        memory: where.
        length: its tokens.
        stream: where its last step ran: calls with this cache work there, and get their tokens there.
        windows: of each layer, whether it has a window, and which.
    """

    def __init__(self, memory: Memory, cache: Any, length: int) -> None:
        self.memory, self.length, self.stream = memory, length, dynamic_cache.stream_of(memory.index.device)
        self._cache: Callable[[], Any] = weakref.ref(cache)
        self.windows = dynamic_cache.windows_of(cache)
        for number, each in enumerate(cache.layers):
            _hold(self, number, each)
        self._layers: list[Callable[[], Any]] = [weakref.ref(each) for each in cache.layers]  # copies share them

    @property
    def layers(self) -> list[Any]:
        """The layers that a caller has, and took no tokens out of."""
        living = [layer for each in self._layers if (layer := each()) is not None]
        return [each for each in living if vars(each).get("_held") is self]

    def is_of(self, cache: Any) -> bool:
        """Whether this is that cache, and no layer was taken out."""
        if cache is None or self._cache() is not cache or len(cache.layers) != len(self._layers):
            return False
        pairs = zip(self._layers, cache.layers, strict=True)
        return all(mine() is each and vars(each).get("_held") is self for mine, each in pairs)

    def release(self) -> None:
        """Give every layer that a caller has memory of its own."""
        for each in self.layers:
            release(each, self)
        self.memory.held = None


def why_not(cache: Any) -> str:
    """Say why a cache cannot be held; empty where it can."""
    from transformers import DynamicCache

    held, known = _classes(), dynamic_cache.known_layers()
    if type(cache) is not DynamicCache or getattr(cache, "offloading", False):
        return f"its cache is a {type(cache).__name__}, wanted a DynamicCache that is not offloaded"
    length = cache.get_seq_length()
    for each in cache.layers:
        if type(each) not in known and type(each) not in held:
            return f"its cache has a {type(each).__name__}"
        if getattr(each, "record_past", False):
            return "its cache records its past"
        keys, values = seen(each, "keys"), seen(each, "values")
        if keys is None or keys.ndim != 4 or values.shape[:3] != keys.shape[:3]:
            return "its cache has a layer without tokens"
        if each.get_seq_length() != length or keys.shape[2] != min(length, dynamic_cache.longest_of(each, length)):
            return "layers of its cache have different lengths"
    return ""


_TENSORS = ("keys", "values")

_LENGTH = "cumulative_length"
"""What layers with a window count, and others do not have."""


def seen(layer: Any, name: str) -> Any:
    """The keys or values of a layer where they lie, to be asked for their sizes: they are the memory's."""
    held: Held | None = vars(layer).get("_held")
    return getattr(layer, name) if held is None else _part(held, layer, name)


def _part(held: Held, layer: Any, name: str) -> Tensor:
    length, memory = held.length, held.memory
    tokens = (memory.keys if name == "keys" else memory.values)[vars(layer)["_number"]]
    first = max(0, length - dynamic_cache.longest_of(layer, length))
    part: Tensor = tokens[:, first:length].transpose(1, 2)
    return part


def _hold(held: Held, number: int, layer: Any) -> None:
    """Let a layer of Transformers read a memory, which has its tokens."""
    own = vars(layer)
    own["_held"], own["_number"] = held, number
    layer.__class__ = _classes()[int(bool(layer.is_sliding))]
    for name in (*_TENSORS, _LENGTH):  # last: another thread that reads finds them, or asks the memory
        own.pop(name, None)


def release(layer: Any, only: Held | None = None) -> None:
    """Make a layer Transformers' own again, with memory of its own; ``only`` where that held it."""
    own = vars(layer)
    held: Held | None = own.get("_held")
    if held is None or (only is not None and held is not only):
        return
    with held.memory.turn():
        if own.get("_held") is not held:  # another thread was first
            return
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            dynamic_cache.on(held.stream),
        ):  # inference mode's would not be writable
            taken = {name: _part(held, layer, name).clone() for name in _TENSORS}
        sliding = bool(layer.is_sliding)
        own.update(taken | ({_LENGTH: held.length} if sliding else {}))
        layer.__class__ = dynamic_cache.known_layers()[int(sliding)]
        del own["_held"], own["_number"]


def _reading(name: str) -> property:
    """Tokens, which a read or an assignment takes out first: they are the caller's, to be written into and kept.

    The count of a layer with a window every step reads, where it lies.
    """

    def read(layer: Any) -> Any:
        held = vars(layer).get("_held")
        if held is not None and name == _LENGTH:
            return held.length
        release(layer)
        return getattr(layer, name)

    def write(layer: Any, value: Any) -> None:
        release(layer)
        setattr(layer, name, value)

    return property(read, write)


@functools.cache
def _classes() -> tuple[Any, Any]:
    """Classes of layers, as Transformers' own and reading a memory: one that keeps all tokens, one with a window."""
    plain: Any
    plain, window = dynamic_cache.known_layers()

    def get_seq_length(layer: Any) -> int:
        held = vars(layer).get("_held")
        return int(plain.get_seq_length(layer) if held is None else held.length)

    def __reduce_ex__(layer: Any, protocol: Any) -> Any:  # noqa: N807
        release(layer)
        return layer.__reduce_ex__(protocol)  # of its own class, with which it is copied and loaded

    made = {name: _reading(name) for name in _TENSORS} | {"__reduce_ex__": __reduce_ex__, "__module__": __name__}
    return (
        type("HeldLayer", (plain,), made | {"get_seq_length": get_seq_length}),
        type("HeldWindowLayer", (window,), made | {_LENGTH: _reading(_LENGTH)}),
    )


def step_cache(memory: Memory, held: Held, length: int) -> Any:
    """The cache that a model gets for one token: it writes that where ``index`` says, and returns ``length`` places."""
    from transformers import DynamicCache

    made = DynamicCache()
    made.layers = [
        _step_layer()(memory, held, number, length, sliding) for number, (sliding, _) in enumerate(held.windows)
    ]
    return made


@functools.cache
def _step_layer() -> Any:
    plain: Any = dynamic_cache.known_layers()[0]

    def __init__(layer: Any, memory: Memory, held: Held, number: int, length: int, sliding: bool) -> None:  # noqa: N807
        plain.__init__(layer)
        layer.memory, layer.held, layer.number, layer.length = memory, held, number, length
        layer.is_sliding, layer.is_initialized = sliding, True

    def update(layer: Any, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        memory, number = layer.memory, layer.number
        memory.write(number, keys, values)
        places = memory.keys[number], memory.values[number]
        first, second = (place[:, : layer.length].transpose(1, 2) for place in places)
        return first, second

    def get_seq_length(layer: Any) -> int:
        return int(layer.held.length)

    def get_mask_sizes(layer: Any, query_length: Any) -> tuple[int, int]:
        return int(layer.held.length) + 1, 0

    made = {"__init__": __init__, "update": update, "get_seq_length": get_seq_length, "get_mask_sizes": get_mask_sizes}
    return type("StepLayer", (plain,), {**made, "__module__": __name__})


def _told(held: Held, number: int, named: Mapping[str, Any]) -> dict[str, Any]:
    """What attention was given, for LayerZero's functions; whose keys these are says which window is meant."""
    window, (_, own) = named["sliding_window"], held.windows[number]
    if own != window:
        wanted = f"wanted attention that is told its window of {own}, got {window}"
        raise InvalidCallError("lz.optimize(graph=True)", [wanted])
    return {"window": None if window is None else (window - 1, 0), "softcap": named["softcap"]}


_OTHERS = "wanted attention to the keys and values that the cache keeps, got others, made of them (latent attention)"


def _number(memory: Memory, key: Tensor) -> int:
    start = key.data_ptr()
    for number, keys in enumerate(memory.keys):
        if keys.data_ptr() == start:
            return number
    raise InvalidCallError("lz.optimize(graph=True)", [_OTHERS])


def attend_view(
    held: Held, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, named: Mapping[str, Any]
) -> Tensor:
    """(B, 1, H, D) of a query (B, H, 1, D) and the used part of a memory."""
    told = _told(held, _number(held.memory, key), named)
    if told["window"] is not None and key.shape[2] <= told["window"][0] + 1:
        told["window"] = None
    output = lz.attention(query, key, value, True, scaling, layout="BHSD", sinks=named["s_aux"], **told)
    assert isinstance(output, Tensor)
    return output.transpose(1, 2)


def attend_pages(
    held: Held,
    step: lz.StepMetadata,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    named: Mapping[str, Any],
) -> Tensor:
    """The same by lengths that only the device knows."""
    if named["s_aux"] is not None:
        raise InvalidCallError("lz.optimize(graph=True)", ["wanted attention without sinks, which pages do not serve"])
    memory, number = held.memory, _number(held.memory, key)
    told = _told(held, number, named)
    for given, mine in ((key, memory.keys[number]), (value, memory.values[number])):
        kept = mine[:, : given.shape[2]].transpose(1, 2)
        if (given.data_ptr(), given.shape, given.stride()) != (kept.data_ptr(), kept.shape, kept.stride()):
            raise InvalidCallError("lz.optimize(graph=True)", [_OTHERS])  # DiffLlama: halves of values
    keys, values = memory.pages(number)
    output = lz.paged_attention(
        query.transpose(1, 2), keys, values, step.block_tables, step.context_lens, scaling, step=step, **told
    )
    assert isinstance(output, Tensor)
    return output
