"""The attention calls that are worth measuring by default: sizes between which times can be predicted.

Batches and contexts go in steps of four over what models do, lengths of prefill in steps of two, where kernels overtake
each other; for the head counts of common models. On a GPU, every other length of prefill and the contexts of the middle
batches lie between powers of two, each batch at other places: there it shows what a kernel pays for tiles that it
cannot fill, and users' lengths are like that. A CPU gets smaller sizes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from layerzero.core.operation import Case


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
    """The sizes of a sweep.

    Attributes:
        heads: kinds of models.
        batches, lengths: of prefill.
        max_tokens: largest product of both.
        decode_batches, contexts, max_context: the same of decoding.
        off: by batch, what lengths and contexts that need not be powers of two are multiplied by.
    """

    heads: tuple[Heads, ...]
    batches: tuple[int, ...]
    lengths: tuple[int, ...]
    max_tokens: int
    decode_batches: tuple[int, ...]
    contexts: tuple[int, ...]
    max_context: int
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

    def narrowed(self, narrow: Mapping[str, Sequence[int]]) -> Extent:
        """The same with other head dims, lengths or batches, where they are given."""
        dims = narrow.get("head_dim")
        heads = tuple(each for each in self.heads if dims is None or each.head_dim in dims)
        if dims is not None and not heads:  # none of the common models: as many heads as the first of them has
            first = self.heads[0]
            heads = tuple(Heads(first.heads, first.kv_heads, dim) for dim in dims)
        lengths, batches = tuple(narrow.get("seq_lens", ())), tuple(narrow.get("batch_sizes", ()))
        return dataclasses.replace(
            self,
            heads=heads,
            batches=batches or self.batches,
            decode_batches=batches or self.decode_batches,
            lengths=lengths or self.lengths,
            contexts=lengths or self.contexts,
        )


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
)


def extent_of(device: str, narrow: Mapping[str, Sequence[int]]) -> Extent:
    """The sizes for a kind of device, narrowed."""
    return (GPU if device == "cuda" else CPU).narrowed(narrow)


def prefill_case(heads: Heads, batch: int, seq: int, *, causal: bool) -> tuple[str, Case]:
    """An operation's name and a case of it: as many queries as keys."""
    name = f"B{batch} S{seq} ({heads}) {'causal' if causal else 'full'}"
    return f"attention.{heads.kind}.prefill", Case(name, sizes_of(heads, batch, seq, seq), {"causal": causal})


def decode_case(heads: Heads, batch: int, context: int) -> tuple[str, Case]:
    """An operation's name and a case of it: one query a sequence."""
    return f"attention.{heads.kind}.decode", Case(f"B{batch} KV{context} ({heads})", sizes_of(heads, batch, 1, context))


def sizes_of(heads: Heads, batch: int, seq_q: int, seq_k: int) -> dict[str, int]:
    """The axes of a case."""
    counts = {"heads": heads.heads, "kv_heads": heads.kv_heads}
    dims = {"head_dim": heads.head_dim, "value_dim": heads.head_dim}
    return {"batch": batch, "seq_q": seq_q, "seq_k": seq_k, **counts, **dims}


def _every(extent: Extent) -> Iterator[tuple[str, Case]]:
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


def sweep_of(operation: str, device: str, narrow: Mapping[str, Sequence[int]]) -> Iterator[Case]:
    """The sweep of one operation."""
    return (case for name, case in _every(extent_of(device, narrow)) if name == operation)
