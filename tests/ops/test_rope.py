"""lz.rope and lz.rope_: what they compute, in which layout, what they refuse, what one choice serves."""

from __future__ import annotations

import pytest
import torch

import layerzero as lz
from drawing import at_once, examples
from layerzero.engine.functions import CALLS
from layerzero.ops.rope.declare import cos_sin, rope

CPU = torch.device("cpu")


def tensors(*, batch=2, seq=5, heads=4, kv_heads=2, head_dim=64, half=None, rows=40, dtype=torch.float32):
    torch.manual_seed(seq)
    lead = (seq,) if batch is None else (batch, seq)
    query, key = (torch.randn(*lead, each, head_dim).to(dtype) for each in (heads, kv_heads))
    return query, key, *cos_sin(rows, half or head_dim // 2, CPU), torch.randint(0, rows, lead)


def test_half_split_is_what_transformers_models_do():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    query, key, cos, sin, positions = tensors()
    wide = [torch.cat((each, each), -1)[positions] for each in (cos, sin)]
    wanted = llama.apply_rotary_pos_emb(query.transpose(1, 2), key.transpose(1, 2), *wide)
    got = lz.rope(query.transpose(1, 2), key.transpose(1, 2), cos, sin, positions, layout="BHSD")
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_interleaved_is_a_product_of_complex_numbers():
    query, key, cos, sin, positions = tensors()
    turn = torch.complex(cos, sin)[positions].unsqueeze(2)
    got = lz.rope(query, key, cos, sin, positions, interleaved=True, layout="BSHD")
    for given, one in zip((query, key), got, strict=True):
        pairs = torch.view_as_complex(given.unflatten(-1, (-1, 2)))
        torch.testing.assert_close(one, torch.view_as_real(pairs * turn).flatten(-2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
def test_entries_beyond_the_table_width_pass_through(interleaved):
    query, key, cos, sin, positions = tensors(head_dim=80, half=16)
    got = lz.rope(query, key, cos, sin, positions, interleaved=interleaved, layout="BSHD")
    narrow = lz.rope(query[..., :32], key[..., :32], cos, sin, positions, interleaved=interleaved, layout="BSHD")
    for given, one, part in zip((query, key), got, narrow, strict=True):
        assert torch.equal(one[..., 32:], given[..., 32:])
        torch.testing.assert_close(one[..., :32], part, rtol=1e-6, atol=1e-6)


def test_flattened_tokens_a_batch_and_heads_first_are_the_same_call():
    query, key, cos, sin, positions = tensors()
    wanted = rope(query, key, cos, sin, positions=positions)
    flat = lz.rope(query.flatten(0, 1), key.flatten(0, 1), cos, sin, positions.flatten())
    turned = lz.rope(query.transpose(1, 2), key.transpose(1, 2), cos, sin, positions, layout="BHSD")
    for one, other, third in zip(flat, turned, wanted, strict=True):
        torch.testing.assert_close(one.view(third.shape), third, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(other.transpose(1, 2), third, rtol=1e-5, atol=1e-5)


def test_no_positions_are_those_from_the_start_and_one_row_serves_a_batch():
    query, key, cos, sin, _ = tensors()
    counted = torch.arange(5)
    wanted = lz.rope(query, key, cos, sin, counted.expand(2, 5), layout="BSHD")
    for positions in (None, counted, counted[None], counted.int()):
        got = lz.rope(query, key, cos, sin, positions, layout="BSHD")
        for one, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("tokens", [1, 3])
def test_in_place_on_the_parts_of_one_projection(heads, kv_heads, tokens):
    query, key, cos, sin, positions = tensors(batch=None, seq=tokens, heads=heads, kv_heads=kv_heads)
    packed = torch.cat([each.flatten(1) for each in (query, key, key)], -1)
    q, k, v = torch.split(packed, [each * 64 for each in (heads, kv_heads, kv_heads)], -1)
    wanted = rope(query, key, cos, sin, positions=positions)
    assert lz.rope_(q.view(query.shape), k.view(key.shape), cos, sin, positions) is None
    for one, other in zip((q, k), wanted, strict=True):
        torch.testing.assert_close(one, other.flatten(1), rtol=1e-5, atol=1e-5)
    assert torch.equal(v, key.flatten(1))


def test_elements_that_query_and_key_share_are_refused():
    query, key, cos, sin, positions = tensors(batch=None)
    with pytest.raises(lz.InvalidCallError, match="key: wanted elements of its own"):
        lz.rope_(query, query[:, 1:3], cos, sin, positions)
    with pytest.raises(lz.InvalidCallError, match="query: wanted memory of its own"):
        lz.rope_(query[:1].expand(5, 4, 64), key, cos, sin, positions)
    with pytest.raises(lz.InvalidCallError, match="leaf that requires gradients"):
        lz.rope_(query.requires_grad_(), key, cos, sin, positions)


@at_once(
    "change, words",
    [
        ({"query": torch.zeros(5, 64)}, "query: wanted .tokens, heads, head dim. or four axes"),
        ({"key": torch.zeros(5, 2, 64)}, "key: wanted 4 axes as query has, got 3"),
        ({"key": torch.zeros(3, 5, 2, 64)}, "key: wanted batch 2 as in query, got 3"),
        ({"cos": torch.zeros(40, 33), "sin": torch.zeros(40, 33)}, "half of 2 to 64 rotated entries"),
        ({"sin": torch.zeros(40, 32).half()}, "sin: wanted dtype float32 like cos, got float16"),
        ({"positions": torch.zeros(2, 4, dtype=torch.int64)}, "positions: wanted seq 5"),
        (
            {"positions": torch.zeros(3, 5, dtype=torch.int64)},
            r"positions: wanted shape \(2, 5\) or \(1, 5\) or \(5,\)",
        ),
        ({"positions": torch.zeros(2, 5)}, "positions: wanted dtype int32 or int64"),
        ({"positions": None, "cos": torch.zeros(4, 32), "sin": torch.zeros(4, 32)}, "a row for each of 5 tokens"),
        ({"cos": torch.zeros(0, 32), "sin": torch.zeros(0, 32)}, "cos: wanted a row for each position"),
        (
            {"cos": torch.zeros(40, 64), "sin": torch.zeros(40, 64)},
            r"got 64; of Transformers' tables, which hold each angle twice, pass cos\[:, :32\] and sin\[:, :32\]",
        ),
        (
            {"cos": torch.zeros(2, 5, 64), "sin": torch.zeros(2, 5, 64)},
            r"cos: wanted .positions, rotated entries / 2., got \(2, 5, 64\); .* pass cos\[0\]",
        ),
        ({"layout": "THD"}, "layout: wanted BSHD or BHSD, got .THD."),
    ],
)
def test_what_means_nothing_is_refused_with_wanted_and_got(change, words):
    query, key, cos, sin, positions = tensors()
    arguments = {"query": query, "key": key, "cos": cos, "sin": sin, "positions": positions, "layout": "BSHD"}
    with pytest.raises(lz.InvalidCallError, match=words):
        lz.rope(**(arguments | change))


def test_what_the_error_says_of_transformers_tables_is_right():
    query, key, cos, sin, _ = tensors()
    twice = [torch.cat((each, each), -1)[None, :5].expand(2, -1, -1) for each in (cos, sin)]
    got = lz.rope(query, key, *(each[0][:, :32] for each in twice), layout="BSHD")
    turned = torch.cat((-query[..., 32:], query[..., :32]), -1)
    torch.testing.assert_close(got[0], query * twice[0][:, :, None] + turned * twice[1][:, :, None])


@pytest.mark.parametrize("interleaved", [False, True])
def test_of_an_odd_width_the_last_entry_passes_through_or_the_table_is_refused(interleaved):
    query, key = torch.randn(2, 5, 4, 63), torch.randn(2, 5, 2, 63)
    _, _, cos, sin, positions = tensors()
    given = {"positions": positions, "interleaved": interleaved, "layout": "BSHD"}
    with pytest.raises(lz.InvalidCallError, match="half of 2 to 63 rotated entries"):
        lz.rope(query, key, cos, sin, **given)
    turned, _ = lz.rope(query, key, cos[:, :31], sin[:, :31], **given)
    whole, _ = lz.rope(query[..., :62], key[..., :62], cos[:, :31], sin[:, :31], **given)
    torch.testing.assert_close(turned[..., :62], whole)
    assert torch.equal(turned[..., 62], query[..., 62])


def test_positions_beyond_the_table_are_found_in_debug_mode():
    query, key, cos, sin, positions = tensors()
    positions[1, 2] = 40
    with lz.scope(debug=True), pytest.raises(lz.InvalidCallError, match=r"positions\[1, 2\]: .*0 to 39, got 40"):
        lz.rope(query, key, cos, sin, positions, layout="BSHD")


def test_head_counts_and_positions_tell_the_layout():
    query, key, cos, sin, positions = tensors(seq=5)
    wanted = lz.rope(query, key, cos, sin, positions, layout="BSHD")
    for one, other in zip(lz.rope(query, key, cos, sin, positions), wanted, strict=True):
        assert torch.equal(one, other)
    query, key, cos, sin, positions = tensors(heads=4, kv_heads=4)
    turned = lz.rope(query.transpose(1, 2).contiguous(), key.transpose(1, 2).contiguous(), cos, sin, positions)
    wanted = lz.rope(query, key, cos, sin, positions, layout="BSHD")
    torch.testing.assert_close(turned[0].transpose(1, 2), wanted[0], rtol=1e-6, atol=1e-6)
    query, key, cos, sin, _ = tensors(seq=4, heads=4, kv_heads=4)
    with pytest.raises(lz.InvalidCallError, match=r"rope: layout: wanted .*both fit query"):
        lz.rope(query, key, cos, sin)


@pytest.mark.parametrize("name", ["rope", "rope_"])
def test_few_choices_serve_every_number_of_tokens(name):
    cos, sin = cos_sin(4096, 32, CPU)
    cache = CALLS[name].dispatcher.cache
    lz.configure()  # a new epoch: nothing is kept
    before = cache.size()
    chosen = 0
    for tokens in range(1, 301):
        query, key = torch.randn(tokens, 4, 64), torch.randn(tokens, 2, 64)
        positions = torch.randint(0, 4096, (tokens,))
        wanted = rope(query, key, cos, sin, positions=positions)
        got = getattr(lz, name)(query, key, cos, sin, positions) or (query, key)
        chosen = max(chosen, cache.size() - before)
        for one, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert chosen <= 12


def test_a_kept_plan_never_reads_beyond_a_table_without_positions():
    query, key, cos, sin, _ = tensors(batch=None, seq=40, rows=50)
    lz.rope(query, key, cos, sin)
    query, key, cos, sin, _ = tensors(batch=None, seq=50, rows=50)
    lz.rope(query, key, cos, sin)
    query, key, _, _, _ = tensors(batch=None, seq=51, rows=50)
    with pytest.raises(lz.InvalidCallError, match="a row for each of 51 tokens"):
        lz.rope(query, key, cos, sin)


def test_a_table_in_two_tensors_on_the_plan_of_a_joined_one():
    query, key, cos, sin, positions = tensors(batch=None)
    loose = torch.randn(40, 64)[:, :32], torch.randn(40, 64)[:, 32:]  # the same strides, other memory
    for pair in ((cos, sin), loose):
        got = lz.rope(query, key, *pair, positions)
        for one, other in zip(got, rope(query, key, *pair, positions=positions), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("half", [8, 3])
def test_gradients_by_finite_differences(interleaved, half):
    query, key, cos, sin, positions = tensors(seq=2, heads=2, kv_heads=1, head_dim=16, half=half, dtype=torch.float64)
    cos, sin = cos.double(), sin.double()
    leaves = [each.requires_grad_() for each in (query, key, cos.clone(), sin.clone())]

    def call(*given):
        return lz.rope(*given, positions, interleaved=interleaved, layout="BSHD")

    assert torch.autograd.gradcheck(call, leaves, fast_mode=examples(100) < 100)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("interleaved", [False, True])
def test_compiled_as_one_graph(interleaved):
    query, key, cos, sin, positions = tensors()

    def model(query, key, cos, sin, positions):
        turned = lz.rope(query, key, cos, sin, positions, interleaved=interleaved, layout="BSHD")
        own = turned[0].clone(), turned[1].clone()
        lz.rope_(*own, cos, sin, positions, interleaved=interleaved, layout="BSHD")
        return own

    got = torch.compile(model, fullgraph=True, backend="aot_eager")(query, key, cos, sin, positions)
    for one, other in zip(got, model(query, key, cos, sin, positions), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["rope", "rope_"])
@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_stock_computes_the_same(name, layout, interleaved):
    query, key, cos, sin, positions = tensors(head_dim=80, half=16)
    if layout == "BHSD":
        query, key = query.transpose(1, 2), key.transpose(1, 2)
    wanted = lz.rope(query, key, cos, sin, positions, interleaved=interleaved, layout=layout)
    (operation,) = CALLS[name].function.operations
    got = operation.stock(query, key, cos, sin, positions, interleaved=interleaved, layout=layout)() or (query, key)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_gradients_of_the_table_follow_a_write_in_place():
    query, key = torch.randn(1, 4, 2, 8), torch.randn(1, 4, 1, 8)
    tables = [torch.randn(4, 4, requires_grad=True) for _ in range(2)]
    wanted = sum(each.sum() for each in lz.rope(query, key, *tables, layout="BSHD"))
    there = torch.autograd.grad(wanted, tables)
    lz.rope_(query, key, *tables, layout="BSHD")
    for one, other in zip(torch.autograd.grad(query.sum() + key.sum(), tables), there, strict=True):
        torch.testing.assert_close(one, other)


def test_a_view_that_autograd_cannot_follow_is_the_callers_mistake(path):
    whole = torch.randn(1, 4, 3, 8, requires_grad=True) * 1
    query, key = whole.split((2, 1), 2)
    cos = torch.ones(4, 4)
    with pytest.raises(lz.InvalidCallError, match=r"query or key: .* is a view and is being modified inplace"):
        lz.rope_(query, key, cos, cos, layout="BSHD")
    lz.rope_(whole[:, :, :2], whole[:, :, 2:], cos, cos, layout="BSHD")


def test_nothing_is_written_into_expanded_views_of_no_elements():
    query, key = (torch.empty(1, heads, 0, 8).expand(3, heads, 0, 8) for heads in (4, 2))
    table = torch.randn(9, 4), torch.randn(9, 4)
    lz.rope_(query, key, *table, positions=torch.zeros(1, 0, dtype=torch.int64), layout="BHSD")
    lz.add_residual_rms_norm_(torch.empty(3, 0, 8), torch.empty(1, 0, 8).expand(3, 0, 8), torch.ones(8))


def test_views_of_a_large_table_are_kept_for_nobody():
    from layerzero.backends import rotary

    large = torch.ones(2**12, 64)
    small = torch.ones(4, 64)
    for table, kept in ((large, False), (small, True)):
        cos, sin, positions = table[:4, :32], table[:4, 32:], torch.arange(4)
        made = rotary.table_and_places(cos, sin, positions, 1, 4, torch.int64)
        assert (rotary.table_and_places(cos, sin, positions, 1, 4, torch.int64)[0] is made[0]) == kept
        assert torch.equal(made[0], table[:4])
