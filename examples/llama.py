"""A Llama with random weights, by whatever operations it is given, and its tokens in plain torch, one by one.

What ``examples/engine.py`` serves, and what that is compared with.
"""

from __future__ import annotations

import random
from collections import Counter, namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.benchmark import Timer

import layerzero as lz

EPS = 1e-6
Shape = namedtuple("Shape", "vocabulary width layers heads kv_heads head_dim wide longest")  # noqa: PYI024  # of sizes
LLAMA_8B = Shape(128256, 4096, 32, 32, 8, 128, 14336, 8192)
PLAIN = SimpleNamespace(embedding=functional.embedding, linear=functional.linear)
PLAIN.rms_norm = lambda hidden, weight, eps: functional.rms_norm(hidden, weight.shape, weight, eps)  # as lz has it
PLAIN.silu_mul = lambda both: functional.silu(both.chunk(2, -1)[0]) * both.chunk(2, -1)[1]


class Llama:
    """The weights of a model, made where they stay, and its pass over tokens."""

    def __init__(self, shape: Shape, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        def made(*size: int) -> Tensor:
            tensor = torch.empty(size, device=device, dtype=dtype)
            return tensor.fill_(1) if len(size) == 1 else tensor.normal_(std=size[1] ** -0.5)

        torch.manual_seed(0)
        self.shape, width, query = shape, shape.width, shape.heads * shape.head_dim
        sizes = {"before": (width,), "qkv": (query + 2 * shape.kv_heads * shape.head_dim, width), "out": (width, query)}
        sizes |= {"after": (width,), "gate_up": (2 * shape.wide, width), "down": (width, shape.wide)}
        self.layers = [{name: made(*size) for name, size in sizes.items()} for _ in range(shape.layers)]
        self.embedding, self.head, self.norm = made(shape.vocabulary, width), made(shape.vocabulary, width), made(width)
        self.cos, self.sin = lz.rope_table(shape.longest, shape.head_dim, base=10000.0, device=device)

    def packed(self) -> Any:
        """LayerZero's operations; each weight is packed once for kernels that take it so, and stays as it is."""
        every = [self.head, *(each for layer in self.layers for each in layer.values() if each.ndim == 2)]
        packed = {id(each): lz.PackedWeight(each) for each in every}
        return SimpleNamespace(
            embedding=lz.embedding,
            rms_norm=lz.rms_norm,
            silu_mul=lz.silu_mul,
            linear=lambda input, weight: lz.linear(input, weight, packed=packed[id(weight)]),
        )

    def hidden(self, ids: Tensor, by: Any, attend: Callable[..., Tensor]) -> Tensor:
        """What the layers make of tokens; ``by`` has operations, ``attend`` keys and values."""
        hidden, counts = by.embedding(ids, self.embedding), (self.shape.heads, *[self.shape.kv_heads] * 2)
        for number, layer in enumerate(self.layers):
            qkv = by.linear(by.rms_norm(hidden, layer["before"], EPS), layer["qkv"])
            seen = attend(number, *qkv.unflatten(-1, (-1, self.shape.head_dim)).split(counts, 1))
            hidden = hidden + by.linear(seen.reshape(len(ids), -1), layer["out"])
            both = by.linear(by.rms_norm(hidden, layer["after"], EPS), layer["gate_up"])
            hidden = hidden + by.linear(by.silu_mul(both), layer["down"])
        return hidden

    def logits(self, hidden: Tensor, by: Any) -> Tensor:
        """The logits of the next token of each row."""
        return by.linear(by.rms_norm(hidden, self.norm, EPS), self.head)


@torch.inference_mode()
def one_by_one(model: Llama, prompts: list[list[int]], count: int, draw: Any = None) -> list[list[int]]:
    """Write requests in plain torch without an engine: one after the other, each to its end."""

    def attend(number: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = past[number]
        cos, sin = (each[len(keys) : len(keys) + len(query)].unsqueeze(1) for each in (model.cos, model.sin))
        left, right = torch.cat((query, key), 1).float().chunk(2, -1)
        rotated = torch.cat((left * cos - right * sin, right * cos + left * sin), -1).to(query.dtype)
        query, key = rotated.split((query.shape[1], key.shape[1]), 1)
        past[number] = torch.cat((keys, key)), torch.cat((values, value))
        q, k, v = (each.transpose(0, 1).unsqueeze(0) for each in (query, *past[number]))
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=len(query) > 1, enable_gqa=True)
        return seen[0].transpose(0, 1)

    everything, nothing = [], model.head.new_empty(0, model.shape.kv_heads, model.shape.head_dim)
    for number, prompt in enumerate(prompts):
        past, ids, written = [(nothing, nothing)] * len(model.layers), torch.tensor(prompt, device=nothing.device), []
        while len(written) < count:
            logits = model.logits(model.hidden(ids, PLAIN, attend)[-1:], PLAIN)
            ids = draw(number, logits, prompt, written) if draw else logits.argmax(-1)
            written.append(int(ids))
        everything.append(written)
    return everything


def requests_of(count: int, vocabulary: int, length: int = 0, seed: int = 0) -> list[list[int]]:
    """Prompts of 20 to 119 tokens, or of ``length``; half of them begin with the same 40."""
    draw = random.Random(seed)  # noqa: S311  # reproducible, not secret
    lengths = [length] * count if length else draw.choices(range(20, 80), k=count)
    system, *own = [draw.choices(range(vocabulary), k=each) for each in (40, *lengths)]
    return [((system if number % 2 else []) + prompt)[: length or None] for number, prompt in enumerate(own)]


def told_roof(model: Llama, spent: Counter[str], layers: list[Any]) -> str:
    """Tokens a second of decode steps, and what the bandwidth of a copy would allow."""
    copy = Timer("block.clone()", globals={"block": torch.ones(2**30, dtype=torch.uint8, device=model.head.device)})
    speed = 2**31 / copy.blocked_autorange().median / 1e9  # as many bytes are written as are read
    read = spent["steps"] * sum(each.nbytes for part in ({0: model.head}, *model.layers) for each in part.values())
    read += spent["read"] * sum(each.keys[0, 0].nbytes + each.values[0, 0].nbytes for each in layers)
    share, got = read / speed / 1e9 / spent["seconds"], spent["tokens"] / spent["seconds"]
    roof = f"{got / share:.0f}, weights, keys and values read at {speed:.0f} GB/s"
    return f"decode steps: {got:.0f} tokens a second, {share:.0%} of the roof: {roof}"
