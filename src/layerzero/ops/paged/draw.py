"""Random arguments over a paged cache: shuffled pages, garbage wherever nothing may be read, slots in any order.

Calls of several queries a sequence have chunks, whole prefills, decodes, and none at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from layerzero.core.dtypes import FLOATING, ordered
from layerzero.ops.draw import Draw
from layerzero.ops.paged import tiles
from layerzero.ops.paged.declare import CACHE_LAYOUTS, listed
from layerzero.ops.paged.step import StepMetadata
from layerzero.ops.ragged.declare import scores, starts_of

_HEAD_DIMS = (1, 7, 16, 32, 64, 128)
_HEAD_DIM_WEIGHTS = (1, 1, 2, 2, 4, 3)


def _head_dims(draw: Draw) -> tuple[int, int]:
    head_dim = draw.of(_HEAD_DIMS, _HEAD_DIM_WEIGHTS)
    return head_dim, draw.of(_HEAD_DIMS, _HEAD_DIM_WEIGHTS) if draw.chance(0.1) else head_dim


def caches(
    draw: Draw,
    lead: tuple[int, int],
    kv_heads: int,
    dims: tuple[int, int],
    dtype: torch.dtype,
    *,
    transposed: bool = False,
) -> list[Tensor]:
    """Key and value caches in NHD: apart, side by side in each page or token, padded, or with transposed keys.

    Transposed: each page of the keys the other way round in memory, seen in HND, as vLLM's CPU kernels want them.
    """
    (pages, page_size), (key_dim, value_dim) = lead, dims
    if transposed:
        keys = draw.normal((pages, kv_heads, key_dim, page_size), dtype).permute(0, 3, 1, 2)
        return [keys, draw.normal((pages, kv_heads, page_size, value_dim), dtype).transpose(1, 2)]
    form = draw.of(("apart", "joined", "padded"), (3, 1, 1))
    if form == "joined" and key_dim == value_dim:
        axis = draw.of((1, 2))
        return list(draw.normal((*lead[:axis], 2, *lead[axis:], kv_heads, key_dim), dtype).unbind(axis))
    extra = 1 if form == "padded" else 0
    shapes = [(pages + extra, page_size, kv_heads, dim + 8 * extra) for dim in dims]
    return [draw.normal(shape, dtype)[extra:, ..., :dim] for shape, dim in zip(shapes, dims, strict=True)]


def in_layout(draw: Draw, tensors: list[Tensor], layout: str, *, transposed: bool = False) -> list[Tensor]:
    """Caches in NHD as a layout has them: views, or in memory of that order."""
    if layout == CACHE_LAYOUTS[0]:
        return tensors
    moved = [each.transpose(1, 2) for each in tensors]
    return moved if transposed or draw.chance(0.5) else [each.contiguous() for each in moved]


def tables(draw: Draw, lens: Tensor, blocks: int, page_size: int, shared: int = 0) -> tuple[Tensor, int]:
    """Block tables of shuffled pages, the first ``shared`` the same in all, and pages of the cache.

    What lies beyond a sequence's last page is garbage.
    """
    batch = len(lens)
    pages = batch * blocks + draw.of((1, 2))
    table = torch.randperm(pages, generator=draw.data)[: batch * blocks].view(batch, blocks).to(draw.device)
    table[:, :shared] = table[:1, :shared]
    first = torch.arange(blocks, device=draw.device) * page_size
    return torch.where(first < lens.unsqueeze(1), table, draw.of((0, -1, 2**30))).int(), pages


def fill(draw: Draw, tensors: Sequence[Tensor], table: Tensor, lens: Tensor, dtype: torch.dtype) -> None:
    """Write unit normal numbers wherever a sequence has a token: of those that share it, the last one's."""
    page_size = tensors[0].shape[1]
    positions = torch.arange(table.shape[1] * page_size, device=draw.device)
    owner, position = ((positions < lens.unsqueeze(1)).nonzero()).unbind(1)
    places = table[owner, position // page_size].long(), position % page_size
    slots, each = places[0] * page_size + places[1], torch.arange(len(owner), device=draw.device)
    # torch writes numbers for one place in any order: a call that was drawn again had others
    last = torch.zeros(len(tensors[0]) * page_size, dtype=torch.int64, device=draw.device)
    last.scatter_reduce_(0, slots, each, "amax")
    for cache in tensors:
        cache[places] = draw.normal((len(owner), *cache.shape[2:]), dtype)[last[slots]]


def _one_token(
    draw: Draw, dtype: torch.dtype, most: Callable[[int, int], Sequence[int]] | None = None
) -> dict[str, Any]:
    """Draw a call of one token a sequence.

    ``most`` draws the most tokens of each sequence, given how many sequences there are and the most that any may have.
    """
    batch = draw.of((0, 1, 2, 3, 5), (1, 10, 20, 10, 4))
    kv_heads = draw.of((1, 2, 3))
    heads = kv_heads * draw.of((1, 2, 4), (6, 2, 2))
    dims = _head_dims(draw)
    page_size = draw.of((1, 3, 8, 16, 32), (1, 1, 3, 8, 3))
    transposed = draw.chance(0.15)  # as vLLM's CPU kernels want them, which know fewer sizes
    if transposed:
        dims, page_size = (draw.of((32, 64, 128)),) * 2, draw.of((16, 32, 48, 64))
    blocks = draw.of((1, 2, 3, 7), (2, 3, 3, 2)) if not draw.chance(0.05) else -(-2100 // page_size)
    capacity = blocks * page_size
    least = 0 if draw.chance(0.1) else 1
    bound = draw.of((None, capacity, draw.stream.randint(1, capacity), 2 * capacity), (7, 1, 1, 1))
    longest = capacity if bound is None else min(bound, capacity)
    lens = (draw.uniform((batch,), torch.float32).cpu() * (longest - least + 1)).int().clamp_(max=longest - least)
    lens = (lens + least).to(draw.device)
    if most is not None:
        lens = lens.minimum(lens.new_tensor(most(batch, longest)))
    table, pages = tables(draw, lens, blocks, page_size)
    pair = [
        each.fill_(torch.nan) for each in caches(draw, (pages, page_size), kv_heads, dims, dtype, transposed=transposed)
    ]
    fill(draw, pair, table, lens, dtype)
    layout = draw.of(CACHE_LAYOUTS)
    keys, values = in_layout(draw, pair, layout, transposed=transposed)
    arguments: dict[str, Any] = {
        "query": draw.laid_out(draw.normal((batch, 1, heads, dims[0]), dtype)),
        "key_cache": keys,
        "value_cache": values,
        "block_tables": table,
        "context_lens": lens,
    }
    if layout != CACHE_LAYOUTS[0] or draw.chance(0.3):
        arguments["layout"] = layout
    arguments |= scores(draw, dims[0])
    if bound is not None:
        arguments["max_context_len"] = bound
    if draw.chance(0.4):
        arguments["step"] = StepMetadata(table, lens, max_context_len=bound, capturable=draw.chance(0.5))
    return draw.poison(arguments, ("query",))


def quantize(draw: Draw, arguments: dict[str, Any]) -> dict[str, Any]:
    """The same call with caches of float8 or int8, and scales of any shape."""
    dtype = draw.of((torch.float8_e4m3fn, torch.float8_e5m2, torch.int8))
    layout = arguments.get("layout", CACHE_LAYOUTS[0])
    forms = ("one", "head", "token")
    form = draw.of(forms)
    arguments.pop("decodes", None)
    for name in ("key", "value"):
        form = draw.of(forms) if draw.chance(0.1) else form
        cache = arguments[f"{name}_cache"]
        pages = cache if layout == CACHE_LAYOUTS[0] else cache.transpose(1, 2)
        shape = {"one": (), "head": pages.shape[2:3], "token": pages.shape[:3]}[form]
        scale = 0.03 + 0.03 * draw.uniform(shape, torch.float32)
        scale = scale.half() if form == "token" and draw.chance(0.3) else scale
        codes = pages / (scale.unsqueeze(-1) if scale.ndim else scale)
        codes = codes if dtype.is_floating_point else codes.nan_to_num(127.0).round().clamp(-127, 127)
        codes = codes.to(dtype)
        arguments[f"{name}_cache"] = codes if layout == CACHE_LAYOUTS[0] else codes.transpose(1, 2)
        arguments[f"{name}_scale"] = scale
    return arguments


def batched_attention(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call of ``lz.batched_attention``: rows of one tensor, as a list of caches or as they are."""
    batch, capacity = draw.of((1, 2, 3, 5)), draw.of((1, 3, 17, 40))
    kv_heads, dims = draw.of((1, 2, 3)), _head_dims(draw)
    lens = draw.integers((batch,), capacity, draw.of((torch.int32, torch.int64)))
    layout, held = draw.of(CACHE_LAYOUTS), draw.of((dtype, *ordered(FLOATING)), (12, 1, 1, 1, 1))
    beyond = torch.arange(capacity, device=draw.device) >= lens.unsqueeze(1)
    pair = caches(draw, (batch, capacity), kv_heads, dims, held)
    keys, values = in_layout(draw, [each.masked_fill_(beyond[..., None, None], torch.nan) for each in pair], layout)
    heads = kv_heads * draw.of((1, 2, 4))
    arguments: dict[str, Any] = {
        "query": draw.laid_out(draw.normal((batch, 1, heads, dims[0]), dtype)),
        "key_cache": keys,
        "value_cache": values,
        "kv_lens": lens,
        "layout": layout,
    }
    arguments |= scores(draw, dims[0])
    return arguments | draw.maybe(0.6, cache_list=lambda: listed(arguments))


def _convert(draw: Draw, arguments: dict[str, Any]) -> dict[str, Any]:
    """The same call with caches of another floating dtype; how they lie in memory stays."""
    dtypes = [each for each in ordered(FLOATING) if each is not arguments["query"].dtype]
    dtype = draw.of(dtypes)
    arguments.pop("decodes", None)
    return arguments | {name: arguments[name].to(dtype) for name in ("key_cache", "value_cache")}


def _tile(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same call with caches in tiles, where these hold heads and pages of its sizes; one in no layout."""
    caches = [arguments[name] for name in ("key_cache", "value_cache")]
    if arguments.get("layout", CACHE_LAYOUTS[0]) != CACHE_LAYOUTS[0]:
        caches = [each.transpose(1, 2) for each in caches]
    keys, values = caches
    if keys.shape != values.shape or keys.shape[1] % tiles.LANES or keys.shape[-1] % tiles.LANES:
        return arguments
    arguments.pop("layout", None)
    return arguments | dict(zip(("key_cache", "value_cache"), tiles.to_tiles(keys, values), strict=True))


def slots(draw: Draw, capacity: int, tokens: int) -> Tensor:
    """Slots in any order, none of them twice; now and then some tokens have none."""
    found = torch.randperm(capacity, generator=draw.data)[:tokens]
    if draw.chance(0.3):
        found = found.masked_fill(torch.rand(tokens, generator=draw.data) < draw.of((0.3, 1.1)), -1)
    return found.to(draw.device)


def append_paged_kv_(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call of ``lz.append_paged_kv_``."""
    kv_heads, page_size = draw.of((1, 2, 3, 8)), draw.of((1, 3, 8, 16, 32))
    dims, pages = _head_dims(draw), draw.of((1, 2, 9))
    transposed = draw.chance(0.15)
    if transposed:
        dims, page_size = (draw.of((32, 64, 128)),) * 2, draw.of((16, 32, 48))
    capacity = pages * page_size
    tokens = min(draw.of((0, 1, 2, 3, 17), (1, 6, 6, 6, 4)), capacity)
    places = slots(draw, capacity, tokens)
    layout, pair = (
        draw.of(CACHE_LAYOUTS),
        caches(draw, (pages, page_size), kv_heads, dims, dtype, transposed=transposed),
    )
    keys, values = in_layout(draw, pair, layout, transposed=transposed)
    arguments = {
        "key": draw.laid_out(draw.normal((tokens, kv_heads, dims[0]), dtype)),
        "value": draw.laid_out(draw.normal((tokens, kv_heads, dims[1]), dtype)),
        "key_cache": keys,
        "value_cache": values,
        "slot_mapping": draw.laid_out(places, expand=False),
        "layout": layout,
    }
    return _tile(arguments) if draw.chance(0.15) else arguments


def _several_tokens(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call with ``cu_seqlens_q``, over the cache of a decode's call.

    How many queries a sequence has is no data: the same call with other data has as many. So a whole prefill is a
    sequence that is at most as long as its queries, rather than one whose queries are as many as its tokens.
    """
    decodes, lengths = 0, list[int]()

    def most(batch: int, longest: int) -> list[int]:
        nonlocal decodes
        decodes = draw.stream.randint(1, batch) if batch and draw.chance(0.5) else 0
        tokens = [longest] * batch
        for number in range(batch):
            queries = 1 if number < decodes else draw.of((0, 1, 2, 5, None), (2, 3, 3, 3, 5))
            if queries is None:
                tokens[number] = queries = draw.stream.randint(1, longest)
            lengths.append(queries)
        return tokens

    arguments = _one_token(draw, dtype, most)
    table, lens, query = arguments["block_tables"], arguments["context_lens"], arguments["query"]
    starts = draw.laid_out(starts_of(draw, lengths), expand=False)
    arguments |= {
        "query": draw.laid_out(draw.normal((sum(lengths), *query.shape[2:]), dtype)),
        "cu_seqlens_q": starts,
        "causal": draw.chance(0.7),
    }
    if decodes:
        arguments["decodes"] = decodes
    arguments |= draw.maybe(0.6, max_seqlen_q=lambda: max(*lengths, 1, 1) + draw.of((0, 3), (4, 1)))
    heads = query.shape[-2]
    arguments |= draw.maybe(0.08, sinks=lambda: draw.laid_out(draw.normal((heads,), draw.of((dtype, torch.float32)))))
    if draw.chance(0.12):
        slopes = (heads,) if draw.chance(0.6) else (len(lengths), heads)
        arguments["alibi_slopes"] = draw.laid_out(draw.uniform(slopes, draw.of((dtype, torch.float32))) / 2)
    if draw.chance(0.15):
        arguments |= {"causal": True, "tree_mask": _trees(draw, lengths)}
    if "step" in arguments:
        bound = arguments.get("max_context_len")
        capturable = draw.chance(0.5)
        arguments["step"] = StepMetadata(table, lens, cu_seqlens_q=starts, max_context_len=bound, capturable=capturable)
    return arguments


def _trees(draw: Draw, lengths: list[int]) -> Tensor:
    """Drafts whose parents are any earlier token or none; what lies beyond a sequence's own columns is garbage."""
    columns = draw.of((0, 3, max([*lengths, 1])), (1, 3, 3))
    mask = torch.full((sum(lengths), columns), draw.chance(0.5))
    first = 0
    for count in lengths:
        if count <= columns:
            mask[first : first + count, :count] = False
        for place in range(count if count <= columns else 0):
            parent = draw.stream.randint(-1, place - 1)
            if parent >= 0:
                mask[first + place] = mask[first + parent]
            mask[first + place, place] = True
        first += count
    return mask.to(draw.device)


def paged_attention(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call of ``lz.paged_attention``: one token a sequence, or several."""
    arguments = (_several_tokens if draw.chance(0.5) else _one_token)(draw, dtype)
    if "cu_seqlens_q" in arguments and "tree_mask" not in arguments and draw.chance(0.1):
        return _tile(arguments)
    if draw.chance(0.15):
        arguments = quantize(draw, arguments)
        return arguments | draw.maybe(0.3, narrow_query=lambda: True)
    return _convert(draw, arguments) if draw.chance(0.1) else arguments
