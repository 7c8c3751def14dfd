"""Sinks and slopes over pages on GPUs: what vLLM's operators are given, which calls their kernels take, and when."""

from __future__ import annotations

import math
import types

import pytest
import torch
from operator_schemas import FA2_VARLEN_SCHEMA, FA3_SCHEMA, Operator

import layerzero as lz
from layerzero.backends.vllm import varlen
from layerzero.core.device import Device
from layerzero.core.facts import FactsBuilder
from layerzero.core.kernel import Trust
from layerzero.core.ledger import Verdict
from layerzero.core.reasons import ReasonCode as Code
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.registry import REGISTRY
from layerzero.ops.paged.mixed import paged_tokens_reference
from layerzero.tuning.verification.vetting import class_pairs
from paged_calls import paged

TOKENS, SPLIT = "vllm.flash_attn.v3.paged_tokens_sinks", "vllm.flash_attn.v3.paged_split_sinks"
ALIBI = "vllm.flash_attn.v2.paged_tokens_alibi"
LIBRARIES = {"torch": "2.11.0", "vllm": "0.20.0"}
PREFILL, MIXED = "attention.gqa.prefill.paged", "attention.gqa.mixed.paged"


# what the operators are given


@pytest.fixture
def operators(monkeypatch):
    """Both operators by definition, each with a list of what it was given; the pages of tests have 4 tokens, not 16."""
    given = {"fwd": [], "varlen_fwd": []}

    def forward(arguments):
        given["fwd"].append(dict(arguments))
        return [*meaning(arguments, table="page_table", hidden=-math.inf), None, None]

    def varlen_forward(arguments):
        given["varlen_fwd"].append(dict(arguments))
        assert arguments.pop("cu_seqlens_k").dtype == torch.int32  # never read beside lengths
        return list(meaning(arguments, table="block_table", hidden=math.inf))

    library = types.SimpleNamespace(
        fwd=Operator(FA3_SCHEMA, forward), varlen_fwd=Operator(FA2_VARLEN_SCHEMA, varlen_forward)
    )
    monkeypatch.setattr(varlen, "operators", lambda *_: library)
    return given


def meaning(given, *, table, hidden):
    """The reference on what an operator was given; anything that the reference has no word for fails.

    Of a query that sees no key the log-sum-exp is ``hidden``, as where FlashAttention finds a tile without keys.
    """
    query, keys, values = (given.pop(name) for name in "qkv")
    pages, lens, starts = given.pop(table), given.pop("seqused_k"), given.pop("cu_seqlens_q")
    window = given.pop("window_size_left"), given.pop("window_size_right")
    sinks, slopes = given.pop("s_aux", None), given.pop("alibi_slopes", None)
    assert sinks is None or sinks.dtype == torch.bfloat16
    assert slopes is None or slopes.dtype == torch.float32
    assert given.pop("max_seqlen_q") >= starts.diff().max()
    assert given.pop("max_seqlen_k") >= lens.max()
    call = query, keys, values, pages, lens, starts
    named = {
        "causal": given.pop("is_causal"),
        "scale": given.pop("softmax_scale"),
        "window": None if window == (-1, -1) else window,
        "softcap": given.pop("softcap") or None,
        "alibi_slopes": slopes,
        "return_lse": True,
    }
    out = given.pop("out")
    assert set(given.values()) <= {None, False, True}  # nothing but switches is left
    output, lse = paged_tokens_reference(*call, **named, sinks=sinks)
    blind = paged_tokens_reference(*call, **named)[1] == -math.inf
    return output if out is None else out.copy_(output), lse.masked_fill(blind, hidden)


def facts_of(call, operation, **named):
    built = FactsBuilder(REGISTRY.operation(operation))
    return built.build(*call, device=Device.named("H100"), layout="NHD", **named)


def small(queries=(1, 1, 0, 8), lens=(5, 7, 2, 6)):
    """Two decodes, a sequence without queries, and one whose first two queries come before its context."""
    return paged(queries, lens, dtype=torch.float32)


CALLS = [
    {},
    {"causal": False, "scale": 0.3},
    {"softcap": 5.0, "max_context_len": 8, "max_seqlen_q": 8},
    {"window": (3, -1)},
]


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("named", CALLS)
@pytest.mark.parametrize(("name", "decodes"), [(TOKENS, None), (TOKENS, 2), (SPLIT, 2)])
def test_version_3_is_given_sinks_in_their_place(operators, name, decodes, named, lse):
    call, sinks = small(), torch.tensor([0.1, -2.0, 3.0, 0.4]).bfloat16()
    given = {"causal": True, **named, "sinks": sinks, "return_lse": lse}
    own = {"decodes": decodes} if name == SPLIT else {}
    facts = facts_of(call, MIXED if decodes else PREFILL, **given, **({"decodes": decodes} if decodes else {}))
    got = REGISTRY.kernel(name).load(facts)(*call, **given, **own)
    torch.testing.assert_close(got, paged_tokens_reference(*call, **given), atol=1e-5, rtol=1e-5)
    told = operators["fwd"]
    assert all(each["s_aux"] is sinks for each in told)
    assert [len(each["q"]) for each in told] == ([2, 8] if name == SPLIT else [10])


@pytest.mark.parametrize("by_sequence", [False, True])
@pytest.mark.parametrize("named", CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_version_2_is_given_slopes_in_their_place(operators, named, by_sequence, dtype):
    call, slopes = small(), torch.rand(*((4, 4) if by_sequence else (4,))).to(dtype)
    given = {"causal": True, **named, "alibi_slopes": slopes}
    given["return_lse"] = given["causal"] is False
    got = REGISTRY.kernel(ALIBI).load(facts_of(call, PREFILL, **given))(*call, **given)
    torch.testing.assert_close(got, paged_tokens_reference(*call, **given), atol=1e-5, rtol=1e-5)
    (told,) = operators["varlen_fwd"]
    assert torch.equal(told["alibi_slopes"], slopes.float())


@pytest.mark.parametrize("name", ["vllm.flash_attn.v3.paged_tokens", "vllm.flash_attn.v3.paged_split"])
def test_kernels_without_biases_give_none(operators, name):
    call, own = small(), {"decodes": 2} if name.endswith("split") else {}
    got = REGISTRY.kernel(name).load(facts_of(call, MIXED, causal=True, decodes=2))(*call, causal=True, **own)
    torch.testing.assert_close(got, paged_tokens_reference(*call, causal=True), atol=1e-5, rtol=1e-5)
    assert all(each["s_aux"] is None for each in operators["fwd"])


# which calls they take


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def asked(heads=64, kv_heads=8, dtype=torch.bfloat16, **named):
    """Two decodes and a prefill, as GPT-OSS has them: heads of 64."""
    cache = meta(40, 16, kv_heads, 64, dtype=dtype)
    table, lens, starts = (meta(*shape, dtype=torch.int32) for shape in ((3, 8), (3,), (4,)))
    query = meta(18, heads, 64, dtype=dtype)
    return {
        "query": query, "key_cache": cache, "value_cache": cache, "block_tables": table, "context_lens": lens,
        "cu_seqlens_q": starts,
    } | named  # fmt: skip


def report(device="H100", **named):
    return lz.explain("paged_attention", device=device, libraries=LIBRARIES, **asked(**named))


def refused(name, **named):
    return {(reason.code, reason.fact) for reason in report(**named).reasons(name)}


SINKS = meta(64)
SLOPES = meta(64, dtype=torch.float32)


@pytest.mark.parametrize(("name", "named"), [
    (TOKENS, {"sinks": SINKS}),
    (SPLIT, {"sinks": SINKS, "decodes": 2}),
    (ALIBI, {"alibi_slopes": SLOPES, "device": "A100"}),
])  # fmt: skip
def test_they_wait_for_vetting_and_no_call_without_biases_asks_for_it(name, named):
    assert REGISTRY.kernel(name).trust is Trust.UNTRIED
    assert refused(name, **named) == {(Code.NOT_VETTED, name)}
    assert report(**named).chosen.kernel.is_reference
    with lz.scope(require_vetting=False, allow_jit_compile=True):
        plain = {each: value for each, value in named.items() if each not in ("sinks", "alibi_slopes")}
        argument = "alibi_slopes" if name == ALIBI else "sinks"
        assert refused(name, **plain) == {(Code.CONSTRAINT_FAILED, argument)}
        proven = {each.kernel.id for each in report(**plain).candidates if each.legal}
    assert {"vllm.flash_attn.v2.paged_tokens"} <= proven
    assert not {TOKENS, SPLIT, ALIBI} & proven


@pytest.mark.parametrize(("name", "named"), [
    (TOKENS, {"sinks": SINKS}),
    (TOKENS, {"sinks": SINKS, "decodes": 2, "window": (127, 0)}),
    (TOKENS, {"sinks": SINKS, "dtype": torch.float16, "return_lse": True}),
    (ALIBI, {"alibi_slopes": SLOPES, "device": "A100"}),
    (ALIBI, {"alibi_slopes": meta(3, 64, dtype=torch.float32), "device": "A100"}),
])  # fmt: skip
def test_they_are_chosen_where_vetting_is_not_asked_for(name, named):
    with lz.scope(require_vetting=False):
        assert report(**named).chosen.kernel.id == name


@pytest.mark.parametrize(("name", "named"), [
    (SPLIT, {"sinks": SINKS, "decodes": 2}),
    (ALIBI, {"alibi_slopes": SLOPES, "device": "A100"}),
])  # fmt: skip
def test_a_lock_is_the_operators_word_for_them(name, named):
    operation = MIXED if "decodes" in named else PREFILL
    with lz.scope(locks={operation: name}):
        assert report(**named).chosen.kernel.id == name


@pytest.mark.parametrize(("name", "device"), [(TOKENS, "H100"), (ALIBI, "A100")])
def test_vetting_finds_calls_with_biases_to_ask_them_about(name, device):
    argument = "alibi_slopes" if name == ALIBI else "sinks"
    kernel, found = REGISTRY.kernel(name), Device.named(device)
    pairs = list(class_pairs([kernel], "*", found))
    assert {facts.operation.name for _, facts in pairs} == set(kernel.operations)
    assert {facts["dtype"] for _, facts in pairs} == {torch.float16, torch.bfloat16}
    assert {facts[argument] for _, facts in pairs} == {"float"}
    assert not list(class_pairs([kernel], "*", Device.named("T4")))


def test_one_that_passed_is_chosen(monkeypatch):
    judged = []

    def judgement(kernel, facts):
        judged.append(kernel.id)
        return types.SimpleNamespace(verdict=Verdict.PASSED) if kernel.id == TOKENS else None

    monkeypatch.setattr(ENGINE.ledger, "judgement", judgement)
    monkeypatch.setattr("layerzero.engine.legality._as_here", lambda *_: True)
    assert report(sinks=SINKS).chosen.kernel.id == TOKENS
    assert {TOKENS, ALIBI} <= set(judged)


# what they refuse


@pytest.mark.parametrize(("name", "named", "expected"), [
    (TOKENS, {"sinks": meta(64, dtype=torch.float16)}, {(Code.CONSTRAINT_FAILED, "sinks.dtype")}),
    (TOKENS, {"sinks": meta(64, dtype=torch.float32)}, {(Code.CONSTRAINT_FAILED, "sinks.dtype")}),
    (TOKENS, {"sinks": meta(65), "heads": 65, "kv_heads": 5}, {(Code.CONSTRAINT_FAILED, "heads")}),
    (TOKENS, {"sinks": SINKS, "device": "A100"}, {
        (Code.SM_TOO_OLD, "sm"), (Code.INSTRUCTION_SET_MISMATCH, "instruction_sets")
    }),
    (TOKENS, {"sinks": SINKS, "alibi_slopes": SLOPES}, {(Code.CONSTRAINT_FAILED, "alibi_slopes")}),
    (TOKENS, {"sinks": SINKS, "tree_mask": meta(18, 4, dtype=torch.bool)}, {(Code.CONSTRAINT_FAILED, "tree_mask")}),
    (ALIBI, {"alibi_slopes": SLOPES, "return_lse": True}, {(Code.LSE_UNSUPPORTED, "return_lse")}),
    (ALIBI, {"alibi_slopes": SLOPES, "sinks": SINKS}, {(Code.CONSTRAINT_FAILED, "sinks")}),
])  # fmt: skip
def test_what_the_libraries_lack_is_refused_with_its_reason(name, named, expected):
    with lz.scope(require_vetting=False, allow_jit_compile=True):
        assert refused(name, **named) == expected


@pytest.mark.parametrize(("name", "biases"), [(TOKENS, {"sinks": SINKS}), (ALIBI, {"alibi_slopes": SLOPES})])
def test_a_cache_that_starts_between_16_bytes_is_refused(name, biases):
    call = {each: torch.zeros(tensor.shape, dtype=tensor.dtype) for each, tensor in asked(**biases).items()}
    call["context_lens"] = torch.tensor([5, 7, 16], dtype=torch.int32)
    call["cu_seqlens_q"] = torch.tensor([0, 1, 2, 18], dtype=torch.int32)
    numbers = torch.zeros(call["key_cache"].numel() + 8, dtype=torch.bfloat16)
    first = (1 - numbers.data_ptr() // 2) % 8
    shifted = numbers[first : first + call["key_cache"].numel()].view(call["key_cache"].shape)
    with lz.scope(require_vetting=False, allow_jit_compile=True):
        for caches, expected in ({}, set()), ({"key_cache": shifted}, {(Code.MISALIGNED, "key_cache")}):
            found = lz.explain("paged_attention", device="H100", libraries=LIBRARIES, **call | caches)
            assert {(reason.code, reason.fact) for reason in found.reasons(name)} == expected
