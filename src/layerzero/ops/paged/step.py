"""What all layers of one forward pass share: block tables, lengths, and what kernels made of their values."""

from __future__ import annotations

from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from layerzero.core.arguments import out_of_range, told
from layerzero.core.errors import public, refuse
from layerzero.core.handle import CAPTURABLE, FOREIGN, STALE, Handle
from layerzero.core.values import Check
from layerzero.ops.declaration import number_problems
from layerzero.ops.paged.pages import padded_tables
from layerzero.ops.paged.slots import LateCount, SlotMapping, host_table_problems, numbers_on_host
from layerzero.ops.ragged.starts import host_problems, is_readable, shape_problems


class StepMetadata(Handle):
    """The block tables and lengths of one forward pass, and one slot for each kernel that plans on their values.

    Some kernels read lengths on the host before they launch (FlashInfer's ``plan``). With a step they do so once for
    all layers; without one, in every call. Between forward passes change the tensors in place, then call
    :meth:`advance`. A new object each time is right as well, and pays for the slots' buffers again.

        step = lz.StepMetadata(block_tables, context_lens, capturable=True)
        for layer in layers:
            lz.append_paged_kv_(k, v, layer.keys, layer.values, step.slot_mapping(page_size))
            output = lz.paged_attention(q, layer.keys, layer.values, block_tables, context_lens, step=step)
        context_lens += 1
        step.advance()

    A step of several tokens a sequence has ``cu_seqlens_q``, too; its slots are those of all tokens in their order.

    Args:
        block_tables: (B, max_blocks) int32, the pages of each sequence in order.
        context_lens: (B,) int32, tokens of each sequence, the newest included.
        cu_seqlens_q: (B + 1,) int32, where each sequence's new tokens begin, and the end of the last; one each if None.
        host: ``context_lens``, and ``cu_seqlens_q`` where there is one, as CPU tensors, where the caller has them.
            Plans on the host then wait for no copy. Their numbers are compared where both lie on the CPU.
        max_context_len: upper bound of ``context_lens``, for kernels that split long sequences; what the tables hold if
            None. A graph keeps the one that it was captured with.
        capturable: keep every buffer where it is, so that a captured CUDA graph can be replayed after ``advance``.
        pages: pages of the caches; where it is given, a table that names another one is reported, too.
        finite_pages: a promise that pages hold no NaN and no infinity beyond a sequence's tokens, as in a cache that
            began with zeros. Kernels that multiply those by 0 need not check their result.
        host_tables: ``block_tables`` as a CPU tensor, with ``host`` and compared as that is: slots are made there then,
            and take one copy.
    Raises: InvalidCallError for tensors that are no tables and lengths, for a bound or number of pages below 1, and for
        lengths beyond the bound, where they lie on the CPU or ``host`` brings them.
    """

    destination: Tensor | None = None
    """Where the next call is to write its result: a kernel that can does so once, and returns this very tensor."""

    finite_pages = False
    _is_captured = False
    """Whether a launch that is sized by the bound was captured."""

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
        finite_pages: bool = False,
    ) -> None:
        problems = table_problems(block_tables, context_lens) + _number_problems("max_context_len", max_context_len)
        problems += _number_problems("pages", pages)
        if cu_seqlens_q is not None and not problems:
            problems += shape_problems("cu_seqlens_q", cu_seqlens_q, len(context_lens) + 1)
        lengths = (context_lens,) if cu_seqlens_q is None else (context_lens, cu_seqlens_q)
        problems += [] if problems else host_problems(host, lengths) + host_table_problems(host_tables, block_tables)
        problems += (
            [] if problems else self._length_problems(max_context_len, context_lens if host is None else host[0])
        )
        refuse("StepMetadata", problems)
        self._keep((block_tables, *lengths), host, host_tables, max_context_len, pages, capturable=capturable)
        self.finite_pages = finite_pages

    def _keep(
        self,
        tensors: tuple[Tensor, ...],
        host: tuple[Tensor, ...] | None,
        host_tables: Tensor | None,
        max_context_len: int | None,
        pages: int | None,
        *,
        capturable: bool,
    ) -> None:
        super().__init__(tensors, CAPTURABLE if capturable else "eager")
        self._max_context_len = max_context_len
        self._beyond = LateCount()
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
        lens, *starts = self._given or self._on_host()
        return lens, starts[0] if starts else numbers_on_host(0, len(lens) + 1).int()

    def _on_host(self) -> tuple[Tensor, ...]:
        return tuple([each.cpu() for each in self._tensors[1:]])

    @property
    def host_lens(self) -> Tensor:
        """The first of :attr:`host`, alone."""
        return self._given[0] if self._given else self.host[0]

    @property
    def has_host(self) -> bool:
        """Whether :attr:`host` waits for nothing: its numbers were given, or lie on the CPU as they are."""
        return self._given is not None or not self.context_lens.is_cuda

    def checks(self) -> list[Check]:
        """Values on the device, for debug mode: they are those that the host was given, or read when it planned.

        So a step is found that was not advanced after writes into tensors of inference mode, which torch does not
        count.
        """
        names, read = ("block_tables", "context_lens", "cu_seqlens_q"), self._given or self.__dict__.get("host", ())
        told = (self._host_tables, *read, None, None)
        return [
            _same(name, mine, known.to(mine.device, non_blocking=True))
            for name, mine, copy, given in zip(names, self._tensors, self._uncounted, told, strict=False)
            if (known := given if copy is None else copy) is not None
        ]

    @property
    def host_tables(self) -> Tensor | None:
        """The block tables on the CPU: what was given, or themselves where they lie there."""
        return self.block_tables if self.block_tables.device.type == "cpu" else self._host_tables

    def kind_for(self, *tensors: Tensor | None) -> str:
        """Its kind; ``foreign`` for other tables, lengths and starts than its own, ``stale`` once these changed.

        A call of one token each has no starts, whatever the step has.
        """
        # each call asks: a generator costs as much again
        for mine, theirs in zip(self._tensors, tensors, strict=False):
            if mine is not theirs and theirs is not None:
                return FOREIGN
        if len(tensors) > len(self._tensors) and tensors[-1] is not None:
            return FOREIGN
        return STALE if self.is_stale else self.kind

    @property
    def max_context_len(self) -> int | None:
        """Upper bound of the lengths; None for what the tables hold."""
        return self._max_context_len

    def bound_of_launch(self, *, captured: bool) -> int | None:
        """:attr:`max_context_len`, for a launch that is sized by it; one that is ``captured`` has it for good."""
        if captured:
            self._is_captured = True
        return self._max_context_len

    def advance(
        self,
        *,
        max_context_len: int | None = None,
        host: tuple[Tensor, ...] | None = None,
        host_tables: Tensor | None = None,
    ) -> None:
        """Tell that the values of tables and lengths changed; every slot reads them again, outside any capture.

        ``host`` and ``host_tables`` are as for a new one. Without them plans on the host copy the values again, and
        slots are made on the device. A smaller ``max_context_len`` changes nothing once a launch that is sized by it
        was captured.
        Raises: InvalidCallError where :meth:`slot_mapping` found a token without a place, for a bound above that of a
            captured launch, and for lengths beyond the bound: on the CPU and by ``host`` for these values; on a GPU for
            those of an earlier step, as far as the device has answered, since nothing waits for it.
        """
        problems = _number_problems("max_context_len", max_context_len) + host_problems(host, self._tensors[1:])
        problems += host_table_problems(host_tables, self.block_tables)
        with self._lock:
            made = [each for each in self._slots.values() if isinstance(each, SlotMapping) and each.by_starts]
        if host is not None and not problems and made:
            problems = [text for each in made[:1] if (text := each.other_total(int(host[1][-1])))]
        problems += [] if problems else self._bound_problems(max_context_len, host)
        refuse("StepMetadata.advance", problems)
        with self._lock:
            self._given, self._host_tables = host, host_tables
            if not self._is_captured:
                self._max_context_len = max_context_len or self._max_context_len
            slots = [each for each in self._slots.values() if isinstance(each, SlotMapping)]
            self.refresh()
            for slot in slots:
                slot.tell("StepMetadata.advance")

    def _bound_problems(self, bound: int | None, host: tuple[Tensor, ...] | None) -> list[str]:
        """A bound that a captured launch cannot take any more, and lengths beyond the one that counts."""
        mine, lens = self._max_context_len, self.context_lens if host is None else host[0]
        if not self._is_captured:
            return self._length_problems(bound or mine, lens)
        if mine is None:
            return []
        if bound is not None and bound > mine:
            return [f"max_context_len: wanted at most {mine}, {_CAPTURED}, got {bound}{_AGAIN}"]
        if lens.is_cuda:  # a replay looks at nothing
            self._beyond.add(lens > mine)
        beyond = self._beyond.untold()
        lost = f"context_lens: wanted at most {mine}, {_CAPTURED}, got {beyond} beyond it, now or in an earlier step"
        return [lost + _AGAIN] if beyond else self._length_problems(mine, lens)

    def _length_problems(self, bound: int | None, lens: Tensor) -> list[str]:
        """Lengths on the CPU beyond a bound, which sizes launches."""
        if bound is None or not is_readable(lens) or not len(lens):
            return []
        longest = int(lens.max())
        if longest <= bound:
            return []
        more = _AGAIN if self._is_captured else "; pass a larger max_context_len, or None for what the tables hold"
        return [f"context_lens: wanted at most max_context_len {bound}, got {longest}{more}"]

    def refresh(self) -> None:
        """Bring every slot up to date; lengths on the host are read again unless they were given."""
        super().refresh()
        self._uncounted = self._copies()

    def slot_mapping(self, page_size: int, tokens: int | None = None) -> Tensor:
        """Where the newest tokens of each sequence belong, for :func:`layerzero.append_paged_kv_`.

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
        refuse("StepMetadata.slot_mapping", problems)
        return self.slot(("slot_mapping", page_size, tokens), lambda step: SlotMapping(step, page_size, tokens)).slots


_MOST_TOKENS = 2**31 - 1
_CAPTURED = "which captured launches are sized by"
_AGAIN = "; make a new StepMetadata with a larger max_context_len and capture again"


def _same(name: str, tensor: Tensor, known: Tensor) -> Check:
    def say(place: tuple[int, ...], got: tuple[int, ...]) -> str:
        where = ", ".join(map(str, place))
        wanted = f"{name}[{where}]: wanted {got[0]}, which the host knows, got {got[1]} on the device"
        return f"{wanted}; pass host= the same numbers, and advance() after they change"

    return Check(tensor != known, torch.stack((known, tensor), -1), say)


def _number_problems(name: str, number: object) -> list[str]:
    if number is None or (type(number) is int and number >= 1 and not out_of_range(number)):
        return []
    return [f"{name}: wanted a number of at least 1 or None, got {told(number)}"]


def table_problems(block_tables: object, context_lens: object) -> list[str]:
    """List what is wrong with block tables and lengths as tensors; their values are not read."""
    problems = number_problems("block_tables", block_tables, 2, "(B, max_blocks)")
    problems += number_problems("context_lens", context_lens, 1, "(B,)")
    if problems or not isinstance(block_tables, Tensor) or not isinstance(context_lens, Tensor):
        return problems
    if block_tables.device != context_lens.device:
        where = f"{block_tables.device} and {context_lens.device}"
        problems.append(f"block_tables and context_lens: wanted both on the device of the caches, got {where}")
    if block_tables.shape[0] != context_lens.shape[0]:
        lengths = f"wanted {block_tables.shape[0]} lengths as in block_tables, got {context_lens.shape[0]}"
        problems.append(f"context_lens: {lengths}")
    return problems


def step_problems(step: object, block_tables: Tensor, context_lens: Tensor) -> list[str]:
    """What is wrong with the step of a call over these tables and lengths."""
    kind = step.kind_for(block_tables, context_lens) if isinstance(step, StepMetadata) else ""
    if kind == FOREIGN:
        return ["step: wanted the StepMetadata of these block_tables and context_lens, got that of others"]
    changed = "step: wanted advance() after tables, lengths or starts changed, got a step of old values"
    return [changed] if kind == STALE else []
