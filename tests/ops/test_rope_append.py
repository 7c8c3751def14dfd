"""lz.rope_append_: what it computes and writes, what it refuses before it writes, which kernels are offered it."""

from __future__ import annotations

import pytest
import torch

import layerzero as lz
from drawing import at_once
from layerzero.core.reasons import ReasonCode
from layerzero.engine.functions import CALLS
from layerzero.ops import OPERATIONS
from layerzero.ops.rope.declare import cos_sin

CPU = torch.device("cpu")
LIBRARIES = {"torch": "2.11.0", "vllm": "0.20.0"}
BF16, F32 = torch.bfloat16, torch.float32


def contiguous(*, batch=2, seq=3, heads=4, kv_heads=2, head_dim=64, length=16, rows=40, layout="NHD"):
    torch.manual_seed(seq)
    query, key, value = (torch.randn(batch, seq, each, head_dim) for each in (heads, kv_heads, kv_heads))
    caches = [torch.randn(batch, length, kv_heads, head_dim) for _ in range(2)]
    if layout == "HND":
        caches = [each.transpose(1, 2).contiguous() for each in caches]
    cos, sin = cos_sin(rows, head_dim // 2, CPU)
    arguments = {"query": query, "key": key, "value": value, "cos": cos, "sin": sin}
    arguments |= {"key_cache": caches[0], "value_cache": caches[1], "layout": layout}
    return arguments | {"positions": torch.stack([torch.randperm(length)[:seq] for _ in range(batch)])}


def paged(*, tokens=5, pages=4, page_size=8, layout="NHD", **sizes):
    arguments = contiguous(batch=pages, length=page_size, seq=1, layout=layout, **sizes)
    for name, heads in (("query", 4), ("key", 2), ("value", 2)):
        arguments[name] = torch.randn(tokens, heads, 64)
    return arguments | {
        "positions": torch.randint(0, 40, (tokens,)),
        "slot_mapping": torch.randperm(pages * page_size)[:tokens],
    }


def close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_paged_it_is_a_rotation_and_an_append(layout, interleaved):
    arguments = paged(layout=layout)
    arguments["slot_mapping"][2] = -1
    table = [arguments[name] for name in ("cos", "sin", "positions")]
    query, key = lz.rope(arguments["query"], arguments["key"], *table, interleaved=interleaved)
    wanted = [arguments[name].clone() for name in ("key_cache", "value_cache")]
    lz.append_paged_kv_(key, arguments["value"], *wanted, arguments["slot_mapping"], layout=layout)
    close(lz.rope_append_(**arguments, interleaved=interleaved), query)
    close(arguments["key_cache"], wanted[0])
    assert torch.equal(arguments["value_cache"], wanted[1])


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("shape", ["each", "one row", "shared"])
def test_contiguous_it_writes_each_token_at_its_position(layout, shape):
    arguments = contiguous(layout=layout)
    if shape != "each":
        arguments["positions"] = arguments["positions"][0] if shape == "shared" else arguments["positions"][:1]
    places = arguments["positions"].expand(2, 3)
    query, key = lz.rope(*(arguments[name] for name in ("query", "key", "cos", "sin", "positions")), layout="BSHD")
    wanted = [arguments[name].clone() for name in ("key_cache", "value_cache")]
    for cache, new in zip(wanted, (key, arguments["value"]), strict=True):
        for sequence in range(2):
            for token, place in enumerate(places[sequence].tolist()):
                row = cache[sequence, place] if layout == "NHD" else cache[sequence, :, place]
                row.copy_(new[sequence, token])
    close(lz.rope_append_(**arguments), query)
    close(arguments["key_cache"], wanted[0])
    assert torch.equal(arguments["value_cache"], wanted[1])


@pytest.mark.parametrize("made", [contiguous, paged])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_stock_computes_the_same(made, layout):
    arguments = made(layout=layout)
    caches = ("key_cache", "value_cache")
    copies = {name: arguments[name].clone() for name in caches}
    close(OPERATIONS["kv.rope_append"].stock(**(arguments | copies))(), lz.rope_append_(**arguments))
    for name in caches:
        close(copies[name], arguments[name])


def test_a_cache_whose_keys_and_values_alternate_page_by_page():
    arguments = paged()
    joined = torch.zeros(4, 2, 8, 2, 64)
    wanted = {"key_cache": torch.zeros(4, 8, 2, 64), "value_cache": torch.zeros(4, 8, 2, 64)}
    lz.rope_append_(**(arguments | wanted))
    lz.rope_append_(**(arguments | {"key_cache": joined[:, 0], "value_cache": joined[:, 1]}))
    close(joined[:, 0], wanted["key_cache"])
    assert torch.equal(joined[:, 1], wanted["value_cache"])


def _whole():
    return torch.zeros(2, 16, 2, 64)


@at_once(
    "change, words",
    [
        ({"query": torch.zeros(3, 4, 64)}, "query: wanted .batch, sequence, heads, head dim. without slot_mapping"),
        ({"slot_mapping": torch.zeros(6, dtype=torch.int64)}, "query: wanted .tokens, heads, head dim."),
        ({"cos": torch.zeros(40, 33), "sin": torch.zeros(40, 33)}, "half of 2 to 64 rotated entries"),
        ({"sin": torch.zeros(40, 32).half()}, "sin: wanted dtype float32 like cos"),
        ({"cos": torch.zeros(15, 32), "sin": torch.zeros(15, 32)}, "cos: wanted a row for each of 16 places"),
        ({"positions": torch.zeros(2, 4, dtype=torch.int64)}, "positions: wanted seq 3"),
        ({"positions": torch.zeros(3, 3, dtype=torch.int64)}, r"wanted shape \(2, 3\) or \(1, 3\) or \(3,\)"),
        ({"positions": torch.full((2, 3), 16)}, r"positions\[0, 0\]: wanted 0 to 15, got 16"),
        ({"positions": torch.full((2, 3), -1)}, r"positions\[0, 0\]: wanted 0 to 15, got -1"),
        ({"layout": "BSHD"}, "layout: wanted NHD or HND, got 'BSHD'"),
        ({"value_cache": _whole().half()}, "value_cache: wanted dtype float32"),
        ({"value_cache": torch.zeros(2, 15, 2, 64)}, "value_cache: wanted length 16"),
        ({"value_cache": torch.zeros(2, 1, 2, 64).expand(2, 16, 2, 64)}, "value_cache: wanted memory of its own"),
        ({"key_cache": _whole().requires_grad_()}, "key_cache: .* a leaf that requires gradients"),
    ],
)
def test_what_means_nothing_is_refused_before_anything_is_written(change, words):
    arguments = contiguous() | change
    before = [arguments[name].detach().clone() for name in ("key_cache", "value_cache")]
    with pytest.raises(lz.InvalidCallError, match=words):
        lz.rope_append_(**arguments)
    for name, kept in zip(("key_cache", "value_cache"), before, strict=True):
        assert torch.equal(arguments[name], kept)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"slot_mapping": torch.tensor([0, 1, 2, 3, 32])}, r"slot_mapping\[4\]: wanted -1 to 31, got 32"),
        ({"positions": torch.tensor([0, 1, 2, 3, 40])}, r"positions\[4\]: wanted 0 to 39, got 40"),
        ({"slot_mapping": torch.zeros(5, dtype=torch.int32)}, "slot_mapping: wanted dtype int64"),
        ({"cos": torch.zeros(0, 32), "sin": torch.zeros(0, 32)}, "cos: wanted a row for each position"),
    ],
)
def test_places_that_lead_nowhere_are_refused_before_anything_is_written(change, words):
    arguments = paged() | change
    before = arguments["value_cache"].clone()
    with pytest.raises(lz.InvalidCallError, match=words):
        lz.rope_append_(**arguments)
    assert torch.equal(arguments["value_cache"], before)


def test_caches_that_share_elements_are_refused():
    arguments = contiguous()
    with pytest.raises(lz.InvalidCallError, match="value_cache: wanted elements of its own"):
        lz.rope_append_(**(arguments | {"value_cache": arguments["key_cache"]}))
    memory = torch.zeros(2 * 16 * 2 * 64 + 64)
    shared = memory[64:].view(2, 16, 2, 64)
    with pytest.raises(lz.InvalidCallError, match="value_cache: wanted elements of its own"):
        lz.rope_append_(**(arguments | {"key_cache": memory[:-64].view(2, 16, 2, 64), "value_cache": shared}))
    with pytest.raises(lz.InvalidCallError, match=r"key_cache: wanted memory of its own, got .* shares with value"):
        lz.rope_append_(**(arguments | {"value": arguments["key_cache"][:, :3]}))


def test_places_named_twice_are_found_in_debug_mode():
    with lz.scope(debug=True):
        with pytest.raises(lz.InvalidCallError, match="positions: wanted each place once, got 0 at 0 and 1"):
            lz.rope_append_(**(contiguous() | {"positions": torch.zeros(2, 3, dtype=torch.int64)}))
        with pytest.raises(lz.InvalidCallError, match="slot_mapping: wanted each place once, got 0 at 0 and 1"):
            lz.rope_append_(**(paged() | {"slot_mapping": torch.zeros(5, dtype=torch.int64)}))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("made", [contiguous, paged])
def test_compiled_as_one_graph(made):
    arguments = made()
    caches = [{name: arguments[name].clone() for name in ("key_cache", "value_cache")} for _ in range(2)]
    compiled = torch.compile(lz.rope_append_, fullgraph=True, backend="aot_eager")
    close(compiled(**(arguments | caches[0])), lz.rope_append_(**(arguments | caches[1])))
    for name, cache in caches[0].items():
        close(cache, caches[1][name])


@pytest.mark.parametrize("made", [contiguous, paged])
def test_gradients_go_through_the_cache_too(made):
    arguments = made()
    for name in ("query", "key", "value"):
        arguments[name].requires_grad_()
    turned = lz.rope_append_(**arguments)
    kept = [arguments[name] for name in ("key_cache", "value_cache")]
    sum(each.square().sum() for each in (turned, *kept)).backward()
    for name in ("query", "key", "value"):  # a rotation keeps lengths
        close(arguments[name].grad, 2 * arguments[name].detach())


@pytest.mark.usefixtures("path")
def test_positions_of_three_sequences_are_refused_beside_two_when_warm_too():
    lz.rope_append_(**contiguous(batch=3, seq=1))
    two = contiguous(batch=2, seq=1) | {"positions": torch.tensor([[0], [1], [2]])}
    with pytest.raises(lz.InvalidCallError, match="positions: wanted shape"):
        lz.rope_append_(**two)


def test_few_choices_serve_every_number_of_tokens():
    cache = CALLS["rope_append_"].dispatcher.cache
    lz.configure()  # a new epoch: nothing is kept
    before = cache.size()
    for tokens in range(1, 101):
        lz.rope_append_(**paged(tokens=tokens, pages=16))
    assert cache.size() - before <= 10


def codes(kernel, *, dtype=BF16, table=F32, **arguments):
    meta = torch.device("meta")
    given = {
        name: torch.empty(64, heads, 128, dtype=dtype, device=meta)
        for name, heads in (("query", 32), ("key", 8), ("value", 8))
    }
    given |= dict(zip(("cos", "sin"), cos_sin(4096, 64, meta, table), strict=True))
    given |= {name: torch.empty(512, 16, 8, 128, dtype=dtype, device=meta) for name in ("key_cache", "value_cache")}
    given |= {name: torch.empty(64, device=meta).long() for name in ("positions", "slot_mapping")}
    report = lz.explain("rope_append_", **given, **arguments, device="H200", libraries=LIBRARIES)
    return {reason.code for reason in report.reasons(kernel)}


def test_a_models_call_is_offered_to_vllm():
    assert codes("vllm.rope_append") == set()
    assert codes("vllm.rope_append", interleaved=True) == set()
    assert codes("vllm.rope_append", table=BF16) == {ReasonCode.DTYPE_UNSUPPORTED}
    assert codes("torch.rope_append") == set()
