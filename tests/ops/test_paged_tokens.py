"""Several query tokens a sequence over a paged cache: against dense calls, steps, slots, and what calls refuse."""

from __future__ import annotations

import itertools
import random
import re
import unittest.mock
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import layerzero as lz
from drawing import at_once, examples
from launches import Counted
from layerzero.core.indices import IN_C
from layerzero.ops.attention.reference import attention_reference
from layerzero.ops.calls import arguments_of
from layerzero.ops.paged import pages
from layerzero.ops.paged import slots as paged_slots
from layerzero.ops.paged.mixed import GQA_MIXED_PAGED, paged_tokens_reference
from layerzero.ops.paged.slots import numpy_here, slots_on_host
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
    (lambda c: {"cu_seqlens_q": None}, r"got 3D .*; queries of \(T, H, D\) go with cu_seqlens_q="),
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


@at_once("seed", range(200))
def test_slots_of_the_host_are_those_of_the_device(seed):
    tables, lens, starts, page_size = drawn_step(seed)
    tokens = None if starts is not None else 1 + seed % 3

    def asked():
        step = lz.StepMetadata(tables, lens, cu_seqlens_q=starts, pages=8)
        try:
            return step.slot_mapping(page_size, tokens).tolist()
        except lz.InvalidCallError as error:
            return str(error)

    on_host = asked()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged_slots, "slots_on_host", lambda *_: None)  # as without numpy
        assert on_host == asked()


def test_a_length_below_every_difference_of_int32_leads_nowhere(monkeypatch):
    """By launches it wraps around: to tokens beyond their table, not to places beyond all tables."""
    monkeypatch.setattr(paged_slots, "slots_on_host", lambda *_: None)  # as without numpy
    tables, lens = torch.zeros(2, 2, dtype=torch.int32), torch.tensor([5, -(2**31)], dtype=torch.int32)
    step = lz.StepMetadata(tables, lens, cu_seqlens_q=torch.tensor([0, 1, 3], dtype=torch.int32))
    with pytest.raises(lz.InvalidCallError, match="got 2 tokens beyond their table"):
        step.slot_mapping(16)


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
    lz.rms_norm(torch.ones(1, 2), torch.ones(2))  # the first call loads the extension
    wanted = slots_one_by_one(tables, lens, counts, page_size, pages)
    in_c, numpy = dict(IN_C), numpy_here() is not None
    for ways in [*([in_c] if in_c else []), *([{}] if numpy else [])]:
        with unittest.mock.patch.dict(IN_C, ways, clear=True):
            found = slots_on_host(each, torch.tensor(lens, dtype=torch.int32), begins, same, page_size, pages)
        if found is None and not numpy:  # what the loop in C leaves to numpy is left to launches
            continue
        slots, lost = found
        assert (slots.tolist(), lost) == wanted
        assert slots.dtype is torch.int64


def freed():
    tables = torch.zeros(2, 2, dtype=torch.int32)
    tables.untyped_storage().resize_(0)
    return tables


SLOTS = {
    "tables": torch.tensor([[3, 5], [1, -1]], dtype=torch.int32), "lens": torch.tensor([4, 5], dtype=torch.int32),
    "starts": torch.tensor([0, 1, 3], dtype=torch.int32), "tokens": 1, "page_size": 4, "pages": 8,
    "out": torch.empty(3, dtype=torch.int64),
}  # fmt: skip
NOT_FOR_C = [
    *({"out": torch.empty(size, dtype=torch.int64)} for size in (0, 2, 4)),
    {"out": torch.empty(3, dtype=torch.int32)},
    {"out": torch.empty(6, dtype=torch.int64)[::2]},
    {"starts": None},  # two tokens, and places for three
    {"starts": torch.tensor([0, 3], dtype=torch.int32)},
    {"starts": torch.tensor([0, 1, 2**31 - 1], dtype=torch.int32)},
    {"tables": SLOTS["tables"].t()},
    {"tables": torch.zeros(2, 4, dtype=torch.int32)[:, ::2]},
    {"tables": torch.zeros(1, 2, dtype=torch.int32)},
    {"tables": torch.zeros(2, dtype=torch.int32)},
    {"tables": torch.zeros(2, 2)},
    {"tables": torch.zeros(2, 2, dtype=torch.int32, device="meta")},
    {"tables": freed()},
    {"tables": [[3, 5], [1, -1]]},
    {"lens": torch.tensor([4, 5])},
    {"page_size": 0},
    {"page_size": -4},
    {"page_size": 2**62},
    {"tokens": -1},
    {"tokens": 2**62},
]


@at_once("other", NOT_FOR_C)
def test_the_loop_in_c_leaves_what_it_does_not_fit(other):
    fill = loop_in_c()
    assert (fill(*SLOTS.values()), SLOTS["out"].tolist()) == (1, [15, 7, -1])
    assert fill(*{**SLOTS, **other}.values()) is None


@pytest.mark.parametrize("starts", [[1, 1, 3], [0, 2, 1], [0, -1, 3], [-1, 1, 3], [0, -3, -3]])
def test_starts_that_are_none_are_told_with_the_loop_in_c(starts):
    pytest.importorskip("numpy")  # it says what was wrong; by launches another place does
    begins = torch.tensor(starts, dtype=torch.int32)
    assert loop_in_c()(*{**SLOTS, "starts": begins}.values()) == -1
    with pytest.raises(lz.InvalidCallError, match=re.escape(f"do not decrease, got {starts}")):
        slots_on_host(SLOTS["tables"], SLOTS["lens"], begins, 0, 4, 8)


def test_slots_of_the_host_lie_there_wherever_torch_makes_tensors():
    fill = unittest.mock.Mock(wraps=loop_in_c())
    with unittest.mock.patch.dict(IN_C, slots=fill), torch.device("meta"):
        slots, _ = slots_on_host(*list(SLOTS.values())[:-1])
    assert (slots.device.type, fill.call_args.args[-1] is slots) == ("cpu", True)


def loop_in_c():
    lz.rms_norm(torch.ones(1, 2), torch.ones(2))  # the first call loads the extension
    return IN_C.get("slots") or pytest.skip("the extension was not built")


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("ways", ["as they are", "by launches"])
def test_a_step_is_made_on_the_host_wherever_torch_makes_tensors(monkeypatch, ways, count):
    if ways == "by launches":
        monkeypatch.setattr(paged_slots, "slots_on_host", lambda *_: None)
    tables, lens = torch.arange(8, dtype=torch.int32).view(2, 4), torch.tensor([20, 9], dtype=torch.int32)
    starts = None if count == 1 else torch.tensor([0, count, 2 * count], dtype=torch.int32)
    wanted = lz.StepMetadata(tables, lens, cu_seqlens_q=starts)
    with torch.device("meta"):
        step = lz.StepMetadata(tables, lens, cu_seqlens_q=starts)
        assert step.host[1].device.type == "cpu"
        slots = step.slot_mapping(16)
    assert slots.tolist() == wanted.slot_mapping(16).tolist()
    assert step.host[1].dtype is torch.int32


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
    views = {"aten.detach.default", "aten.lift_fresh.default", "aten.empty.memory_format"}  # no launch
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


def test_tables_of_the_host_name_the_pages_of_those_on_the_cpu():
    """Nobody compared them, and slots were made of one, pages read by the other."""
    tables = torch.tensor([[3, 1], [0, 5]], dtype=torch.int32)
    lens = torch.tensor([17, 20], dtype=torch.int32)
    other = tables.clone()
    step = lz.StepMetadata(tables, lens, host=(lens,), host_tables=other)
    other[1, 0] = 4
    wanted = r"host_tables\[1, 0\]: wanted the page that it stands for, 0, got 4"
    with pytest.raises(lz.InvalidCallError, match=wanted):
        step.advance(host=(lens,), host_tables=other)
    with pytest.raises(lz.InvalidCallError, match=wanted):
        lz.StepMetadata(tables, lens, host_tables=other)
    tables[1, 0] = 4
    step.advance(host=(lens,), host_tables=other)


@pytest.mark.parametrize("numpy_is_here", [True, False])
@pytest.mark.parametrize("wrong", [[1, 3, 4], [0, 3, 2], [0, -1, 1], [0, 2**31 - 1, -(2**31)]])
def test_starts_that_are_none_are_refused_before_anything_is_read_by_them(monkeypatch, numpy_is_here, wrong):
    if not numpy_is_here:
        monkeypatch.setattr(paged_slots, "slots_on_host", lambda *_: None)
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


@pytest.mark.parametrize("inference", [False, True])
def test_slots_of_values_that_changed_are_refused_until_a_step_advances(inference):
    """In inference mode too, where torch counts no writes."""
    with torch.inference_mode(inference):
        tables = torch.tensor([[3, 1], [0, 5]], dtype=torch.int32)
        lens = torch.tensor([17, 20], dtype=torch.int32)
        step = lz.StepMetadata(tables, lens)
        assert step.slot_mapping(16).tolist() == [16, 83]
        for changed in (lens, tables):
            changed.add_(1)
            with pytest.raises(lz.InvalidCallError, match=r"step: wanted advance\(\) after tables or lengths changed"):
                step.slot_mapping(16)
            step.advance()
        assert step.slot_mapping(16).tolist() == [33, 100]


def test_numbers_of_the_host_are_those_beside_them():
    """On a CPU both are there: slots were made of the one, and attention read the other."""
    tables = torch.tensor([[3, 1], [0, 5]], dtype=torch.int32)
    lens, starts = torch.tensor([17, 20], dtype=torch.int32), torch.tensor([0, 1, 9], dtype=torch.int32)
    with pytest.raises(lz.InvalidCallError, match=r"host\[0\]: wanted the numbers .*, \[17, 20\], got \[18, 21\]"):
        lz.StepMetadata(tables, lens, host=(lens + 1,))
    step = lz.StepMetadata(tables, lens, cu_seqlens_q=starts, host=(lens.clone(), starts.clone()))
    before, wanted = step.slot_mapping(16).clone(), r"host\[1\]: wanted the numbers .*, \[0, 1, 9\], got \[0, 2, 9\]"
    with pytest.raises(lz.InvalidCallError, match=wanted):
        step.advance(host=(lens, torch.tensor([0, 2, 9], dtype=torch.int32)))
    assert torch.equal(step.slot_mapping(16), before)
    with pytest.raises(lz.InvalidCallError, match=r"RaggedMetadata: host\[0\]: wanted the numbers that it stands for"):
        lz.RaggedMetadata(starts, starts, host=(starts + 1, starts))


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
