"""The decodes behind a shared prefix that are worth measuring where nobody says which."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from layerzero.core.operation import Case
from layerzero.ops.attention.sweep import extent_of
from layerzero.ops.paged.sweep import paged_case


def sweep(device: str, narrow: Mapping[str, Sequence[int]]) -> Iterator[Case]:
    """Contexts of decoding, of which seven pages of eight are shared, for more than one sequence."""
    extent = extent_of(device, narrow)
    for heads in extent.heads[:2]:
        for batch in extent.decode_batches:
            for context in extent.contexts:
                if batch > 1 and context >= 256 and batch * context <= extent.max_context:
                    yield paged_case(heads, batch, context)[1]
