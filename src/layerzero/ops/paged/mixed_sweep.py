"""The calls of several queries a sequence over pages that are worth measuring where nobody says which."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from layerzero.core.operation import Case
from layerzero.ops.attention.sweep import Heads, extent_of
from layerzero.ops.paged.sweep import MAX_PAGED, PAGE_SIZE

CHUNKS = {"cuda": 512, "cpu": 64}
"""Queries of a chunk of a prefill."""


def tokens_case(
    heads: Heads, kind: str, batch: int, tokens: int, context: int, page_size: int = PAGE_SIZE
) -> tuple[str, Case]:
    """An operation's name and a case of it; in a mixed call eight sequences of nine decode."""
    blocks = -(-context // page_size)
    sizes = {"tokens": tokens, "batch": batch, "starts": batch + 1, "heads": heads.heads, "kv_heads": heads.kv_heads}
    sizes |= {"head_dim": heads.head_dim, "value_dim": heads.head_dim, "page_size": page_size}
    name = f"{tokens} tokens of {batch} KV{context} ({heads}) page {page_size}"
    operation = f"attention.{heads.kind}.{kind}.paged"
    return operation, Case(name, sizes | {"max_blocks": blocks, "pages": batch * blocks}, {"causal": True})


def sweep_of(operation: str) -> Callable[[str, Mapping[str, Sequence[int]]], Iterator[Case]]:
    """The sweep of one kind of head counts: chunks behind prefixes, and chunks among eight times as many decodes."""
    kind = operation.split(".")[2]

    def sweep(device: str, narrow: Mapping[str, Sequence[int]]) -> Iterator[Case]:
        extent = extent_of(device, narrow)
        chunk = CHUNKS.get(device, CHUNKS["cpu"])
        for heads in extent.heads[:2]:
            for batch in (1, 8):
                for context in extent.contexts:
                    prefill = batch, batch * chunk
                    sequences, tokens = prefill if kind == "prefill" else (9 * batch, batch * (chunk + 8))
                    if chunk <= context <= MAX_PAGED and sequences * context <= extent.max_context:
                        name, case = tokens_case(heads, kind, sequences, tokens, context)
                        if name == operation:
                            yield case

    return sweep
