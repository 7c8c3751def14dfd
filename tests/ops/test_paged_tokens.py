"""Several query tokens a sequence over a paged cache: against dense calls, steps, slots, and what calls refuse."""

from __future__ import annotations

import itertools
import math
import random
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import layerzero as lz
from drawing import examples
from launches import Counted
from layerzero.ops.attention.reference import attention_reference
from layerzero.ops.calls import arguments_of
from layerzero.ops.paged import step as paged_step
from layerzero.ops.paged.host_slots import slots_on_host
from layerzero.ops.paged.mixed import GQA_MIXED_PAGED, paged_tokens_reference

PAGE = 4


def starts(*lengths):
    return torch.tensor([sum(lengths[:count]) for count in range(len(lengths) + 1)], dtype=torch.int32)


def paged(queries=(1, 3, 0, 8), lens=(5, 7, 2, 8), heads=4, kv_heads=2, head_dim=8, dtype=torch.float64):
    """Queries, caches full of NaN beyond what was written, tables with garbage at their ends, lengths, starts."""
    torch.manual_seed(0)
    blocks, pages = 2, len(lens) * 2 + 1
    keys, values = (torch.full((pages, PAGE, kv_heads, head_dim), math.nan, dtype=dtype) for _ in range(2))
    table = torch.randperm(pages)[: len(lens) * blocks].view(len(lens), blocks).int()
    for sequence, length in enumerate(lens):
        for position in range(length):
            page = table[sequence, position // PAGE]
            keys[page, position % PAGE] = torch.randn(kv_heads, head_dim, dtype=dtype)
            values[page, position % PAGE] = torch.randn(kv_heads, head_dim, dtype=dtype)
        table[sequence, -(-length // PAGE) :] = -1
    query = torch.randn(sum(queries), heads, head_dim, dtype=dtype)
    return query, keys, values, table, torch.tensor(lens, dtype=torch.int32), starts(*queries)


def by_sequence(query, keys, values, table, lens, cu_q, **arguments):
    """Each sequence gathered and attended as a dense call: (T, H, D) and (H, T)."""
    found = []
    for sequence, (first, last) in enumerate(pairwise(cu_q.tolist())):
        length = int(lens[sequence])
        places = [(int(table[sequence, p // PAGE]), p % PAGE) for p in range(length)]
        k, v = (
            torch.stack([cache[place] for place in places])[None] if places else cache[:0, 0][None]
            for cache in (keys, values)
        )
        found.append(attention_reference(query[None, first:last], k, v, return_lse=True, **arguments))
    return torch.cat([output[0] for output, _ in found]), torch.cat([lse[0] for _, lse in found], 1)


@pytest.mark.parametrize(
    "arguments",
    [{"causal": True}, {"causal": False}, {"causal": True, "window": (2, 0)}, {"causal": True, "softcap": 3.0}],
)
@pytest.mark.parametrize("queries", [(1, 3, 0, 8), (1, 1, 1, 1), (5, 7, 2, 8), (0, 9, 0, 0)], ids=str)
def test_the_reference_is_one_dense_call_a_sequence(queries, arguments):
    call = paged(queries)
    output, lse = paged_tokens_reference(*call, return_lse=True, **arguments)
    wanted, wanted_lse = by_sequence(*call, **arguments)
    torch.testing.assert_close(output, wanted)
    torch.testing.assert_close(lse, wanted_lse)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("decodes", [None, 1])
def test_calls_route_by_head_counts_and_promised_decodes_and_take_both_layouts(kv_heads, decodes):
    query, keys, values, table, lens, cu_q = call = paged(kv_heads=kv_heads)
    kind = "standard" if kv_heads == 4 else "gqa"
    named = {"cu_seqlens_q": cu_q, "decodes": decodes}
    report = lz.explain("paged_attention", query, keys, values, table, lens, **named)
    assert report.operation == f"attention.{kind}.{'mixed' if decodes else 'prefill'}.paged"
    wanted, wanted_lse = by_sequence(*call, causal=True)
    output, lse = lz.paged_attention(query, keys, values, table, lens, **named, return_lse=True)
    torch.testing.assert_close(output, wanted)
    torch.testing.assert_close(lse, wanted_lse.float())
    moved = [cache.transpose(1, 2).contiguous() for cache in (keys, values)]
    torch.testing.assert_close(lz.paged_attention(query, *moved, table, lens, **named, layout="HND"), wanted)


def test_one_token_a_sequence_gives_what_a_decode_call_gives():
    query, keys, values, table, lens, _ = paged((1, 1, 1, 1))
    several = lz.paged_attention(query, keys, values, table, lens, cu_seqlens_q=starts(1, 1, 1, 1))
    torch.testing.assert_close(several.unsqueeze(1), lz.paged_attention(query.unsqueeze(1), keys, values, table, lens))


def test_steps_of_other_batch_sizes_stay_on_one_plan_and_are_looked_at():
    from layerzero.engine.functions import CALLS

    for queries, lens in (((1, 3, 2, 5, 1), (5, 7, 2, 8, 3)), ((1, 2, 2, 4, 1, 2), (5, 7, 2, 8, 3, 4))):
        query, keys, values, table, context, cu_q = paged(queries, lens)
        lz.paged_attention(query, keys, values, table, context, cu_seqlens_q=cu_q)
        sizes = CALLS["paged_attention"].dispatcher.cache.size()
    query, keys, values, table, context, cu_q = paged((1, 3, 2, 4, 1, 1), (5, 6, 2, 8, 3, 4))
    lz.paged_attention(query, keys, values, table, context, cu_seqlens_q=cu_q)
    assert CALLS["paged_attention"].dispatcher.cache.size() == sizes
    with pytest.raises(lz.InvalidCallError, match="cu_seqlens_q: wanted 7 numbers, the end of each of 6 sequences"):
        lz.paged_attention(query, keys, values, table, context, cu_seqlens_q=starts(1, 3, 2, 4, 2))


# steps


def test_a_step_has_slots_for_every_new_token_and_numbers_on_the_host():
    table = torch.tensor([[7, 2], [5, 9], [1, 3]], dtype=torch.int32)
    lens, cu_q = torch.tensor([5, 3, 6], dtype=torch.int32), starts(1, 3, 2)
    step = lz.StepMetadata(table, lens, cu_seqlens_q=cu_q)
    slots = step.slot_mapping(PAGE)
    assert slots.tolist() == [2 * PAGE, 5 * PAGE, 5 * PAGE + 1, 5 * PAGE + 2, 3 * PAGE, 3 * PAGE + 1]
    assert [each.tolist() for each in step.host] == [[5, 3, 6], [0, 1, 4, 6]]
    lens += 1
    assert step.kind_for(table, lens) == "stale"
    step.advance()
    assert slots.tolist()[0] == 2 * PAGE + 1
    assert step.host[0].tolist() == [6, 4, 7]
    host = lens.clone(), cu_q.clone()
    step.advance(host=host)
    assert step.host == host
    assert step.slot_mapping(PAGE, tokens=1).tolist() == [2 * PAGE + 1, 5 * PAGE + 3, 3 * PAGE + 2]
    with pytest.raises(lz.InvalidCallError, match="host: wanted int32 tensors on the CPU"):
        step.advance(host=(lens,))
    with pytest.raises(lz.InvalidCallError, match="cu_seqlens_q: wanted 4 numbers"):
        lz.StepMetadata(table, lens, cu_seqlens_q=starts(1, 2))


def test_a_step_of_other_starts_is_refused():
    query, keys, values, table, lens, cu_q = paged()
    for other in (None, cu_q.clone()):
        step = lz.StepMetadata(table, lens, cu_seqlens_q=other)
        with pytest.raises(lz.InvalidCallError, match="step: wanted the StepMetadata of this cu_seqlens_q"):
            lz.paged_attention(query, keys, values, table, lens, cu_seqlens_q=cu_q, step=step)


def test_cases_of_a_mixed_call_decode_eight_sequences_of_nine():
    case = next(each for each in GQA_MIXED_PAGED.cases if each.sizes["batch"] == 72)
    made = arguments_of(GQA_MIXED_PAGED, case, torch.bfloat16, "meta")
    assert made["decodes"] == 64
    assert made["max_seqlen_q"] > 500


# what a call refuses

WRONG = [
    (lambda c: {"cu_seqlens_q": c["cu_seqlens_q"].long()}, "cu_seqlens_q: wanted an int32 tensor"),
    (lambda c: {"cu_seqlens_q": c["cu_seqlens_q"][:-1]}, "cu_seqlens_q: wanted 5 numbers"),
    (lambda c: {"cu_seqlens_q": c["cu_seqlens_q"] + 1}, r"cu_seqlens_q\[0\]: wanted 0, got 1"),
    (lambda c: {"cu_seqlens_q": torch.tensor([0, 4, 1, 4, 12]).int()}, r"cu_seqlens_q\[2\]: wanted at least 4"),
    (lambda c: {"cu_seqlens_q": starts(1, 3, 0, 9)}, r"cu_seqlens_q\[4\]: wanted 12, the number of tokens, got 13"),
    (lambda c: {"cu_seqlens_q": c["cu_seqlens_q"].to("meta")}, "cu_seqlens_q: wanted device"),
    (lambda c: {"cu_seqlens_q": None}, "query: wanted a 4D tensor, got 3D"),
    (lambda c: {"query": c["query"][None]}, "query: wanted a 3D tensor, got 4D"),
    (lambda c: {"block_tables": c["block_tables"].long()}, "block_tables: wanted an int32 tensor"),
    (lambda c: {"context_lens": c["context_lens"][:2]}, "wanted 4 lengths as in block_tables, got 2"),
    (lambda c: {"context_lens": c["context_lens"] + 1}, r"context_lens\[3\]: wanted 0 to 8, got 9"),
    (lambda c: {"block_tables": c["block_tables"].clamp(min=0) + 9}, r"block_tables\[0, 0\]: wanted 0 to 8"),
    (lambda c: {"decodes": 5}, "decodes: wanted at most 4, as many as there are sequences, got 5"),
    (lambda c: {"decodes": 0}, "decodes: wanted a number of at least 1 or None, got 0"),
    (lambda c: {"max_seqlen_q": 0}, "max_seqlen_q: wanted a number of at least 1 or None, got 0"),
    (lambda c: {"causal": None}, "causal: wanted bool, got None"),
    (lambda c: {"layout": "BSHD"}, "layout: wanted NHD or HND, got 'BSHD'"),
]


@pytest.mark.parametrize(("change", "text"), WRONG, ids=[text for _, text in WRONG])
def test_what_means_nothing_is_refused_before_anything_is_read(change, text):
    names = ("query", "key_cache", "value_cache", "block_tables", "context_lens", "cu_seqlens_q")
    arguments = dict(zip(names, paged(), strict=True))
    lz.paged_attention(**arguments)
    with pytest.raises(lz.InvalidCallError, match=text):
        lz.paged_attention(**arguments | change(arguments))


@pytest.mark.parametrize("name", ["max_seqlen_q", "decodes"])
def test_promises_about_starts_mean_nothing_without_them(name):
    query, keys, values, table, lens, _ = paged((1, 1, 1, 1))
    with pytest.raises(lz.InvalidCallError, match=f"{name}: wanted None without cu_seqlens_q, got 1"):
        lz.paged_attention(query.unsqueeze(1), keys, values, table, lens, **{name: 1})


def test_debug_mode_holds_a_caller_to_the_promised_decodes():
    query, keys, values, table, lens, cu_q = paged()
    with lz.scope(debug=True), pytest.raises(lz.InvalidCallError, match="wanted one query in each of the first 2"):
        lz.paged_attention(query, keys, values, table, lens, cu_seqlens_q=cu_q, decodes=2)


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("lens", [(5, 3, 6), (5, 8, 2), (9, 3, 6)], ids=str)
@pytest.mark.parametrize("tokens", [None, 1, 2])
def test_slots_are_the_same_whether_lengths_lie_on_the_host(lens, given, tokens, monkeypatch):
    table, cu_q = torch.tensor([[7, 2], [5, 9], [1, 3]], dtype=torch.int32), starts(1, 3, 2)

    def slots(on_host):
        monkeypatch.setattr(lz.StepMetadata, "has_host", on_host)
        host = (torch.tensor(lens).int(), cu_q.clone()) if given else None
        try:
            step = lz.StepMetadata(table, torch.tensor(lens).int(), cu_seqlens_q=cu_q, host=host)
            return step.slot_mapping(PAGE, tokens).tolist()
        except lz.InvalidCallError as error:
            return str(error)

    assert slots(True) == slots(False)


def test_the_code_of_the_serving_page_runs():
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    code, *_ = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names = {}
    exec(code, names)
    starts, lens, tables = names["starts"].tolist(), names["lens"].tolist(), names["tables"]
    cache = names["cache"]
    for row, (first, last) in enumerate(pairwise(starts)):
        keys, values = (
            each[tables[row].long()].flatten(0, 1)[None, : lens[row]] for each in (cache.keys, cache.values)
        )
        wanted = attention_reference(names["query"][None, first:last], keys, values, causal=True)
        torch.testing.assert_close(names["output"][first:last], wanted[0], rtol=1e-5, atol=1e-5)


def drawn_step(seed):
    """Tables, lengths and starts, with tokens before a sequence's first, beyond its table and on no page."""
    draw = random.Random(seed)
    batch, columns, page_size = draw.randint(0, 5), draw.randint(0, 4), draw.choice([1, 3, 16])
    tables = torch.tensor([[draw.randint(-1, 9) for _ in range(columns)] for _ in range(batch)], dtype=torch.int32)
    lens = torch.tensor([draw.randint(0, columns * page_size + 2) for _ in range(batch)], dtype=torch.int32)
    counts = [draw.randint(0, 4) for _ in range(batch)]
    starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    return tables.view(batch, columns), lens, starts if draw.random() < 0.5 else None, page_size


@pytest.mark.parametrize("seed", range(200))
def test_slots_of_the_host_are_those_of_the_device(monkeypatch, seed):
    tables, lens, starts, page_size = drawn_step(seed)
    tokens = None if starts is not None else 1 + seed % 3

    def asked():
        step = lz.StepMetadata(tables, lens, cu_seqlens_q=starts, pages=8)
        try:
            return step.slot_mapping(page_size, tokens).tolist()
        except lz.InvalidCallError as error:
            return str(error)

    on_host = asked()
    monkeypatch.setattr(paged_step, "slots_on_host", lambda *_: None)  # as without numpy
    assert on_host == asked()


def slots_one_by_one(tables, lens, counts, page_size, pages):
    """What each new token gets, and how many are lost, token by token."""
    found, lost = [], 0
    for table, length, count in zip(tables, lens, counts, strict=True):
        for place in range(length - count, length):
            column = place // page_size
            page = table[column] if 0 <= column < len(table) else -1
            there = 0 <= page < pages
            found.append(page * page_size + place % page_size if there else -1)
            lost += not there and place >= 0
    return found, lost


@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_slots_of_the_host_are_those_of_each_token(data):
    batch, columns = data.draw(st.integers(0, 6)), data.draw(st.integers(0, 4))
    page_size, pages = data.draw(st.sampled_from([1, 3, 16, 64])), data.draw(st.sampled_from([9, 2**31]))
    wrong = data.draw(st.sampled_from([0, 0, 1]))  # most steps have a place for each token
    pages_drawn = st.sampled_from(
        [0, 5, 8, 2**31 - 1 if pages > 9 else 3, *([-1, -(2**31), 9, 2**31 - 1] if wrong else [])]
    )
    tables = [data.draw(st.lists(pages_drawn, min_size=columns, max_size=columns)) for _ in range(batch)]
    room = columns * page_size
    lens = [data.draw(st.integers(-wrong, room + wrong)) for _ in range(batch)]
    if same := data.draw(st.sampled_from([0, 1, 3])):
        counts = [same] * batch
    else:
        counts = [data.draw(st.integers(0, max(length, 0) + wrong)) for length in lens]
    each = torch.tensor(tables, dtype=torch.int32).view(batch, columns)
    begins = None if same else torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    slots, lost = slots_on_host(each, torch.tensor(lens, dtype=torch.int32), begins, same, page_size, pages)
    assert (slots.tolist(), lost) == slots_one_by_one(tables, lens, counts, page_size, pages)
    assert slots.dtype is torch.int64


@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize("count", [1, 3])
def test_slots_of_tables_on_the_host_are_one_copy(batch, count):
    tables = torch.arange(batch * 4, dtype=torch.int32).view(batch, 4)
    lens = torch.full((batch,), 20, dtype=torch.int32)
    starts = None if count == 1 else torch.arange(0, batch * count + 1, count, dtype=torch.int32)
    given = {"host": (lens,) if starts is None else (lens, starts), "host_tables": tables}
    step = lz.StepMetadata(tables, lens, cu_seqlens_q=starts, **given)
    before = step.slot_mapping(16).tolist()
    lens += 1
    with Counted() as counted:
        step.advance(**given)
        slots = step.slot_mapping(16)
    views = {"aten.detach.default", "aten.lift_fresh.default"}  # numpy's of a tensor, and back: no launch
    reads = {"aten.select.int", "aten._local_scalar_dense.default"}  # the host's last start
    assert [each for each in counted.calls if each not in views | reads] == ["aten.copy_.default"]
    assert slots.tolist() == [each + 1 for each in before]


@pytest.mark.parametrize("tables", [torch.zeros(2, 3), torch.zeros(2, 4, dtype=torch.int32), [[0]]])
def test_tables_of_the_host_are_those_of_the_device(tables):
    step = {"block_tables": torch.zeros(2, 3, dtype=torch.int32), "context_lens": torch.ones(2, dtype=torch.int32)}
    with pytest.raises(lz.InvalidCallError, match="host_tables: wanted an int32 tensor on the CPU of shape"):
        lz.StepMetadata(**step, host_tables=tables)
    with pytest.raises(lz.InvalidCallError, match="host_tables: wanted an int32 tensor on the CPU of shape"):
        lz.StepMetadata(**step).advance(host_tables=tables)


@pytest.mark.parametrize("numpy_is_here", [True, False])
@pytest.mark.parametrize("wrong", [[1, 3, 4], [0, 3, 2], [0, -1, 1], [0, 2**31 - 1, -(2**31)]])
def test_starts_that_are_none_are_refused_before_anything_is_read_by_them(monkeypatch, numpy_is_here, wrong):
    if not numpy_is_here:
        monkeypatch.setattr(paged_step, "slots_on_host", lambda *_: None)
    tables, lens = torch.zeros(2, 3, dtype=torch.int32), torch.tensor([3, 2], dtype=torch.int32)
    step = lz.StepMetadata(tables, lens, cu_seqlens_q=torch.tensor(wrong, dtype=torch.int32))
    with pytest.raises(lz.InvalidCallError, match="cu_seqlens_q: wanted starts that begin with 0 and do not decrease"):
        step.slot_mapping(16)


@pytest.mark.parametrize("given", [True, False])
def test_another_total_of_new_tokens_is_told_when_a_step_advances(given):
    tables, lens = torch.zeros(2, 3, dtype=torch.int32), torch.tensor([3, 2], dtype=torch.int32)
    starts = torch.tensor([0, 2, 3], dtype=torch.int32)
    step = lz.StepMetadata(tables, lens, cu_seqlens_q=starts)
    before = step.slot_mapping(16).tolist()
    starts.copy_(torch.tensor([0, 1, 2]))
    with pytest.raises(lz.InvalidCallError, match="wanted 3 new tokens, as its slots have, got 2; make a new"):
        step.advance(host=(lens, starts) if given else None)
    starts.copy_(torch.tensor([0, 2, 3]))
    step.advance()
    assert step.slot_mapping(16).tolist() == before


def named(call):
    names = "query", "key_cache", "value_cache", "block_tables", "context_lens", "cu_seqlens_q"
    return dict(zip(names, call, strict=True))


def drafts():
    """A decode, five drafts of two branches, no query at all, and a prefill that is longer than the mask is wide."""
    call = named(paged((1, 5, 0, 8), (5, 7, 2, 8)))
    parents = {1: [-1], 5: [-1, 0, 0, 1, 2]}
    mask, first = torch.zeros(14, 6, dtype=torch.bool), 0
    for count in (1, 5):
        for place, parent in enumerate(parents[count]):
            if parent >= 0:
                mask[first + place] = mask[first + parent]
            mask[first + place, place] = True
        first += count
    return call, mask


@pytest.mark.parametrize("kernel", ["torch.paged_sdpa", "reference.attention.gqa.prefill.paged"])
@pytest.mark.parametrize("window", [None, (2, 0)])
def test_drafts_see_their_ancestors_and_what_was_cached_before(kernel, window):
    call, mask = drafts()
    with lz.scope(locks={"attention.gqa.prefill.paged": kernel}):
        output, lse = lz.paged_attention(**call, tree_mask=mask, window=window, return_lse=True)
        chains = lz.paged_attention(**call, window=window)
    assert torch.equal(output[[0, 1, 2]], chains[[0, 1, 2]])
    assert torch.allclose(output[6:], chains[6:])
    whole = {name: call[name] for name in ("key_cache", "value_cache")}
    keys, values = (each[call["block_tables"][1, :2].long()].flatten(0, 1)[:7] for each in whole.values())
    seen = torch.cat((torch.ones(5, 2, dtype=torch.bool), mask[1:6, :5]), 1)
    if window is not None:
        places = torch.arange(7)
        seen &= places >= (torch.arange(5) + 2 - window[0]).unsqueeze(1)
    each = {"query": call["query"][1:6], "key": keys, "value": values}
    wanted, sums = attention_reference(
        **{name: tensor.unsqueeze(0) for name, tensor in each.items()}, attn_mask=seen, return_lse=True
    )
    assert torch.allclose(output[1:6], wanted[0])
    assert torch.allclose(lse[:, 1:6], sums[0])


@pytest.mark.parametrize("by_sequence", [False, True])
@pytest.mark.parametrize("kernel", ["torch.paged_sdpa", "reference.attention.gqa.prefill.paged"])
def test_slopes_over_pages_are_those_of_ragged_keys(kernel, by_sequence):
    call = named(paged())
    slopes = torch.rand(4, 4, dtype=torch.float64) if by_sequence else torch.rand(4, dtype=torch.float64)
    with lz.scope(locks={"attention.gqa.prefill.paged": kernel}):
        output = lz.paged_attention(**call, alibi_slopes=slopes)
    assert torch.allclose(output, lz.ragged_attention(*ragged_of(call), alibi_slopes=slopes))


@pytest.mark.parametrize("kernel", ["torch.paged_sdpa", "reference.attention.gqa.prefill.paged"])
@pytest.mark.parametrize("lens", [(5, 7, 2, 8), (5, 3, 0, 8)])
def test_sinks_over_pages_are_those_of_ragged_keys(kernel, lens):
    call, sinks = named(paged(lens=lens)), torch.randn(4, dtype=torch.float64)
    kind = "attention.gqa.prefill"
    locks = {f"{kind}.paged": kernel, f"{kind}.ragged": f"reference.{kind}.ragged"}
    with lz.scope(locks=locks):
        output, lse = lz.paged_attention(**call, sinks=sinks, return_lse=True)
        wanted, sums = lz.ragged_attention(*ragged_of(call), sinks=sinks, return_lse=True)
        assert torch.equal(lz.paged_attention(**call, sinks=sinks), output)
    torch.testing.assert_close(output, wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, sums)


def put(mask, row, column, value):
    changed = mask.clone()
    changed[row, column] = value
    return changed


def ragged_of(call):
    """The same keys without pages."""
    lens = call["context_lens"].tolist()
    caches = [
        torch.cat(
            [
                call[name][call["block_tables"][row, : -(-n // PAGE)].long()].flatten(0, 1)[:n]
                for row, n in enumerate(lens)
            ]
        )
        for name in ("key_cache", "value_cache")
    ]
    return call["query"], *caches, call["cu_seqlens_q"], starts(*lens)


@pytest.mark.parametrize(("change", "text"), [
    (lambda m: m.float(), r"tree_mask: wanted a bool tensor \(14, columns\), a row for each query, got torch.float32"),
    (lambda m: m[:13], r"tree_mask: wanted a bool tensor \(14, columns\), a row for each query, got .* \(13, 6\)"),
    (lambda m: m & False, r"tree_mask\[0\]: wanted the token itself and what its parent sees, columns \[0\], got \[\]"),
    (lambda m: put(m, 1, 4, True), r"tree_mask\[1\]: .*\[0\], got \[0, 4\]"),
    (lambda m: put(m, 4, 2, True), r"tree_mask\[4\]: .*got \[0, 1, 2, 3\]"),
    (lambda m: put(m, 4, 0, False), r"tree_mask\[4\]: .*got \[1, 3\]"),
])  # fmt: skip
@pytest.mark.parametrize("known", [False, True])
def test_a_mask_that_is_no_tree_is_told_on_every_call(change, text, known):
    call, mask = drafts()
    if known:
        lz.paged_attention(**call, tree_mask=mask)
    with pytest.raises(lz.InvalidCallError, match=text):
        lz.paged_attention(**call, tree_mask=change(mask))


def test_a_tree_is_causal_and_of_several_tokens():
    call, mask = drafts()
    with pytest.raises(lz.InvalidCallError, match="causal: wanted True beside tree_mask"):
        lz.paged_attention(**call, tree_mask=mask, causal=False)
    one = {**call, "query": call["query"][:4].unsqueeze(1)}
    del one["cu_seqlens_q"]
    with pytest.raises(lz.InvalidCallError, match="sinks: wanted cu_seqlens_q beside it"):
        lz.paged_attention(**one, sinks=torch.zeros(4))
    with pytest.raises(lz.InvalidCallError, match=r"alibi_slopes: wanted shape \(4,\) or \(4, 4\), got \(3,\)"):
        lz.paged_attention(**call, alibi_slopes=torch.zeros(3))


@pytest.mark.parametrize("name", ["sinks", "alibi_slopes", "tree_mask"])
def test_a_cache_of_codes_takes_no_bias(name):
    call, mask = drafts()
    codes = {each: torch.zeros(call[each].shape, dtype=torch.int8) for each in ("key_cache", "value_cache")}
    scales = {"key_scale": torch.tensor(1.0), "value_scale": torch.tensor(1.0)}
    bias = mask if name == "tree_mask" else torch.zeros(4)
    with pytest.raises(lz.InvalidCallError, match=f"{name}: wanted None over a cache of torch.int8"):
        lz.paged_attention(**call | codes | scales, **{name: bias})
