"""A cache of sequences: what attention reads of it, what it refuses, and calls that take it for its tensors."""

from __future__ import annotations

import gc
import re
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import layerzero as lz
from drawing import at_once
from kv_caches import FORMS, appended, drawn, made, plain
from layerzero.ops.paged import layout_record


@pytest.mark.parametrize("form", FORMS)
def test_sequences_attend_to_what_was_appended(form):
    cache = made(**FORMS[form])
    first, second = cache.allocate(), cache.allocate("b")
    assert (first, second, len(cache), "b" in cache, list(cache)) == (0, "b", 2, True, [0, "b"])
    held = {name: [] for name in (first, second)}
    for counts in ((17, 5), (1, 1), (4, 1), (1, 0)):
        new, output = appended(cache, [first, second], counts)
        outputs = dict(zip(new, output.split(counts), strict=True))
        for name, (query, *pair) in new.items():
            held[name].append(pair)
            keys, values = (torch.cat(each) for each in zip(*held[name], strict=True))
            torch.testing.assert_close(outputs[name], plain(query, keys, values), rtol=1e-5, atol=1e-5)
    assert [cache.length(name) for name in cache] == [23, 7]
    cache.close()


@pytest.mark.parametrize("form", FORMS)
def test_a_fork_reads_the_same_tokens_and_writes_its_own(form):
    cache = made(**FORMS[form])
    cache.allocate("a")
    ((_, key, value),) = appended(cache, ["a"], [20])[0].values()
    assert cache.fork("a", "b") == "b"
    assert cache.fork("a", "c", 16) == "c"
    before = cache.usage()
    assert (before.tokens, before.sequences) == (20, 3)
    assert before.shared_pages == (2 if form in ("paged", "heads first") else 1)
    new, output = appended(cache, ["a", "b", "c"], [1, 1, 1])
    for row, (name, length) in enumerate((("a", 20), ("b", 20), ("c", 16))):
        query, *pair = new[name]
        keys, values = (torch.cat((old[:length], each)) for old, each in zip((key, value), pair, strict=True))
        torch.testing.assert_close(output[row : row + 1], plain(query, keys, values)[-1:], rtol=1e-5, atol=1e-5)
    cache.close()


@pytest.mark.parametrize("form", FORMS)
def test_swapped_and_moved_sequences_are_as_they_were(form):
    cache = made(**FORMS[form])
    for name, count in (("a", 9), ("b", 33), ("c", 20)):
        cache.allocate(name)
        for layer in (0, 1):
            _, key, value = drawn(count)
            if layer == 0:
                step = cache.writing([name], [count])
            lz.append_paged_kv_(key, value, cache.layer(layer), slot_mapping=step.slots)
        step.commit()

    def read(name):
        query = torch.ones(1, 1, 4, 32)
        tables, lens = cache.block_tables([name])
        return [lz.paged_attention(query, layer, block_tables=tables, context_lens=lens) for layer in cache.layers]

    before = {name: read(name) for name in ("b", "c")}
    cache.free("a")
    cache.swap_out("b")
    assert cache.usage().host_bytes == 33 * 2 * 2 * 2 * 32 * 4
    with pytest.raises(
        lz.KVCacheError, match=r"wanted a sequence on the device, got 'b' on the host; swap_in\(\) first"
    ):
        cache.table("b")
    assert cache.compact() > 0
    cache.swap_in("b")
    cache.defragment()
    for name, outputs in before.items():
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(read(name), outputs, strict=True))
    cache.close()


def test_both_forms_of_tables_say_the_same():
    cache = made()
    for name, count in (("a", 16), ("b", 0), ("c", 21)):
        cache.allocate(name)
        cache.writing([name], [count]).commit()
    tables, lens = cache.block_tables(["a", "b", "c"])
    starts, pages, last = cache.ragged_tables(["a", "b", "c"])
    assert lens.tolist() == [16, 0, 21]
    assert (starts.tolist(), pages.tolist(), last.tolist()) == ([0, 1, 1, 3], [0, 1, 2], [16, 0, 5])
    assert tables.tolist() == [[0, 0], [0, 0], [1, 2]]
    assert {each.dtype for each in (tables, lens, starts, pages, last)} == {torch.int32}


def test_shared_prefixes_are_what_cascade_attention_takes():
    cache = made()
    cache.allocate("system")
    appended(cache, ["system"], [35])
    for name in ("a", "b", "c"):
        cache.fork("system", name)
    cache.allocate("alone")
    names = ["a", "alone", "b", "c"]
    new, output = appended(cache, names, [1, 1, 1, 1])
    group, other = cache.shared_prefix(names)
    assert (group.sequences, group.rows, group.shared_blocks) == (("a", "b", "c"), (0, 2, 3), 2)
    assert (other.sequences, other.shared_blocks) == (("alone",), 0)
    query = torch.cat([new[name][0] for name in group.sequences]).unsqueeze(1)
    tables, lens = cache.block_tables(group.sequences)
    step = lz.StepMetadata(tables, lens)
    got = lz.cascade_attention(query, cache.layer(0), step=step, shared_blocks=group.shared_blocks)
    torch.testing.assert_close(got[:, 0], output[list(group.rows)], rtol=1e-5, atol=1e-5)


def test_a_step_that_fails_leaves_everything_as_it_was():
    cache = made()
    cache.allocate("a")
    appended(cache, ["a"], [20])
    cache.fork("a", "b")
    before, usage = (cache.table("a"), cache.table("b")), cache.usage()
    with pytest.raises(RuntimeError, match="in the middle"), cache.writing(["a", "b"], [3, 30]):
        raise RuntimeError("in the middle")
    assert (cache.table("a"), cache.table("b")) == before
    assert cache.usage() == usage
    with pytest.raises(lz.KVCacheError, match=r"\[KV_CACHE_EXHAUSTED\] .*13 free pages .*got 10 of 12; nothing was"):
        cache.writing(["a", "b"], [1, 200])
    assert cache.usage() == usage


def test_a_step_that_was_lost_is_taken_back_without_it():
    cache = made()
    cache.allocate("a")
    cache.writing(["a"])
    with pytest.raises(lz.KVCacheError, match=r"cache\.abort\(\) ends one that was lost"):
        cache.writing(["a"])
    cache.abort()
    assert cache.usage().free_pages == 12
    cache.writing(["a"]).commit()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda cache: cache.writing(["x"]), r"wanted a sequence that was allocated \('a', 'b'\), got 'x'"),
        (lambda cache: cache.writing([["a"]]), "unhashable|wanted a sequence that was allocated"),
        (lambda cache: cache.writing(["a", "a"]), "sequences: wanted each once, got one twice"),
        (lambda cache: cache.writing(["a"], [1, 2]), "counts: wanted 1, one a sequence, got 2"),
        (lambda cache: cache.writing(["a"], [-1]), "counts: wanted numbers of at least 0, got -1"),
        (lambda cache: cache.writing(["a"], [True]), "counts: wanted numbers of at least 0, got True"),
        (lambda cache: cache.writing(["a"], [40], blocks=2), "blocks: wanted at least 3 columns"),
        (
            lambda cache: cache.writing(["a"], reuse="a"),
            r"reuse: wanted a step that writing\(\) gave, or None, got 'a'",
        ),
        (lambda cache: cache.layer(2), "KVCache.layer: number: wanted a layer from 0 to 1, got 2"),
        (lambda cache: cache.layer(-1), "wanted a layer from 0 to 1, got -1"),
        (lambda cache: cache.layer("a"), "wanted a layer from 0 to 1, got 'a'"),
        (lambda cache: cache.free("x"), "got 'x'"),
        (lambda cache: cache.fork("a", tokens=1), "tokens: wanted 0 to 0 or None, got 1"),
        (lambda cache: cache.truncate("a", 1), "tokens: wanted 0 to 0, got 1"),
        (lambda cache: cache.swap_in("a"), "wanted a sequence on the host, got 'a'"),
        (lambda cache: cache.allocate("a"), "wanted a name that no sequence has, got 'a'"),
        (lambda cache: cache.rows(["a"], 0), "wanted a cache of rows with heads, got a paged one"),
        (lambda cache: cache.commit(None), "wanted the step that is open, got none"),
        (lambda cache: cache.abort(), "wanted the step that is open, got none"),
    ],
)
def test_mistakes_are_told(call, message):
    cache = made()
    cache.allocate("a")
    cache.allocate("b")
    with pytest.raises((lz.LayerZeroError, TypeError), match=message):
        call(cache)
    assert cache.usage().free_pages == 12


@at_once(
    "change, message",
    [
        ({"layers": 0}, "layers: wanted a number of at least 1, got 0"),
        ({"captured": "no"}, "captured: wanted True or False, got 'no'"),
        ({"device": 2**70}, "device: wanted one that torch knows"),
        ({"kv_heads": None}, "kv_heads: wanted a number of at least 1, got None"),
        ({"layout": "DNH"}, "layout: wanted NHD or HND or VLLM or VLLM_CPU, got 'DNH'"),
        ({"dtype": torch.bool}, "dtype: wanted float32, .* got torch.bool"),
        ({"latent": (512, 64)}, "latent: wanted no kv_heads, head_dim and value_dim with it"),
        ({"pages": None}, "max_sequences and max_length: wanted both for a contiguous cache"),
        ({"strategy": "virtual"}, "pages: wanted None for a virtual cache"),
        ({"max_length": 64}, "max_length: wanted None with pages, which say how many tokens fit, got 64"),
        ({"strategy": "elsewhere"}, "strategy: wanted contiguous, paged, virtual, unified or None, got 'elsewhere'"),
        ({"layout": "VLLM", "head_dim": 6}, "head_dim: wanted a multiple of 4 in VLLM, got 6"),
    ],
)
def test_what_is_no_cache_is_refused(change, message):
    given = {"layers": 1, "kv_heads": 2, "head_dim": 8, "pages": 4, "dtype": torch.float32} | change
    with pytest.raises(lz.InvalidCallError, match=message):
        lz.KVCache(**given)


def test_a_closed_cache_says_so_and_its_memory_is_free_for_another_layout():
    cache = made()
    layer, name = cache.layer(0), cache.allocate()
    cache.close()
    cache.close()
    for ask in (lambda: layer.keys, lambda: cache.length(name), cache.usage, cache.allocate):
        with pytest.raises(lz.KVCacheError, match="got one that was closed; make another"):
            ask()
    query = torch.randn(1, 1, 4, 32)
    step = lz.StepMetadata(torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32))
    with pytest.raises(lz.KVCacheError, match="got one that was closed"):
        lz.paged_attention(query, layer, step=step)
    assert "closed" in repr(cache)
    assert "closed" in repr(layer), "what shows an object does not raise"


class Copies(TorchDispatchMode):
    """Pages of each copy of keys or values, by whatever operator."""

    def __init__(self):
        super().__init__()
        self.pages = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.ndim > 3 and result._base is None and not operator.is_view:
            self.pages.append(len(result))
        return result


def test_layers_say_in_which_layout_they_are_written():
    gc.collect()
    cache = made(**FORMS["heads first"])
    keys, values = cache.layer(0).keys, cache.layer(0).values
    tables, lens = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    query = torch.randn(1, 1, 4, 32)
    with pytest.raises(lz.InvalidCallError, match="KV_CACHE_LAYOUT_MISMATCH"):
        lz.paged_attention(query, keys.transpose(1, 2), values.transpose(1, 2), tables, lens)
    split = made(pages=4, layout="VLLM")
    new = drawn(5)[1:]
    split.allocate("a")
    with split.writing(["a"], [5]) as step:
        split.layer(1).append(*new, step.slots)
        assert all(torch.equal(*pair) for pair in zip(split.layer(1).gather(step.slots), new, strict=True))
        for layout in ("NHD", "HND"):
            other = split.layer(1).converted(layout)
            got = lz.gather_paged_kv(other, slot_mapping=step.slots)
            assert all(torch.equal(*pair) for pair in zip(got, new, strict=True))
            asked = {
                "query": torch.randn(5, 4, 32),
                "context_lens": step.context_lens,
                "cu_seqlens_q": step.cu_seqlens_q,
            }
            wanted = lz.paged_attention(key_cache=other, block_tables=step.block_tables, **asked)
            for pages, count in ((step.block_tables, step.block_tables.numel()), (step, -(-5 // split.page_size))):
                with Copies() as copies:
                    part = split.layer(1).converted(layout, pages=pages)
                assert copies.pages == [count, count]
                tables = torch.arange(count, dtype=torch.int32).view(1, -1)
                assert torch.equal(lz.paged_attention(key_cache=part, block_tables=tables, **asked), wanted)
        with pytest.raises(lz.InvalidCallError, match=r"pages: wanted a step, or an int32 .*, got \[0\]"):
            split.layer(1).converted(pages=[0])
        with pytest.raises(lz.InvalidCallError, match=r"KV_CACHE_LAYOUT_MISMATCH.*converted\(\)"):
            lz.paged_attention(query, split.layer(1), step=step)
    del step, other, part
    split.close()
    cache.close()
    assert not layout_record._LAYOUTS


def test_a_latent_cache_brings_its_two_planes():
    cache = lz.KVCache(2, latent=(512, 64), pages=4, page_size=16)
    cache.allocate("a")
    layer = cache.layer(1)
    assert (layer.ckv_cache.shape, layer.kpe_cache.shape) == ((4, 16, 512), (4, 16, 64))
    with cache.writing(["a"], [20]) as step:
        new = torch.randn(20, 512, dtype=torch.bfloat16), torch.randn(20, 64, dtype=torch.bfloat16)
        layer.append(*new, step.slots)
        queries = torch.randn(1, 2, 16, 512, dtype=torch.bfloat16), torch.randn(1, 2, 16, 64, dtype=torch.bfloat16)
        output = lz.mla_attention(*queries, layer, step=step, scale=0.07)
        with lz.scope(debug=True):
            assert torch.equal(lz.mla_attention(*queries, layer, step=step, scale=0.07), output)
        tables = step.block_tables, step.context_lens
        planes = layer.ckv_cache.contiguous(), layer.kpe_cache.contiguous()
        torch.testing.assert_close(output, lz.mla_attention(*queries, *planes, *tables, 0.07), rtol=2e-2, atol=2e-2)
    assert layer.ckv_cache.untyped_storage().data_ptr() == layer.kpe_cache.untyped_storage().data_ptr()
    with pytest.raises(TypeError, match="missing required arguments: 'scale'"):
        lz.mla_attention(*queries, layer, step=step)
    slots = step.slots
    assert torch.equal(layer.ckv_cache.flatten(0, 1)[slots], new[0])
    assert torch.equal(layer.kpe_cache.flatten(0, 1)[slots], new[1])
    with pytest.raises(lz.InvalidCallError, match="got one of latent attention"):
        lz.paged_attention(torch.randn(1, 1, 4, 32), layer, step=step)


@pytest.mark.slow
def test_the_code_of_the_serving_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    names = {}
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        if "import vllm" in code:  # tests/engines runs it, where vLLM has all that it needs
            continue
        own = dict(names)
        exec(code, own)  # a later section's names are not this one's
        made = [value for name, value in own.items() if names.get(name) is not value]
        if not names or any(isinstance(each, lz.KVCache) for each in made):
            names.update(own)
    cache, group = names["cache"], names["group"]
    assert (group.shared_blocks, group.rows) == (2, (0, 1, 2))
    assert ([*cache], cache.usage().swapped, cache.length("system")) == (["system", 0, 2], 1, 40)
    want = lz.paged_attention(names["query"][2:], names["layer"], step=lz.StepMetadata(*cache.block_tables([2])))
    torch.testing.assert_close(names["output"][2:], want, rtol=1e-5, atol=1e-5)


# calls with a cache in place of tensors


@pytest.mark.usefixtures("path")
def test_calls_take_a_cache_in_place_of_its_tensors():
    for layout in ("NHD", "HND"):
        cache = lz.PagedCache.allocate(4, 16, 2, 32, layout=layout, dtype=torch.float32)
        query, key, value = drawn(18)
        cos, sin = lz.rope_table(64, 32, base=10000.0)
        slots = torch.arange(18)
        for form in ({"key_cache": cache}, {"key_cache": cache, "value_cache": cache, "layout": layout}):
            turned = lz.rope_append_(query, key, value, cos, sin, **form, positions=slots, slot_mapping=slots)
        tables, lens = torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([18], dtype=torch.int32)
        starts = torch.tensor([0, 18], dtype=torch.int32)
        step = lz.StepMetadata(tables, lens, cu_seqlens_q=starts)
        want = lz.paged_attention(
            turned, cache.keys, cache.values, tables, lens, layout=layout, cu_seqlens_q=starts, step=step
        )
        assert torch.equal(lz.paged_attention(turned, cache, step=step), want)
        assert torch.equal(lz.paged_attention(turned, cache, cache, tables, lens, cu_seqlens_q=starts), want)
        assert lz.which("paged_attention", turned, cache, step=step) is not None
        rows = lz.KVCache(1, 2, 32, max_sequences=2, max_length=32, layout=layout, dtype=torch.float32)
        lz.append_kv_(key[None], value[None], rows.layer(0).keys[:1], rows.layer(0).values[:1], slots, layout=layout)
        assert torch.equal(lz.gather_paged_kv(rows.layer(0), slot_mapping=slots)[0], key)
        lz.copy_kv_blocks_(cache, from_pages=torch.tensor([0, 1]), to_pages=torch.tensor([1, 0]))
        assert torch.equal(lz.gather_paged_kv(cache, slot_mapping=slots[:2] + 16)[1], value[:2])


@pytest.mark.usefixtures("path")
def test_a_cache_beside_other_tensors_or_in_another_layout_is_refused():
    cache = lz.PagedCache.allocate(4, 16, 2, 32, layout="NHD", dtype=torch.float32)
    query, tables, lens = (
        torch.randn(1, 1, 4, 32),
        torch.zeros(1, 1, dtype=torch.int32),
        torch.ones(1, dtype=torch.int32),
    )
    with pytest.raises(lz.InvalidCallError, match="layout: wanted 'NHD', which the cache is written in, got 'HND'"):
        lz.paged_attention(query, cache, block_tables=tables, context_lens=lens, layout="HND")
    with pytest.raises(lz.InvalidCallError, match="value_cache: wanted that of the same cache, or nothing with it"):
        lz.paged_attention(query, cache, torch.zeros(4, 16, 2, 32), tables, lens)
    with pytest.raises(lz.InvalidCallError, match="query: wanted a tensor, got a PagedCache"):
        lz.paged_attention(cache, cache.keys, cache.values, tables, lens)
    with pytest.raises(TypeError, match="missing required arguments: 'block_tables', 'context_lens'"):
        lz.paged_attention(query, cache)
    with pytest.raises(
        TypeError, match=r"'value_cache'; wanted value_cache .pages, page_size, kv_heads, value_dim., got query"
    ):
        lz.paged_attention(query, cache.keys, block_tables=tables, context_lens=lens)
