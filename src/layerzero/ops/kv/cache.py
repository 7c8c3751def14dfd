"""A cache that knows itself: its layout, its pages, its sequences, and what of its memory is used."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from layerzero.core.arguments import told
from layerzero.core.errors import InvalidCallError, refuse
from layerzero.ops.kv import storage as memory
from layerzero.ops.kv.form import KVCacheError, KVCacheStrategy
from layerzero.ops.kv.page_table import PrefixGroup, groups_of
from layerzero.ops.kv.sequences import CachedSequences, alone, several
from layerzero.ops.kv.step import CacheStep, columns_for, counts_of, numbers_to


def _no_rows(places: list[int]) -> str:
    """What is wrong with places that are no rows behind each other, and what helps."""
    helps = "defragment() first"
    if not places or min(places) < 0:  # -1 stands for a sequence without any
        helps = "name sequences that have tokens"
    elif len(set(places)) < len(places):
        helps = "sequences that share a row part where one of them is written"
    return f"wanted sequences in rows that follow each other, got {places[:8]}; {helps}"


class KVCache(CachedSequences):
    """Keys and values of all layers, and the sequences that they belong to.

        cache = lz.KVCache(32, 8, 128, pages=4096, page_size=16, device="cuda")
        name = cache.allocate()
        with cache.writing([name], [17]) as step:
            for layer in cache.layers:
                lz.append_paged_kv_(key, value, layer, slot_mapping=step.slots)
                output = lz.paged_attention(query, layer, step=step)

    Sequences have pages; one that is forked shares them until one writes. In caches of rows (``contiguous``,
    ``virtual``, ``unified``) a sequence has one page of ``max_length`` tokens, and :meth:`rows` gives tensors for
    contiguous kernels.

    Args:
        layers: layers of the model.
        kv_heads, head_dim, value_dim: of a layer; ``value_dim`` is ``head_dim`` if None.
        latent: widths of the two planes of latent attention, (512, 64), in place of heads.
        pages, page_size: of a paged cache; the size in tokens.
        max_sequences, max_length: of a cache of rows, or to have the pages counted.
        layout: ``NHD`` or ``HND``. ``VLLM`` splits keys into 16 bytes, and is written, read and converted. ``VLLM_CPU``
            is what vLLM's kernels for CPUs read: ``HND`` in calls, keys transposed in memory.
        dtype: of the elements.
        device: where it lies; the CPU if None.
        strategy: one of :class:`layerzero.KVCacheStrategy`, whatever the facts say; chosen by them if None.
        captured: whether steps are replayed as CUDA graphs; a fact for the choice.
        scales: of a cache of float8 or int8: one for the ``tensor`` (1 until it is set), for a ``head``, or for each
            ``token`` and head. :meth:`layerzero.ops.kv.layer.CacheLayer.fit_scales` sets the last.
        limit_bytes: the most memory that a virtual cache takes.
    Attributes:
        choice: the strategy, and why.
        layers: what calls take in place of tensors, one a layer.
    Raises: InvalidCallError for sizes that mean nothing; KVCacheError for a strategy that cannot be had here.
    Source: PagedAttention, arXiv:2309.06180; vAttention, arXiv:2405.04437.
    """

    @alone
    def allocate(
        self, name: Hashable | None = None, *, prompt: Sequence[int] | None = None, salt: str = ""
    ) -> Hashable:
        """Begin a sequence: an empty one, or one that has the pages that :meth:`publish` made known of its prompt.

        What is known is never all of a prompt: its last token is computed, since a model says what follows.
        Args:
            name: a number if none is given.
            prompt: token ids; :meth:`length` says how many of them the sequence has then.
            salt: what else keys and values depend on: an adapter, a picture, a tenant.
        Returns: its name.
        Raises: KVCacheError for a name that is taken, and with a prompt for a cache without pages; InvalidCallError for
            a prompt that is no token ids.
        """
        if prompt is None:
            return self._book.add(name)
        return self._book.find(name, *self._known_by("allocate", "prompt", prompt, salt))

    @alone
    def publish(self, name: Hashable, tokens: Sequence[int], *, salt: str = "") -> int:
        """Make the full pages of a sequence known by its first tokens, for :meth:`allocate`; how many became so.

        Known pages have the cache as one more user, so that a sequence that writes into one gets a copy. Those that no
        sequence has are free pages still: the one that is idle longest is taken where no other is free.
        Args:
            tokens: token ids of its tokens from the first on, at most as many as it has.
            salt: as of :meth:`allocate`.
        Raises: InvalidCallError for more tokens than the sequence has; KVCacheError for one that a step writes.
        """
        self._not_written(name)
        entry, known = self._book.entry(name), self._known_by("publish", "tokens", tokens, salt)
        if len(tokens) > entry.length:
            problem = f"tokens: wanted at most the {entry.length} that the sequence has, got {len(tokens)}"
            raise InvalidCallError("KVCache.publish", [problem])
        return self._book.publish(entry, *known)

    def _known_by(self, method: str, argument: str, tokens: Sequence[int], salt: object) -> tuple[array[int], bytes]:
        """Token ids as numbers of 64 bits, and a salt as bytes."""
        if self.strategy is not KVCacheStrategy.PAGED:
            raise KVCacheError(f"wanted a paged cache for {argument}=, got a {self.strategy} one; pass pages=")
        problems = [] if isinstance(salt, str) else [f"salt: wanted a string, got {told(salt)}"]
        try:
            whole = isinstance(tokens, bytes | bytearray)  # of which array() would make one number of eight
            ids = array("q", list(tokens) if whole else tokens)  # what is none raises
        except (TypeError, ValueError, OverflowError):
            problems.append(f"{argument}: wanted a list of token ids, got {told(tokens)}")
        refuse(f"KVCache.{method}", problems)
        return ids, str(salt).encode()

    # what kernels read

    @alone
    def block_tables(self, sequences: Sequence[Hashable]) -> tuple[Tensor, Tensor]:
        """Padded block tables (B, max_blocks) and lengths (B,), int32 on the cache's device."""
        entries = [self._book.entry(name) for name in several(sequences, "block_tables")]
        width = max([len(entry.pages) for entry in entries], default=0)
        tables = [[*entry.pages, *[0] * (width - len(entry.pages))] for entry in entries]
        table = torch.tensor(tables, dtype=torch.int32).view(len(entries), width)
        lens = torch.tensor([entry.length for entry in entries], dtype=torch.int32)
        return table.to(self.device), lens.to(self.device)

    @alone
    def ragged_tables(self, sequences: Sequence[Hashable]) -> tuple[Tensor, Tensor, Tensor]:
        """The other form: where each table begins (B + 1,), all pages (sum,), tokens of each last page (B,); int32."""
        entries = [self._book.entry(name) for name in several(sequences, "ragged_tables")]
        starts = [0, *accumulate(len(entry.pages) for entry in entries)]
        pages = [page for entry in entries for page in entry.pages]
        last = [(entry.length - 1) % self.page_size + 1 if entry.length else 0 for entry in entries]
        like: dict[str, Any] = {"dtype": torch.int32, "device": self.device}
        return torch.tensor(starts, **like), torch.tensor(pages, **like), torch.tensor(last, **like)

    @alone
    def shared_prefix(self, sequences: Sequence[Hashable]) -> list[PrefixGroup]:
        """Group sequences by the full pages that they begin with, for ``lz.cascade_attention``."""
        sequences = several(sequences, "shared_prefix")
        entries = [self._book.entry(name) for name in sequences]
        return groups_of(
            sequences, [entry.pages for entry in entries], [entry.length // self.page_size for entry in entries]
        )

    @alone
    def rows(self, sequences: Sequence[Hashable], layer: int, *, exact: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values of sequences as contiguous kernels take them, and their lengths.

        Shapes: → (B, L, K, D), (B, L, K, D_v) in NHD, heads before L in HND, L the longest; (B,) int32. Views.
        Args:
            sequences: in the order of their rows, which must follow each other; :meth:`compact` makes them.
            layer: its number.
            exact: a promise that kernels load nothing more than 256 tokens behind a sequence's last. Without it a
                virtual cache maps every row as far as the longest is.
        Raises: KVCacheError for a paged cache, and for rows that do not follow each other.
        """
        if self.strategy is KVCacheStrategy.PAGED or self.layout == "MLA":
            reads = "mla_attention" if self.layout == "MLA" else "paged_attention"
            got = f"got a {self.strategy} one in {self.layout}; its layers are read by {reads}"
            raise KVCacheError(f"wanted a cache of rows with heads, {got}")
        entries = [self._book.entry(name) for name in several(sequences, "rows")]
        places = [entry.pages[0] if entry.pages else -1 for entry in entries]
        if not places or places[0] < 0 or places != list(range(places[0], places[0] + len(places))):
            raise KVCacheError(_no_rows(places))
        longest = max(entry.length for entry in entries)
        if not exact:
            for place in places:
                self.ensure(place, longest)
        lens = torch.tensor([entry.length for entry in entries], dtype=torch.int32, device=self.device)
        found = self.layer(layer)
        axis = 1 + self.layout.index("N")
        keys, values = (
            each[places[0] : places[0] + len(places)].narrow(axis, 0, longest) for each in (found.keys, found.values)
        )
        return keys, values, lens

    # before traffic

    def rehearsal(self, sequences: int, tokens: int, length: int) -> Iterator[CacheStep]:
        """Open one step of every class of sizes that traffic may bring, so that no call is chosen for while it lasts.

            for step in cache.rehearsal(sequences=32, tokens=256, length=4096):
                model.forward(step)  # as on any step; what it writes is taken back

        Calls are of one class while sequences, new tokens and columns of tables stay within a power of two. The step's
        :attr:`CacheStep.max_seqlen_q` and :attr:`CacheStep.decodes` must also be the same.
        Args:
            sequences, tokens: the most of one step.
            length: the longest sequence.
        Raises: InvalidCallError for numbers below 1, and for fewer tokens than sequences; KVCacheError where a step of
            this size has no room.
        """
        given = {"sequences": sequences, "tokens": tokens, "length": length}
        problems = [
            f"{name}: wanted a number of at least 1, got {told(number)}"
            for name, number in given.items()
            if type(number) is not int or number < 1
        ]
        if not problems and tokens < sequences:
            problems.append(f"tokens: wanted at least one for each of {sequences} sequences, got {tokens}")
        refuse("KVCache.rehearsal", problems)
        names = [self.allocate() for _ in range(sequences)]
        most = -(-length // self.page_size)
        classes = {columns_for(1 << power) for power in range((most - 1).bit_length() + 1)}
        try:
            for wide in sorted(classes) if self.strategy is KVCacheStrategy.PAGED else [1]:
                columns = min(wide, self.pages)
                for batch in numbers_to(sequences):
                    for counts in counts_of(batch, tokens):
                        if -(-max(counts) // self.page_size) <= columns:
                            with self.writing(names[:batch], counts, blocks=columns) as step:
                                yield step
                                step.abort()
        finally:
            for name in names:
                self.free(name)

    # memory

    @property
    def free_pages(self) -> int:
        """Pages that no sequence has, known ones included."""
        return self._book.free_count

    @alone
    def swap_out(self, name: Hashable) -> None:
        """Move a sequence to the host; its pages are free then, but for those that others share."""
        self._not_written(name)
        entry = self._book.entry(name)
        kept = memory.to_host(self._storage.layers, self._planes, entry.pages, entry.length, self.page_size)
        length = entry.length
        self._book.shrink(entry, 0)
        entry.swapped, entry.length = kept, length
        self._book.swapped += 1

    @alone
    def swap_in(self, name: Hashable) -> None:
        """Bring a sequence back. Raises: KVCacheError without room; it stays on the host then."""
        entry = self._book.known(name)
        if entry.swapped is None:
            raise KVCacheError(f"wanted a sequence on the host, got {told(name)}, which is on the device")
        pages = self._book.take_all(-(-entry.length // self.page_size), entry.length)
        try:
            for number, page in enumerate(pages):
                self.ensure(page, min(entry.length - number * self.page_size, self.page_size))
        except BaseException:
            for page in pages:
                self._book.give(page)
            raise
        memory.from_host(self._storage.layers, self._planes, pages, entry.swapped)
        entry.pages, entry.row, entry.swapped = array("i", pages), b"", None
        self._book.swapped -= 1

    @alone
    def compact(self) -> int:
        """Move the last used pages into the first free ones; how many moved. Steps made before are refused.

        Known pages that no sequence has are free ones, and are evicted where a page moves there.
        """
        return self._move(memory.to_the_front(self._book))

    @alone
    def defragment(self) -> int:
        """Put the pages of each sequence next to each other; how many moved. Steps made before are refused."""
        return self._move(memory.in_order(self._book))

    def _move(self, places: dict[int, int]) -> int:
        if self._step is not None:
            raise KVCacheError("wanted no open step while pages move, got one; commit() or abort() it first")
        held = self._book.held()
        most = max((held[page] for page in places), default=0)
        for page, place in places.items():  # the same tokens are copied of all of them
            self.ensure(page, most)
            self.ensure(place, most)
        memory.copy_pages(self._storage.layers, self._planes, list(places.items()), most)
        self._book.move(places)
        self.moves += bool(places)
        return len(places)

    @alone
    def trim(self) -> None:
        """Give the memory of free rows back, after the device is done with them."""
        self._storage.trim(self._book.free)

    @alone
    def usage(self) -> CacheUsage:
        """What there is, what is used and what is wasted."""
        book, storage = self._book, self._storage
        tokens = sum(book.held().values())
        of_token = sum(plane.bytes_of_token for plane in self._planes) * len(self.layers)
        entries = book.entries.values()
        return CacheUsage(
            strategy=self.strategy.value,
            pages=self.pages,
            free_pages=book.free_count,
            shared_pages=sum(count - (page in book.prefixes) > 1 for page, count in enumerate(book.users)),
            known_pages=len(book.prefixes),
            evictions=book.prefixes.evictions,
            found_tokens=book.prefixes.found,
            page_size=self.page_size,
            tokens=tokens,
            sequences=sum(entry.swapped is None for entry in entries),
            swapped=book.swapped,
            largest_free_run=longest_run(book.free),
            reserved_bytes=storage.reserved_bytes,
            committed_bytes=storage.committed_bytes,
            needed_bytes=tokens * of_token,
            host_bytes=sum(memory.bytes_of(entry.swapped) for entry in entries if entry.swapped is not None),
            growths=storage.growths,
            waited_growths=storage.waited_growths,
            growth_us=storage.growth_us,
        )


@dataclass(frozen=True, slots=True)
class CacheUsage:
    """A cache at one moment.

    Attributes:
        strategy: how its memory is laid out.
        pages, free_pages, shared_pages: all pages, free ones, those that several sequences have.
        known_pages: those that ``publish`` made known and nothing evicted since, with sequences or without.
        evictions: known pages that were taken for other tokens since the cache was made.
        found_tokens: tokens that ``allocate`` found in known pages since then.
        page_size: tokens of a page.
        tokens: tokens of all sequences on the device, a shared one once.
        sequences, swapped: sequences on the device, and on the host.
        reserved_bytes: address space, or memory where that is the same.
        committed_bytes: memory that is really there, of all layers.
        needed_bytes: what the tokens take.
        host_bytes: what is swapped to the host.
        growths: how often memory was added since the cache was made, and ``growth_us`` how long that took, in all.
        waited_growths: those of them that a step had to wait for.
    """

    strategy: str
    pages: int
    free_pages: int
    shared_pages: int
    known_pages: int
    evictions: int
    found_tokens: int
    page_size: int
    tokens: int
    sequences: int
    swapped: int
    largest_free_run: int
    reserved_bytes: int
    committed_bytes: int
    needed_bytes: int
    host_bytes: int
    growths: int
    waited_growths: int
    growth_us: float

    @property
    def used_pages(self) -> int:
        """Pages that sequences have."""
        return self.pages - self.free_pages

    @property
    def fragmentation(self) -> float:
        """The part of the free pages that does not lie in their longest row, 0 to 1."""
        return 1.0 - self.largest_free_run / self.free_pages if self.free_pages else 0.0


def longest_run(numbers: list[int]) -> int:
    """The most numbers of a sorted list that follow each other."""
    longest = run = 0
    before = None
    for number in numbers:
        run = run + 1 if before is not None and number == before + 1 else 1
        longest, before = max(longest, run), number
    return longest
