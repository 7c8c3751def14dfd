"""lz.rope_append_ into a cache of float8 or int8: the bytes of two calls, what is refused, which libraries serve it."""

from __future__ import annotations

import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import layerzero as lz
from drawing import at_once, examples
from layerzero.backends.vllm import quantized, rope
from layerzero.core.reasons import ReasonCode
from layerzero.engine.registry import REGISTRY
from layerzero.ops import OPERATIONS
from layerzero.ops.rope.declare import cos_sin

E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
NAME = "kv.rope_append.quantized"
KERNELS = ["torch.rope_append_codes", f"reference.{NAME}"]
H200 = {"device": "H200", "libraries": {"torch": "2.11.0", "vllm": "0.20.0"}}


def call(seed=0, *, dtype=torch.bfloat16, form=E4M3, scales=(), tokens=5, pages=3, half=32, layout="NHD"):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    cos, sin = cos_sin(40, half, torch.device("cpu"))
    caches = [torch.randint(0, 99, (pages, 8, 2, 64), generator=generator).to(torch.uint8).view(form) for _ in "kv"]
    if layout == "HND":
        caches = [each.transpose(1, 2) for each in caches]
    factors = [0.004 + 0.05 * torch.rand(scales, generator=generator) for _ in "kv"]
    return {
        **{name: normal(tokens, heads, 64) for name, heads in (("query", 4), ("key", 2), ("value", 2))},
        "cos": cos,
        "sin": sin,
        "key_cache": caches[0],
        "value_cache": caches[1],
        "positions": torch.randint(0, 40, (tokens,), generator=generator),
        "slot_mapping": torch.randperm(pages * 8, generator=generator)[:tokens],
        "key_scale": factors[0],
        "value_scale": factors[1],
        "layout": layout,
    }


def bytes_of(arguments):
    return [arguments[name].view(torch.uint8).clone() for name in ("key_cache", "value_cache")]


@pytest.mark.parametrize("kernel", KERNELS)
@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_it_is_a_rotation_and_an_append_to_the_byte(kernel, data):
    arguments = call(
        data.draw(st.integers(0, 2**31)),
        dtype=data.draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64])),
        form=data.draw(st.sampled_from([E4M3, E5M2, INT8])),
        scales=data.draw(st.sampled_from([(), (1,), (2,), (3, 8, 2)])),
        tokens=data.draw(st.integers(1, 9)),
        half=data.draw(st.sampled_from([32, 8, 1])),
        layout=data.draw(st.sampled_from(["NHD", "HND"])),
    )
    interleaved = data.draw(st.booleans())
    slots = arguments["slot_mapping"]
    slots[torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(slots), max_size=len(slots))), dtype=bool)] = -1
    copies = arguments | {name: arguments[name].clone() for name in ("key_cache", "value_cache")}
    apart = {"posenc.rope": kernel.replace("rope_append_codes", "rope").replace(NAME, "posenc.rope")}
    with lz.scope(locks=apart):
        pair = (copies[name] for name in ("query", "key", "cos", "sin", "positions"))
        query, key = lz.rope(*pair, interleaved=interleaved)
    names = "value", "key_cache", "value_cache", "slot_mapping", "key_scale", "value_scale"
    lz.append_quantized_kv_(key, *(copies[name] for name in names), layout=copies["layout"])
    with lz.scope(locks={NAME: kernel}):
        turned = lz.rope_append_(**arguments, interleaved=interleaved)
    assert torch.equal(turned, query)
    for got, wanted in zip(bytes_of(arguments), bytes_of(copies), strict=True):
        assert torch.equal(got, wanted)


def test_a_cache_brings_its_scales():
    arguments = call(scales=(2,))
    cache = lz.PagedCache(
        *(arguments[name].clone() for name in ("key_cache", "value_cache")),
        **{name: arguments[name] for name in ("key_scale", "value_scale")},
    )
    rest = {name: arguments[name] for name in ("query", "key", "value", "cos", "sin", "positions", "slot_mapping")}
    lz.rope_append_(**rest, key_cache=cache)
    lz.rope_append_(**arguments)
    assert torch.equal(cache.keys.view(torch.uint8), arguments["key_cache"].view(torch.uint8))
    assert torch.equal(cache.values.view(torch.uint8), arguments["value_cache"].view(torch.uint8))


@at_once(
    "change, text",
    [
        ({"key_scale": None}, "key_scale: wanted a float32 tensor with a quantized cache, got NoneType"),
        ({"value_scale": torch.ones(3)}, r"value_scale: wanted shape \(\), \(2,\) or \(3, 8, 2\), got \(3,\)"),
        ({"value_scale": torch.ones(()).double()}, "value_scale: wanted dtype float16 or float32, got float64"),
        ({"value_cache": torch.zeros(3, 8, 2, 64, dtype=INT8)}, "value_cache: wanted dtype float8_e4m3 like key_cache"),
        ({"key_cache": torch.zeros(3, 8, 2, 64)}, "value_cache: wanted dtype float32 like key_cache"),
        ({"slot_mapping": None}, "slot_mapping: wanted a tensor with a cache of float8 or int8, got None"),
        ({"slot_mapping": torch.tensor([0, 1, 2, 3, 24])}, r"slot_mapping\[4\]: wanted -1 to 23, got 24"),
        ({"positions": torch.tensor([0, 1, 2, 3, 40])}, r"positions\[4\]: wanted 0 to 39, got 40"),
    ],
)
@at_once("known", [False, True])
def test_what_means_nothing_is_refused_before_anything_is_written(change, text, known):
    arguments = call()
    if known:
        lz.rope_append_(**arguments)
    before = bytes_of(arguments)
    with pytest.raises(lz.InvalidCallError, match=text):
        lz.rope_append_(**arguments | change)
    assert all(torch.equal(one, other) for one, other in zip(bytes_of(arguments), before, strict=True))


def test_scales_beside_a_cache_of_floats_are_refused():
    arguments = call()
    floats = {name: arguments[name].bfloat16() for name in ("key_cache", "value_cache")}
    with pytest.raises(lz.InvalidCallError, match=r"key_cache: wanted dtype .*float8_e4m3.*, got bfloat16"):
        lz.rope_append_(**arguments | floats)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan")])
def test_scales_that_nothing_can_be_divided_by_are_found_in_debug_mode(scale):
    arguments = call() | {"value_scale": torch.tensor(scale)}
    with lz.scope(debug=True), pytest.raises(lz.InvalidCallError, match="value_scale: wanted numbers above 0"):
        lz.rope_append_(**arguments)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("form", [E4M3, E5M2])
def test_vllms_rotation_and_append_of_codes(monkeypatch, form, interleaved):
    def rotate(places, query, key, width, table, half_split):
        assert places.dtype is torch.int64
        turned = OPERATIONS["posenc.rope"].reference(
            query, key, *table.chunk(2, -1), positions=places, interleaved=not half_split
        )
        query.copy_(turned[0])
        key.copy_(turned[1])

    def append(key, value, key_cache, value_cache, slots, kind, key_scale, value_scale):
        assert key.is_contiguous()
        assert kind == {E4M3: "fp8_e4m3", E5M2: "fp8_e5m2"}[form]
        caches = key_cache.view(form), value_cache.view(form)
        OPERATIONS["kv.append.quantized"].reference(key, value, *caches, slots, key_scale, value_scale)

    functions = {"rotary_embedding": rotate, "reshape_and_cache_flash": append}
    library = types.SimpleNamespace(**{name: types.SimpleNamespace(default=each) for name, each in functions.items()})
    for module in (rope, quantized):
        monkeypatch.setattr(module, "operators", lambda *_: library)
    arguments = call(form=form)
    arguments["slot_mapping"][2] = -1
    copies = arguments | {name: arguments[name].clone() for name in ("key_cache", "value_cache")}
    names = [each.name for each in OPERATIONS[NAME].schema.inputs]
    facts = lz.explain("rope_append_", **arguments, interleaved=interleaved, **H200).facts
    got = REGISTRY.kernel("vllm.rope_append_codes").load(facts)(
        *(arguments[name] for name in names), interleaved=interleaved
    )
    wanted = OPERATIONS[NAME].reference(*(copies[name] for name in names), interleaved=interleaved)
    assert torch.equal(got, wanted)
    assert all(torch.equal(one, other) for one, other in zip(bytes_of(arguments), bytes_of(copies), strict=True))
    assert torch.equal(arguments["query"], copies["query"])


def refused(**changes):
    report = lz.explain("rope_append_", **call(**changes), **H200)
    return {reason.code for reason in report.reasons("vllm.rope_append_codes")}


def test_it_runs_where_it_is_installed_for_one_scale_of_keys_and_one_of_values():
    assert refused() == set()
    assert refused(scales=(2,)) == {ReasonCode.CONSTRAINT_FAILED}
    assert refused(form=INT8) == {ReasonCode.KV_CACHE_DTYPE_MISMATCH}
