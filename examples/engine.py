"""A small serving engine: continuous batching over a paged cache, mixed steps, and prefixes that requests share.

    python examples/engine.py --dtype bfloat16      16 requests, on the engine and one after the other in plain torch

Each step takes one token of every request that writes, and fills up with chunks of prompts: prefills and decodes are
one call of ``lz.paged_attention``. Full pages of prompts are kept by their tokens; a request that begins with the same
ones takes them over. Weights are random; the engine writes what the plain model writes, request by request.
"""

from __future__ import annotations

import argparse
import random
import time
import warnings
from collections import deque
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

import layerzero as lz

PAGE, EPS = 16, 1e-6


@dataclass(frozen=True)
class Shape:
    """The sizes of a model."""

    vocabulary: int = 512
    width: int = 256
    layers: int = 4
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 32
    longest: int = 512


def layer_of(shape: Shape) -> nn.ParameterDict:
    """The weights of one layer."""
    heads, kv_heads, wide = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, 3 * shape.width
    sizes = {"qkv": (heads + 2 * kv_heads, shape.width), "out": (shape.width, heads)}
    sizes |= {"gate_up": (2 * wide, shape.width), "down": (shape.width, wide)}
    weights = {name: torch.randn(size) * size[1] ** -0.5 for name, size in sizes.items()}
    return nn.ParameterDict(weights | {name: torch.ones(shape.width) for name in ("before", "after")})


class Llama(nn.Module):
    """The weights of a model, and its plain forward pass: contiguous keys and values of one request."""

    def __init__(self, shape: Shape, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList([layer_of(shape) for _ in range(shape.layers)])
        self.norm = nn.Parameter(torch.ones(shape.width))
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.cos, self.sin = lz.rope_table(shape.longest, shape.head_dim, base=10000.0, device=device)
        self.to(device, dtype)

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (T, H, D), keys and values (T, K, D)."""
        heads, counts = qkv.unflatten(-1, (-1, self.shape.head_dim)), (self.shape.heads, *[self.shape.kv_heads] * 2)
        return heads.split(counts, 1)

    def rotate(self, tensor: Tensor, first: int) -> Tensor:
        """Rotate (T, H, D) by the angles of the positions from ``first`` on."""
        cos, sin = (each[first : first + len(tensor)].unsqueeze(1) for each in (self.cos, self.sin))
        left, right = tensor.float().chunk(2, -1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), -1).to(tensor.dtype)

    def plain(self, ids: Tensor, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        """The logits after the last of these tokens; appends to ``past``."""
        hidden, width = self.embedding(ids), (self.shape.width,)
        first = len(past[0][0]) if past else 0
        for number, layer in enumerate(self.layers):
            query, key, value = self.split(linear(rms_norm(hidden, width, layer["before"], EPS), layer["qkv"]))
            query, key = self.rotate(query, first), self.rotate(key, first)
            if first:
                key, value = torch.cat((past[number][0], key)), torch.cat((past[number][1], value))
            past[number : number + 1] = [(key, value)]
            q, k, v = (each.transpose(0, 1).unsqueeze(0) for each in (query, key, value))
            seen = scaled_dot_product_attention(q, k, v, is_causal=len(ids) > 1, enable_gqa=True)
            hidden = hidden + linear(seen[0].transpose(0, 1).flatten(1), layer["out"])
            gate, up = linear(rms_norm(hidden, width, layer["after"], EPS), layer["gate_up"]).chunk(2, -1)
            hidden = hidden + linear(silu(gate) * up, layer["down"])
        return self.head(rms_norm(hidden[-1:], width, self.norm, EPS))[0]


@torch.inference_mode()
def one_by_one(model: Llama, prompts: list[list[int]], count: int) -> list[list[int]]:
    """What somebody without an engine does: one request after the other, each to its end."""
    written = []
    for prompt in prompts:
        past, tokens, ids = [], [], torch.tensor(prompt, device=model.cos.device)
        for _ in range(count):
            tokens.append(int(model.plain(ids, past).argmax()))
            ids = torch.tensor(tokens[-1:], device=model.cos.device)
        written.append(tokens)
    return written


class Pages:
    """The pages of a cache: free ones, how often each is used, and those whose tokens are known."""

    def __init__(self, count: int) -> None:
        self.free, self.users = deque(range(count)), [0] * count
        self.known, self.tokens = {}, {}  # pages by all tokens up to their ends, and the other way round

    def begin(self, tokens: list[int], total: int) -> tuple[list[int], int] | None:
        """Pages for ``total`` tokens, and how many of them are known, all but one at most; None without room."""
        shared = []
        for end in range(PAGE, len(tokens), PAGE):
            if (page := self.known.get(tuple(tokens[:end]))) is None:
                break
            shared.append(page)
        needed = -(-total // PAGE) - len(shared)
        if needed > len(set(self.free) - set(shared)):
            return None
        for page in shared:
            if self.users[page] == 0:
                self.free.remove(page)
        pages = shared + [self._take() for _ in range(needed)]
        for page in pages:
            self.users[page] += 1
        return pages, len(shared) * PAGE

    def _take(self) -> int:
        """The page that lies idle longest; what it held is forgotten."""
        page = self.free.popleft()
        self.known.pop(self.tokens.pop(page, ()), None)
        return page

    def publish(self, tokens: list[int], pages: list[int]) -> None:
        """Make the full pages of a prompt known."""
        for number, page in enumerate(pages[: len(tokens) // PAGE], 1):
            key = tuple(tokens[: number * PAGE])
            if self.known.setdefault(key, page) == page:
                self.tokens[page] = key

    def end(self, pages: list[int]) -> None:
        """Give pages back; those that are known keep what they hold until somebody needs the room."""
        for page in pages:
            self.users[page] -= 1
            if self.users[page] == 0:
                self.free.append(page)


@dataclass
class Request:
    """A prompt, the tokens after it, and its place in the cache."""

    prompt: list[int]
    count: int
    written: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    cached: int = 0

    @property
    def todo(self) -> list[int]:
        """Tokens that are not in the cache yet."""
        return (self.prompt + self.written)[self.cached :]


class Engine:
    """Serves requests that come at any time."""

    def __init__(self, model: Llama, pages: int = 256, budget: int = 128, most: int = 32) -> None:
        self.model, self.pages, self.budget, self.most = model, Pages(pages), budget, most
        sizes, weight = (pages, PAGE, model.shape.kv_heads, model.shape.head_dim), model.head.weight
        like = {"dtype": weight.dtype, "device": weight.device}
        self.caches = [lz.PagedCache.allocate(*sizes, **like) for _ in range(model.shape.layers)]
        self.waiting, self.running, self.reused = deque(), [], 0

    def submit(self, prompt: list[int], count: int) -> Request:
        """Queue a request. Raises: ValueError for one that no step could ever serve."""
        room = min(self.model.shape.longest, len(self.pages.users) * PAGE)
        if not prompt or count < 1 or len(prompt) + count > room:
            raise ValueError(f"wanted a prompt and at most {room} tokens, got {len(prompt)} and {count} more")
        self.waiting.append(Request(prompt, count))
        return self.waiting[-1]

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.most:
            first = self.waiting[0]
            if (begun := self.pages.begin(first.prompt, len(first.prompt) + first.count)) is None:
                return
            first.pages, first.cached = begun
            self.reused += first.cached
            self.running.append(self.waiting.popleft())

    def _schedule(self) -> list[tuple[Request, list[int]]]:
        """Whose tokens are in the next step: one of each that writes, then chunks of prompts while the budget lasts."""
        chosen = [(each, each.todo) for each in self.running if len(each.todo) == 1]
        for each in self.running:
            left = self.budget - sum(len(tokens) for _, tokens in chosen)
            if len(each.todo) > 1 and left > 0:
                chosen.append((each, each.todo[:left]))
        return chosen

    @torch.inference_mode()
    def step(self) -> bool:
        """Run one step; False when there is nothing left to do."""
        self._admit()
        if not (chosen := self._schedule()):
            return False
        device, last = self.model.cos.device, []
        ends = [0, *accumulate(len(tokens) for _, tokens in chosen)]
        lens = torch.tensor([each.cached + len(tokens) for each, tokens in chosen], dtype=torch.int32)
        several = ends[-1] > len(chosen)  # tokens a sequence, in at least one of them
        host = (lens, torch.tensor(ends, dtype=torch.int32)) if several else (lens,)
        columns = max(len(each.pages) for each, _ in chosen)
        tables = torch.tensor([each.pages + [0] * (columns - len(each.pages)) for each, _ in chosen], dtype=torch.int32)
        starts = host[1].to(device) if several else None
        step = lz.StepMetadata(tables.to(device), lens.to(device), cu_seqlens_q=starts, host=host)
        ids = torch.tensor([token for _, tokens in chosen for token in tokens], device=device)
        places = [each.cached + number for each, tokens in chosen for number in range(len(tokens))]
        hidden = self._forward(ids, torch.tensor(places, device=device), step, [len(tokens) for _, tokens in chosen])
        for (each, tokens), end in zip(chosen, ends[1:], strict=True):
            each.cached += len(tokens)
            if each.cached == len(each.prompt) + len(each.written):
                last.append((each, end - 1))
            if each.cached >= len(each.prompt) > each.cached - len(tokens):
                self.pages.publish(each.prompt, each.pages)
        if not last:  # chunks alone
            return True
        rows = torch.tensor([row for _, row in last], device=device)
        logits = lz.linear(lz.rms_norm(hidden[rows], self.model.norm, EPS), self.model.head.weight)
        for (each, _), token in zip(last, lz.greedy(logits).tolist(), strict=True):
            each.written.append(token)
            if len(each.written) == each.count:
                self.running.remove(each)
                self.pages.end(each.pages)
        return True

    def _forward(self, ids: Tensor, places: Tensor, step: lz.StepMetadata, counts: list[int]) -> Tensor:
        """The hidden state after the last layer, of every token of a step."""
        model, slots, table = self.model, step.slot_mapping(PAGE), (self.model.cos, self.model.sin)
        first = next((place for place, count in enumerate(counts) if count > 1), 0)  # those before it decode
        longest = {} if step.cu_seqlens_q is None else {"max_seqlen_q": max(counts), "decodes": first or None}
        hidden = lz.embedding(ids, model.embedding.weight)
        for layer, cache in zip(model.layers, self.caches, strict=True):
            query, key, value = model.split(lz.linear(lz.rms_norm(hidden, layer["before"], EPS), layer["qkv"]))
            query = lz.rope_append(query, key, value, *table, cache.keys, cache.values, places, slots)
            query = query.unsqueeze(1) if step.cu_seqlens_q is None else query
            read = (cache.keys, cache.values, step.block_tables, step.context_lens)
            seen = lz.paged_attention(query, *read, step=step, cu_seqlens_q=step.cu_seqlens_q, **longest)
            hidden = hidden + lz.linear(seen.reshape(len(ids), -1), layer["out"])
            both = lz.linear(lz.rms_norm(hidden, layer["after"], EPS), layer["gate_up"])
            hidden = hidden + lz.linear(lz.silu_mul(both), layer["down"])
        return hidden


def requests_of(count: int, vocabulary: int, seed: int = 0) -> list[list[int]]:
    """Prompts of 20 to 120 tokens, half of which begin with the same 40."""
    draw = random.Random(seed)  # noqa: S311  # reproducible, not secret
    system, *own = [draw.choices(range(vocabulary), k=each) for each in (40, *draw.choices(range(20, 80), k=count))]
    return [(system if number % 2 else []) + prompt for number, prompt in enumerate(own)]


def serve(engine: Engine, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Requests that come while others run: two at first, another after every other step."""
    submitted, steps = [engine.submit(prompt, count) for prompt in prompts[:2]], 0
    while engine.step() or len(submitted) < len(prompts):
        steps += 1
        if steps % 2 == 0 and len(submitted) < len(prompts):
            submitted.append(engine.submit(prompts[len(submitted)], count))
    return [each.written for each in submitted]


def main() -> None:
    """Serve the same requests both ways, compare what was written, and tell tokens a second."""
    parser = argparse.ArgumentParser(description="Serve requests on the engine, and one by one.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=48)
    given = parser.parse_args()
    warnings.simplefilter("ignore", lz.LayerZeroWarning)
    shape = Shape(2048, given.width, 4, given.width // 64, max(given.width // 256, 1), 64)
    model, prompts = Llama(shape, given.device, getattr(torch, given.dtype)), requests_of(16, shape.vocabulary)
    results, total = {}, len(prompts) * given.tokens
    for name in ("one by one", "engine"):
        print(f"{name}: {len(prompts)} requests of {given.tokens} tokens, twice", flush=True)
        for _round in range(2):  # the first one chooses kernels and warms caches up
            started, engine = time.perf_counter(), Engine(model)
            run, to = (serve, engine) if name == "engine" else (one_by_one, model)
            results[name] = run(to, prompts, given.tokens)
            spent = time.perf_counter() - started
        print(f"{name}: {total / spent:.0f} tokens a second")
    same = sum(a == b for pair in zip(*results.values(), strict=True) for a, b in zip(*pair, strict=True))
    print(f"tokens that are the same: {same} of {total}; prompt tokens that were not computed again: {engine.reused}")


if __name__ == "__main__":
    main()
