"""A small serving engine on ``lz.KVCache``: mixed steps, known prefixes, drafts, draws by request, graphs of decodes.

    python examples/engine.py --dtype bfloat16      16 requests, on the engine and one after the other in plain torch
    python examples/engine.py --sampled 8 --draft 3      half of them draw, penalise and obey a mask; the others draft
    python examples/engine.py --shape 8b --requests 64 --prompt 1024 --tokens 128      Llama-3-8B's sizes, on a GPU

A step takes one token of each request that writes, with its draft, and fills up with chunks of prompts. Where all write
one, it is a CUDA graph. A draw has a seed of its request and place, so that it is the same alone. Weights are random.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections import Counter, deque, namedtuple
from collections.abc import Callable
from typing import Any

import torch
from llama import LLAMA_8B, Llama, Shape, one_by_one, requests_of, told_roof  # in this folder
from torch import Tensor

import layerzero as lz

PAGE = 16
_FIELDS = "temperature top_k top_p min_p seed repetition presence frequency allowed"
Sampling = namedtuple("Sampling", _FIELDS, defaults=(0.0, 2**31 - 1, 1.0, 0.0, 0, 1.0, 0.0, 0.0, None))  # noqa: PYI024
GREEDY = Sampling()


def drawn(logits: Tensor, of: list[Sampling], places: list[int], **said: Tensor) -> Tensor:
    """A token of each row as its request wants it: a mask, penalties of what was said, and a draw of its own seed."""
    names, columns = Sampling._fields[:-1], zip(*(each[:-1] for each in of), strict=True)
    given = {name: torch.tensor(each, device=logits.device) for name, each in zip(names, columns, strict=True)}
    if any(each.allowed is not None for each in of):
        everything = torch.full((-(-logits.shape[-1] // 32),), -1, dtype=torch.int32)
        masks = torch.stack([everything if each.allowed is None else each.allowed for each in of])
        logits = lz.apply_token_bitmask(logits, masks.to(logits.device))
    seeds = given.pop("seed") * 2**32 + torch.tensor(places, device=logits.device)
    by_row = {name: given.pop(name) for name in ("repetition", "presence", "frequency")}
    return lz.sample(lz.apply_penalties(logits, **said, **by_row), seed=seeds, **given)


def captured(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A CUDA graph of what ``run`` launches, as a function that replays it; the result stays where it is."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(), run()  # what is chosen, built, planned and allocated on the way is there before the capture
    torch.cuda.current_stream().wait_stream(stream)
    with lz.capturing(graph, stream=stream):  # nothing is collected meanwhile; kernels may be built
        result = run()
    return lambda: (graph.replay(), result)[1]


class Request:
    """A prompt, how its tokens are drawn, and those that are written."""

    def __init__(self, prompt: list[int], count: int, sampling: Sampling) -> None:
        self.prompt, self.count, self.sampling, self.written = prompt, count, sampling, []


class Engine:
    """Serves requests that come at any time; ``capture`` makes replays of steps in which all decode."""

    def __init__(
        self, model: Llama, pages: int = 256, budget: int = 128, most: int = 32, capture: Any = None, draft: int = 0
    ) -> None:
        self.model, self.budget, self.most, self.capture, self.device = model, budget, most, capture, model.head.device
        self.by = model.packed()
        shape, form = model.shape, {"page_size": PAGE, "dtype": model.head.dtype, "device": self.device}
        aside = most if capture else 0  # pages for rows that fill a graph up, each with a token
        self.cache = lz.KVCache(shape.layers, shape.kv_heads, shape.head_dim, pages=pages + aside, **form)
        self.padding = [self.cache.allocate(("padding", row)) for row in range(aside)]
        self.cache.writing(self.padding).commit()
        self.drafts = lz.NGramConfig(num_speculative_tokens=max(draft, 1), enabled=draft > 0 and not capture)
        self.pairs = lz.speculative_pair(None, self.cache, heads=shape.heads, config=self.drafts)
        self.accepted, self.salt = 0, ""  # accepted tokens of drafts; what known prefixes depend on besides tokens
        self.counts, self.room = lz.TokenCounts(shape.vocabulary, device=self.device, rows=1), pages
        self.waiting, self.running, self.graphs, self.spent = deque(), [], {}, Counter()

    def submit(self, prompt: list[int], count: int, sampling: Sampling = GREEDY) -> Request:
        """Queue a request. Raises: ValueError for one that no step could ever serve."""
        room = min(self.model.shape.longest, self.room * PAGE)
        if not prompt or count < 1 or len(prompt) + count > room:
            raise ValueError(f"wanted a prompt and at most {room} tokens, got {len(prompt)} and {count} more")
        self.waiting.append(Request(prompt, count, sampling))
        return self.waiting[-1]

    def _admit(self) -> None:
        """Begin requests while there are pages for all that run, to the end of each."""
        while self.waiting and len(self.running) < self.most:
            first = self.waiting[0]
            first.name = self.cache.allocate(prompt=first.prompt, salt=self.salt)
            pages = [(-(-(len(each.prompt) + each.count) // PAGE), each.name) for each in (*self.running, first)]
            if sum(end - len(self.cache.table(name)) for end, name in pages) > self.cache.free_pages:
                self.cache.free(first.name)
                break
            first.row = None if first.sampling == GREEDY else self.counts.begin(first.prompt)
            self.running.append(self.waiting.popleft())

    def _schedule(self) -> list[Request]:
        """Whose tokens are in the next step: the last of each that writes, with a draft, then chunks of prompts."""
        length, left = self.pairs.at(max(len(self.running), 1)).tokens, self.budget
        for each in self.running:
            have = self.cache.length(each.name)
            each.tokens = each.prompt[have:] or each.written[-1:]
            each.drafts = 0
            if have >= len(each.prompt) and each.row is None:
                more = min(length, each.count - len(each.written) - 1)
                each.tokens += self.drafts.propose(each.prompt + each.written, more) if more > 0 else []
                each.drafts = len(each.tokens) - 1
        chosen = []
        for each in sorted(self.running, key=lambda one: (not one.written, len(one.tokens) > 1)):
            if not each.written:
                each.tokens = each.tokens[: max(left, 0)]
            left -= len(each.tokens)
            chosen += [each] if each.tokens else []
        return chosen

    @torch.inference_mode()
    def step(self) -> bool:
        """Run one step; False when there is nothing left to do."""
        started = time.perf_counter()
        self._admit()
        if not (chosen := self._schedule()):
            return False
        found, logits = self._launch(chosen)  # of each request the likeliest tokens, and logits for another choice
        ends = [self.cache.length(each.name) for each in chosen]
        done = [row for row, each in enumerate(chosen) if ends[row] >= len(each.prompt)]
        others = [(row, chosen[row]) for row in done if chosen[row].row is not None]
        said = found.tolist()
        if others:
            rows, of = [each.row for _, each in others], [each.sampling for _, each in others]
            own = logits[torch.tensor([row for row, _ in others], device=self.device)]
            tokens = drawn(own, of, [len(each.written) for _, each in others], **self.counts.of(rows))
            self.counts.add(rows, tokens)
            for (row, _), token in zip(others, tokens.tolist(), strict=True):
                said[row] = [token]
        for row in done:
            each, new = chosen[row], [token for token in said[row] if token >= 0]
            if not each.written:
                self.cache.publish(each.name, each.prompt, salt=self.salt)
            if len(new) <= each.drafts:
                self.cache.truncate(each.name, ends[row] - each.drafts + len(new) - 1)
            self.accepted += len(new) - 1
            each.written += new
            if len(each.written) == each.count:
                self.running.remove(each)
                self.cache.free(each.name)
                if each.row is not None:
                    self.counts.end(each.row)
        if all(len(each.tokens) == 1 for each in chosen):
            spent = {"seconds": time.perf_counter() - started, "read": sum(ends)}
            self.spent.update(spent, steps=1, tokens=len(chosen))
        return True

    def _launch(self, chosen: list[Request]) -> tuple[Tensor, Tensor]:
        """The likeliest tokens after each of these chunks, -1 behind a draft that fell, and the logits of the first."""
        names, counts = [each.name for each in chosen], [len(each.tokens) for each in chosen]
        ids = torch.tensor([token for each in chosen for token in each.tokens])
        if self.capture is not None and max(counts) == 1:
            return self._replayed(names, ids)
        with self.cache.writing(names, counts) as step:
            hidden = self._hidden(ids.to(self.device), step)
        most, ends = max(each.drafts for each in chosen), torch.tensor(counts).cumsum(0)
        lens = torch.tensor([each.drafts for each in chosen])
        rows = torch.minimum((ends - 1 - lens).unsqueeze(1) + torch.arange(most + 1), (ends - 1).unsqueeze(1))
        logits = self.model.logits(hidden[rows.flatten().to(self.device)], self.by)
        if not most:
            return lz.greedy(logits).unsqueeze(1), logits
        drafts = ids[(rows[:, :-1] + 1).clamp(max=len(ids) - 1)].to(self.device)  # behind a row's own any token may be
        logits = logits.unflatten(0, (-1, most + 1))
        found, _ = lz.verify_speculative(drafts, logits, draft_lens=lens.to(self.device), greedy=True)
        return found, logits[:, 0]

    def _replayed(self, names: list[Any], ids: Tensor) -> tuple[Tensor, Tensor]:
        """The same of a graph of 1, 2, 4, 8, ... rows, padding last."""
        rows = 1 << (len(names) - 1).bit_length()
        pads = self.padding[: rows - len(names)]
        if rows in self.graphs:
            buffer, step, replay = self.graphs[rows]
            self.cache.writing(names + pads, reuse=step)  # what is planned on the host is planned here
        else:
            buffer = torch.zeros(rows, dtype=torch.long, device=self.device)
            blocks = -(-self.model.shape.longest // PAGE)
            step = self.cache.writing(names + pads, blocks=blocks, capturable=True)
        buffer[: len(ids)] = ids.to(self.device)
        if rows not in self.graphs:
            replay = self.capture(lambda: self._greedy(buffer, step))
            self.graphs[rows] = buffer, step, replay
        found = replay()
        step.commit()
        for name in pads:
            self.cache.truncate(name, 1)
        return found

    def _greedy(self, ids: Tensor, step: lz.CacheStep) -> tuple[Tensor, Tensor]:
        logits = self.model.logits(self._hidden(ids, step), self.by)
        return lz.greedy(logits).unsqueeze(1), logits

    def _hidden(self, ids: Tensor, step: lz.CacheStep) -> Tensor:
        """What the layers make of a step's tokens, whose keys and values are written into the cache."""
        starts, slots, places = step.cu_seqlens_q, step.slots, step.positions
        promised = {} if starts is None else {"max_seqlen_q": step.max_seqlen_q, "decodes": step.decodes}

        def attend(number: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = self.cache.layers[number].keys, self.cache.layers[number].values
            query = lz.rope_append_(query, key, value, self.model.cos, self.model.sin, keys, values, places, slots)
            query, read = query.unsqueeze(1) if starts is None else query, (keys, values, step.block_tables)
            return lz.paged_attention(query, *read, step.context_lens, step=step, cu_seqlens_q=starts, **promised)

        return self.model.hidden(ids, self.by, attend)

    @torch.inference_mode()
    def warm(self) -> None:
        """Choose the kernels of every step that may come, so that no request waits for a choice."""
        for step in self.cache.rehearsal(self.most, self.budget, self.model.shape.longest):
            hidden = self._hidden(torch.zeros(len(step.slots), dtype=torch.long, device=self.device), step)
            lz.greedy(self.model.logits(hidden[: len(step.sequences)], self.by))


def sampling_of(number: int, vocabulary: int) -> Sampling:
    """Another way to draw for each request: penalties for every second, and a mask of even tokens for every third."""
    penalties = {"repetition": 1.2, "presence": 0.5, "frequency": 0.25} if number % 2 else {}
    even = torch.full((-(-vocabulary // 32),), 0x55555555, dtype=torch.int32) if number % 3 == 0 else None
    return Sampling(0.8, 50, 0.9, 0.02, seed=number, allowed=even, **penalties)


def serve(
    engine: Engine, prompts: list[list[int]], count: int, at_first: int = 2, of: tuple[Sampling, ...] = ()
) -> list[list[int]]:
    """Requests that come while others run: some at first, another after every other step."""
    submitted, steps, of = [], 0, [*of, *[GREEDY] * (len(prompts) - len(of))]
    while len(submitted) < at_first or engine.step() or len(submitted) < len(prompts):
        if len(submitted) < len(prompts) and (len(submitted) < at_first or (steps := steps + 1) % 2 == 0):
            submitted.append(engine.submit(prompts[len(submitted)], count, of[len(submitted)]))
    return [each.written for each in submitted]


def draw_alone(of: tuple[Sampling, ...]) -> Callable[..., Tensor]:
    """How the same requests draw one by one: by whole lists of tokens, a row at a time."""

    def draw(number: int, logits: Tensor, prompt: list[int], written: list[int]) -> Tensor:
        if number >= len(of):
            return logits.argmax(-1)
        ids = {"output_ids": torch.tensor([written], dtype=torch.long), "prompt_ids": torch.tensor([prompt])}
        said = {name: each.to(logits.device) for name, each in ids.items()}
        return drawn(logits, [of[number]], [len(written)], **said)

    return draw


def main() -> None:
    """Serve the same requests both ways, compare what was written, and tell tokens a second."""
    parser = argparse.ArgumentParser(description="Serve requests on the engine, and one by one.")
    parser.add_argument("--shape", choices=("small", "8b"), default="small", help="Llama-3-8B's has other defaults")
    parser.add_argument("--no-graphs", action="store_true", help="launch each kernel of a decode step, on a GPU, too")
    options = {"device": ("cuda" if torch.cuda.is_available() else "cpu", "where"), "dtype": ("float32", "of weights")}
    options |= {"width": (512, "in the small shape, from 64"), "requests": (16, "in all"), "first": (2, "at once")}
    options |= {"tokens": (48, "to write"), "prompt": (0, "its length; 0: 20 to 119"), "budget": (128, "tokens a step")}
    options |= {"compare": (10**6, "so many requests with those one by one; 0: none")}
    options |= {"sampled": (0, "requests that draw tokens"), "draft": (0, "tokens of an n-gram draft")}
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
    pages, of = max(256, most * -(-longest // PAGE)), tuple(sampling_of(each, 2048) for each in range(given.sampled))
    engine, results = Engine(model, pages, given.budget, most, capture, given.draft), {}
    runs = {"one by one": prompts[: given.compare]} if given.compare > 0 else {}
    for name, asked in (runs | {"engine": prompts}).items():
        print(f"{name}: {len(asked)} requests of {given.tokens} tokens, twice", flush=True)
        for engine.salt in ("first", "second"):  # the first one chooses kernels and captures; its prefixes are its own
            known, engine.spent = engine.cache.usage().found_tokens, Counter()
            started = time.perf_counter()
            if asked is prompts:
                results[name] = serve(engine, asked, given.tokens, given.first, of)
            else:
                results[name] = one_by_one(model, asked, given.tokens, draw_alone(of))
            spent = time.perf_counter() - started
        print(f"{name}: {len(asked) * given.tokens / spent:.0f} tokens a second")
    if model.head.is_cuda and engine.spent:
        print(told_roof(model, engine.spent, engine.cache.layers))
    pairs = [pair for both in zip(*results.values(), strict=False) for pair in zip(*both, strict=True)]
    same = f"{sum(one == other for one, other in pairs)} of {len(pairs)}" if len(results) > 1 else "none compared"
    known = engine.cache.usage().found_tokens - known
    print(f"tokens that are the same: {same}; prompt tokens that were not computed again: {known}")


if __name__ == "__main__":
    main()
