"""A step that writes into a cache: its new tokens have their slots, and it is the only one until it ends."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from layerzero.ops.kv.book import Entry, Growth
from layerzero.ops.kv.errors import KVCacheError
from layerzero.ops.kv.packed import PackedStep
from layerzero.ops.paged.step import StepMetadata

if TYPE_CHECKING:
    from layerzero.ops.kv.sequences import CachedSequences


class CacheStep(StepMetadata):
    """What :meth:`layerzero.KVCache.writing` gives: the step metadata of its sequences, new tokens included.

        with cache.writing(names, counts) as step:
            for layer in cache.layers:
                lz.append_paged_kv_(key, value, layer, slot_mapping=step.slots)
                output = lz.paged_attention(query, layer, step=step)

    Where the block raises, the sequences are as they were before.

    Attributes:
        sequences: their names.
        counts: new tokens of each.
    """

    def __init__(
        self,
        cache: CachedSequences,
        sequences: Sequence[Hashable],
        counts: Sequence[int],
        entries: Sequence[Entry],
        growths: list[Growth],
        *,
        blocks: int | None,
        capturable: bool,
    ) -> None:
        self.cache, self.sequences, self.counts = cache, tuple(sequences), tuple(counts)
        self._growths, self.is_open, self.is_aborted = growths, True, False
        self._packed = PackedStep(
            len(entries),
            max([len(entry.pages) for entry in entries], default=0) if blocks is None else blocks,
            sum(counts),
            by_starts=self.counts.count(1) != len(self.counts),
            page_size=cache.page_size,
            device=torch.device(cache.device),
        )
        self.moves = cache.moves
        host = self._fill(entries, counts)
        super().__init__(
            self._packed.tables,
            self._packed.lens,
            cu_seqlens_q=self._packed.starts,
            host=host,
            capturable=capturable,
            pages=cache.pages,
        )

    def _fill(self, entries: Sequence[Entry], counts: Sequence[int]) -> tuple[Tensor, ...]:
        """Send tables, lengths, starts and slots, and note whose they are."""
        host = self._packed.fill([entry.pages for entry in entries], [entry.length for entry in entries], counts)
        self.returned, self.known = self.cache.returned, [(entry, entry.returned) for entry in entries]
        return host

    @property
    def slots(self) -> Tensor:
        """Where the new tokens belong, (T,) int64. Raises: KVCacheError where another sequence may have that place."""
        self.cache.check_moved(self)
        if self.is_stale:
            return self.slot_mapping(self.cache.page_size)  # which says so
        return self._packed.slots

    def kind_for(self, *tensors: Tensor | None) -> str:
        """As of any step. Raises: KVCacheError where its pages may be another sequence's by now."""
        self.cache.check_moved(self)
        return super().kind_for(*tensors)

    @property
    def positions(self) -> Tensor:
        """The place of each new token in its sequence, (T,) int64 on the cache's device."""
        lens, starts = self.host
        counts = (starts[1:] - starts[:-1]).long()
        first = torch.repeat_interleave(lens.long() - starts[1:], counts)
        return (first + torch.arange(int(starts[-1]))).to(self.cache.device)

    def begin(self, counts: Sequence[int], entries: Sequence[Entry], growths: list[Growth]) -> None:
        """Take the next tokens of the same sequences, in the same buffers."""
        host = self._fill(entries, counts)
        self.counts, self._growths, self.moves, self.is_open = tuple(counts), growths, self.cache.moves, True
        self.is_aborted = False
        self.advance(host=host)

    def end(self) -> list[Growth]:
        """Stop; what it had added. Raises: KVCacheError for one that ended before."""
        if not self.is_open:
            raise KVCacheError("wanted a step that is open, got one that ended; writing() begins another")
        self.is_open = False
        growths, self._growths = self._growths, []
        return growths

    def commit(self) -> None:
        """Keep the new tokens."""
        self.cache.commit(self)

    def abort(self) -> None:
        """Take the new tokens back: lengths and pages are as before."""
        self.cache.abort(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.is_open:
            self.cache.abort(self) if kind is not None else self.cache.commit(self)
