"""The latent decodes that are worth measuring where nobody says which: DeepSeek's widths, its head counts by rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from layerzero.core.operation import Case
from layerzero.ops.attention.sweep import extent_of

LATENT_DIM, ROPE_DIM, PAGE_SIZE = 512, 64, 64


def latent_case(
    name: str,
    batch: int,
    seq_q: int,
    context: int,
    *,
    heads: int = 128,
    latent_dim: int = LATENT_DIM,
    rope_dim: int = ROPE_DIM,
    page_size: int = PAGE_SIZE,
) -> Case:
    """A case: as many tokens of each sequence, over so much context; units are tokens."""
    blocks = -(-context // page_size)
    sizes = {"batch": batch, "seq_q": seq_q, "heads": heads, "latent_dim": latent_dim, "rope_dim": rope_dim}
    return Case(name, sizes | {"page_size": page_size, "max_blocks": blocks, "pages": batch * blocks})


def sweep(device: str, narrow: Mapping[str, Sequence[int]]) -> Iterator[Case]:
    """Batches and contexts of decoding, with all heads of DeepSeek-V3 and with those of one rank of eight."""
    extent = extent_of(device, {name: sizes for name, sizes in narrow.items() if name != "head_dim"})
    page_size = PAGE_SIZE if device == "cuda" else 16  # vLLM's kernel for CPUs knows no other
    for heads in (128, 16) if "head_dim" not in narrow else ():
        for batch in extent.decode_batches:
            for context in extent.contexts:
                if batch * context <= extent.max_context:
                    name = f"B{batch} KV{context} ({heads} heads) page {page_size}"
                    yield latent_case(name, batch, 1, context, heads=heads, page_size=page_size)
