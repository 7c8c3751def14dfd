"""A Transformers cache whose keys and values lie in memory that stays where it is, as a CUDA graph needs them.

The caller's cache stays the object that it was; its layers become others of the same classes, which read the common
memory. Whoever assigns to one (a crop, a reordering, a longer input) takes that layer's tokens out, as a copy.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

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
        index: (1,) int64, where the next token is written.
        lengths: (B,) int32, tokens of each sequence, that one included.
        held: the cache that has them now.
    """

    def __init__(self, cache: Any, capacity: int) -> None:
        first = cache.layers[0].keys
        self.batch, self.capacity, device = first.shape[0], capacity, first.device
        self.keys = [self._empty(each.keys) for each in cache.layers]
        self.values = [self._empty(each.values) for each in cache.layers]
        self.index = torch.zeros(1, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(self.batch, dtype=torch.int32, device=device)
        self.ids = torch.zeros(self.batch, 1, dtype=torch.int64, device=device)
        self.positions = torch.zeros(self.batch, 1, dtype=torch.int64, device=device)
        pages = torch.arange(self.batch * capacity // PAGE, dtype=torch.int32, device=device)
        self.table = pages.view(self.batch, -1)
        self.held: Held | None = None

    def _empty(self, like: Tensor) -> Tensor:
        """Zeros: what lies beyond a sequence's end is multiplied by 0 in some kernels."""
        batch, heads, _, width = like.shape
        return torch.zeros(batch, self.capacity, heads, width, dtype=like.dtype, device=like.device)

    @property
    def bytes(self) -> int:
        """What all of it takes."""
        return sum(each.nbytes for each in (*self.keys, *self.values))

    def serves(self, cache: Any) -> bool:
        """Whether its sizes are those of a cache."""
        layers = cache.layers
        return len(layers) == len(self.keys) and all(
            each.keys.shape[0] == self.batch
            and (each.keys.shape[1], each.keys.shape[3]) == tuple(mine.shape[2:])
            and each.keys.dtype == mine.dtype
            and each.keys.device == mine.device
            for each, mine in zip(layers, self.keys, strict=True)
        )

    def take(self, cache: Any) -> Held:
        """Copy a cache's tokens here and let it read them from here; another cache that is here takes its own out."""
        length = cache.get_seq_length()
        tokens = [(each.keys, each.values) for each in cache.layers]  # copies, where they lie here
        if self.held is not None:
            self.held.release()
        for mine, (keys, values) in zip(zip(self.keys, self.values, strict=True), tokens, strict=True):
            for place, each in zip(mine, (keys, values), strict=True):
                first = length - each.shape[2]  # a window keeps the last tokens alone
                place[:, :first].zero_()  # and nothing stays of the cache before: 0 times infinity is no 0
                place[:, length:].zero_()
                place[:, first:length].copy_(each.transpose(1, 2))
        self.held = Held(self, cache, length)
        return self.held


class Held:
    """A cache in a memory.

    Attributes:
        memory: where.
        length: its tokens.
        windows: of each layer, whether it has a window, and which.
    """

    def __init__(self, memory: Memory, cache: Any, length: int) -> None:
        self.memory, self.length = memory, length
        self._cache: Callable[[], Any] = weakref.ref(cache)
        cache.layers[:] = [_held_layer(self, number, each) for number, each in enumerate(cache.layers)]
        self.windows = [(bool(each.is_sliding), getattr(each, "sliding_window", None)) for each in cache.layers]
        self._layers: list[Callable[[], Any]] = [weakref.ref(each) for each in cache.layers]  # copies share them

    @property
    def layers(self) -> list[Any]:
        """The layers that somebody has."""
        return [layer for each in self._layers if (layer := each()) is not None]

    def is_of(self, cache: Any) -> bool:
        """Whether this is that cache, and nobody took a layer out."""
        if cache is None or self._cache() is not cache or len(cache.layers) != len(self._layers):
            return False
        pairs = zip(self._layers, cache.layers, strict=True)
        return all(mine() is each and each._held is self for mine, each in pairs)

    def release(self) -> None:
        """Give every layer that somebody has memory of its own."""
        for each in self.layers:
            each._release()
        self.memory.held = None


def why_not(cache: Any) -> str:
    """Say why a cache cannot be held; empty where it can."""
    from transformers import DynamicCache

    held, known = _classes(), _known()
    if type(cache) is not DynamicCache or getattr(cache, "offloading", False):
        return f"its cache is a {type(cache).__name__}, wanted a DynamicCache that is not offloaded"
    length = cache.get_seq_length()
    for each in cache.layers:
        if type(each) not in known and type(each) not in held:
            return f"its cache has a {type(each).__name__}"
        if getattr(each, "record_past", False):
            return "its cache records its past"
        keys, values = each.keys, each.values
        if keys is None or keys.ndim != 4 or values.shape[:3] != keys.shape[:3]:
            return "its cache has a layer without tokens"
        if each.get_seq_length() != length or keys.shape[2] != min(length, _longest(each, length)):
            return "layers of its cache have different lengths"
    return ""


def _longest(layer: Any, length: int) -> int:
    return int(layer.sliding_window) - 1 if layer.is_sliding else length


def _known() -> tuple[type, ...]:
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    return DynamicLayer, DynamicSlidingWindowLayer


def _held_layer(held: Held, number: int, layer: Any) -> Any:
    sliding = bool(layer.is_sliding)
    made = object.__new__(_classes()[int(sliding)])
    own = {name: each for name, each in vars(layer).items() if name not in _PROPERTIES and not name.startswith("_own")}
    made.__dict__.update(own | {"_held": held, "_number": number})
    return made


_PROPERTIES = ("keys", "values", "cumulative_length")


def _reading(name: str) -> property:
    """An attribute that is read from the memory until somebody assigns to the layer."""

    def read(layer: Any) -> Any:
        if layer._held is None:
            return getattr(layer, f"_own_{name}")
        part = layer._part(name)  # of memory that is another cache's later: who keeps what he reads gets a copy
        return part.clone() if isinstance(part, Tensor) else part

    def write(layer: Any, value: Any) -> None:
        layer._release()
        setattr(layer, f"_own_{name}", value)

    return property(read, write)


class _Reads:
    """What layers that read a memory add to those of Transformers."""

    _held: Held | None
    _number: int
    is_sliding: bool

    def _part(self, name: str) -> Any:
        held = self._held
        assert held is not None
        if name == "cumulative_length":
            return held.length
        length, memory = held.length, held.memory
        tokens = (memory.keys if name == "keys" else memory.values)[self._number]
        first = max(0, length - _longest(self, length))
        return tokens[:, first:length].transpose(1, 2)

    def _release(self) -> None:
        if self._held is not None:
            own = {f"_own_{name}": self._part(name) for name in _PROPERTIES}
            self.__dict__.update(
                {name: each.clone() if isinstance(each, Tensor) else each for name, each in own.items()}
            )
            self._held = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy has memory of its own."""
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update({name: each for name, each in vars(self).items() if not name.startswith("_own")})
        own = {
            f"_own_{name}": getattr(self, name) for name in _PROPERTIES if self._held or hasattr(self, f"_own_{name}")
        }
        twin.__dict__.update({name: each.clone() if isinstance(each, Tensor) else each for name, each in own.items()})
        twin._held = None
        return twin


@functools.cache
def _classes() -> tuple[Any, Any]:
    """Classes of layers, as Transformers' own and reading a memory: one that keeps all tokens, one with a window."""
    plain, window = _known()
    fields = {name: _reading(name) for name in _PROPERTIES[:2]}
    more = {"cumulative_length": _reading("cumulative_length")}
    return (
        type("HeldLayer", (_Reads, plain), {**fields, "get_seq_length": _length, "__module__": __name__}),
        type("HeldWindowLayer", (_Reads, window), {**fields, **more, "__module__": __name__}),
    )


def _length(layer: Any) -> int:
    if layer._held is not None:
        return int(layer._held.length)
    keys = layer.keys
    return 0 if not layer.is_initialized or keys.numel() == 0 else int(keys.shape[-2])


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
    plain: Any = _known()[0]

    def __init__(layer: Any, memory: Memory, held: Held, number: int, length: int, sliding: bool) -> None:  # noqa: N807
        plain.__init__(layer)
        layer.memory, layer.held, layer.number, layer.length = memory, held, number, length
        layer.is_sliding, layer.is_initialized = sliding, True

    def update(layer: Any, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        memory, number = layer.memory, layer.number
        places = memory.keys[number], memory.values[number]
        for place, each in zip(places, (keys, values), strict=True):
            place.index_copy_(1, memory.index, each.transpose(1, 2))
        first, second = (place[:, : layer.length].transpose(1, 2) for place in places)
        return first, second

    def get_seq_length(layer: Any) -> int:
        return int(layer.held.length)

    def get_mask_sizes(layer: Any, query_length: Any) -> tuple[int, int]:
        return int(layer.held.length) + 1, 0

    made = {"__init__": __init__, "update": update, "get_seq_length": get_seq_length, "get_mask_sizes": get_mask_sizes}
    return type("StepLayer", (plain,), {**made, "__module__": __name__})
