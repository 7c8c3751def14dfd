"""The sequences of a cache, and the steps that write them: bookkeeping and memory go together or not at all."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from operator import add
from typing import Any, NoReturn, TypeVar

import torch

from layerzero.core.arguments import has_hash, told
from layerzero.core.bundle import Bundle
from layerzero.core.errors import InvalidCallError, public, refuse
from layerzero.core.reasons import ReasonCode
from layerzero.core.system import forking
from layerzero.ops.kv.form import GONE, KVCacheError, KVCacheStrategy, form_of
from layerzero.ops.kv.layer import CacheLayer, LatentLayer, SplitLayer
from layerzero.ops.kv.page_table import Book, Growth
from layerzero.ops.kv.step import CacheStep, columns_for
from layerzero.ops.kv.storage import Fixed, Virtual, copy_pages

_Method = TypeVar("_Method", bound=Callable[..., Any])


def several(sequences: object, asked: str) -> tuple[Hashable, ...]:
    """The names of several sequences. Raises: InvalidCallError for what are not several."""
    if isinstance(sequences, (str, bytes)) or not isinstance(sequences, Iterable):
        problem = f"sequences: wanted a list of names, got {told(sequences)}; put one name into a list"
        raise InvalidCallError(f"KVCache.{asked}", [problem])
    return tuple(sequences)


def _numbers(counts: object) -> tuple[Any, ...]:
    """One number for each of several sequences. Raises: InvalidCallError for what are not several."""
    if not isinstance(counts, Iterable):
        problem = f"counts: wanted a number or one for each sequence, got {told(counts)}"
        raise InvalidCallError("KVCache.writing", [problem])
    return tuple(counts)


def alone(method: _Method) -> _Method:
    """A method that no other thread runs meanwhile, of a cache that is there."""

    @functools.wraps(method)
    def run(self: CachedSequences, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            if self._closed:
                raise KVCacheError(GONE)
            return method(self, *args, **kwargs)

    return run  # type: ignore[return-value]  # the same signature


class CachedSequences(Bundle):
    """Sequences of a cache: they begin, grow by steps, share what they begin with, and end; see :class:`KVCache`."""

    @public("KVCache")
    def __init__(
        self,
        layers: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        value_dim: int | None = None,
        latent: tuple[int, int] | None = None,
        pages: int | None = None,
        page_size: int = 16,
        max_sequences: int | None = None,
        max_length: int | None = None,
        layout: str = "NHD",
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        strategy: KVCacheStrategy | str | None = None,
        captured: bool = False,
        limit_bytes: int | None = None,
        scales: str | None = None,
    ) -> None:
        self._closed = True  # until it is made
        if limit_bytes is not None and (type(limit_bytes) is not int or limit_bytes < 1):
            problem = f"limit_bytes: wanted a number of at least 1 or None, got {told(limit_bytes)}"
            raise InvalidCallError("KVCache", [problem])
        made = form_of(
            *(layers, kv_heads, head_dim, value_dim, latent, pages, page_size, max_sequences, max_length),
            *(layout, dtype, device, strategy, captured, scales),
        )
        self.choice, self.layout, self.dtype = made.choice, "MLA" if latent is not None else made.layout, dtype
        self.pages, self.page_size, self.device = made.pages, made.page_size, made.device
        self._planes, self._scales = made.planes, scales
        sizes = made.planes, made.layers, made.pages, made.device
        if made.choice.strategy is KVCacheStrategy.VIRTUAL:
            self._storage: Fixed = Virtual(*sizes, limit_bytes)
        else:
            needed = made.layers * made.pages * made.page_size * sum(each.bytes_of_token for each in made.planes)
            if limit_bytes is not None and needed > limit_bytes:
                problem = (
                    f"wanted {needed} bytes for {made.pages} pages, got a limit of {limit_bytes}; take fewer pages"
                )
                raise KVCacheError(problem, ReasonCode.KV_CACHE_EXHAUSTED)
            try:
                self._storage = Fixed(*sizes, shared=made.choice.strategy is KVCacheStrategy.UNIFIED)
            except (RuntimeError, MemoryError) as error:  # torch's allocators know no more of their own
                problem = (
                    f"wanted {needed} bytes on {made.device} for {made.pages} pages, got {type(error).__name__}: "
                    f"{str(error).splitlines()[0][:200]}; take fewer pages"
                )
                raise KVCacheError(problem, ReasonCode.KV_CACHE_EXHAUSTED) from error
        self._book = Book(made.pages, made.page_size)
        self._lock = forking.rlock()
        self._step: CacheStep | None = None
        self.moves = 0
        self.layers = [self._layer(number) for number in range(made.layers)]
        self._closed = False

    def _layer(self, number: int) -> Any:
        planes = dict(self._storage.layers[number])
        if self._scales in ("tensor", "head"):
            heads = self._planes[0].inner[-2 if self.layout == "NHD" else 0]
            shape = () if self._scales == "tensor" else (heads,)
            like: Any = {"dtype": torch.float32, "device": self.device}
            planes |= {name: torch.ones(shape, **like) for name in ("key_scale", "value_scale")}
        if self.layout == "MLA":
            return LatentLayer(self, planes)
        return SplitLayer(planes) if self.layout == "VLLM" else CacheLayer(self, number, planes, self.layout)

    def __reduce_ex__(self, _protocol: object) -> NoReturn:  # what copy, deepcopy and pickle ask for
        wanted = "wanted a cache in the process and the memory that it was made in, got a copy or a pickle of it"
        ways = "fork(name) shares a sequence's pages; lz.gather_paged_kv and lz.append_paged_kv_ move tokens to another"
        raise KVCacheError(f"{wanted}; {ways}")

    def __repr__(self) -> str:
        sizes = f"{len(self.layers)} layers, {self.pages} pages of {self.page_size} tokens, {self.layout}, {self.dtype}"
        return f"KVCache({self.strategy}, {sizes}, {self.device}{', closed' if self._closed else ''})"

    def __len__(self) -> int:
        return len(self._book.entries)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(tuple(self._book.entries))

    def __contains__(self, name: object) -> bool:
        return has_hash(name) and name in self._book.entries

    def arguments_of(self, function: str, parameter: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Refuse: a call is of one layer. Raises: InvalidCallError naming it."""
        lacks = " and step=, of cache.writing()" if "step" in given and given["step"] is None else ""
        problem = f"{parameter}: wanted one layer of the cache, got the whole KVCache; pass cache.layers[i]{lacks}"
        raise InvalidCallError(function, [problem])

    @property
    def head_sizes(self) -> tuple[int, ...]:
        """Heads of keys and values and the widths of both; of a latent cache the widths of its planes."""
        if self.layout == "MLA":
            return tuple(each.inner[-1] for each in self._planes)
        keys, values = (plane.inner for plane in self._planes[:2])
        if self.layout == "VLLM":
            return keys[0], keys[1] * keys[3], values[1]
        return keys[1 if self.layout == "NHD" else 0], keys[-1], values[-1]

    @property
    def strategy(self) -> KVCacheStrategy:
        """Where the tokens of a sequence lie."""
        return self.choice.strategy

    def layer(self, number: int) -> Any:
        """One layer, to be passed in place of a cache's tensors. Raises: InvalidCallError for a number that is none."""
        if type(number) is not int or not 0 <= number < len(self.layers):
            problem = f"number: wanted a layer from 0 to {len(self.layers) - 1}, got {told(number)}"
            raise InvalidCallError("KVCache.layer", [problem])
        return self.layers[number]

    # sequences

    @alone
    def length(self, name: Hashable) -> int:
        """Tokens of a sequence."""
        return self._book.known(name).length

    @alone
    def table(self, name: Hashable) -> list[int]:
        """Pages of a sequence, in order."""
        return list(self._book.entry(name).pages)

    @alone
    def free(self, name: Hashable) -> None:
        """End a sequence. Raises: KVCacheError for one that is unknown, or that a step writes."""
        self._not_written(name)
        self._book.remove(name)

    @alone
    def fork(self, name: Hashable, new: Hashable | None = None, tokens: int | None = None) -> Hashable:
        """Begin a sequence with the first ``tokens`` of another one (all if None), which it shares until one writes."""
        self._not_written(name)
        length = self._book.entry(name).length
        if tokens is not None and (type(tokens) is not int or not 0 <= tokens <= length):
            raise InvalidCallError("KVCache.fork", [f"tokens: wanted 0 to {length} or None, got {told(tokens)}"])
        return self._book.fork(name, new, length if tokens is None else tokens)

    @alone
    def truncate(self, name: Hashable, tokens: int) -> None:
        """Keep the first ``tokens`` of a sequence: the others were drafts that were rejected."""
        self._not_written(name)
        entry = self._book.entry(name)
        if type(tokens) is not int or not 0 <= tokens <= entry.length:
            raise InvalidCallError("KVCache.truncate", [f"tokens: wanted 0 to {entry.length}, got {told(tokens)}"])
        self._book.shrink(entry, tokens)

    def _not_written(self, name: Hashable) -> None:
        if self._step is not None and name in self._step.sequences:
            raise KVCacheError(f"wanted a sequence that no step writes, got {told(name)}; commit() or abort() it first")

    # steps

    @alone
    def writing(
        self,
        sequences: Sequence[Hashable],
        counts: int | Sequence[int] = 1,
        *,
        blocks: int | None = None,
        capturable: bool = False,
        reuse: CacheStep | None = None,
    ) -> CacheStep:
        """Begin a step that appends tokens: room for all of them, or an error before anything is changed.

        Args:
            sequences: their names, each once.
            counts: new tokens of each, or one number for all; one token each makes a decode step.
            blocks: columns of its block tables. If None as many as the longest needs, and on up to 16 or twice as
                many as a power of two has, so that a sequence that grows by a page makes no new class of calls.
            capturable: keep its buffers where they are, as :class:`layerzero.StepMetadata` does.
            reuse: a step of as many sequences that ended: its buffers are filled anew, for graphs that are replayed.
        Raises: KVCacheError where pages or memory are short, where another step is open, or for an unknown sequence;
            InvalidCallError for counts that are none.
        """
        names = several(sequences, "writing")
        if self._step is not None:
            helps = "commit() or abort() that one; cache.abort() ends one that was lost"
            raise KVCacheError(f"wanted one step at a time, got another while one is open; {helps}")
        asked = (counts,) if isinstance(counts, int) else _numbers(counts)
        numbers = asked * len(names) if isinstance(counts, int) else asked
        growth, needed = self._asked(names, asked, numbers, blocks, reuse)
        self._grow(growth, numbers)
        try:
            if reuse is None:
                columns, bound = max(needed, blocks or 0), None
                if blocks is None and not capturable and self.strategy is KVCacheStrategy.PAGED:
                    columns, bound = min(columns_for(needed), max(self.pages, needed)), needed * self.page_size
                reuse = CacheStep(self, names, numbers, growth, columns, bound or None, capturable=capturable)
            else:
                reuse.begin(names, numbers, growth, needed * self.page_size)
        except BaseException:
            self._book.undo(growth)
            raise
        self._step = reuse
        return reuse

    def _asked(
        self,
        names: tuple[Hashable, ...],
        asked: tuple[int, ...],
        counts: tuple[int, ...],
        blocks: int | None,
        reuse: CacheStep | None,
    ) -> tuple[Growth, int]:
        """The sequences of a step, once it is sure that it can be one, and the pages that its longest one needs."""
        known = self._book.entries
        problems = [
            f"counts: wanted numbers of at least 0, got {told(each)}"
            for each in asked
            if type(each) is not int or each < 0
        ][:4]
        if len(counts) != len(names):
            problems.append(f"counts: wanted {len(names)}, one a sequence, got {len(counts)}")
        try:
            entries = [known[name] for name in names]
        except (KeyError, TypeError):
            entries = [self._book.known(name) for name in names]  # says which one is none
        if len(set(names)) != len(names):
            problems.append("sequences: wanted each once, got one twice")
        refuse("KVCache.writing", problems)
        if self._book.swapped:
            entries = [self._book.entry(name) for name in names]  # says which one
        before = [entry.length for entry in entries]
        growth = Growth(entries, before, list(map(add, before, counts)))
        longest = max(growth.after, default=0)
        if self.strategy is not KVCacheStrategy.PAGED and longest > self.page_size:
            problem = f"wanted at most {self.page_size} tokens a sequence (max_length), got {longest}"
            raise KVCacheError(f"{problem}; truncate or free it, or make a cache of longer rows")
        needed = -(-longest // self.page_size)
        if reuse is not None and type(reuse) is not CacheStep:
            problems.append(f"reuse: wanted a step that writing() gave, or None, got {told(reuse)}")
        elif reuse is not None:
            same_form = (reuse.cu_seqlens_q is None) == (counts.count(1) == len(counts))
            if reuse.cache is not self or len(reuse.sequences) != len(names) or reuse.is_open or not same_form:
                problems.append("reuse: wanted a step of as many sequences and this kind that ended, got another one")
            elif sum(counts) != sum(reuse.counts):
                problems.append(f"reuse: wanted {sum(reuse.counts)} new tokens as its slots have, got {sum(counts)}")
            else:
                blocks = reuse.block_tables.shape[1]
        if blocks is not None and (type(blocks) is not int or blocks < needed):
            whose = "" if reuse is None else ", as the step to reuse has; make one with more blocks="
            problems.append(f"blocks: wanted at least {needed} columns for these lengths, got {told(blocks)}{whose}")
        refuse("KVCache.writing", problems)
        return growth, needed

    def _grow(self, growth: Growth, counts: Sequence[int]) -> None:
        """Take pages and memory for new tokens; what others share is copied."""
        self._book.grow(growth, counts)
        try:
            for entry, before in zip(growth.entries, growth.before, strict=True) if self._storage.grows else ():
                if entry.length > before:
                    for number in range(before // self.page_size, len(entry.pages)):
                        self.ensure(entry.pages[number], min(entry.length - number * self.page_size, self.page_size))
            if growth.replaced:
                self._copy_shared(growth)
        except BaseException:
            self._book.undo(growth)
            raise

    def _copy_shared(self, growth: Growth) -> None:
        """Copy what was written of the pages that sequences no longer share."""
        lengths = {id(entry): before for entry, before in zip(growth.entries, growth.before, strict=True)}
        copies: dict[int, list[tuple[int, int]]] = {}
        for entry, shared, page, _ in growth.replaced:
            tokens = self.page_size if self.strategy is KVCacheStrategy.PAGED else lengths[id(entry)]
            copies.setdefault(tokens, []).append((shared, page))
        for tokens, pairs in copies.items():
            copy_pages(self._storage.layers, self._planes, pairs, tokens)

    def ensure(self, page: int, tokens: int) -> None:
        """Memory for the first tokens of a page; what free rows have is given back where it is short."""
        try:
            self._storage.ensure(page, tokens)
        except KVCacheError:
            self._storage.trim(self._book.free)
            self._storage.ensure(page, tokens)

    @alone
    def commit(self, step: CacheStep) -> None:
        """End a step and keep its tokens."""
        step = self._mine(step)
        growth = step.end()
        self._book.keep(growth)
        for entry in growth.entries if self._storage.grows else ():
            if entry.pages:
                last = len(entry.pages) - 1
                self._storage.soon(entry.pages[-1], entry.length - last * self.page_size)
        self._step = None

    @alone
    def abort(self, step: CacheStep | None = None) -> None:
        """End a step and take its tokens back; the open one if None, as after an error that lost it."""
        step = self._mine(self._step if step is None else step)
        self._book.undo(step.end())
        step.is_aborted = True
        self._step = None

    def _mine(self, step: CacheStep | None) -> CacheStep:
        if step is None or step is not self._step:
            got = "another one" if isinstance(step, CacheStep) else "none" if step is None else told(step)
            raise KVCacheError(f"wanted the step that is open, got {got}; writing() begins one")
        return step

    @property
    def returned(self) -> int:
        """How often sequences gave tokens back until now."""
        return self._book.returned

    def check_moved(self, step: object) -> None:
        """Refuse the step of another cache or of a closed one, and one whose pages may be another sequence's by now.

        Raises: KVCacheError.
        """
        if not isinstance(step, CacheStep):
            return
        if self._closed:
            raise KVCacheError(GONE)
        if step.cache is not self:
            raise KVCacheError("wanted a step of this cache, got one of another; writing() begins one")
        if step.moves != self.moves:
            raise KVCacheError("wanted a step made since pages moved, got one from before; writing() begins another")
        if step.is_aborted:
            raise KVCacheError("wanted a step that was not aborted, got one that was; writing() begins another")
        if step.returned == self._book.returned:  # almost always
            return
        if any(entry.returned > step.returned for entry in step.entries):
            got = "got one that was freed, truncated or swapped out"
            raise KVCacheError(f"wanted a step whose sequences are as they were, {got}; writing() begins another")

    def close(self) -> None:
        """Give all memory back. Any later use of the cache or its layers is an error that says so."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._step = None
            for layer in self.layers:
                layer.forget()
            self._storage.close()
