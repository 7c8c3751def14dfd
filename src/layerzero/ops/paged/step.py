"""What all layers of one forward pass share: block tables, lengths, and what kernels made of their values."""

from __future__ import annotations

from functools import cached_property
from typing import Self, cast

import torch
from torch import Tensor

from layerzero.core.arguments import out_of_range, told
from layerzero.core.binding import public
from layerzero.core.errors import InvalidCallError
from layerzero.core.handle import CAPTURABLE, FOREIGN, STALE, Handle
from layerzero.ops.paged.host_slots import check_starts, host_table_problems, slots_on_host
from layerzero.ops.paged.ragged_tables import padded_tables
from layerzero.ops.ragged.starts import shape_problems
from layerzero.ops.ragged.step import host_problems


class StepMetadata(Handle):
    """The block tables and lengths of one forward pass, and one slot for each kernel that plans on their values.

    Some kernels read lengths on the host before they launch (FlashInfer's ``plan``). With a step they do so once for
    all layers; without one, in every call. Between forward passes change the tensors in place, then call
    :meth:`advance`; making a new object each time is right as well, and pays for the slots' buffers again.

        step = lz.StepMetadata(block_tables, context_lens, capturable=True)
        for layer in layers:
            lz.append_paged_kv(k, v, layer.keys, layer.values, step.slot_mapping(page_size))
            output = lz.paged_attention(q, layer.keys, layer.values, block_tables, context_lens, step=step)
        context_lens += 1
        step.advance()

    A step of several tokens a sequence has ``cu_seqlens_q``, too; its slots are those of all tokens in their order.

    Args:
        block_tables: (B, max_blocks) int32, the pages of each sequence in order.
        context_lens: (B,) int32, tokens of each sequence, the newest included.
        cu_seqlens_q: (B + 1,) int32, where each sequence's new tokens begin, and the end of the last; one each if None.
        host: ``context_lens``, and ``cu_seqlens_q`` where there is one, as CPU tensors, where the caller has them: what
            plans on the host waits for no copy then. Their numbers are compared where both lie on the CPU.
        max_context_len: upper bound of ``context_lens``, for kernels that split long sequences; what the tables hold
            if None.
        capturable: keep every buffer where it is, so that a captured CUDA graph can be replayed after ``advance``.
        pages: pages of the caches; where it is given, a table that names another one is told of, too.
        host_tables: ``block_tables`` as a CPU tensor, beside ``host``: slots are made there then, and take one copy.
    Raises: InvalidCallError for tensors that are no tables and lengths, or a bound or number of pages below 1.
    """

    @public("StepMetadata")
    def __init__(
        self,
        block_tables: Tensor,
        context_lens: Tensor,
        *,
        cu_seqlens_q: Tensor | None = None,
        host: tuple[Tensor, ...] | None = None,
        max_context_len: int | None = None,
        capturable: bool = False,
        pages: int | None = None,
        host_tables: Tensor | None = None,
    ) -> None:
        problems = table_problems(block_tables, context_lens) + _number_problems("max_context_len", max_context_len)
        problems += _number_problems("pages", pages)
        if cu_seqlens_q is not None and not problems:
            problems += shape_problems("cu_seqlens_q", cu_seqlens_q, len(context_lens) + 1)
        lengths = (context_lens,) if cu_seqlens_q is None else (context_lens, cu_seqlens_q)
        problems += [] if problems else host_problems(host, lengths) + host_table_problems(host_tables, block_tables)
        if problems:
            raise InvalidCallError("StepMetadata", problems)
        super().__init__((block_tables, *lengths), CAPTURABLE if capturable else "eager")
        self._max_context_len = max_context_len
        self._given, self._host_tables = host, host_tables
        self.pages = pages
        self._uncounted = self._copies()

    def _copies(self) -> tuple[Tensor | None, ...]:
        """Of tensors of inference mode, in which torch counts no writes, what they hold; None for others.

        They are compared where that waits for nothing: on a CPU.
        """
        return tuple([each.clone() if each.is_inference() and each.is_cpu else None for each in self._tensors])

    @classmethod
    def of_ragged_tables(
        cls,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_last_page_len: Tensor,
        page_size: int,
        *,
        max_blocks: int | None = None,
        cu_seqlens_q: Tensor | None = None,
        max_context_len: int | None = None,
        pages: int | None = None,
    ) -> Self:
        """Make one of block tables without padding, as FlashInfer takes them; :attr:`block_tables` is the padded form.

        Shapes: kv_indptr (B + 1,), kv_indices (Z,), kv_last_page_len (B,), all int32 on one device.
        Args:
            kv_indptr: where each sequence's pages begin: 0, then the end of each. A sequence may have none.
            kv_indices: the pages of all sequences, in order.
            kv_last_page_len: tokens of each sequence's last page, 1 to ``page_size``.
            page_size: tokens of a page.
            max_blocks: columns of the padded tables; None for the most that a sequence has, which waits for a GPU.
            cu_seqlens_q, max_context_len, pages: as of the constructor.
        Raises: InvalidCallError for tensors that are no such tables; their numbers are looked at on a CPU, and on a GPU
            where ``max_blocks`` is None.
        Source: BatchDecodeWithPagedKVCacheWrapper of FlashInfer, arXiv:2501.01005.
        """
        tables, lens = padded_tables(kv_indptr, kv_indices, kv_last_page_len, page_size, max_blocks)
        return cls(tables, lens, cu_seqlens_q=cu_seqlens_q, max_context_len=max_context_len, pages=pages)

    def __repr__(self) -> str:
        return f"StepMetadata({self.kind}, max_context_len={self._max_context_len})"

    @property
    def block_tables(self) -> Tensor:
        """The pages of each sequence; change them in place, then advance."""
        return self._tensors[0]

    @property
    def context_lens(self) -> Tensor:
        """Tokens of each sequence; change them in place, then advance."""
        return self._tensors[1]

    @property
    def cu_seqlens_q(self) -> Tensor | None:
        """Where each sequence's new tokens begin; change it in place, then advance. None for one token each."""
        return self._tensors[2] if len(self._tensors) > 2 else None

    @cached_property
    def host(self) -> tuple[Tensor, Tensor]:
        """Lengths and starts on the CPU: what was given, or one copy a step, which waits for the device."""
        lens, *starts = self._given or [each.cpu() for each in self._tensors[1:]]
        return lens, starts[0] if starts else _numbers(0, len(lens) + 1).int()

    @property
    def host_lens(self) -> Tensor:
        """The first of :attr:`host`, alone."""
        return self._given[0] if self._given else self.host[0]

    @property
    def has_host(self) -> bool:
        """Whether :attr:`host` waits for nothing: its numbers were given, or lie on the CPU as they are."""
        return self._given is not None or not self.context_lens.is_cuda

    @property
    def host_tables(self) -> Tensor | None:
        """The block tables on the CPU: what was given, or themselves where they lie there."""
        return self.block_tables if self.block_tables.device.type == "cpu" else self._host_tables

    def kind_for(self, *tensors: Tensor) -> str:
        """Its kind; ``foreign`` for other tables and lengths than it was made of, ``stale`` once these changed."""
        # each call asks: a generator costs as much again
        for mine, theirs in zip(self._tensors, tensors, strict=False):
            if mine is not theirs:
                return FOREIGN
        return STALE if self.is_stale else self.kind

    @property
    def max_context_len(self) -> int | None:
        """Upper bound of the lengths; None for what the tables hold."""
        return self._max_context_len

    @property
    def capturable(self) -> bool:
        """Whether its buffers stay where they are."""
        return self.kind == CAPTURABLE

    def advance(
        self,
        *,
        max_context_len: int | None = None,
        host: tuple[Tensor, ...] | None = None,
        host_tables: Tensor | None = None,
    ) -> None:
        """Tell that the values of tables and lengths changed; every slot reads them again, outside any capture.

        ``host`` and ``host_tables`` are as for a new one: without them what plans on the host copies the values again,
        and slots are made on the device.
        Raises: InvalidCallError where :meth:`slot_mapping` found a token without a place: on the CPU for these values;
            on a GPU for those of an earlier step, as far as the device has answered, since nothing waits for it.
        """
        problems = _number_problems("max_context_len", max_context_len) + host_problems(host, self._tensors[1:])
        problems += host_table_problems(host_tables, self.block_tables)
        with self._lock:
            made = [each for each in self._slots.values() if isinstance(each, _SlotMapping) and each.by_starts]
        if host is not None and not problems and made:
            problems = [text for each in made[:1] if (text := each.other_total(int(host[1][-1])))]
        if problems:
            raise InvalidCallError("StepMetadata.advance", problems)
        with self._lock:
            self._given, self._host_tables = host, host_tables
            self._max_context_len = max_context_len or self._max_context_len
            slots = [each for each in self._slots.values() if isinstance(each, _SlotMapping)]
            self.refresh()
            for slot in slots:
                slot.tell("StepMetadata.advance")

    def refresh(self) -> None:
        """Bring every slot up to date; lengths on the host are read again unless they were given."""
        self.__dict__.pop("host", None)
        super().refresh()
        self._uncounted = self._copies()

    def slot_mapping(self, page_size: int, tokens: int | None = None) -> Tensor:
        """Where the newest tokens of each sequence belong, for :func:`layerzero.append_paged_kv`.

        ``tokens`` of each sequence; without it those that ``cu_seqlens_q`` says, or one.
        Shapes: → (B * tokens,) or (T,) int64, ``page * page_size + offset``; -1, which writes nothing, for a token
        before the sequence's first. The same buffer after each :meth:`advance`.
        Raises: InvalidCallError where tables or lengths changed since; for a token that is beyond what its table holds
            or on a page that does not exist: at once on the CPU, on a GPU by a later :meth:`advance`. There it has -1,
            too, and is lost.
        """
        problems = [
            f"{name}: wanted a number from 1 to {_MOST_TOKENS}, got {told(number)}"
            for name, number in (("page_size", page_size), ("tokens", tokens))
            if (name, number) != ("tokens", None) and (type(number) is not int or not 1 <= number <= _MOST_TOKENS)
        ]
        written = zip(self._uncounted, self._tensors, strict=True)
        if self.is_stale or any(old is not None and not torch.equal(old, now) for old, now in written):
            problems.append("step: wanted advance() after tables or lengths changed, got a question about the old ones")
        if problems:
            raise InvalidCallError("StepMetadata.slot_mapping", problems)
        return self.slot(("slot_mapping", page_size, tokens), lambda step: _SlotMapping(step, page_size, tokens)).slots


class _SlotMapping:
    """The slots of the newest tokens, and how many had no place: on a GPU a count there, which is copied meanwhile."""

    def __init__(self, step: StepMetadata, page_size: int, tokens: int | None) -> None:
        by_starts = tokens is None and step.cu_seqlens_q is not None
        self._page_size, self._tokens = page_size, None if by_starts else tokens or 1
        self._lost: Tensor | None = None
        self._told = self._lost_on_host = 0
        self._seen: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None
        self.slots = self._compute(step).to(step.context_lens.device, non_blocking=True)  # staged before it returns
        self.tell("StepMetadata.slot_mapping")

    def update(self, handle: Handle) -> None:
        slots = self._compute(cast(StepMetadata, handle))
        if slots.shape != self.slots.shape:  # starts on a device, which nobody gave on the host
            raise InvalidCallError("StepMetadata.advance", [self.other_total(len(slots))])
        self.slots.copy_(slots, non_blocking=True)

    def other_total(self, tokens: int) -> str:
        """What is wrong with so many new tokens; empty where as many belong to these slots."""
        if tokens == len(self.slots):
            return ""
        wanted = f"cu_seqlens_q: wanted {len(self.slots)} new tokens, as its slots have"
        return f"{wanted}, got {tokens}; make a new StepMetadata"

    @property
    def by_starts(self) -> bool:
        """Whether starts say how many tokens there are."""
        return self._tokens is None

    def _places(self, step: StepMetadata) -> tuple[Tensor, Tensor]:
        """The sequence of each new token, and its position there."""
        lens = step.context_lens
        if self._tokens is not None:
            positions = lens.long().unsqueeze(1) + torch.arange(-self._tokens, 0, device=lens.device)
            return torch.arange(len(lens), device=lens.device).repeat_interleave(self._tokens), positions.flatten()
        starts, on_host = cast(Tensor, step.cu_seqlens_q), step.host[1]
        tokens = torch.arange(int(on_host[-1]), device=lens.device)
        owner = torch.searchsorted(starts[1:].contiguous(), tokens.int(), right=True).clamp(max=max(len(lens) - 1, 0))
        return owner, tokens + (lens - starts[1:])[owner]

    def _compute(self, step: StepMetadata) -> Tensor:
        tables, page_size = step.block_tables, self._page_size
        capacity = tables.shape[1] * page_size
        if step.host_tables is not None and step.has_host:
            starts = None if self._tokens is not None else step.host[1]
            pages_there = step.pages or _MOST_PAGES
            lens = step.host_lens
            made = slots_on_host(step.host_tables, lens, starts, self._tokens or 1, page_size, pages_there)
            if made is not None:
                self._lost_on_host += made[1]
                return made[0]
        if self._tokens is None:
            check_starts(step.host[1])
        placed = self._placed_on_host(step, capacity)
        if placed is not None:
            rows, offsets = placed.to(tables.device, non_blocking=True)
            pages = tables.reshape(-1).index_select(0, rows)
            lost = pages < 0
            if step.pages is not None and step.pages < _MOST_PAGES:
                lost |= pages >= step.pages
            return self._within(torch.add(offsets, pages, alpha=page_size), lost, None)
        owner, positions = self._places(step)
        early, late = positions < 0, positions >= capacity
        if capacity == 0:
            return self._within(torch.full_like(positions, -1), late, early)
        pages = tables[owner, (positions // page_size).masked_fill(early | late, 0)].long()
        late = late | (~early & ((pages < 0) | (pages >= (step.pages or _MOST_PAGES))))
        return self._within(pages * page_size + positions % page_size, late, early)

    def _placed_on_host(self, step: StepMetadata, capacity: int) -> Tensor | None:
        """The entry of all tables and the place in its page of each token; None where lengths say that one has none.

        Computed on the host, as one sum: if all tables were one row of pages, each would begin at a page. A GPU gets
        both in one copy: each launch costs 4 us of host time and more (H200, 2026-11-22).
        Shapes: → (2, T) int64 on the CPU
        """
        if capacity == 0 or not step.has_host or len(step.context_lens) == 0:
            return None
        lens, starts = step.host
        if self._tokens is not None:
            starts = _numbers(0, (len(lens) + 1) * self._tokens, self._tokens)
        counts = starts[1:] - starts[:-1]
        before = lens.long() - counts  # tokens that were in the cache already; differences of int32 wrap around
        if int(before.min()) < 0 or int(lens.max()) > capacity:
            return None
        places = before + _numbers(0, len(lens) * capacity, capacity)
        if self._tokens != 1:
            total = int(starts[-1])
            places = torch.repeat_interleave(places - starts[:-1], counts, output_size=total) + _numbers(0, total)
        bits = self._page_size.bit_length() - 1
        if self._page_size == 1 << bits:
            return torch.stack((places >> bits, places & (self._page_size - 1)))
        return torch.stack((places // self._page_size, places % self._page_size))

    def _within(self, slots: Tensor, late: Tensor, early: Tensor | None) -> Tensor:
        """The slots, -1 where there is none, after those that are lost were counted."""
        slots = slots.masked_fill(late if early is None else early | late, -1)
        self._lost = late.sum() if self._lost is None else self._lost + late.sum()
        if self._lost.is_cuda:
            self._seen = torch.zeros((), dtype=torch.int64, pin_memory=True) if self._seen is None else self._seen
            if self._arrived is None:
                self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._seen.copy_(self._lost, non_blocking=True)
            self._arrived.record(torch.cuda.current_stream(self._lost.device))
        return slots

    def tell(self, function: str) -> None:
        """Raise for tokens without a place, once for each; on a GPU for those that it has counted by now."""
        if self._arrived is not None and not self._arrived.query():  # type: ignore[no-untyped-call]
            return
        seen = self._lost if self._seen is None else self._seen
        lost = self._lost_on_host + (0 if seen is None else int(seen))
        if lost > self._told:
            count, self._told = lost - self._told, lost
            when = "" if self._seen is None else ", now or in an earlier step; they were lost"
            problem = (
                f"context_lens and block_tables: wanted a page of the cache for each new token, got {count} tokens "
                f"beyond their table or on a page that does not exist{when}"
            )
            raise InvalidCallError(function, [problem])


_MOST_PAGES = 2**31
_MOST_TOKENS = 2**31 - 1


def _numbers(first: int, end: int, step: int = 1) -> Tensor:
    """Numbers on the host, wherever torch makes tensors by default."""
    return torch.arange(first, end, step, device="cpu")


def _number_problems(name: str, number: object) -> list[str]:
    if number is None or (type(number) is int and number >= 1 and not out_of_range(number)):
        return []
    return [f"{name}: wanted a number of at least 1 or None, got {told(number)}"]


def table_problems(block_tables: object, context_lens: object) -> list[str]:
    """List what is wrong with block tables and lengths as tensors; their values are not read."""
    problems = []
    for name, tensor, shape, ndim in (
        ("block_tables", block_tables, "(B, max_blocks)", 2),
        ("context_lens", context_lens, "(B,)", 1),
    ):
        if not isinstance(tensor, Tensor):
            problems.append(f"{name}: wanted an int32 tensor {shape}, got {type(tensor).__name__}")
        elif tensor.dtype is not torch.int32 or tensor.ndim != ndim:
            got = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
            problems.append(f"{name}: wanted an int32 tensor {shape}, got {got}")
    if problems or not isinstance(block_tables, Tensor) or not isinstance(context_lens, Tensor):
        return problems
    if block_tables.device != context_lens.device:
        problems.append(f"context_lens: wanted device {block_tables.device}, got {context_lens.device}")
    if block_tables.shape[0] != context_lens.shape[0]:
        lengths = f"wanted {block_tables.shape[0]} lengths as in block_tables, got {context_lens.shape[0]}"
        problems.append(f"context_lens: {lengths}")
    return problems
