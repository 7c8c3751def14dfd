"""Slots of a step's new tokens: on the host, in C and by launches, and the numbers that they are made of."""

from __future__ import annotations

import itertools
import random
import re
import unittest.mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import layerzero as lz
from drawing import at_once, examples
from launches import Counted
from layerzero.core.indices import IN_C
from layerzero.ops.paged import slots as paged_slots
from layerzero.ops.paged.slots import numpy_here, slots_on_host
from paged_calls import PAGE, starts


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
