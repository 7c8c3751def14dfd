"""A small serving engine: continuous batching over a paged cache, mixed steps, shared prefixes, graphs of decodes.

    python examples/engine.py --dtype bfloat16      16 requests, on the engine and one after the other in plain torch
    python examples/engine.py --shape 8b --requests 64 --prompt 1024 --tokens 128      Llama-3-8B's sizes, on a GPU

A step takes one token of each request that writes, and fills up with chunks of prompts; where all write, it is a CUDA
graph. Full pages of prompts are kept for those that begin with the same tokens. The weights are random ones.
"""

from __future__ import annotations

import argparse
import random
import time
import warnings
from collections import Counter, deque, namedtuple
from collections.abc import Callable
from itertools import accumulate, islice, takewhile
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.benchmark import Timer

import layerzero as lz

PAGE, EPS = 16, 1e-6
Shape = namedtuple("Shape", "vocabulary width layers heads kv_heads head_dim wide longest")  # noqa: PYI024  # of sizes
LLAMA_8B = Shape(128256, 4096, 32, 32, 8, 128, 14336, 8192)
PLAIN = SimpleNamespace(embedding=functional.embedding, linear=functional.linear, greedy=lambda rows: rows.argmax(-1))
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

    def tokens(self, ids: Tensor, by: Any, attend: Callable[..., Tensor], rows: Any = slice(None)) -> Tensor:
        """The likeliest token after each of these rows; ``by`` has operations, ``attend`` keys and values."""
        hidden, counts = by.embedding(ids, self.embedding), (self.shape.heads, *[self.shape.kv_heads] * 2)
        for number, layer in enumerate(self.layers):
            qkv = by.linear(by.rms_norm(hidden, layer["before"], EPS), layer["qkv"])
            seen = attend(number, *qkv.unflatten(-1, (-1, self.shape.head_dim)).split(counts, 1))
            hidden = hidden + by.linear(seen.reshape(len(ids), -1), layer["out"])
            both = by.linear(by.rms_norm(hidden, layer["after"], EPS), layer["gate_up"])
            hidden = hidden + by.linear(by.silu_mul(both), layer["down"])
        return by.greedy(by.linear(by.rms_norm(hidden[rows], self.norm, EPS), self.head))


@torch.inference_mode()
def one_by_one(model: Llama, prompts: list[list[int]], count: int) -> list[list[int]]:
    """What somebody without an engine does in plain torch: one request after the other, each to its end."""

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

    written, nothing = [], model.head.new_empty(0, model.shape.kv_heads, model.shape.head_dim)
    for prompt in prompts:
        past, ids = [(nothing, nothing)] * len(model.layers), torch.tensor(prompt, device=nothing.device)
        written.append([int(ids := model.tokens(ids, PLAIN, attend, slice(-1, None))) for _ in range(count)])
    return written


class Request:
    """A prompt, the tokens written after it, and its place in the cache: pages, and how many tokens they have."""

    def __init__(self, prompt: list[int], count: int) -> None:
        self.prompt, self.count, self.written, self.pages, self.cached = prompt, count, [], [], 0


class Pages:
    """The pages of a cache: free ones, how often each is used, and those whose tokens are known."""

    def __init__(self, count: int) -> None:
        self.free, self.users = dict.fromkeys(range(count)), [0] * count  # what lies idle longest comes first
        self.known, self.tokens = {}, {}  # pages by all tokens up to their ends, and the other way round

    def begin(self, request: Request) -> bool:
        """Give it pages to its end, with all that is known of its prompt but for the last token; False without room."""
        ends = (self.known.get(tuple(request.prompt[:end])) for end in range(PAGE, len(request.prompt), PAGE))
        shared = list(takewhile(lambda page: page is not None, ends))
        needed = -(-(len(request.prompt) + request.count) // PAGE) - len(shared)
        fresh = list(islice((page for page in self.free if page not in shared), needed))
        if len(fresh) < needed:
            return False
        for page in fresh:  # what they held is forgotten
            self.known.pop(self.tokens.pop(page, ()), None)
        for page in shared + fresh:
            self.free.pop(page, None)
            self.users[page] += 1
        request.pages, request.cached = shared + fresh, len(shared) * PAGE
        return True

    def publish(self, request: Request) -> None:
        """Make the full pages of a prompt known."""
        for number, page in enumerate(request.pages[: len(request.prompt) // PAGE], 1):
            if self.known.setdefault(key := tuple(request.prompt[: number * PAGE]), page) == page:
                self.tokens[page] = key

    def end(self, request: Request) -> None:
        """Take its pages back; those that are known keep what they hold until somebody needs the room."""
        for page in request.pages:
            self.users[page] -= 1
            self.free |= {} if self.users[page] else {page: None}


def captured(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A CUDA graph of what ``run`` launches, as a function that replays it; the result stays where it is."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(), run()  # what is chosen, built, planned and allocated on the way is there before the capture
    torch.cuda.current_stream().wait_stream(stream)
    with lz.capturing(graph, stream=stream):  # nothing is collected meanwhile; kernels may build beside it
        result = run()
    return lambda: (graph.replay(), result)[1]


class Engine:
    """Serves requests that come at any time; ``capture`` makes replays of steps in which all decode."""

    def __init__(self, model: Llama, pages: int = 256, budget: int = 128, most: int = 32, capture: Any = None) -> None:
        self.model, self.budget, self.most, self.capture, self.device = model, budget, most, capture, model.head.device
        sizes = (pages + most, PAGE, model.shape.kv_heads, model.shape.head_dim)
        self.caches = [lz.PagedCache.allocate(*sizes, dtype=model.head.dtype, device=self.device) for _ in model.layers]
        self.padding = [(Request([0], 1), [0]) for _ in range(most)]  # fill graphs up; each has a page aside to write
        for page, (each, _) in enumerate(self.padding, pages):
            each.table = torch.full((-(-model.shape.longest // PAGE),), page, dtype=torch.int32)
        self.waiting, self.running, self.graphs = deque(), [], {}
        self.pages, self.reused, self.spent = Pages(pages), 0, Counter()

    def submit(self, prompt: list[int], count: int) -> Request:
        """Queue a request. Raises: ValueError for one that no step could ever serve."""
        room = min(self.model.shape.longest, len(self.pages.users) * PAGE)
        if not prompt or count < 1 or len(prompt) + count > room:
            raise ValueError(f"wanted a prompt and at most {room} tokens, got {len(prompt)} and {count} more")
        self.waiting.append(Request(prompt, count))
        return self.waiting[-1]

    def _schedule(self) -> list[tuple[Request, list[int]]]:
        """Whose tokens are in the next step: one of each that writes, then chunks of prompts while the budget lasts."""
        while self.waiting and len(self.running) < self.most and self.pages.begin(self.waiting[0]):
            self.running.append(first := self.waiting.popleft())
            first.table = self.padding[0][0].table.clone()
            first.table[: len(first.pages)] = torch.tensor(first.pages)
            self.reused += first.cached
        todo = [(each, each.prompt[each.cached :] or each.written[-1:]) for each in self.running]
        chosen = [(each, tokens) for each, tokens in todo if len(tokens) == 1]
        left = self.budget - len(chosen)
        for each, tokens in todo:
            if len(tokens) > 1 and left > 0:
                chosen.append((each, tokens[:left]))
                left -= len(tokens)
        return chosen

    @torch.inference_mode()
    def step(self) -> bool:
        """Run one step; False when there is nothing left to do."""
        started = time.perf_counter()
        if not (chosen := self._schedule()):
            return False
        for (each, tokens), token in zip(chosen, self._launch(chosen).tolist(), strict=False):  # padding comes last
            each.cached += len(tokens)
            if each.cached >= len(each.prompt) > each.cached - len(tokens):
                self.pages.publish(each)
            if each.cached == len(each.prompt) + len(each.written):
                each.written.append(token)
                if len(each.written) == each.count:
                    self.running.remove(each)
                    self.pages.end(each)
        if all(len(tokens) == 1 for _, tokens in chosen):
            spent = {"seconds": time.perf_counter() - started, "read": sum(each.cached for each, _ in chosen)}
            self.spent.update(spent, steps=1, tokens=len(chosen))
        return True

    def _launch(self, chosen: list[tuple[Request, list[int]]]) -> Tensor:
        """The token after each of these chunks, and after those that fill a graph up to 1, 2, 4, 8, ... rows."""
        several = any(len(tokens) > 1 for _, tokens in chosen)
        rows, replayed = 1 << (len(chosen) - 1).bit_length(), self.capture is not None and not several
        chosen = chosen + self.padding[: rows - len(chosen) if replayed else 0]
        counts = [len(tokens) for _, tokens in chosen]
        tables = torch.stack([each.table for each, _ in chosen])
        lens = torch.tensor([each.cached + len(tokens) for each, tokens in chosen], dtype=torch.int32)
        host = (lens, torch.tensor([0, *accumulate(counts)], dtype=torch.int32)) if several else (lens,)
        places = [each.cached + number for each, tokens in chosen for number in range(len(tokens))]
        given = (torch.tensor([[token for _, tokens in chosen for token in tokens], places]), tables, *host)
        if not replayed or rows not in self.graphs:
            inputs, *others = (each.to(self.device, copy=replayed) for each in given)
            starts, more = others[2] if several else None, {"host": host, "host_tables": tables}
            step = lz.StepMetadata(*others[:2], cu_seqlens_q=starts, capturable=replayed, **more)
            if not replayed:
                return self._tokens(inputs, step, counts)
            self.graphs[rows] = (inputs, *others), step, self.capture(lambda: self._tokens(inputs, step, counts))
        buffers, step, replay = self.graphs[rows]
        for buffer, new in zip(buffers, given, strict=True):
            buffer.copy_(new)
        step.advance(host=host, host_tables=tables)  # what is planned on the host is planned here
        return replay()

    def _tokens(self, inputs: Tensor, step: lz.StepMetadata, counts: list[int]) -> Tensor:
        """The token after the last of each request's; of all there are tokens and places, (2, T)."""
        (ids, places), starts, slots = inputs, step.cu_seqlens_q, step.slot_mapping(PAGE)
        first = next((place for place, count in enumerate(counts) if count > 1), 0)  # those before it decode
        longest = {} if starts is None else {"max_seqlen_q": max(counts), "decodes": first or None}

        def attend(number: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = self.caches[number].keys, self.caches[number].values
            query = lz.rope_append_(query, key, value, self.model.cos, self.model.sin, keys, values, places, slots)
            query, read = query.unsqueeze(1) if starts is None else query, (keys, values, step.block_tables)
            return lz.paged_attention(query, *read, step.context_lens, step=step, cu_seqlens_q=starts, **longest)

        return self.model.tokens(ids, lz, attend, slice(None) if starts is None else starts[1:] - 1)


def requests_of(count: int, vocabulary: int, length: int = 0, seed: int = 0) -> list[list[int]]:
    """Prompts of 20 to 120 tokens, or of ``length``; half of them begin with the same 40."""
    draw = random.Random(seed)  # noqa: S311  # reproducible, not secret
    lengths = [length] * count if length else draw.choices(range(20, 80), k=count)
    system, *own = [draw.choices(range(vocabulary), k=each) for each in (40, *lengths)]
    return [((system if number % 2 else []) + prompt)[: length or None] for number, prompt in enumerate(own)]


def serve(engine: Engine, prompts: list[list[int]], count: int, at_first: int = 2) -> list[list[int]]:
    """Requests that come while others run: some at first, another after every other step."""
    submitted, steps = [engine.submit(prompt, count) for prompt in prompts[:at_first]], 0
    while engine.step() or len(submitted) < len(prompts):
        if (steps := steps + 1) % 2 == 0 and len(submitted) < len(prompts):
            submitted.append(engine.submit(prompts[len(submitted)], count))
    return [each.written for each in submitted]


def main() -> None:
    """Serve the same requests both ways, compare what was written, and tell tokens a second."""
    parser = argparse.ArgumentParser(description="Serve requests on the engine, and one by one.")
    parser.add_argument("--shape", choices=("small", "8b"), default="small", help="Llama-3-8B's has other defaults")
    parser.add_argument("--no-graphs", action="store_true", help="launch each kernel of a decode step, on a GPU, too")
    options = {"device": ("cuda" if torch.cuda.is_available() else "cpu", "where"), "dtype": ("float32", "of weights")}
    options |= {"width": (512, "in the small shape, from 64"), "requests": (16, "in all"), "first": (2, "at once")}
    options |= {"tokens": (48, "to write"), "prompt": (0, "its length; 0: 20 to 119"), "budget": (128, "tokens a step")}
    options |= {"compare": (10**6, "so many requests with those one by one; 0: none")}
    for name, (default, text) in options.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"{text} (default: {default})")
    if large := parser.parse_args().shape == "8b":
        parser.set_defaults(dtype="bfloat16", first=32, budget=2048, compare=2)
    width = (given := parser.parse_args()).width
    warnings.simplefilter("ignore", lz.LayerZeroWarning)
    shape = LLAMA_8B if large else Shape(2048, width, 4, width // 64, max(width // 256, 1), 64, 3 * width, 512)
    prompts = requests_of(given.requests, shape.vocabulary, given.prompt)
    longest, most = max(map(len, prompts)) + given.tokens, min(given.requests, 64)
    model = Llama(shape._replace(longest=longest), given.device, getattr(torch, given.dtype))
    capture = captured if model.head.is_cuda and not given.no_graphs else None
    engine, results = Engine(model, pages := max(256, most * -(-longest // PAGE)), given.budget, most, capture), {}
    runs = {"one by one": (one_by_one, model, prompts[: given.compare])} if given.compare > 0 else {}
    runs["engine"] = (serve, engine, prompts, given.first)
    for name, (run, to, asked, *more) in runs.items():
        print(f"{name}: {len(asked)} requests of {given.tokens} tokens, twice", flush=True)
        for _round in range(2):  # the first one chooses kernels, captures, and warms caches up
            engine.pages, engine.reused, engine.spent = Pages(pages), 0, Counter()  # no prefix is known any more
            started = time.perf_counter()
            results[name] = run(to, asked, given.tokens, *more)
            spent = time.perf_counter() - started
        print(f"{name}: {len(asked) * given.tokens / spent:.0f} tokens a second")
    if model.head.is_cuda and (spent := engine.spent):
        copy = Timer("block.clone()", globals={"block": torch.ones(2**30, dtype=torch.uint8, device=engine.device)})
        speed = 2**31 / copy.blocked_autorange().median / 1e9  # as many bytes are written as are read
        read = spent["steps"] * sum(each.nbytes for part in ({0: model.head}, *model.layers) for each in part.values())
        read += spent["read"] * sum(each.keys[0, 0].nbytes + each.values[0, 0].nbytes for each in engine.caches)
        share, got = read / speed / 1e9 / spent["seconds"], spent["tokens"] / spent["seconds"]
        roof = f"{got / share:.0f}, weights, keys and values read at {speed:.0f} GB/s"
        print(f"decode steps: {got:.0f} tokens a second, {share:.0%} of the roof: {roof}")
    pairs = [pair for both in zip(*results.values(), strict=False) for pair in zip(*both, strict=True)]
    same = f"{sum(one == other for one, other in pairs)} of {len(pairs)}" if len(results) > 1 else "none compared"
    print(f"tokens that are the same: {same}; prompt tokens that were not computed again: {engine.reused}")


if __name__ == "__main__":
    main()
