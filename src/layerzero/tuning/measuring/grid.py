"""The calls that ``lz.tune()`` measures where nobody says which: sizes between which times can be predicted.

Batches and contexts go in steps of four over what models do, lengths of prefill in steps of two, where kernels overtake
each other; for the head counts of common models. On a GPU, every other length of prefill and the contexts of the middle
batches lie between powers of two, each batch at other places: there it shows what a kernel pays for tiles that it
cannot fill, and users' lengths are like that. Norms go by rows and hidden size. On a GPU of an H200's speed all of it
takes under five minutes, compiling apart; a CPU gets smaller sizes.
"""

from __future__ import annotations

import fnmatch
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from layerzero.core.operation import Case
from layerzero.tuning.measuring.jobs import Job


@dataclass(frozen=True, slots=True)
class Heads:
    """Head counts and head dim of a kind of model, and whether its prefill is causal."""

    heads: int
    kv_heads: int
    head_dim: int
    causal: tuple[bool, ...] = (True,)

    @property
    def kind(self) -> str:
        """``gqa`` or ``standard``, as the operations are called."""
        return "standard" if self.heads == self.kv_heads else "gqa"

    def __str__(self) -> str:
        return f"{self.heads}/{self.kv_heads}/{self.head_dim}"


@dataclass(frozen=True, slots=True)
class Extent:
    """The sizes of a grid.

    Attributes:
        heads: kinds of models.
        batches, lengths: of prefill.
        max_tokens: largest product of both.
        decode_batches, contexts, max_context: the same of decoding.
        rows, hidden, max_elements: of norms.
        off: by batch, what lengths and contexts that need not be powers of two are multiplied by.
    """

    heads: tuple[Heads, ...]
    batches: tuple[int, ...]
    lengths: tuple[int, ...]
    max_tokens: int
    decode_batches: tuple[int, ...]
    contexts: tuple[int, ...]
    max_context: int
    rows: tuple[int, ...]
    hidden: tuple[int, ...]
    max_elements: int
    off: Mapping[int, float] = field(default_factory=dict)

    def lengths_of(self, batch: int, *, rare: bool) -> Iterator[int]:
        """Lengths of prefill: every other one off the powers of two; of what models rarely do, every other one."""
        for number, length in enumerate(self.lengths):
            if not rare or number % 2 == self.batches.index(batch) % 2:
                yield round(length * self.off.get(batch, 1.0)) if number % 2 else length

    def contexts_of(self, batch: int) -> Iterator[int]:
        """Contexts of decoding: those of the middle batches off the powers of two."""
        off = self.off.get(batch, 1.0) if batch in self.decode_batches[1:-1] else 1.0
        yield from (round(context * off) for context in self.contexts)


GPU = Extent(
    heads=(
        Heads(32, 8, 128, (True, False)),
        Heads(16, 16, 64, (True, False)),
        Heads(16, 4, 256, (True, False)),
        Heads(24, 24, 128, (False,)),
    ),
    batches=(1, 4, 16, 64),
    lengths=(128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768),
    max_tokens=32768,
    decode_batches=(1, 4, 16, 64),
    contexts=(128, 512, 2048, 8192, 32768),
    max_context=2**19,
    rows=(1, 4, 16, 64, 256, 1024, 4096, 16384),
    hidden=(1024, 2048, 4096, 8192),
    max_elements=2**27,
    off={1: 1.19, 4: 0.79, 16: 1.37, 64: 1.17},
)
CPU = Extent(
    heads=(Heads(32, 8, 128), Heads(16, 16, 64, (True, False))),
    batches=(1, 4),
    lengths=(32, 128, 512),
    max_tokens=512,
    decode_batches=(1, 4, 16),
    contexts=(128, 512, 2048),
    max_context=2**13,
    rows=(1, 4, 16, 64, 256, 1024),
    hidden=(512, 1024, 4096),
    max_elements=2**21,
)
PAGE_SIZE, MAX_PAGED = 16, 8192


def default_grid(device: str, dtypes: Sequence[str] = (), operation: str = "*") -> list[Job]:
    """The grid of a kind of device, in an order in which every beginning covers the whole as evenly as it can.

    Args:
        device: ``cpu`` or ``cuda``.
        dtypes: by name; float32 and bfloat16 on a CPU, bfloat16 elsewhere.
        operation: a glob of operation names.
    """
    extent = GPU if device == "cuda" else CPU
    dtypes = dtypes or (("bfloat16",) if device == "cuda" else ("float32", "bfloat16"))
    cases = [each for each in cases_of(extent) if fnmatch.fnmatchcase(each[0], operation)]
    return spread([Job(name, case, dtype) for dtype in dtypes for name, case in cases])


def prefill_case(heads: Heads, batch: int, seq: int, *, causal: bool) -> tuple[str, Case]:
    """An operation's name and a case of it: as many queries as keys."""
    name = f"B{batch} S{seq} ({heads}) {'causal' if causal else 'full'}"
    return f"attention.{heads.kind}.prefill", Case(name, _sizes(heads, batch, seq, seq), {"causal": causal})


def decode_case(heads: Heads, batch: int, context: int) -> tuple[str, Case]:
    """An operation's name and a case of it: one query a sequence."""
    return f"attention.{heads.kind}.decode", Case(f"B{batch} KV{context} ({heads})", _sizes(heads, batch, 1, context))


def paged_case(heads: Heads, batch: int, context: int, page_size: int = PAGE_SIZE) -> tuple[str, Case]:
    """An operation's name and a case of it: one query a sequence over pages."""
    blocks = -(-context // page_size)
    sizes = {name: size for name, size in _sizes(heads, batch, 1, context).items() if name != "seq_k"}
    sizes |= {"page_size": page_size, "max_blocks": blocks, "pages": batch * blocks}
    return f"attention.{heads.kind}.decode.paged", Case(f"B{batch} KV{context} ({heads}) page {page_size}", sizes)


def norm_case(operation: str, rows: int, hidden: int) -> tuple[str, Case]:
    """An operation's name and a case of it."""
    return operation, Case(f"{rows}x{hidden}", {"rows": rows, "hidden": hidden})


def append_case(heads: Heads, tokens: int, pages: int = 8192) -> tuple[str, Case]:
    """An operation's name and a case of it: new tokens into a cache."""
    sizes = {"tokens": tokens, "kv_heads": heads.kv_heads, "head_dim": heads.head_dim, "value_dim": heads.head_dim}
    name = f"{tokens} tokens ({heads.kv_heads}/{heads.head_dim})"
    return "kv.append.paged", Case(name, sizes | {"pages": pages, "page_size": PAGE_SIZE})


def _sizes(heads: Heads, batch: int, seq_q: int, seq_k: int) -> dict[str, int]:
    counts = {"heads": heads.heads, "kv_heads": heads.kv_heads}
    dims = {"head_dim": heads.head_dim, "value_dim": heads.head_dim}
    return {"batch": batch, "seq_q": seq_q, "seq_k": seq_k, **counts, **dims}


def cases_of(extent: Extent) -> Iterator[tuple[str, Case]]:
    """Every call of an extent."""
    for heads in extent.heads:
        for batch in extent.batches:
            for causal in heads.causal:
                for length in extent.lengths_of(batch, rare=causal != heads.causal[0]):
                    if batch * length <= extent.max_tokens:
                        yield prefill_case(heads, batch, length, causal=causal)
        for batch in extent.decode_batches:
            for context in extent.contexts_of(batch):
                if batch * context <= extent.max_context:
                    yield decode_case(heads, batch, context)
    for heads in extent.heads:
        for batch in extent.decode_batches:
            for context in extent.contexts_of(batch):
                if batch * context <= extent.max_context and context <= MAX_PAGED:
                    yield paged_case(heads, batch, context)
    for heads in extent.heads[:2]:
        for tokens in (1, 64, 2048):
            yield append_case(heads, tokens, 8192 if extent is GPU else 256)
    for operation in ("norm.rms", "norm.add_rms", "norm.layer"):
        for rows in extent.rows:
            for hidden in extent.hidden:
                if rows * hidden <= extent.max_elements:
                    yield norm_case(operation, rows, hidden)


def spread(jobs: Sequence[Job]) -> list[Job]:
    """Order jobs so that an interruption leaves little unknown.

    Each kind of call has its turn, and of a kind it is always the call that is farthest from all before it, beginning
    with the smallest sizes.
    """
    kinds: dict[tuple[object, ...], list[Job]] = defaultdict(list)
    for job in jobs:
        sizes = job.case.sizes
        fixed = tuple(sizes.get(name) for name in ("heads", "kv_heads", "head_dim", "page_size"))
        kinds[job.operation, job.dtype, job.layout, tuple(job.case.params.items()), fixed].append(job)
    ordered = [_farthest_first(each) for each in kinds.values()]
    longest = max((len(each) for each in ordered), default=0)
    return [each[turn] for turn in range(longest) for each in ordered if turn < len(each)]


def _farthest_first(jobs: list[Job]) -> list[Job]:
    names = sorted({name for job in jobs for name in job.case.sizes})
    points = [[math.log2(max(job.case.sizes.get(name, 1), 1)) for name in names] for job in jobs]
    left = list(range(len(jobs)))
    first = min(left, key=lambda index: sum(points[index]))
    chosen = [first]
    left.remove(first)
    near = {index: math.dist(points[index], points[first]) for index in left}
    while left:
        index = max(left, key=lambda each: near[each])
        chosen.append(index)
        left.remove(index)
        near = {each: min(near[each], math.dist(points[each], points[index])) for each in left}
    return [jobs[index] for index in chosen]
