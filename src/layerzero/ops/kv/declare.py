"""What is moved in and out of caches: into rows, out of slots, from pages to pages, and into narrower elements.

    kv.append.contiguous   tokens into rows         kv.copy_blocks       pages into other pages
    kv.gather.paged        the tokens of slots      kv.append.quantized  tokens into slots, divided by scales

Pages and rows are (pages, page_size, kv_heads, head_dim) in NHD, (pages, kv_heads, page_size, head_dim) in HND.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from layerzero.core.arguments import Axis, TensorSchema
from layerzero.core.dtypes import FLOATING, INDEX
from layerzero.core.operation import Case, Operation, Tolerance, Work
from layerzero.core.schema import OperationSchema
from layerzero.ops.attention.declare import HEAD_DIMS, TOLERANCE
from layerzero.ops.paged import on_demand, written
from layerzero.ops.paged.codes import DERIVED, ONE_STEP, append_quantized_reference
from layerzero.ops.paged.codes import check_values as check_codes
from layerzero.ops.paged.codes import derive as derive_codes
from layerzero.ops.paged.codes import examples as scales
from layerzero.ops.paged.codes import guard as guard_codes
from layerzero.ops.paged.declare import CACHE_LAYOUTS
from layerzero.ops.paged.quantized import QUANTIZED, SCALES
from layerzero.ops.rope_append.declare import write_rows

_INT64 = frozenset({torch.int64})
_EXACT = dict.fromkeys(TOLERANCE, Tolerance(0.0, 0.0))
_HEADS = (Axis("kv_heads", scales=True, apart=True), *HEAD_DIMS)
_PAGES = Axis("pages", live=True, works=False)


def _caches(lead: tuple[str, ...], dtypes: frozenset[torch.dtype] = FLOATING, **more: Any) -> tuple[TensorSchema, ...]:
    kept = {"has_layout": True, "resident": True} | more
    return (
        TensorSchema("key_cache", (*lead, "kv_heads", "head_dim"), dtypes, **kept),
        TensorSchema("value_cache", (*lead, "kv_heads", "value_dim"), dtypes, **kept),
    )


def _new(*token: str) -> tuple[TensorSchema, ...]:
    return (
        TensorSchema("key", (*token, "kv_heads", "head_dim"), FLOATING),
        TensorSchema("value", (*token, "kv_heads", "value_dim"), FLOATING),
    )


def _slots(*, distinct: bool) -> TensorSchema:
    places = ("pages", "page_size")
    return TensorSchema(
        "slot_mapping", ("tokens",), _INT64, same_dtype=False, indexes=places, holes=True, distinct=distinct
    )


def _moved(*counts: str) -> Callable[[Mapping[str, Any]], Work]:
    """Each number read and written."""

    def work(facts: Mapping[str, Any]) -> Work:
        elements = facts["kv_heads"] * (facts["head_dim"] + facts["value_dim"])
        for name in counts:
            elements *= facts[name]
        return Work(0.0, 2.0 * elements * facts["dtype"].itemsize)

    return work


def _nothing(*_: object, **__: object) -> None:
    return None


_SHAPES = ((8, 128), (2, 64))


def _row(name: str, batch: int, seq: int, length: int, kv_heads: int, head_dim: int) -> Case:
    sizes = {"batch": batch, "seq": seq, "length": length, "kv_heads": kv_heads}
    return Case(name, sizes | {"head_dim": head_dim, "value_dim": head_dim})


def _paged(name: str, count: tuple[str, int], pages: int, kv_heads: int, head_dim: int, page_size: int = 16) -> Case:
    sizes = {count[0]: count[1], "pages": pages, "page_size": page_size, "kv_heads": kv_heads}
    return Case(name, sizes | {"head_dim": head_dim, "value_dim": head_dim})


ROWS = (
    _row("small", 2, 3, 16, 2, 64),
    _row("llama3_8b_decode_b8", 8, 1, 4096, 8, 128),
    _row("llama3_8b_s512", 1, 512, 4096, 8, 128),
)
SLOTS = (
    _paged("small", ("tokens", 5), 4, 2, 64),
    _paged("llama3_8b_b64", ("tokens", 64), 1024, 8, 128),
    _paged("llama3_8b_s2048", ("tokens", 2048), 1024, 8, 128),
)
ONE_HEAD = _paged("one_head", ("tokens", 7), 5, 1, 128)
COPIES = (
    _paged("small", ("copied_pages", 3), 8, 2, 64),
    _paged("llama3_8b_16", ("copied_pages", 16), 1024, 8, 128),
)


def _positions(
    case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None
) -> dict[str, Tensor]:
    """The tokens of a sequence one after the other, from anywhere."""
    batch, seq, length = (case.sizes[name] for name in ("batch", "seq", "length"))
    first = torch.randint(0, max(length - seq, 0) + 1, (batch, 1), generator=generator)
    return {"positions": (first + torch.arange(seq)).clamp(max=max(length - 1, 0)).to(device)}


def _page_numbers(
    case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None
) -> dict[str, Tensor]:
    """Pages that are read, and others that are written."""
    count, copies = case.sizes["pages"], case.sizes["copied_pages"]
    order = torch.randperm(count, generator=generator)
    return {"from_pages": order[:copies].to(device), "to_pages": order[-copies:].flip(0).to(device)}


def _rows_sweep(device: str, narrow: Mapping[str, Sequence[int]]) -> Iterator[Case]:
    """A decode step of one row and of several, a prefill; none where sizes are named."""
    for kv_heads, head_dim in _SHAPES if not narrow else ():
        for batch, seq in ((1, 1), (16, 1), (1, 512)):
            yield _row(f"B{batch} S{seq} ({kv_heads}/{head_dim})", batch, seq, 1024, kv_heads, head_dim)


def _slots_sweep(device: str, narrow: Mapping[str, Sequence[int]]) -> Iterator[Case]:
    """A decode step's tokens, a batch's, a prefill's."""
    for kv_heads, head_dim in _SHAPES if not narrow else ():
        for tokens in (1, 64, 2048):
            name = f"{tokens} tokens ({kv_heads}/{head_dim})"
            yield _paged(name, ("tokens", tokens), 8192 if device == "cuda" else 256, kv_heads, head_dim)


def _copies_sweep(device: str, narrow: Mapping[str, Sequence[int]]) -> Iterator[Case]:
    """One page, and as many as a batch that was forked needs."""
    for kv_heads, head_dim in _SHAPES if not narrow else ():
        for copies in (1, 64):
            name = f"{copies} pages ({kv_heads}/{head_dim})"
            yield _paged(name, ("copied_pages", copies), 8192 if device == "cuda" else 256, kv_heads, head_dim)


# kv.append.contiguous


def append_reference(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, positions: Tensor) -> None:
    """Write each token's key and value into its sequence's row, at its position.

    Shapes: key (B, S, K, D), value (B, S, K, D_v), key_cache (B, L, K, D), value_cache (B, L, K, D_v), positions
    (B, S), (1, S) or (S,). Mutates both caches. Source: static caches of Transformers 5.
    """
    write_rows(key, value, key_cache, value_cache, positions)


APPEND = Operation(
    schema=OperationSchema(
        operation="kv.append.contiguous",
        inputs=(
            *_new("batch", "seq"),
            *_caches(("batch", "length"), mutated=True),
            TensorSchema("positions", ("...", "seq"), INDEX, same_dtype=False, indexes=("length",), distinct=True),
        ),
        outputs=(),
        axes=(
            Axis("batch", scales=True, live=True, apart=True),
            Axis("seq", scales=True, live=True),
            Axis("length", works=False),
            *_HEADS,
        ),
        layouts=CACHE_LAYOUTS,
    ),
    summary="Write new keys and values into the rows of a contiguous cache",
    reference=append_reference,
    fake=_nothing,
    cases=ROWS,
    tolerance=_EXACT,
    tolerance_reason="it only moves numbers",
    check_values=on_demand.checks,
    guard=written.guard,
    note=written.note,
    examples=_positions,
    work=_moved("batch", "seq"),
    sweep=_rows_sweep,
)

# kv.gather.paged


def gather_reference(key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> tuple[Tensor, Tensor]:
    """The keys and values of slots; zeros where a slot is -1.

    Shapes: key_cache (P, N, K, D), value_cache (P, N, K, D_v), slot_mapping (T,) → (T, K, D), (T, K, D_v).
    """
    none = (slot_mapping < 0).view(-1, 1, 1)
    slots = slot_mapping.clamp(min=0)
    found = []
    for cache in (key_cache, value_cache):
        pages, size = max(cache.shape[0], 1), max(cache.shape[1], 1)
        held = cache if cache.shape[0] and cache.shape[1] else cache.new_zeros((pages, size, *cache.shape[2:]))
        found.append(held[slots // size, slots % size].masked_fill(none, 0.0))
    return found[0], found[1]


def _gather_fake(key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> tuple[Tensor, Tensor]:
    keys, values = (cache.new_empty((len(slot_mapping), *cache.shape[2:])) for cache in (key_cache, value_cache))
    return keys, values


GATHER = Operation(
    schema=OperationSchema(
        operation="kv.gather.paged",
        inputs=(*_caches(("pages", "page_size")), _slots(distinct=False)),
        outputs=(
            TensorSchema("keys_out", ("tokens", "kv_heads", "head_dim"), FLOATING),
            TensorSchema("values_out", ("tokens", "kv_heads", "value_dim"), FLOATING),
        ),
        axes=(Axis("tokens", scales=True, live=True, apart=True), _PAGES, *_HEADS),
        layouts=CACHE_LAYOUTS,
    ),
    summary="Read the keys and values of slots of a paged cache",
    reference=gather_reference,
    fake=_gather_fake,
    cases=SLOTS,
    tolerance=_EXACT,
    tolerance_reason="it only moves numbers",
    check_values=on_demand.checks,
    guard=written.guard,
    work=_moved("tokens"),
    sweep=_slots_sweep,
)

# kv.copy_blocks


def copy_blocks_reference(key_cache: Tensor, value_cache: Tensor, from_pages: Tensor, to_pages: Tensor) -> None:
    """Copy pages into others, as if all were read before any is written.

    Shapes: key_cache (P, N, K, D), value_cache (P, N, K, D_v), from_pages and to_pages (M,). Mutates both caches.
    Source: copy_blocks of vLLM, arXiv:2309.06180.
    """
    for cache in (key_cache, value_cache):
        cache[to_pages] = cache[from_pages]


COPY_BLOCKS = Operation(
    schema=OperationSchema(
        operation="kv.copy_blocks",
        inputs=(
            *_caches(("pages", "page_size"), mutated=True),
            TensorSchema("from_pages", ("copied_pages",), _INT64, same_dtype=False, indexes=("pages",)),
            TensorSchema("to_pages", ("copied_pages",), _INT64, same_dtype=False, indexes=("pages",), distinct=True),
        ),
        outputs=(),
        axes=(Axis("copied_pages", scales=True, live=True), Axis("page_size", scales=True), _PAGES, *_HEADS),
        layouts=CACHE_LAYOUTS,
    ),
    summary="Copy pages of a cache into other pages",
    reference=copy_blocks_reference,
    fake=_nothing,
    cases=COPIES,
    tolerance=_EXACT,
    tolerance_reason="it only moves numbers",
    check_values=on_demand.checks,
    guard=written.guard,
    examples=_page_numbers,
    work=_moved("copied_pages", "page_size"),
    sweep=_copies_sweep,
)

# kv.append.quantized

APPEND_QUANTIZED = Operation(
    schema=OperationSchema(
        operation="kv.append.quantized",
        inputs=(
            *_new("tokens"),
            *_caches(("pages", "page_size"), QUANTIZED, mutated=True, same_dtype=False),
            _slots(distinct=True),
            *SCALES,
        ),
        outputs=(),
        axes=(Axis("tokens", scales=True, live=True, apart=True), _PAGES, *_HEADS),
        layouts=CACHE_LAYOUTS,
    ),
    summary="Write new keys and values, divided by scales, into the slots of a cache of float8 or int8",
    reference=append_quantized_reference,
    fake=_nothing,
    cases=(*SLOTS, ONE_HEAD),
    derive=derive_codes,
    derived=DERIVED,
    derived_from=dict.fromkeys(DERIVED, ()),
    judge=ONE_STEP,
    check_values=check_codes,
    guard=guard_codes,
    note=written.note,
    examples=scales,
    work=_moved("tokens"),
    sweep=_slots_sweep,
)

OPERATIONS = (APPEND, GATHER, COPY_BLOCKS, APPEND_QUANTIZED)
