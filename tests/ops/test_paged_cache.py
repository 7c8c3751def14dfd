"""A cache that knows its layout: calls that name another one are errors, as long as it lives."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch

import layerzero as lz
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.functions import CALLS
from layerzero.ops import OPERATION_ALIASES
from layerzero.ops.paged import layout_record
from paged_calls import decoding, paged


def step_of(length=3):
    tables = torch.arange(2, dtype=torch.int32).view(1, 2)
    return tables, torch.tensor([length], dtype=torch.int32)


def written_cache(layout, **more):
    cache = lz.PagedCache.allocate(4, 16, 16, 8, layout=layout, dtype=torch.float32, **more)
    new = torch.randn(3, 16, 8), torch.randn(3, 16, 8 if not more else more["value_dim"])
    lz.append_paged_kv_(*new, cache.keys, cache.values, torch.arange(3), layout=cache.layout)
    return cache, new


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_what_was_written_is_read(layout):
    cache, (key, value) = written_cache(layout)
    query = torch.randn(1, 1, 16, 8)
    got = lz.paged_attention(query, cache.keys, cache.values, *step_of(), layout=cache.layout)
    want = lz.attention(query, key[None], value[None], causal=False, layout="BSHD")
    torch.testing.assert_close(got, want)
    assert (cache.page_size, cache.kv_heads, cache.layout) == (16, 16, layout)
    assert repr(cache) == f"PagedCache(4 pages of 16 tokens, 16 heads, {layout}, torch.float32)"
    assert written_cache(layout, value_dim=4)[0].values.shape[-1] == 4


@pytest.mark.parametrize("debug", [False, True])
def test_another_layout_is_refused_for_reading_and_for_writing(debug):
    cache, (key, value) = written_cache("NHD")
    wanted = r"\[KV_CACHE_LAYOUT_MISMATCH\] .*key_cache: wanted layout='NHD', which its memory is written in, got 'HND'"
    with lz.scope(debug=debug):
        with pytest.raises(lz.InvalidCallError, match=wanted):
            lz.paged_attention(torch.randn(1, 1, 16, 8), cache.keys, cache.values, *step_of(), layout="HND")
        before = cache.keys.clone()
        with pytest.raises(lz.InvalidCallError, match=wanted):
            lz.append_paged_kv_(key, value, cache.keys, cache.values, torch.arange(3), layout="HND")
        assert torch.equal(cache.keys, before)


def test_debug_mode_sees_it_where_the_call_was_chosen_before():
    other = torch.zeros(4, 16, 16, 8), torch.zeros(4, 16, 16, 8)  # nobody says how these are written
    query = torch.randn(1, 1, 16, 8)
    with lz.scope(debug=True):
        lz.paged_attention(query, *other, *step_of(), layout="HND")
        cache = lz.PagedCache(*other, layout="NHD")
        with pytest.raises(lz.InvalidCallError, match="wanted layout='NHD'"):
            lz.paged_attention(query, cache.keys, cache.values, *step_of(), layout="HND")


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_plain_tensors_are_read_as_they_were_written(layout):
    other = "HND" if layout == "NHD" else "NHD"
    key, value, query = torch.randn(3, 16, 8), torch.randn(3, 16, 8), torch.randn(1, 1, 16, 8)
    caches = torch.zeros(2, 4, 16, 16, 8)
    lz.paged_attention(query, *torch.zeros_like(caches), *step_of(), layout=other)  # chosen before anything is written
    lz.explain(lz.append_paged_kv_, key, value, *caches, torch.arange(3), layout=other)  # runs nothing
    slots = torch.arange(3)
    ENGINE.bump()  # a first call, whatever ran in this process before
    lz.append_paged_kv_(key, value, *caches, slots, layout=layout)
    wanted = f"key_cache: wanted layout='{layout}', which its memory is written in, got '{other}'; pass layout="
    with pytest.raises(lz.InvalidCallError, match=wanted) as raised:
        lz.paged_attention(query, *caches, *step_of(), layout=other)
    assert raised.value.code is lz.ReasonCode.KV_CACHE_LAYOUT_MISMATCH
    with pytest.raises(lz.InvalidCallError, match=wanted):
        lz.append_paged_kv_(key, value, *caches, slots, layout=other)
    with pytest.raises(lz.InvalidCallError, match="wanted layout="):
        lz.PagedCache(*caches, layout=other)
    same_numbers = [cache.transpose(1, 2) for cache in caches]  # a view of the same memory in the other order
    got = lz.paged_attention(query, *same_numbers, *step_of(), layout=other)
    want = lz.attention(query, key[None], value[None], causal=False, layout="BSHD")
    torch.testing.assert_close(got, want)


def test_memory_that_was_given_back_is_written_anew():
    cache = torch.zeros(2, 4, 16, 16, 8)
    address = cache[0].data_ptr()
    ENGINE.bump()
    lz.append_paged_kv_(torch.ones(3, 16, 8), torch.ones(3, 16, 8), *cache, torch.arange(3), layout="NHD")
    assert layout_record._WRITTEN[address].layout == "NHD"
    del cache
    assert layout_record._WRITTEN[address].storage.expired()
    new = torch.zeros(2, 4, 16, 16, 8)
    layout_record._WRITTEN[new[0].data_ptr()] = layout_record._WRITTEN.pop(
        address
    )  # as where the allocator gives the same address
    assert not layout_record.problems({"key_cache": new[0]}, "HND")


def test_vllm_memory_says_how_it_is_written_and_read():
    cache = lz.KVCache(1, 2, 32, max_sequences=1, max_length=16, layout="VLLM", dtype=torch.float32)
    layer = cache.layer(0)
    wanted = "layer.append writes it, layer.gather reads it, layer.converted.. copies it into another layout"
    with pytest.raises(lz.InvalidCallError, match=wanted):
        lz.gather_paged_kv(layer, slot_mapping=torch.arange(2))
    with pytest.raises(lz.InvalidCallError, match=wanted):
        lz.gather_paged_kv(layer.values, layer.values, torch.arange(2))


@pytest.fixture
def undeclared(monkeypatch):
    """As in a process in which nobody has said how a cache is written."""
    monkeypatch.setattr(layout_record, "_DECLARED", set())
    monkeypatch.setattr(layout_record, "_UNGUARDED", set())
    ENGINE.bump()
    yield
    monkeypatch.undo()
    ENGINE.bump()


def kept(function):
    return [plan for _, plan in CALLS[function].dispatcher.cache.plans()]


@pytest.mark.usefixtures("path", "undeclared")
@pytest.mark.parametrize("mine", ["NHD", "HND"])
def test_a_kept_plan_notices_a_cache_that_is_written_otherwise(mine):
    (other,) = {"NHD", "HND"} - {mine}
    keys, values = torch.zeros(4, 16, 16, 8), torch.zeros(4, 16, 16, 8)
    alike = torch.zeros(4, 16, 16, 8), torch.zeros(4, 16, 16, 8)
    query, new = torch.randn(1, 1, 16, 8), torch.randn(3, 16, 8)
    step, slots = step_of(), torch.arange(3)

    def read(layout, caches=(keys, values)):
        return lz.paged_attention(query, *caches, *step, layout=layout)

    def write(layout, caches=(keys, values)):
        lz.append_paged_kv_(new, new, *caches, slots, layout=layout)

    for call in (read, write) * 2:
        call(other, alike)
    cache = lz.PagedCache(keys, values, layout=mine)
    for call in (read, write) * 2:
        call(mine)
        with pytest.raises(lz.InvalidCallError, match=f"KV_CACHE_LAYOUT_MISMATCH.*wanted layout='{mine}'"):
            call(other)
    del cache
    gc.collect()
    for call in (read, write) * 2:
        call(other)


@pytest.mark.usefixtures("undeclared")
def test_a_hit_looks_at_nothing_where_all_caches_are_written_in_its_layout():
    cache, _ = written_cache("NHD")
    for _ in range(2):
        lz.paged_attention(torch.randn(1, 1, 16, 8), cache.keys, cache.values, *step_of(), layout="NHD")
    sources = [plan.source for name in ("paged_attention", "append_paged_kv_") for plan in kept(name)]
    assert len(sources) == 2
    assert not any("guard(" in source for source in sources)
    other, _ = written_cache("HND")
    assert not kept("paged_attention")
    lz.paged_attention(torch.randn(1, 1, 16, 8), other.keys, other.values, *step_of(), layout="HND")
    (plan,) = kept("paged_attention")
    assert "guard(" in plan.source


def test_what_is_gone_says_nothing_and_two_must_agree():
    cache, _ = written_cache("NHD")
    keys, values = cache.keys, cache.values
    with pytest.raises(lz.InvalidCallError, match=r"\[KV_CACHE_LAYOUT_MISMATCH\] PagedCache: keys"):
        lz.PagedCache(keys, values, "HND")
    again = lz.PagedCache(keys, values, "NHD")
    del cache
    gc.collect()
    with pytest.raises(lz.InvalidCallError, match="wanted layout='NHD'"):
        lz.PagedCache(keys, values, "HND")
    del again
    gc.collect()
    assert not layout_record._LAYOUTS
    lz.PagedCache(keys, values, "HND")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layout": "DNH"}, "layout: wanted NHD or HND, got 'DNH'"),
        ({"keys": torch.zeros(2, 2)}, r"keys: wanted a floating tensor of pages, .* got torch.float32 \(2, 2\)"),
        ({"values": None}, "values: wanted a floating tensor of pages, .* got NoneType"),
        ({"values": torch.zeros(4, 16, 2, 8)}, r"values: wanted \(4, 16, 16\) on cpu as keys, got \(4, 16, 2\)"),
    ],
)
def test_what_is_no_cache_is_refused(change, message):
    given = {"keys": torch.zeros(4, 16, 16, 8), "values": torch.zeros(4, 16, 16, 8), "layout": "NHD"} | change
    with pytest.raises(lz.InvalidCallError, match=message):
        lz.PagedCache(**given)


def coded(key_scale, value_scale, layout="NHD"):
    """A call over two sequences of a cache of int8, and the same over the numbers that its codes stand for."""
    codes = [torch.randint(-127, 128, (4, 8, 2, 32), dtype=torch.int8) for _ in "kv"]
    factors = [each.float().unsqueeze(-1) if each.ndim else each for each in (key_scale, value_scale)]
    wide = [each * factor for each, factor in zip(codes, factors, strict=True)]
    held = codes if layout == "NHD" else [each.transpose(1, 2) for each in codes]
    tables, lens = torch.tensor([[0, 1], [3, 2]], dtype=torch.int32), torch.tensor([9, 16], dtype=torch.int32)
    query, rest = torch.randn(2, 1, 4, 32), {"block_tables": tables, "context_lens": lens}
    scales = {"key_scale": key_scale, "value_scale": value_scale, "layout": layout}
    plain = dict(zip(("key_cache", "value_cache"), wide, strict=True)) | rest
    return {"query": query, "key_cache": held[0], "value_cache": held[1], **rest, **scales}, {"query": query, **plain}


@pytest.mark.parametrize("kernel", ["torch.quantized_gather", "reference.attention.quantized.decode.paged"])
@pytest.mark.parametrize("shapes", list(itertools.permutations([(), (2,), (4, 8, 2)], 2)), ids=str)
def test_scales_of_keys_and_of_values_may_have_other_shapes(kernel, shapes):
    """Torch's kernels took the shape of the keys' for both, and raised."""
    given, plain = coded(*(0.01 + 0.01 * torch.rand(shape) for shape in shapes))
    with lz.scope(locks={"attention.quantized.decode.paged": kernel}):
        torch.testing.assert_close(lz.paged_attention(**given), lz.paged_attention(**plain), rtol=1e-4, atol=1e-5)
    assert lz.facts("paged_attention", **given)["scale_axes"] == max(map(len, shapes))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_scales_of_tokens_may_be_float16(layout):
    scales = [0.01 + 0.01 * torch.rand(4, 8, 2).half() for _ in "kv"]
    given, plain = coded(*scales, layout)
    torch.testing.assert_close(lz.paged_attention(**given), lz.paged_attention(**plain), rtol=1e-4, atol=1e-5)
    new, slots = [torch.randn(3, 2, 32) for _ in "kv"], torch.tensor([5, -1, 30])
    caches = []
    for dtype in (torch.float16, torch.float32):
        made = [each.clone() for each in (given["key_cache"], given["value_cache"])]
        lz.append_quantized_kv_(*new, *made, slots, *(each.to(dtype) for each in scales), layout=layout)
        caches.append(torch.stack(made))
    assert torch.equal(*caches)
    assert not torch.equal(caches[0], torch.stack([given["key_cache"], given["value_cache"]]))


@pytest.mark.parametrize("shape", [(), (2,)], ids=str)
def test_other_scales_in_float16_are_refused(shape):
    given, _ = coded(torch.ones(shape), torch.ones(shape).half())
    wanted = "value_scale: wanted dtype float32 unless each token has a scale of its own, got float16"
    with pytest.raises(lz.InvalidCallError, match=wanted):
        lz.paged_attention(**given)


@pytest.mark.parametrize(("dtype", "denied"), [("int8", (False, True)), ("float32", (True, False))])
def test_rules_name_the_dtype_of_a_cache(dtype, denied):
    query, cache = torch.randn(1, 1, 4, 16), torch.randn(3, 4, 2, 16)
    tables, lens = torch.zeros(1, 2, dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
    codes, scale = (20 * cache).to(torch.int8), torch.tensor(0.05)
    rule = {"match": {"operation": "attention.*", "kv_cache_dtype": dtype}, "deny": ["torch"]}
    with lz.scope(rules=[rule]):
        plain = lz.explain("paged_attention", query, cache, cache, tables, lens)
        coded = lz.explain("paged_attention", query, codes, codes, tables, lens, key_scale=scale, value_scale=scale)
    for report, wanted in zip((plain, coded), denied, strict=True):
        gathers = ("torch.paged_gather", "torch.quantized_gather")
        of_torch = [each for each in report.candidates if each.kernel.id in gathers]
        assert [any(reason.code == "POLICY_DENIED" for reason in each.reasons) for each in of_torch] == [wanted]


@pytest.mark.parametrize(
    ("alias", "operations"),
    [
        ("attention.mla.prefill", {"attention.mla.decode.paged"}),
        ("attention.sparse.variable_block", {"attention.sparse.variable"}),
        ("attention.pod.paged", {"attention.standard.mixed.paged", "attention.gqa.mixed.paged"}),
        ("kv.append", {"kv.append.contiguous"}),
    ],
)
def test_operations_go_by_the_names_of_the_specification(alias, operations):
    assert set(OPERATION_ALIASES[alias][0]) == operations
    wanted = {kernel.id for name in operations for kernel in lz.list_kernels(name)}
    assert {kernel.id for kernel in lz.list_kernels(alias)} == wanted


@pytest.mark.parametrize("layout", ["NHD", "HND", "VLLM_CPU"])
def test_every_layout_has_a_constructor_and_reads_what_is_written(layout):
    """Both kinds of caches, in each layout that calls read: the same tokens attend to the same result."""
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(20, heads, 32, generator=generator) for heads in (4, 2, 2))
    plain = torch.nn.functional.scaled_dot_product_attention(
        *(each.transpose(0, 1) for each in (query[-1:], key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)))
    ).transpose(0, 1)
    cache = lz.KVCache(1, 2, 32, pages=4, page_size=16, dtype=torch.float32, layout=layout)
    own = lz.PagedCache.allocate(4, 16, 2, 32, dtype=torch.float32, layout=layout)
    assert own.keys.stride() == cache.layers[0].keys.stride()
    name = cache.allocate()
    cache.writing([name], [19]).commit()
    with cache.writing([name]) as step:
        slots = torch.tensor([cache.table(name)[at // 16] * 16 + at % 16 for at in range(20)])
        for pages in (own, cache.layers[0]):
            lz.append_paged_kv_(key, value, pages, slot_mapping=slots)
            found = lz.paged_attention(
                query[-1:].unsqueeze(1), pages, block_tables=step.block_tables, context_lens=step.context_lens
            )
            torch.testing.assert_close(found[0], plain)


@pytest.mark.parametrize(("scales", "shape"), [("tensor", ()), ("head", (2,)), ("token", (4, 16, 2))])
def test_caches_of_codes_have_scales_from_the_beginning(scales, shape):
    cache = lz.PagedCache.allocate(4, 16, 2, 32, dtype=torch.int8, scales=scales)
    assert cache.key_scale.shape == cache.value_scale.shape == shape


@pytest.mark.parametrize("axis", [0, 1])
def test_keys_and_values_of_one_tensor_are_a_cache(axis):
    joined = torch.zeros((2, 4, 16, 2, 32) if axis == 0 else (4, 2, 16, 2, 32))
    cache = lz.PagedCache.of_joined(joined, axis)
    cache.values[3, 1] = 5.0
    assert float(joined.select(axis, 1)[3, 1, 0, 0]) == 5.0
    assert (cache.page_size, cache.kv_heads) == (16, 2)


def test_what_is_no_layout_and_no_scale_is_refused_by_name():
    for call, said in (
        (
            lambda: lz.PagedCache.allocate(4, 16, 2, 32, layout="VLLM"),
            "layout: wanted NHD, HND or VLLM_CPU, got 'VLLM'",
        ),
        (lambda: lz.PagedCache.allocate(4, 16, 2, 32, scales="head"), "scales: wanted None for a cache of bfloat16"),
        (lambda: lz.PagedCache.allocate(4, 16, 2, 32, dtype=torch.int8), "scales: wanted tensor, head or token"),
        (lambda: lz.PagedCache.of_joined(torch.zeros(3, 4, 16, 2, 32), 0), "joined: wanted a tensor of 5 axes"),
        (lambda: lz.KVCache(1, 2, 32, pages=4, layout="NDH"), "layout: wanted NHD or HND or VLLM or VLLM_CPU"),
    ):
        with pytest.raises(lz.InvalidCallError, match=said):
            call()


FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize(("dtype", "held"), list(itertools.permutations(FLOATS, 2)))
@pytest.mark.parametrize("several", [False, True])
def test_a_cache_of_another_floating_dtype_is_attended_to_as_in_float64(dtype, held, several):
    query, keys, values, table, lens, cu_q = paged() if several else (*decoding(), None)
    query, keys, values = query.to(dtype), keys.to(held), values.to(held)
    named = {"cu_seqlens_q": cu_q} if several else {}
    wanted = lz.paged_attention(query.double(), keys.double(), values.double(), table, lens, **named)
    for layout in ("NHD", "HND", "NHD"):  # the last is kept
        caches = [each if layout == "NHD" else each.transpose(1, 2).contiguous() for each in (keys, values)]
        got = lz.paged_attention(query, *caches, table, lens, layout=layout, **named)
        assert got.dtype is dtype
        rounding = torch.finfo(dtype).eps if dtype.itemsize < 4 else 1e-5
        torch.testing.assert_close(got.double(), wanted, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("several", [False, True])
def test_kernels_that_convert_a_cache_say_so_and_others_are_no_candidates(several):
    query, keys, values, table, lens, cu_q = paged() if several else (*decoding(), None)
    named = {"cu_seqlens_q": cu_q} if several else {}
    report = lz.explain("paged_attention", query.float(), keys.half(), values.half(), table, lens, **named)
    assert report.operation == f"attention.converted.{'prefill' if several else 'decode'}.paged"
    assert report.chosen.kernel.id == f"torch.converted_{'sdpa' if several else 'gather'}"
    assert report.facts["kv_cache_dtype"] == "float16"
    assert all(each.kernel.id.startswith(("torch.converted_", "reference.")) for each in report.candidates)
    for dtype, held, wide in ((torch.float16, torch.float64, 8), (torch.bfloat16, torch.float16, 4)):
        report = lz.explain("paged_attention", query.to(dtype), keys.to(held), values.to(held), table, lens, **named)
        numbers = table.numel() * (keys[0].numel() + values[0].numel())
        assert report.chosen.kernel.workspace_bytes(report.facts) >= numbers * (held.itemsize + wide)  # both at once


def test_a_cache_that_was_made_in_16_bits_takes_tokens_and_queries_of_float32():
    cache = lz.KVCache(layers=1, kv_heads=2, head_dim=16, pages=4, page_size=4, dtype=torch.bfloat16)
    sequence, layer = cache.allocate("a"), cache.layers[0]
    torch.manual_seed(0)
    query, key, value = torch.randn(6, 4, 16), torch.randn(6, 2, 16), torch.randn(6, 2, 16)
    with cache.writing([sequence], [6]) as step:
        lz.append_paged_kv_(key, value, layer, slot_mapping=step.slots)
        got = lz.paged_attention(query, layer, step=step)
    held = [each.bfloat16().double().transpose(0, 1)[None] for each in (key, value)]
    wanted = lz.attention(query.double().transpose(0, 1)[None], *held, layout="BHSD")
    torch.testing.assert_close(got.double(), wanted[0].transpose(0, 1), rtol=1e-5, atol=1e-5)
    with pytest.raises(lz.InvalidCallError, match="cache_dtype: wanted bfloat16 as key_cache has"):
        lz.append_paged_kv_(key, value, layer, slot_mapping=torch.arange(6), cache_dtype=torch.float16)
