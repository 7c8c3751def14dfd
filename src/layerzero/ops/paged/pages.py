"""Pages of a cache as rows of tokens, tables without padding made padded ones, and caches without pages as a list.

FlashInfer and SGLang keep tables without padding; a step has padded ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from layerzero.core import values
from layerzero.core.arguments import told
from layerzero.core.bundle import MISSING, Bundle
from layerzero.core.errors import InvalidCallError, refuse
from layerzero.core.facts import TensorFacts
from layerzero.core.handle import FOREIGN
from layerzero.core.values import Check
from layerzero.ops.declaration import number_problems, overlaps, reach
from layerzero.ops.ragged.starts import lengths_of, shape_problems, value_problems

_FUNCTION = "StepMetadata.of_ragged_tables"


def padded_tables(
    kv_indptr: Tensor, kv_indices: Tensor, kv_last_page_len: Tensor, page_size: int, max_blocks: int | None
) -> tuple[Tensor, Tensor]:
    """Block tables (B, max_blocks) and lengths (B,), int32; see :meth:`layerzero.StepMetadata.of_ragged_tables`.

    Raises: InvalidCallError for tensors that are no such tables; numbers are looked at on a CPU, and wherever
        ``max_blocks`` is None, for then they are read.
    """
    problems = shape_problems("kv_indptr", kv_indptr)
    for name, tensor in (("kv_indices", kv_indices), ("kv_last_page_len", kv_last_page_len)):
        problems += number_problems(name, tensor, 1, "of one axis")
        if not problems and tensor.device != kv_indptr.device:
            problems.append(f"{name}: wanted device {kv_indptr.device} as kv_indptr, got {tensor.device}")
    for name, number in (("page_size", page_size), ("max_blocks", 1 if max_blocks is None else max_blocks)):
        if type(number) is not int or not 1 <= number < 2**31:
            problems.append(f"{name}: wanted a number from 1 to {2**31 - 1}, got {told(number)}")
    if not problems and len(kv_last_page_len) != len(kv_indptr) - 1:
        problems.append(f"kv_last_page_len: wanted {len(kv_indptr) - 1} as in kv_indptr, got {len(kv_last_page_len)}")
    if not problems and (kv_indptr.is_cpu or max_blocks is None):
        on_host = kv_indptr.cpu(), kv_last_page_len.cpu()
        problems += _value_problems(*on_host, len(kv_indices), page_size, max_blocks)
        max_blocks = max_blocks or max(int(lengths_of(on_host[0]).max()) if len(on_host[1]) else 0, 1)
    refuse(_FUNCTION, problems)
    assert max_blocks is not None
    counts, columns = lengths_of(kv_indptr), torch.arange(max_blocks, dtype=torch.int32, device=kv_indptr.device)
    there = columns < counts.unsqueeze(1)
    if not len(kv_indices):
        return torch.zeros_like(there, dtype=torch.int32), torch.zeros_like(counts)
    places = (kv_indptr[:-1].unsqueeze(1) + columns).clamp(0, len(kv_indices) - 1)
    tables = kv_indices[places.long()].masked_fill(~there, 0)
    return tables, torch.where(counts > 0, (counts - 1) * page_size + kv_last_page_len, 0)


def _value_problems(starts: Tensor, last: Tensor, pages: int, page_size: int, max_blocks: int | None) -> list[str]:
    end = int(starts[-1])
    problems = value_problems("kv_indptr", starts, end)
    if end != pages:
        problems.append(f"kv_indptr[{len(starts) - 1}]: wanted {pages}, the number of kv_indices, got {end}")
    if problems:
        return problems
    counts = lengths_of(starts)
    if max_blocks is not None and len(counts) and int(counts.max()) > max_blocks:
        problems.append(f"max_blocks: wanted at least {int(counts.max())}, the pages of a sequence, got {max_blocks}")
    lengths = torch.where(counts > 0, (counts.long() - 1) * page_size + last, 0)
    if len(lengths) and int(lengths.max()) >= 2**31:
        problems.append(f"kv_indptr: wanted sequences of less than 2**31 tokens, got one of {int(lengths.max())}")
    wrong = (counts > 0) & ((last < 1) | (last > page_size))
    problems += [
        f"kv_last_page_len[{place}]: wanted 1 to {page_size}, got {int(last[place])}"
        for place in wrong.nonzero().flatten().tolist()[:8]
    ]
    return problems


def blocks_of(block_tables: Tensor, context_lens: Tensor, page_size: int, promised: int | None) -> int:
    """How many columns of a table are followed: on a CPU what the longest sequence needs, as far as the table goes.

    Elsewhere as many as were promised, or all: nothing is read on the host. Nor is it in a transform or a trace, where
    lengths have no numbers, or others later on.
    """
    blocks = block_tables.shape[1]
    if promised is not None:
        blocks = min(blocks, -(-promised // page_size))
    if has_numbers(context_lens) and len(context_lens):
        blocks = min(blocks, -(-max(int(context_lens.max()), 0) // page_size))
    return blocks


def has_numbers(lengths: Tensor) -> bool:
    """Whether numbers may be read of a tensor at no cost, and hold for what is computed with them."""
    if not lengths.is_cpu or isinstance(lengths, FakeTensor):
        return False
    return not (torch._C._is_tracing() or torch._C._functorch.is_functorch_wrapped_tensor(lengths))


def gathered(
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    max_context_len: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Keys and values of each sequence, as long as its table or the promised bound, on a CPU as the longest sequence.

    Entries of a table beyond a sequence's last page are not followed: they may hold anything. Behind the last token
    of a sequence stands what its page holds there, on a GPU that token again.
    Shapes: caches (P, N, K, D) and (P, N, K, D_v), block_tables (B, max_blocks), context_lens (B,) →
    (B, blocks * N, K, D) and (B, blocks * N, K, D_v)
    """
    page_size = key_cache.shape[1]
    blocks = blocks_of(block_tables, context_lens, page_size, max_context_len)
    caches = [cache if len(cache) else cache.new_zeros((1, *cache.shape[1:])) for cache in (key_cache, value_cache)]
    if key_cache.is_cpu:
        used = torch.arange(blocks) * page_size < context_lens.unsqueeze(1)
        pages = block_tables[:, :blocks].masked_fill(~used, 0).long()
        keys, values = (cache[pages].flatten(1, 2) for cache in caches)
    else:
        # A virtual cache has no memory behind its last token: a read there ended the context (H200, 2026-11-25)
        tokens = torch.arange(blocks * page_size, device=block_tables.device)
        place = torch.minimum(tokens, context_lens.unsqueeze(1) - 1).clamp(min=0)
        page = block_tables.gather(1, place // page_size).masked_fill(context_lens.unsqueeze(1) == 0, 0)
        keys, values = (taken(cache, page, place % page_size) for cache in caches)
    return keys, values


def taken(cache: Tensor, page: Tensor, offset: Tensor) -> Tensor:
    """The tokens at these places. Shapes: (P, N, ...), (B, L), (B, L) → (B, L, ...).

    ``index_select`` copies rows in pieces of 16 bytes where an index of two axes copies numbers: 426 us against 1,628
    for 64 sequences of 2,048 tokens (H200, torch 2.11, 2026-11-26).
    """
    if cache.stride(0) != cache.stride(1) * cache.shape[1]:
        return cache[page, offset]
    slots = page.long() * cache.shape[1] + offset
    return cache.flatten(0, 1).index_select(0, slots.flatten()).view(*page.shape, *cache.shape[2:])


def tokens_of(cache: Tensor, pages: Tensor, length: int) -> Tensor:
    """The first tokens of a sequence's pages (length, ...); of a single page no token behind them is read."""
    return cache[:, :length][pages].flatten(0, 1)[:length]


def nhd(layout: str, *caches: Tensor) -> tuple[Tensor, ...]:
    """Caches with tokens before heads, which references are written for; views."""
    return caches if layout == "NHD" else tuple(each.transpose(1, 2) for each in caches)


class CacheList(Bundle):
    """Contiguous caches of several requests, each in memory of its own; calls take it in place of ``key_cache``.

        caches = lz.CacheList(keys, values)  # once, for as long as the same requests are a batch
        lz.append_kv_(k, v, caches, positions=lens[:, None])
        lz.batched_attention(q, caches, kv_lens=lens + 1)

    Calls see one cache of the longest's shape for each request; kernels read and write the list itself.

    Args:
        keys: one for each request, (L, K, D) in NHD, (K, L, D) in HND. L may be another for each.
        values: (L, K, D_v) or (K, L, D_v), the same dtype, on the same device.
        layout: ``NHD`` or ``HND``.
    Attributes:
        rows: keys and values of each request in NHD, views.
        kind: ``apart``, or ``shared`` where caches of two requests may touch the same memory: these are read alone.
    Raises: InvalidCallError for what are no such caches.
    """

    __slots__ = ("_stand_ins", "kind", "layout", "rows")

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor], layout: str = "NHD") -> None:
        refuse("CacheList", [] if len(keys) else ["keys: wanted at least one cache, got none"])
        self._hold(keys, values, layout)
        longest = max(range(len(self.rows)), key=lambda row: len(self.rows[row][0]))
        self._stand_ins = tuple(each[longest].expand(len(self.rows), -1, -1, -1) for each in (keys, values))

    def _hold(self, keys: Sequence[Tensor], values: Sequence[Tensor], layout: str) -> None:
        refuse("CacheList", _list_problems(keys, values, layout))
        pairs = zip(keys, values, strict=True)
        self.rows = tuple(pairs if layout == "NHD" else ((k.transpose(0, 1), v.transpose(0, 1)) for k, v in pairs))
        self.layout, self.kind = layout, "shared" if _touch(keys, values) else "apart"

    @classmethod
    def of_rows(cls, key_cache: Tensor, value_cache: Tensor, layout: str = "NHD") -> CacheList:
        """Make one of the rows of one tensor each, (B, L, K, D) and (B, L, K, D_v) in NHD.

        Of one row that is seen B times each gets a copy.
        """
        made = cls.__new__(cls)
        keys, values = (each if each.stride(0) else each.clone() for each in (key_cache, value_cache))
        made._hold(keys.unbind(), values.unbind(), layout)
        made._stand_ins = key_cache, value_cache
        return made

    def kind_for(self, key_cache: Tensor, value_cache: Tensor) -> str:
        """Its kind; ``foreign`` for other tensors than it brings."""
        mine = self._stand_ins[0] is key_cache and self._stand_ins[1] is value_cache
        return self.kind if mine else FOREIGN

    def arguments_of(self, function: str, parameter: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Stand-ins of both caches, itself as ``cache_list``, its layout. Raises: InvalidCallError where none fits."""
        if parameter != "key_cache" or "cache_list" not in given or given["value_cache"] is not MISSING:
            wanted = "a tensor" if "cache_list" not in given else "it as key_cache, and no value_cache"
            hint = "lz.batched_attention and lz.append_kv_ take a list of caches"
            raise InvalidCallError(function, [f"{parameter}: wanted {wanted}, got a CacheList; {hint}"])
        if given["layout"] not in ("NHD", self.layout):
            wanted, got = self.layout, told(given["layout"])
            raise InvalidCallError(function, [f"layout: wanted {wanted!r} as of the caches, got {got}"])
        found: dict[str, Any] = {"key_cache": self._stand_ins[0], "value_cache": self._stand_ins[1]}
        if given.get("cache_dtype", 0) is None:  # as of the other objects that hold caches
            found["cache_dtype"] = found["key_cache"].dtype
        return found | {"cache_list": self, "layout": self.layout}

    def __repr__(self) -> str:
        return f"CacheList({len(self.rows)} caches in {self.layout}, {self.kind})"

    def checks(self, name: str, ends: Tensor) -> list[Check]:
        """Tokens beyond the end of a shorter cache than the longest, at which the schema looks.

        Shapes: ends (B,), one more than the last place of each request.
        """
        rooms = torch.tensor([len(keys) for keys, _ in self.rows], device=ends.device)
        return [Check(ends > rooms, torch.stack((ends.long(), rooms), 1), partial(_beyond, name), most=1)]

    def refuse_beyond(self, function: str, name: str, ends: Tensor) -> None:
        """Refuse them where numbers may be read at no cost: on a CPU, and not in compiled code.

        Debug mode looks elsewhere, too: the operations' ``check_values``. Raises: InvalidCallError.
        """
        if torch.compiler.is_compiling() or not has_numbers(ends):
            return
        if any(end > len(keys) for end, (keys, _) in zip(ends.tolist(), self.rows, strict=True)):
            refuse(function, values.problems(self.checks(name, ends)))


def _beyond(name: str, place: tuple[int, ...], got: tuple[int, ...]) -> str:
    if name == "positions":  # the end is one more
        return f"{name}: wanted 0 to {got[1] - 1} in cache {place[0]}, got {got[0] - 1}"
    return f"{name}: wanted at most {got[1]} tokens in cache {place[0]}, got {got[0]}"


def _list_problems(keys: Sequence[Tensor], values: Sequence[Tensor], layout: object) -> list[str]:
    """What is wrong with caches that are to be a list."""
    if layout not in ("NHD", "HND"):
        return [f"layout: wanted NHD or HND, got {told(layout)}"]
    if len(keys) != len(values):
        return [f"values: wanted {len(keys)} as many as keys, got {len(values)}"]
    heads = 1 if layout == "NHD" else 0
    for row, pair in enumerate(zip(keys, values, strict=True)):
        for name, each, first in zip(("keys", "values"), pair, (keys[0], values[0]), strict=True):
            if not isinstance(each, Tensor) or each.ndim != 3:
                return [f"{name}[{row}]: wanted a tensor of three axes, got {told(each)}"]
            shape = [pair[0].shape[0], pair[0].shape[1], first.shape[2]]
            shape[heads] = keys[0].shape[heads]
            if [*each.shape] != shape or each.dtype is not keys[0].dtype or each.device != keys[0].device:
                wanted, got = (f"{like.dtype} on {like.device}" for like in (keys[0], each))
                return [f"{name}[{row}]: wanted {tuple(shape)} of {wanted}, got {tuple(each.shape)} of {got}"]
    return []


def _touch(keys: Sequence[Tensor], values: Sequence[Tensor]) -> bool:
    """Whether caches of two requests may lie in the same memory; those of one are looked at when they are written."""
    spans = sorted(each for pair in zip(keys, values, strict=True) for each in _spans(*pair))
    return any(one[0] == other[0] and other[1] <= one[2] for one, other in pairwise(spans))


def _spans(keys: Tensor, values: Tensor) -> list[tuple[int, int, int]]:
    """The storages of a request's caches, and their first and last places there; one where both meet."""
    together = overlaps(keys, values)
    try:
        found = [(each.untyped_storage()._cdata, *reach(each)) for each in (keys, values) if each.numel()]
    except NotImplementedError:  # of a transform, as in ``overlaps``
        return []
    return [(found[0][0], min(each[1] for each in found), max(each[2] for each in found))] if together else found


def converted_dtype(query: Tensor | TensorFacts, cache: Tensor | TensorFacts) -> torch.dtype:
    """The dtype in which queries attend over a cache: their own, or one of at least 32 bits that holds both."""
    if query.dtype is cache.dtype:
        return query.dtype
    return torch.promote_types(torch.promote_types(query.dtype, cache.dtype), torch.float32)
