"""Paged caches in tiles of AMX: what they hold, how they are written and read, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

import layerzero as lz
from drawing import examples
from layerzero.core.errors import InvalidCallError
from layerzero.ops.paged import tiles

PAGE, HEADS, WIDTH = 32, 2, 64

pytestmark = pytest.mark.filterwarnings("ignore::layerzero.core.errors.LayerZeroFallbackWarning")


def caches(pages: int, page: int = PAGE, heads: int = HEADS, width: int = WIDTH, dtype=torch.float32):
    return tiles.to_tiles(*torch.zeros(2, pages, page, heads, width, dtype=dtype))


def call(dtype=torch.float32, page: int = PAGE, width: int = WIDTH):
    """Two sequences of 40 and 30 tokens in a cache of tiles, whose last 10 and 1 have queries; and its tokens."""
    blocks = -(-40 // page)
    pages = torch.randperm(6)[: 2 * blocks].view(2, blocks).int()
    lens, starts = torch.tensor([40, 30], dtype=torch.int32), torch.tensor([0, 10, 11], dtype=torch.int32)
    new = [torch.randn(70, HEADS, width, dtype=dtype) for _ in range(2)]
    places = [torch.arange(count) for count in (40, 30)]
    slots = torch.cat([row.long()[each // page] * page + each % page for row, each in zip(pages, places, strict=True)])
    written = caches(6, page, width=width, dtype=dtype)
    lz.append_paged_kv_(*new, *written, slots)
    query = torch.randn(11, 4, width, dtype=dtype)
    return (query, *written, pages, lens), {"cu_seqlens_q": starts}, (new, slots)


@settings(max_examples=examples(20), deadline=None)
@given(pages=some.integers(0, 3), page=some.sampled_from([16, 32, 48]), heads=some.integers(1, 3))
def test_tiles_hold_the_numbers_that_pages_do(pages, page, heads):
    plain = torch.randn(2, pages, page, heads, 32)
    keys, values = tiles.to_tiles(*plain)
    assert torch.equal(torch.stack(tiles.of_tiles(keys, values)), plain)
    for token, width in ((0, 0), (5, 7), (page - 1, 31)) if pages else ():
        assert torch.equal(keys[:, :, token // 16, width // 2, token % 16, width % 2], plain[0][:, token, :, width])
        assert torch.equal(values[:, :, width // 16, token // 2, width % 16, token % 2], plain[1][:, token, :, width])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_is_read_as_from_pages_in_a_layout(dtype):
    given_, named, (new, slots) = call(dtype)
    query, keys, values, tables, lens = given_
    flat = torch.zeros(2, 6 * PAGE, HEADS, WIDTH, dtype=dtype)
    for cache, tokens in zip(flat, new, strict=True):
        cache[slots] = tokens
    plain = flat.view(2, 6, PAGE, HEADS, WIDTH)
    assert torch.equal(torch.stack(tiles.of_tiles(keys, values)), plain)
    more = {"softcap": 20.0, "window": (12, 0), "return_lse": True, **named}
    found = lz.paged_attention(*given_, **more)
    wanted = lz.paged_attention(query.double(), *plain.double(), tables, lens, **more)
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(
            got.double(), want.double(), atol=1e-2 if dtype is torch.bfloat16 else 1e-5, rtol=1e-2
        )


def test_a_token_without_a_slot_is_not_written_and_garbage_in_a_table_is_not_read():
    (query, keys, values, tables, lens), named, (new, slots) = call()
    wanted, before = lz.paged_attention(query, keys, values, tables, lens, **named), keys.clone()
    lz.append_paged_kv_(*new, keys, values, torch.full_like(slots, -1))
    assert torch.equal(keys, before)
    beyond = torch.cat([tables, torch.full((2, 1), 2**30, dtype=torch.int32)], 1)
    torch.testing.assert_close(lz.paged_attention(query, keys, values, beyond, lens, **named), wanted)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (lambda given: {"key_cache": given["key_cache"][:, :, :1]}, "value_cache: wanted tiles"),
        (lambda given: {"key_cache": given["key_cache"][..., :1]}, "key_cache: wanted tiles"),
        (lambda given: {"value_cache": given["value_cache"].flatten(2, 3)}, "value_cache: wanted tiles"),
        (lambda given: {"query": given["query"][..., :40]}, "key_cache: wanted tiles"),
        (lambda given: {"query": given["query"][:, :3]}, "multiple of kv heads"),
        (lambda _: {"cu_seqlens_q": None}, "cu_seqlens_q: wanted starts"),
        (lambda _: {"layout": "HND"}, "layout: wanted none with tiles"),
        (lambda _: {"tree_mask": torch.ones(11, 1, dtype=torch.bool)}, "tree_mask: wanted None"),
        (lambda _: {"key_scale": torch.ones(())}, "key_scale: wanted None"),
        (lambda _: {"narrow_query": True}, "narrow_query: wanted False"),
        (lambda given: {"value_cache": given["value_cache"].double()}, "value_cache"),
    ],
)
def test_what_is_no_call_over_tiles_is_named(changed, said):
    tensors, named, _ = call()
    names = ("query", "key_cache", "value_cache", "block_tables", "context_lens")
    given_ = dict(zip(names, tensors, strict=True)) | named
    with pytest.raises(InvalidCallError, match=said):
        lz.paged_attention(**given_ | changed(given_))


def test_operators_pass_torchs_own_check_over_tiles():
    given_, named, (new, slots) = call()
    torch.library.opcheck(torch.ops.layerzero.paged_attention.default, given_, named)
    torch.library.opcheck(torch.ops.layerzero.append_paged_kv_.default, (*new, *given_[1:3], slots))


def test_tokens_without_heads_write_nothing():
    new = torch.zeros(2, 0, WIDTH)
    lz.append_paged_kv_(new, new, *caches(2, heads=0), torch.tensor([0, 1]))


def test_slots_beyond_tiles_and_shared_memory_are_refused():
    keys, values = caches(2)
    new = torch.randn(2, HEADS, WIDTH)
    with pytest.raises(InvalidCallError, match="slot_mapping"):
        lz.append_paged_kv_(new, new, keys, values, torch.tensor([0, 2 * PAGE]))
    with pytest.raises(InvalidCallError, match="value_cache"):
        lz.append_paged_kv_(new, new, keys, keys.view(values.shape), torch.tensor([0, 1]))


def test_memory_that_is_written_in_a_layout_is_not_read_as_tiles():
    (query, _, _, tables, lens), named, _ = call()
    cache = lz.PagedCache.allocate(6, PAGE, HEADS, WIDTH, layout="HND", dtype=torch.float32)
    with pytest.raises(InvalidCallError, match="wanted layout='HND', which its memory is written in"):
        lz.paged_attention(query, *tiles.as_tiles(cache.keys, cache.values), tables, lens, **named)


def test_tiles_of_amx_are_multiplied_by_vllm_where_a_cpu_has_them():
    tensors, named, (new, slots) = call(torch.bfloat16)
    report = lz.explain("paged_attention", *tensors, **named)
    codes = {each.code for each in report.failures.get("vllm.cpu.paged_tiles", ())}
    Code = lz.ReasonCode
    if codes & {Code.NOT_INSTALLED, Code.VERSION_UNSUPPORTED, Code.DEVICE_CAPABILITY_UNSUPPORTED}:
        pytest.skip(str(report.failures["vllm.cpu.paged_tiles"][0]))
    assert report.kernel_id == "vllm.cpu.paged_tiles"
    appending = lz.explain("append_paged_kv_", *new, *tensors[1:3], slots)
    assert appending.kernel_id == "vllm.cpu.append_tiles"
    half = call(torch.bfloat16, 16)
    assert lz.explain("paged_attention", *half[0], **half[1]).kernel_id == "torch.tiles_sdpa"


def test_vectors_do_not_read_tiles_where_the_system_lends_none(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: False, raising=False)
    (query, keys, values, tables, lens), named, _ = call(torch.bfloat16)
    given_ = query, *tiles.of_tiles(keys, values), tables, lens
    wanted = lz.paged_attention(*(each.double() if each.is_floating_point() else each for each in given_), **named)
    got = lz.paged_attention(query, keys, values, tables, lens, **named)
    torch.testing.assert_close(got.double(), wanted, atol=1e-2, rtol=1e-2)
