"""A step of a Llama by one run of ggml: one token through all layers, whose keys and values go where the cache lies.

What a decoder is made of comes as addresses. A number of ggml's graph that a step makes lies in memory of the graph;
what a step brings (its rows, the cache, cosines and sines) is set before each run.

Rows of k-quants are rounded with a scale in float32. Those of blocks of 32 numbers have a float16 scale, for which a
row is divided by its root mean square, and the result multiplied.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ctypes import c_float, c_int, c_int64, c_size_t, c_void_p
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layerzero.backends.ggml import BASE, FLOAT16, FLOAT32, Init, Library, library, of_thread, typed
from layerzero.ops.quantize.gguf import KINDS, NUMBERS

_TENSORS = 96
"""Of a layer, at most: 89 where all weights have blocks of 32 numbers and biases."""

_APART = 64
"""Bytes between the beginnings of two numbers of a graph are a multiple of this, which no two threads share then."""

_LEAST = 1e-38
"""Added to a mean of squares, so that a row of zeros gives zeros."""


class Product(NamedTuple):
    """A weight in blocks (N, bytes), by its type and address, with the address of a float32 bias or 0."""

    kind: int
    outputs: int
    inputs: int
    weight: int
    bias: int


class Norm(NamedTuple):
    """A norm by the root mean square: the address of its float32 weight, and what is added under the root."""

    weight: int
    eps: float


class Layer(NamedTuple):
    """Products of queries, keys, values, what attended, gate, up and down; and the norms before each half."""

    products: tuple[Product, ...]
    norms: tuple[Norm, Norm]


class Decoder(NamedTuple):
    """A stack of layers, and the norm behind them.

    Attributes:
        layers: in order.
        norm: behind the last one.
        sizes: heads, heads of keys and values, entries of a head.
        scaling: of the products of queries and keys.
    """

    layers: tuple[Layer, ...]
    norm: Norm
    sizes: tuple[int, int, int]
    scaling: float


class _Operations:
    """Functions of ggml that add an operation to a context and give its result."""

    def __init__(self, of: Library) -> None:
        def one(name: str, *arguments: Any) -> Any:
            return typed(of.quick, f"ggml_{name}", c_void_p, c_void_p, *arguments)

        at = c_void_p
        self.mul, self.add, self.div, self.gate, self.copy = (
            one(each, at, at) for each in ("mul", "add", "div", "swiglu_split", "cpy")
        )
        self.square, self.root, self.mean, self.minus = (one(each, at) for each in ("sqr", "sqrt", "mean", "neg"))
        self.norm, self.plus = one("rms_norm", at, c_float), one("scale_bias", at, c_float, c_float)
        self.view, self.join = one("view_2d", at, c_int64, c_int64, c_size_t, c_size_t), one("concat", at, at, c_int)
        self.turn, self.cube = one("permute", at, *[c_int] * 4), one("new_tensor_3d", c_int, *[c_int64] * 3)
        self.shape = one("reshape_3d", at, c_int64, c_int64, c_int64)
        self.attend = one("flash_attn_ext", at, at, at, at, c_float, c_float, c_float)


class Step:
    """The graph of one token of a decoder whose cache has so many places.

    Attributes:
        of: the decoder.
        places: tokens that fit into the memory of each layer's keys and values.
    """

    def __init__(self, of: Decoder, places: int) -> None:
        self.of, self.places, self._library = of, places, library()
        self._call, count = _Operations(self._library), _TENSORS * len(of.layers) + 8
        bytes_ = count * self._library.tensor_bytes + self._library.graph_bytes(count, False) + 1024
        self._context = self._library.init(Init(bytes_, None, True))
        self._graph = self._library.graph(self._context, count, False)
        self._own: list[Tensor] = []
        self._used, self._length = 0, 0
        with torch.inference_mode(False):  # what that mode makes is not written outside of it
            self._seen = torch.full((places,), -torch.inf, dtype=torch.float16, device="cpu")
            self._build()

    def _build(self) -> None:
        of, width, hidden = self.of, self.of.sizes[2], self.of.layers[0].products[0].inputs
        rows = self._brought(FLOAT32, hidden)
        cos, sin = self._brought(FLOAT32, width), self._brought(FLOAT32, width)
        self._mask = self._new(FLOAT16, self.places, 1, self._seen.data_ptr())
        self._shared = [_place(each, self._library) for each in (rows, cos, sin)]
        self._cached: list[c_void_p] = []
        outputs = [self._room(hidden), self._room(hidden)]
        for number, each in enumerate(of.layers):
            self._used = len(outputs)  # a layer's numbers lie where the one before had its own
            rows = self._layer(each, rows, cos, sin)
            self._library.place(self._library.everywhere, rows, outputs[number % 2])
        last = self._normed(rows, of.norm, hidden)
        self._library.expand(self._graph, last)
        self._shared.append(_place(last, self._library))

    def __del__(self) -> None:
        self._library.free(self._context)

    def run(self, hidden: Tensor, cos: Tensor, sin: Tensor, first: int, cache: Iterable[tuple[int, int]]) -> Tensor:
        """Compute a token.

        Args:
            hidden: float32 (1, 1, K); ``cos`` and ``sin`` float32 (1, 1, D).
            first: tokens that the cache has, where this one's keys and values are written.
            cache: of each layer the addresses of its float32 keys and values, (places, kv heads, D).

        Returns: what leaves the last norm, (1, 1, K).
        """
        output = torch.empty_like(hidden)
        if self._length != first:
            self._seen[:first], self._seen[first:] = 0, -torch.inf
        self._seen[first], self._length = 0, first + 1
        for place, tensor in zip(self._shared, (hidden, cos, sin, output), strict=True):
            place.value = tensor.data_ptr()
        _, kv_heads, width = self.of.sizes
        behind, places = 4 * first * kv_heads * width, iter(self._cached)
        for keys, values in cache:
            for address in (keys + behind, values + behind, keys, values):
                next(places).value = address
        of_thread().products.run(self._graph)
        return output

    def _layer(self, of: Layer, rows: int, cos: int, sin: int) -> int:
        call, at, expand = self._call, self._context, self._library.expand
        heads, kv_heads, width = self.of.sizes
        query, key, value, last, gate, up, down = of.products
        normed = self._scaled(self._normed(rows, of.norms[0], query.inputs), (query, key, value))
        both = self._new(FLOAT32, width, heads + kv_heads, self._room((heads + kv_heads) * width))
        start = 0
        for product in (query, key):
            part = call.view(at, both, product.outputs, 1, 4 * product.outputs, 4 * start)
            expand(self._graph, call.copy(at, self._product(product, normed), part))
            start += product.outputs
        half, all_heads = width // 2, heads + kv_heads
        second = self._kept(call.minus(at, call.view(at, both, half, all_heads, 4 * width, 4 * half)), half * all_heads)
        other = call.join(at, second, call.view(at, both, half, all_heads, 4 * width, 0), 0)
        size = width * all_heads
        turned = self._kept(call.mul(at, self._kept(other, size), sin), size)
        turned = self._kept(call.add(at, self._kept(call.mul(at, both, cos), size), turned), size)
        keys = call.view(at, turned, width * kv_heads, 1, 4 * width * kv_heads, 4 * width * heads)
        for each in (keys, self._product(value, normed)):
            written = call.copy(at, each, self._brought(FLOAT32, value.outputs))
            expand(self._graph, written)
            self._cached.append(_place(written, self._library))
        held = []
        for _ in "kv":
            cube = call.cube(at, FLOAT32, width, kv_heads, self.places)
            self._library.place(self._library.everywhere, cube, BASE)
            held.append(call.turn(at, cube, 0, 2, 1, 3))
            self._cached.append(_place(held[-1], self._library))
        asked = call.shape(at, call.view(at, turned, width * heads, 1, 4 * width * heads, 0), width, 1, heads)
        attended = call.attend(at, asked, *held, self._mask, self.of.scaling, 0.0, 0.0)
        attended = call.view(at, self._kept(attended, width * heads), width * heads, 1, 4 * width * heads, 0)
        total = call.add(at, self._product(last, self._scaled(attended, (last,))), rows)
        total = self._kept(total, last.outputs)
        normed = self._scaled(self._normed(total, of.norms[1], gate.inputs), (gate, up))
        gated = call.gate(at, self._product(gate, normed), self._product(up, normed))
        gated = self._scaled(self._kept(gated, up.outputs), (down,))
        made: int = call.add(at, self._product(down, gated), total)
        return made

    def _normed(self, rows: int, of: Norm, size: int) -> int:
        weight = self._new(FLOAT32, size, 1, of.weight)
        normed = self._kept(self._call.norm(self._context, rows, of.eps), size)
        return self._kept(self._call.mul(self._context, normed, weight), size)

    def _scaled(self, rows: int, products: Sequence[Product]) -> tuple[int, int, int]:
        """A row, it over its root mean square, and that; the row alone where no product needs the others."""
        call, at, size = self._call, self._context, products[0].inputs
        if not any(_has_halves(each.kind) for each in products):
            return rows, 0, 0
        mean = self._kept(call.mean(at, self._kept(call.square(at, rows), size)), 1)
        root = self._kept(call.root(at, self._kept(call.plus(at, mean, 1.0, _LEAST), 1)), 1)
        return rows, self._kept(call.div(at, rows, root), size), root

    def _product(self, of: Product, rows: tuple[int, int, int]) -> int:
        call, at = self._call, self._context
        plain, divided, divisor = rows
        half, weight = _has_halves(of.kind), self._new(of.kind, of.inputs, of.outputs, of.weight)
        made = self._kept(self._library.product(at, weight, divided if half else plain), of.outputs)
        if half:
            made = self._kept(call.mul(at, made, divisor), of.outputs)
        if of.bias:
            made = self._kept(call.add(at, made, self._new(FLOAT32, of.outputs, 1, of.bias)), of.outputs)
        return made

    def _brought(self, kind: int, inputs: int) -> int:
        """A row whose address is not known yet."""
        return self._new(kind, inputs, 1, BASE)

    def _new(self, kind: int, inputs: int, count: int, address: int) -> int:
        made: int = self._library.tensor(self._context, kind, inputs, count)
        self._library.place(self._library.everywhere, made, address)
        return made

    def _kept(self, tensor: int, size: int) -> int:
        """A result of an operation, in memory of the graph."""
        self._library.place(self._library.everywhere, tensor, self._room(size))
        return tensor

    def _room(self, size: int) -> int:
        """The address of memory for so many numbers."""
        if self._used == len(self._own) or self._own[self._used].numel() < size + _APART:
            self._own.insert(self._used, torch.empty(size + _APART, dtype=torch.float32, device="cpu"))
        self._used += 1
        return -(-self._own[self._used - 1].data_ptr() // _APART) * _APART


def _place(tensor: int, of: Library) -> c_void_p:
    """Where the address of its numbers is in a tensor of ggml's."""
    return c_void_p.from_address(tensor + of.data)


def _has_halves(kind: int) -> bool:
    """Whether ggml rounds rows for such a weight with scales in float16."""
    return KINDS[NUMBERS[kind]].block == 32
