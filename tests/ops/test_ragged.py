"""Attention of sequences that lie one after the other: against dense calls, and what calls refuse."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

import layerzero as lz
from drawing import at_once
from layerzero.engine.functions import CALLS
from layerzero.ops.attention.reference import attention_reference
from layerzero.ops.calls import arguments_of, case_of_sizes, facts_of
from layerzero.ops.ragged.declare import GQA_RAGGED
from layerzero.ops.ragged.reference import ragged_attention
from layerzero.ops.ragged.starts import sequences_of, spread


def starts(*lengths):
    return torch.tensor([sum(lengths[:count]) for count in range(len(lengths) + 1)], dtype=torch.int32)


def ragged(queries=(3, 0, 5), keys=(7, 2, 5), heads=4, kv_heads=2, head_dim=8, dtype=torch.float64):
    torch.manual_seed(0)
    query = torch.randn(sum(queries), heads, head_dim, dtype=dtype)
    key, value = (torch.randn(sum(keys), kv_heads, head_dim, dtype=dtype) for _ in range(2))
    return query, key, value, starts(*queries), starts(*keys)


def one_by_one(query, key, value, cu_q, cu_k, **arguments):
    """Each sequence as a dense call of its own: outputs (T, H, D), log-sum-exps (H, T)."""
    found = [
        attention_reference(query[None, a:b], key[None, c:d], value[None, c:d], return_lse=True, **arguments)
        for (a, b), (c, d) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True)
    ]
    return torch.cat([output[0] for output, _ in found]), torch.cat([lse[0] for _, lse in found], 1)


ARGUMENTS = [
    {"causal": False},
    {"causal": True},
    {"causal": True, "window": (2, 0)},
    {"causal": False, "window": (1, 1)},
    {"causal": True, "softcap": 2.0},
    {"causal": False, "scale": 0.3},
    {"causal": True, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)},
    {"causal": True, "alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)},
]


@at_once("arguments", ARGUMENTS)
@at_once("lengths", [((3, 0, 5), (7, 2, 5)), ((4,), (4,)), ((6, 1), (2, 9))])
def test_the_reference_is_one_dense_call_after_the_other(lengths, arguments):
    call = ragged(*lengths)
    output, lse = ragged_attention(*call, return_lse=True, **arguments)
    wanted, wanted_lse = one_by_one(*call, **arguments)
    torch.testing.assert_close(output, wanted)
    torch.testing.assert_close(lse, wanted_lse)


@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("causal", [True, False])
def test_the_public_function_attends_within_sequences_and_routes_by_head_counts(kv_heads, causal):
    call = ragged(kv_heads=kv_heads)
    kind = "standard" if kv_heads == 4 else "gqa"
    assert lz.explain("ragged_attention", *call).operation == f"attention.{kind}.prefill.ragged"
    output, lse = lz.ragged_attention(*call, causal=causal, return_lse=True)
    wanted, wanted_lse = one_by_one(*call, causal=causal)
    torch.testing.assert_close(output, wanted)
    torch.testing.assert_close(lse, wanted_lse.float())


@at_once("dtype", [torch.float64, torch.bfloat16])
@at_once("sink", [0.5, math.nan, math.inf, -math.inf])
@at_once("lengths", [((3, 0, 5), (7, 2, 5)), ((4, 2, 1), (2, 0, 9))])
def test_sinks_have_a_kernel_that_gives_what_the_reference_gives(dtype, sink, lengths):
    call, found = ragged(*lengths, dtype=dtype), []
    sinks = torch.tensor([0.3, sink, -2.0, sink])
    for kernel in ("torch.ragged_sdpa", "reference.attention.gqa.prefill.ragged"):
        with lz.scope(locks={"attention.gqa.prefill.ragged": kernel}):
            found.append(lz.ragged_attention(*call, sinks=sinks, return_lse=True))
            assert torch.equal(lz.ragged_attention(*call, sinks=sinks).nan_to_num(), found[-1][0].nan_to_num())
    near = 1e-2 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(found[0][0], found[1][0], rtol=near, atol=near, equal_nan=True)
    exact = 1e-4 if dtype is torch.bfloat16 else 1e-5  # with AVX2 torch adds up what it rounded to bfloat16: 4e-5 off
    torch.testing.assert_close(found[0][1], found[1][1], rtol=exact, atol=exact, equal_nan=True)


def test_sinks_beside_gradients_are_left_to_the_reference():
    query, *rest = ragged()
    report = lz.explain("ragged_attention", query.requires_grad_(), *rest, sinks=torch.zeros(4))
    (kernel,) = [each for each in report.candidates if each.kernel.id == "torch.ragged_sdpa"]
    assert [reason.code for reason in kernel.reasons] == [lz.ReasonCode.GRAD_UNSUPPORTED]


def test_a_sequence_reads_nothing_of_its_neighbours():
    query, key, value, cu_q, cu_k = ragged((2, 3), (4, 3))
    key[4:], value[4:] = math.nan, math.nan
    for run in (lz.ragged_attention, ragged_attention):
        output = run(query, key, value, cu_q, cu_k, causal=True)
        assert output[:2].isfinite().all()
        assert output[2:].isnan().all()


def test_queries_before_the_first_key_give_zero_and_minus_infinity():
    output, lse = lz.ragged_attention(*ragged((3, 2), (1, 0)), return_lse=True)
    assert output[:2].abs().max() == 0
    assert output[3:].abs().max() == 0
    assert torch.equal(lse[:, [0, 1, 3, 4]], torch.full((4, 4), -math.inf))
    assert lse[:, 2].isfinite().all()


def test_lengths_of_the_same_size_class_stay_on_one_plan():
    for lengths in ((5, 6, 7), (6, 7, 8), (5, 5, 6)):
        lz.ragged_attention(*ragged(lengths, lengths))
    kept = CALLS["ragged_attention"].dispatcher.cache.size()
    lz.ragged_attention(*ragged((7, 4, 6), (7, 4, 6)))
    assert CALLS["ragged_attention"].dispatcher.cache.size() == kept


def test_gradients_are_those_of_dense_calls():
    query, key, value, cu_q, cu_k = ragged((3, 4), (3, 4), kv_heads=4)
    tensors = [each.requires_grad_() for each in (query, key, value)]
    lz.ragged_attention(*tensors, cu_q, cu_k).square().sum().backward()
    got = [each.grad.clone() for each in tensors]
    for each in tensors:
        each.grad = None
    one_by_one(*tensors, cu_q, cu_k, causal=True)[0].square().sum().backward()
    for each, wanted in zip(got, tensors, strict=True):
        torch.testing.assert_close(each, wanted.grad)


# steps


def test_a_step_is_planned_once_for_all_layers():
    counts = []

    class Planned:
        def __init__(self, step):
            self.update(step)

        def update(self, step):
            counts.append([each.tolist() for each in step.host])

    def run(query, key, value, cu_seqlens_q, cu_seqlens_k, *, causal, step=None):
        assert step.belongs(cu_seqlens_q, cu_seqlens_k)
        step.slot("user.planning", Planned)
        return ragged_attention(query, key, value, cu_seqlens_q, cu_seqlens_k, causal=causal)

    lz.register_kernel("attention.gqa.prefill.ragged", "user.planning", priority=100)(run)
    query, key, value, cu, _ = ragged((3, 5), (3, 5))
    step = lz.RaggedMetadata(cu, cu)
    assert step.longest() == (5, 5)
    for _layer in range(4):
        lz.ragged_attention(query, key, value, cu, cu, step=step)
    assert counts == [[[0, 3, 8]] * 2]
    cu[1] = 4
    with pytest.raises(lz.InvalidCallError, match=r"wanted advance\(\)"):
        lz.ragged_attention(query, key, value, cu, cu, step=step)
    step.advance()
    lz.ragged_attention(query, key, value, cu, cu, step=step)
    assert counts[1:] == [[[0, 4, 8]] * 2]


def test_a_step_of_other_starts_is_refused_on_a_kept_plan_too():
    """It was by the first call of a kind, and by kernels that plan, but no more by calls that had run before."""
    query, key, value, cu, _ = ragged((3, 5), (3, 5))
    others = cu.clone()
    step = lz.RaggedMetadata(cu, others)
    lz.ragged_attention(query, key, value, cu, others, step=step)
    for wrong in ((others, cu), (cu.clone(), others), (cu, cu)):
        with pytest.raises(lz.InvalidCallError, match="step: wanted the RaggedMetadata of these cu_seqlens, got that"):
            lz.ragged_attention(query, key, value, *wrong, step=step)
    lz.ragged_attention(query, key, value, cu, others, step=step)


def test_numbers_that_the_caller_has_on_the_host_are_not_copied_again():
    cu = starts(3, 5)
    host = cu.clone(), cu.clone()
    step = lz.RaggedMetadata(cu, cu, host=host)
    assert step.host is host
    with pytest.raises(lz.InvalidCallError, match=r"host: wanted int32 tensors on the CPU of shapes \(3,\), \(3,\)"):
        lz.RaggedMetadata(cu, cu, host=(cu.long(), cu))
    with pytest.raises(lz.InvalidCallError, match="cu_seqlens_k: wanted 3 numbers"):
        lz.RaggedMetadata(cu, cu[:2])


# what a call refuses

WRONG = [
    (lambda c: {"cu_seqlens_q": c["cu_seqlens_q"].long()}, "cu_seqlens_q: wanted an int32 tensor"),
    (lambda c: {"cu_seqlens_k": c["cu_seqlens_k"].tolist()}, "cu_seqlens_k: wanted an int32 tensor.*got list"),
    (lambda c: {"cu_seqlens_q": c["cu_seqlens_q"][:0]}, "cu_seqlens_q: wanted a 0 and the end of each sequence"),
    (lambda c: {"cu_seqlens_k": c["cu_seqlens_k"][:3]}, "cu_seqlens_k: wanted 4 numbers"),
    (lambda c: {"cu_seqlens_k": c["cu_seqlens_k"].to("meta")}, "cu_seqlens_k: wanted device cpu"),
    (lambda c: {"cu_seqlens_q": c["cu_seqlens_q"] + 1}, r"cu_seqlens_q\[0\]: wanted 0, got 1"),
    (lambda c: {"cu_seqlens_q": torch.tensor([0, 5, 3, 8]).int()}, r"cu_seqlens_q\[2\]: wanted at least 5"),
    (lambda c: {"cu_seqlens_q": starts(3, 0, 4)}, r"cu_seqlens_q\[3\]: wanted 8, the number of tokens, got 7"),
    (lambda c: {"cu_seqlens_k": starts(7, 2, 6)}, r"cu_seqlens_k\[3\]: wanted 14, the number of tokens, got 15"),
    (lambda c: dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), starts()), "wanted the end of a sequence for 8 tokens"),
    (lambda c: {"query": c["query"][None]}, "query: wanted a 3D tensor"),
    (lambda c: {"query": c["query"].float()}, "key: wanted dtype float32 like query"),
    (lambda c: {"query": c["query"][:, :3]}, "query heads must be a multiple of kv heads"),
    (lambda c: {"value": c["value"][:-1]}, "value: wanted kv_tokens 14"),
    (lambda c: {"max_seqlen_q": 0}, "max_seqlen_q: wanted a number of at least 1 or None, got 0; pass None where"),
    (lambda c: {"causal": 1}, "causal: wanted bool, got 1"),
    (lambda c: {"window": (1,)}, "window: wanted"),
    (lambda c: {"sinks": torch.zeros(3)}, "sinks: wanted heads 4"),
    (lambda c: {"alibi_slopes": torch.zeros(2, 4)}, r"alibi_slopes: wanted shape \(4,\) or \(3, 4\)"),
    (lambda c: {"step": "now"}, "step: wanted a RaggedMetadata or None, got str"),
    (lambda c: {"step": lz.RaggedMetadata(starts(1), starts(1))}, "step: wanted the RaggedMetadata of these"),
]


@at_once("change, text", WRONG)
def test_what_means_nothing_is_refused(change, text):
    names = ("query", "key", "value", "cu_seqlens_q", "cu_seqlens_k")
    arguments = dict(zip(names, ragged(), strict=True))
    lz.ragged_attention(**arguments)
    with pytest.raises(lz.InvalidCallError, match=text):
        lz.ragged_attention(**arguments | change(arguments))


def test_starts_that_went_wrong_are_refused_on_a_kept_plan_too():
    query, key, value, cu, _ = ragged((3, 5), (3, 5))
    lz.ragged_attention(query, key, value, cu, cu)
    kept = CALLS["ragged_attention"].dispatcher.cache.size()
    cu[1], cu[2] = 9, 8
    with pytest.raises(lz.InvalidCallError, match=r"cu_seqlens_q\[2\]: wanted at least 9|cu_seqlens_q\[1\]"):
        lz.ragged_attention(query, key, value, cu, cu)
    assert CALLS["ragged_attention"].dispatcher.cache.size() == kept


def test_debug_mode_holds_a_caller_to_the_promised_length():
    call = ragged((3, 5), (3, 5))
    with lz.scope(debug=True), pytest.raises(lz.InvalidCallError, match="at most 4 tokens as was promised, got one of"):
        lz.ragged_attention(*call, max_seqlen_q=4)


# calls of cases


def test_cases_and_recipes_keep_starts_that_end_with_the_tokens():
    assert spread(40, 3).tolist()[-1] == 40
    assert spread(0, 0).tolist() == [0]
    lengths = (spread(100, 6)[1:] - spread(100, 6)[:-1]).tolist()
    assert sum(lengths) == 100
    assert 0 in lengths
    assert max((spread(100, 6, 20)[1:] - spread(100, 6, 20)[:-1]).tolist()) == 20
    assert spread(100, 6, 20).tolist()[-1] == 100
    for case in GQA_RAGGED.cases[:1]:
        made = arguments_of(GQA_RAGGED, case, torch.float32, promised=True)
        assert made["max_seqlen_q"] == max((made["cu_seqlens_q"][1:] - made["cu_seqlens_q"][:-1]).tolist())
        facts = facts_of(GQA_RAGGED, case, torch.float32, lz.Device.detect("cpu"))
        assert case_of_sizes(GQA_RAGGED, "again", facts.sizes(), {}) is not None
        lz.ragged_attention(**made)


@pytest.mark.parametrize("tokens", [(0, 0), (0, 5), (5, 0)])
def test_gradients_pass_where_there_are_no_tokens(tokens):
    query, key = (torch.randn(count, 2, 8, requires_grad=True) for count in tokens)
    starts = [torch.tensor([0, count], dtype=torch.int32) for count in tokens]
    lz.ragged_attention(query, key, key, *starts, causal=False).sum().backward()
    assert query.grad is not None


@pytest.mark.parametrize(("starts", "wanted"), [
    ([0, 3, 3, 5], [0, 0, 0, 2, 2, 2, 2]),  # places 5 and 6 lie behind the end
    ([0, 0, 2, 2], [1, 1, 2, 2, 2, 2, 2]),
    ([0, 4], [0, 0, 0, 0, 0, 0, 0]),
])  # fmt: skip
def test_places_have_the_sequence_they_lie_in_and_the_last_behind_the_end(starts, wanted):
    found = sequences_of(torch.tensor(starts, dtype=torch.int32), torch.arange(7, dtype=torch.int32))
    assert found.tolist() == wanted
