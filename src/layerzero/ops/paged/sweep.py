"""The calls over a paged cache that are worth measuring where nobody says which; see the sweep of attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from layerzero.core.operation import Case
from layerzero.ops.attention.sweep import Heads, extent_of, sizes_of

PAGE_SIZE, MAX_PAGED = 16, 8192


def paged_case(heads: Heads, batch: int, context: int, page_size: int = PAGE_SIZE) -> tuple[str, Case]:
    """An operation's name and a case of it: one query a sequence over pages."""
    blocks = -(-context // page_size)
    sizes = {name: size for name, size in sizes_of(heads, batch, 1, context).items() if name != "seq_k"}
    sizes |= {"page_size": page_size, "max_blocks": blocks, "pages": batch * blocks}
    return f"attention.{heads.kind}.decode.paged", Case(f"B{batch} KV{context} ({heads}) page {page_size}", sizes)


def append_case(heads: Heads, tokens: int, pages: int = 8192) -> tuple[str, Case]:
    """An operation's name and a case of it: new tokens into a cache."""
    sizes = {"tokens": tokens, "kv_heads": heads.kv_heads, "head_dim": heads.head_dim, "value_dim": heads.head_dim}
    name = f"{tokens} tokens ({heads.kv_heads}/{heads.head_dim})"
    return "kv.append.paged", Case(name, sizes | {"pages": pages, "page_size": PAGE_SIZE})


def sweep_of(operation: str) -> Callable[[str, Mapping[str, Sequence[int]]], Iterator[Case]]:
    """The sweep of attention over pages with one kind of head counts."""

    def sweep(device: str, narrow: Mapping[str, Sequence[int]]) -> Iterator[Case]:
        extent = extent_of(device, narrow)
        for heads in extent.heads:
            for batch in extent.decode_batches:
                for context in extent.contexts_of(batch):
                    name, case = paged_case(heads, batch, context)
                    if name == operation and batch * context <= extent.max_context and context <= MAX_PAGED:
                        yield case

    return sweep


def append_sweep(device: str, narrow: Mapping[str, Sequence[int]]) -> Iterator[Case]:
    """A decode step's tokens, a batch's, a prefill's."""
    for heads in extent_of(device, {}).heads[:2] if not narrow else ():
        for tokens in (1, 64, 2048):
            yield append_case(heads, tokens, 8192 if device == "cuda" else 256)[1]
