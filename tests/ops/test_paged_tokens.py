"""Several query tokens a sequence over a paged cache: against dense calls, steps, and what calls refuse."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import layerzero as lz
from drawing import at_once
from layerzero.ops.attention.reference import attention_reference
from layerzero.ops.calls import arguments_of
from layerzero.ops.paged import pages
from layerzero.ops.paged.mixed import GQA_MIXED_PAGED, paged_tokens_reference
from paged_calls import PAGE, paged, starts


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


@at_once(
    "arguments",
    [{"causal": True}, {"causal": False}, {"causal": True, "window": (2, 0)}, {"causal": True, "softcap": 3.0}],
)
@at_once("queries", [(1, 3, 0, 8), (1, 1, 1, 1), (5, 7, 2, 8), (0, 9, 0, 0)])
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
    (lambda c: {"cu_seqlens_q": None}, r"got 3D .*, go as query\[:, None\], those of \(T, H, D\) with cu_seqlens_q="),
    (lambda c: {"query": c["query"][None]}, "query: wanted a 3D tensor, got 4D .*; with cu_seqlens_q"),
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


@at_once("change, text", WRONG)
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


def test_a_step_of_other_starts_is_refused_on_a_kept_plan_too():
    """It was by the first call of a kind, and by kernels that plan, but no more by calls that had run before."""
    tables = torch.tensor([[3, 1], [0, 5]], dtype=torch.int32)
    lens, starts = torch.tensor([17, 20], dtype=torch.int32), torch.tensor([0, 1, 4], dtype=torch.int32)
    others = torch.tensor([0, 2, 4], dtype=torch.int32)
    keys, values, query = torch.randn(8, 16, 2, 32), torch.randn(8, 16, 2, 32), torch.randn(4, 8, 32)
    call = query, keys, values, tables, lens
    step, of_one = lz.StepMetadata(tables, lens, cu_seqlens_q=starts), lz.StepMetadata(tables, lens)
    for more in ({}, {"decodes": 1}):
        own = {"cu_seqlens_q": starts, **more}
        wanted = lz.paged_attention(*call, **own)
        torch.testing.assert_close(lz.paged_attention(*call, **own, step=step), wanted)
        if not more:
            with pytest.raises(lz.InvalidCallError, match="StepMetadata of this cu_seqlens_q, got that of others"):
                lz.paged_attention(*call, cu_seqlens_q=others, step=step)
        with pytest.raises(lz.InvalidCallError, match="StepMetadata of this cu_seqlens_q, got that of one token a seq"):
            lz.paged_attention(*call, **own, step=of_one)
        lz.paged_attention(*call, **own, step=step)
    decode = lz.paged_attention(query[:2].unsqueeze(1), *call[1:], step=step)  # one token each, whatever the step has
    torch.testing.assert_close(decode, lz.paged_attention(query[:2].unsqueeze(1), *call[1:], step=of_one))


@pytest.mark.parametrize("rows_apart", [0, 3], ids=["dense", "gaps between pages"])
def test_tokens_are_taken_from_dense_caches_and_from_those_with_gaps(rows_apart):
    cache = torch.randn(5, PAGE + rows_apart, 2, 8)[:, :PAGE]
    page, offset = torch.randint(5, (3, 7), dtype=torch.int32), torch.randint(PAGE, (3, 7))
    assert torch.equal(pages.taken(cache, page, offset), cache[page, offset])


def test_of_a_single_page_nothing_behind_the_last_token_is_read():
    cache = torch.randn(2, PAGE, 2, 8)
    assert torch.equal(pages.tokens_of(cache, torch.tensor([1]), 2), cache[1, :2])
    assert torch.equal(pages.tokens_of(cache, torch.tensor([1, 0]), PAGE + 1), torch.cat([cache[1], cache[0, :1]]))
