"""Layers of a cache: what writes tokens into them and moves these, and scales that belong to tokens."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter

import layerzero as lz
from drawing import at_once, examples
from launches import Counted
from layerzero.ops.kv.form import heads_planes
from layerzero.ops.kv.storage import Virtual

FORMS = {
    "paged": {"pages": 12, "page_size": 16},
    "contiguous": {"max_sequences": 4, "max_length": 64, "strategy": "contiguous"},
    "virtual": {"max_sequences": 4, "max_length": 64, "strategy": "virtual"},
}


def drawn(tokens):
    return torch.randn(tokens, 4, 32), torch.randn(tokens, 2, 32), torch.randn(tokens, 2, 32)


@pytest.mark.parametrize("form", ["paged", "contiguous", "virtual"])
def test_what_moves_tokens_takes_a_latent_cache_as_one_head(form):
    cache = lz.KVCache(1, latent=(64, 16), dtype=torch.float32, **FORMS[form])
    name, layer = cache.allocate(), cache.layer(0)
    latent, rotated = torch.randn(20, 64), torch.randn(20, 16)
    new = latent.unsqueeze(1), rotated.unsqueeze(1)
    with cache.writing([name], [20]) as step:
        slots = step.slots
        lz.append_paged_kv_(*new, layer, slot_mapping=slots)
        found = lz.gather_paged_kv(layer, slot_mapping=slots)
        assert torch.equal(found[0], new[0])
        assert torch.equal(found[1], new[1])
        for wrong in ({"layout": "HND"}, {"value_cache": layer.kpe_cache.unsqueeze(2)}):
            with pytest.raises(lz.InvalidCallError, match=r"KV_CACHE_LAYOUT_MISMATCH.*(layout|value_cache): wanted"):
                lz.append_paged_kv_(*new, layer, slot_mapping=slots, **wrong)
    pages = {"from_pages": torch.tensor([cache.table(name)[0]]), "to_pages": torch.tensor([3])}
    if form == "virtual":  # the row that is written has no memory
        with pytest.raises(lz.KVCacheError, match=r"KV_STRATEGY_UNSUPPORTED.*fork\(\), compact\(\)"):
            lz.copy_kv_blocks_(layer, **pages)
    else:
        lz.copy_kv_blocks_(layer, **pages)
        assert torch.equal(layer.ckv_cache[3], layer.ckv_cache[pages["from_pages"][0]])
    cache.close()


def test_pages_of_a_virtual_cache_are_copied_by_the_cache_alone():
    cache = lz.KVCache(2, 2, 32, dtype=torch.float32, **FORMS["virtual"])
    cache.allocate("a")
    with cache.writing(["a"], [20]):
        pass
    with pytest.raises(lz.KVCacheError, match=r"KV_STRATEGY_UNSUPPORTED.*wanted a cache whose memory is there"):
        lz.copy_kv_blocks_(cache.layer(0), from_pages=torch.tensor([0]), to_pages=torch.tensor([1]))
    cache.close()


def of_layers():
    """By name: a layer, what writes new tokens into it, and what it holds by slot."""
    heads, split = (
        lz.KVCache(1, 2, 32, pages=3, page_size=16, layout="VLLM", dtype=torch.float32),
        lz.KVCache(1, latent=(64, 16), pages=3),
    )
    codes = lz.KVCache(1, 2, 32, pages=3, page_size=16, dtype=torch.int8, scales="token")
    latent = torch.randn(4, 64, dtype=torch.bfloat16), torch.randn(4, 16, dtype=torch.bfloat16)
    return {
        "vllm": (heads, "append", (torch.randn(4, 2, 32), torch.randn(4, 2, 32))),
        "latent": (split, "append", latent),
        "scales": (codes, "fit_scales", (torch.randn(4, 2, 32), torch.randn(4, 2, 32))),
    }


def held_by(layer, kind):
    if kind == "vllm":
        return torch.cat([each.flatten(1) for each in layer.gather(torch.arange(48))], 1)
    planes = (layer.ckv_cache, layer.kpe_cache) if kind == "latent" else (layer.key_scale, layer.value_scale)
    return torch.cat([each.flatten(0, 1) for each in planes], 1)


@pytest.mark.parametrize("kind", ["vllm", "latent", "scales"])
@pytest.mark.parametrize("slots", [[5, -1, 40, 0], [-1] * 4, [3, 2, 1, 47]])
def test_layers_write_without_a_look_at_the_device(kind, slots):
    cache, method, new = of_layers()[kind]
    layer, there = cache.layer(0), torch.tensor(slots)
    before = held_by(layer, kind)
    with Counted() as counted:
        getattr(layer, method)(*new, there)
    reads = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero")
    assert not [call for call in counted.calls if any(name in call for name in reads)]
    after = held_by(layer, kind)
    changed = (after != before).any(1).nonzero().flatten().tolist()
    assert changed == sorted(slot for slot in slots if slot >= 0)
    if kind != "scales":
        for token, slot in enumerate(slots):
            if slot >= 0:
                assert torch.equal(after[slot], torch.cat([each[token].flatten() for each in new]))
    none = [each[:0] for each in new]
    getattr(layer, method)(*none, there[:0])
    with pytest.raises(lz.InvalidCallError, match=r"(key|ckv): wanted .* got"):
        getattr(layer, method)(new[0][:1], new[1], there)
    cache.close()


@at_once("kind", ["vllm", "latent", "scales"])
@at_once(
    "slots, said",
    [
        (torch.tensor([5, 48, 40, 0]), r"slot_mapping\[1\]: wanted -1 to 47, got 48"),
        (torch.tensor([5, 6, 40, -2]), r"slot_mapping\[3\]: wanted -1 to 47, got -2"),
        (torch.tensor([5, 6, 5, -1]), "slot_mapping: wanted each place once"),
        ([5, 6, 7, 8], r"slot_mapping: wanted an int64 tensor \(T,\), got \[5, 6, 7, 8\]"),
        (torch.tensor([5.0, 6.0, 7.0, 8.0]), r"slot_mapping: wanted an int64 tensor \(T,\), got a tensor"),
    ],
)
def test_layers_write_nothing_into_slots_that_are_none(kind, slots, said):
    cache, method, new = of_layers()[kind]
    layer = cache.layer(0)
    before = held_by(layer, kind)
    with pytest.raises(lz.InvalidCallError, match=said):
        getattr(layer, method)(*new, slots)
    assert torch.equal(held_by(layer, kind), before)
    cache.close()


def test_a_split_layer_gives_zeros_for_a_token_without_a_slot():
    cache, _, new = of_layers()["vllm"]
    layer = cache.layer(0)
    layer.append(*new, torch.tensor([0, 1, 2, 47]))  # the last slot is what -1 would name in Python
    for got, tokens in zip(layer.gather(torch.tensor([-1, 47])), new, strict=True):
        assert torch.equal(got, torch.stack((torch.zeros_like(tokens[0]), tokens[3])))
    with pytest.raises(lz.InvalidCallError, match=r"SplitLayer.gather: slot_mapping\[0\]: wanted -1 to 47, got 48"):
        layer.gather(torch.tensor([48]))
    cache.close()


@pytest.mark.parametrize("latent", [False, True])
def test_slots_without_memory_are_refused_where_the_process_would_end(latent):
    form = {"latent": (64, 16)} if latent else {"kv_heads": 2, "head_dim": 32}
    cache = lz.KVCache(1, dtype=torch.float32, strategy="virtual", max_sequences=3, max_length=40_000, **form)
    name, layer = cache.allocate(), cache.layer(0)
    new = [torch.randn(5, 1, 64), torch.randn(5, 1, 16)] if latent else [torch.randn(5, 2, 32)] * 2
    with cache.writing([name], [5]) as step:
        lz.append_paged_kv_(*new, layer, slot_mapping=step.slots)
        for slot in (39_999, 80_000):
            with pytest.raises(
                lz.InvalidCallError, match=rf"slot_mapping\[0\]: wanted a place with memory, got {slot}"
            ):
                lz.append_paged_kv_(*(each[:1] for each in new), layer, slot_mapping=torch.tensor([slot]))
        with pytest.raises(lz.InvalidCallError, match=r"slot_mapping\[0\]: wanted -1 to 119999, got 120000"):
            lz.append_paged_kv_(*(each[:1] for each in new), layer, slot_mapping=torch.tensor([120_000]))
    cache.close()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_tokens_whose_scales_nobody_set_are_refused(dtype, debug, layout):
    """Debug mode refused those whose scales were set, and without it int8 was read as zeros."""
    cache = lz.KVCache(1, 2, 32, pages=3, page_size=16, layout=layout, dtype=dtype, scales="token")
    cache.allocate("a")
    layer = cache.layer(0)
    with lz.scope(debug=debug):
        for tokens in (20, 1):  # the second on a plan that was kept
            query, key, value = drawn(tokens)
            with cache.writing(["a"], [tokens]) as step:
                with pytest.raises(lz.InvalidCallError, match=r"key_scale: wanted numbers above 0.*fit_scales"):
                    lz.append_quantized_kv_(key, value, layer, slot_mapping=step.slots)
                layer.fit_scales(key, value, step.slots)
                lz.append_quantized_kv_(key, value, layer, slot_mapping=step.slots)
                shaped = query.unsqueeze(1) if step.cu_seqlens_q is None else query
                assert lz.paged_attention(shaped, layer, step=step).isfinite().all()
        none = torch.full((1,), -1)
        lz.append_quantized_kv_(key, value, layer, slot_mapping=none)
        key[0, 0, 0] = float("nan")  # the caller's own: it is passed on
        slots = torch.tensor([40])
        layer.fit_scales(key, value, slots)
        lz.append_quantized_kv_(key, value, layer, slot_mapping=slots)
    cache.close()


@given(length=st.integers(1, 6000), asked=st.lists(st.integers(1, 6000), min_size=1, max_size=6))
@settings(max_examples=examples(30), deadline=None)
def test_a_row_with_room_is_one_that_growing_would_leave(length, asked):
    planes = heads_planes("NHD", length, 2, (24, 16), torch.float32)
    memory = Virtual(planes, 2, 3, torch.device("cpu"))
    for place, tokens in enumerate(asked):
        memory.ensure(place % 3, min(tokens, length))
    memory.trim([2])
    for page in range(3):
        for tokens in {1, length, *(min(each, length) for each in asked), *range(1, length, 257)}:
            assert (tokens <= memory._room[page]) == (memory._wanted(tokens) <= memory._has[page])
    memory.close()


def test_compiled_code_takes_layers_and_steps_as_one_graph():
    """Dynamo could not name the value that stands for an argument that a layer brings."""
    torch._dynamo.reset()
    cache = lz.KVCache(2, 2, 32, pages=8, page_size=16, dtype=torch.float32)
    latent = lz.KVCache(1, latent=(32, 16), pages=8, page_size=16, dtype=torch.float32)
    codes = lz.KVCache(1, 2, 32, pages=8, page_size=16, dtype=torch.int8, scales="head")
    codes.layer(0).key_scale.fill_(0.03)
    codes.layer(0).value_scale.fill_(0.03)
    caches = cache, latent, codes
    for each in caches:
        each.allocate("a")
        with each.writing(["a"], [9]):
            pass

    def block(query, key, value, steps, slots):
        output = 0
        for layer in cache.layers:
            lz.append_paged_kv_(key, value, layer, slot_mapping=slots[0])
            output = output + lz.paged_attention(query, layer, step=steps[0])
        lz.append_paged_kv_(key[:, :1], value[:, :1, :16], latent.layer(0), slot_mapping=slots[1])
        output = output + lz.mla_attention(query, query[..., :16], latent.layer(0), step=steps[1], scale=0.1)
        lz.append_quantized_kv_(key, value, codes.layer(0), slot_mapping=slots[2])
        return output + lz.paged_attention(query, codes.layer(0), step=steps[2])

    counted = CompileCounter()
    compiled = torch.compile(block, backend=counted, fullgraph=True)
    for _ in range(4):
        steps = [each.writing(["a"]) for each in caches]
        query, key, value = drawn(1)
        call = query.unsqueeze(1), key, value, steps, [step.slots for step in steps]
        with warnings.catch_warnings():  # plans are made for each call again, which it says
            warnings.simplefilter("ignore", lz.LayerZeroPerformanceWarning)
            got = compiled(*call)
        torch.testing.assert_close(got, block(*call), rtol=1e-5, atol=1e-5)
        for step in steps:
            step.commit()
    assert counted.frame_count == 1
    for each in caches:
        each.close()


def test_compiled_code_refuses_a_step_from_before_pages_moved():
    """No step is asked for its kind there: what a layer brings is all that looks at it."""
    torch._dynamo.reset()
    cache = lz.KVCache(1, 2, 32, pages=8, page_size=16, dtype=torch.float32)
    for name in "ab":
        with cache.writing([cache.allocate(name)]) as step:
            pass
    compiled = torch.compile(lambda query: lz.paged_attention(query, cache.layers[0], step=step), backend="eager")
    query = torch.randn(1, 1, 8, 32)
    with warnings.catch_warnings():  # it plans for each call again, which it says
        warnings.simplefilter("ignore", lz.LayerZeroPerformanceWarning)
        assert compiled(query).shape == query.shape
        cache.free("a")
        cache.compact()
        with pytest.raises(lz.KVCacheError, match="wanted a step made since pages moved"):
            compiled(query)
    cache.close()


def test_compiled_code_writes_into_a_virtual_cache():
    """What a slot's memory is asked by is no part of a graph."""
    cache = lz.KVCache(1, 2, 32, dtype=torch.float32, **FORMS["virtual"])
    cache.allocate("a")
    (key, value), layer = drawn(1)[1:], cache.layer(0)

    def write(slots):
        lz.append_paged_kv_(key, value, layer, slot_mapping=slots)

    with cache.writing(["a"]) as step:
        torch.compile(write, fullgraph=True, backend="eager")(step.slots)
        assert torch.equal(layer.keys.flatten(0, 1)[step.slots], key)
    cache.close()
