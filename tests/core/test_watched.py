"""Facts that remember what was read: everything that can be read is, and nothing is read after they were closed."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import msgspec
import pytest
import torch

import layerzero as lz
from layerzero.core import limits
from layerzero.core.evidence import call_work
from layerzero.core.fact_reads import EVERYTHING, NEGATED, Watched, names_no_size, reads_of, watch
from layerzero.core.facts import Facts, FactsBuilder, TensorFacts
from layerzero.engine.headroom import result_bytes
from layerzero.engine.registry import REGISTRY
from layerzero.ops import OPERATIONS
from layerzero.tuning.measurement.jobs import jobs_of_cases

HALF = TensorFacts((1,), (1,), torch.half)


@pytest.fixture
def facts():
    query, key = torch.randn(2, 5, 4, 8), torch.randn(2, 9, 2, 8)
    return lz.facts("attention", query, key, key, causal=True, layout="BSHD")


@pytest.mark.parametrize(("read", "recorded"), [
    (lambda facts: facts["seq_q"], {"seq_q"}),
    (lambda facts: facts.size("group"), {"group"}),
    (lambda facts: facts.get("nothing"), {"nothing"}),
    (lambda facts: "seq_k" in facts, {"seq_k"}),
    (lambda facts: facts["is_causal"], {"causal"}),
    (lambda facts: facts["seq_len"], {"seq_k"}),
    (lambda facts: facts.size_bits("seq_k"), {"seq_k.class"}),
    (lambda facts: facts.size_classes(), {"*.class"}),
    (lambda facts: facts.sizes(), {EVERYTHING}),
    (lambda facts: facts.items(), {EVERYTHING}),
    (lambda facts: dict(facts), {EVERYTHING}),
    (lambda facts: {**facts}, {EVERYTHING}),
    (lambda facts: list(facts.values()), {EVERYTHING}),
    (lambda facts: len(facts), {EVERYTHING}),
    (lambda facts: facts.to_dict(), {EVERYTHING}),
    (lambda facts: facts == {}, {EVERYTHING}),
    (lambda facts: facts.only_this_call(), {EVERYTHING}),
    (lambda facts: (facts.device, facts.layout, facts.operation), set()),
    (lambda facts: (list(facts.tensors), "sinks" in facts.tensors, facts.tensors.get("sinks")), set()),
    (lambda facts: facts.tensors["key"].shape[1], {"key.shape"}),
    (lambda facts: facts.tensors["key"].strides, {"key.strides"}),
    (lambda facts: facts.tensors["key"].dtype, {"key.dtype"}),
    (lambda facts: facts.tensors["key"].ndim, {"key.ndim"}),
    (lambda facts: facts.tensors["key"].negated, {NEGATED}),
    (lambda facts: facts.tensors["key"].alignment_bytes, {"key.alignment_bytes"}),
    (lambda facts: facts.tensors["key"].row_alignment_bytes, {"key.row_alignment_bytes"}),
    (lambda facts: facts.tensors["key"].last_stride, {"key.last_stride"}),
    (lambda facts: facts.tensors["key"].contiguous, {"key.contiguous"}),
    (lambda facts: [each.ndim for each in facts.tensors.values()], {"query.ndim", "key.ndim", "value.ndim"}),
    (lambda facts: facts.tensors["key"] == facts.tensors["key"], {"key.shape", "key.strides", NEGATED}),
    (lambda facts: hash(facts.tensors["key"]), {"key.shape", "key.strides", NEGATED}),
    (lambda facts: str(facts.tensors["key"]), {"key.shape", "key.strides", NEGATED}),
    (lambda facts: facts.tensors["key"].permuted((0, 2, 1, 3)).contiguous, {"key.shape", "key.strides", NEGATED}),
    (lambda facts: facts.seen_in("BHSD")["seq_q"], {"seq_q"}),
    (lambda facts: facts.seen_in("BHSD").tensors["key"].last_stride, {"key.shape", "key.strides", NEGATED}),
    (lambda facts: facts.with_tensors({"key": HALF}).tensors["key"].shape, {"key.shape"}),
    (lambda facts: facts.of_sizes({"seq_q": 7}, {})["seq_q"], {"seq_q"}),
    (lambda facts: facts.on(facts.device, capturing=True)["capturing"], {"capturing"}),
    (lambda facts: copy.copy(facts)["seq_q"], {EVERYTHING}),
    (lambda facts: copy.deepcopy(facts.tensors["key"]).shape, {"key.shape", "key.strides", NEGATED}),
    (lambda facts: pickle.loads(pickle.dumps(facts.tensors["key"])), {"key.shape", "key.strides", NEGATED}),
])  # fmt: skip
def test_what_is_read_is_recorded(facts, read, recorded):
    answer, reads = watch(read, facts)
    assert EVERYTHING in reads if EVERYTHING in recorded else reads == recorded
    if not isinstance(answer, Facts):
        assert answer == read(facts)


def test_every_way_to_read_facts_is_watched():
    """Whoever gives facts another method has to say here what reading it records."""
    unwatched = {"size", "get", "keys", "values", "empty"}  # they read by name, or by going through names or tensors
    ways = {name for name in dir(Facts) if not name.startswith("_")} - set(Facts.__slots__) - unwatched
    assert ways <= set(vars(Watched)) | {"size"}
    parts = {name for name in dir(TensorFacts) if not name.startswith("_")} - {"of", "permuted"}
    assert parts == {
        *(
            "shape",
            "strides",
            "dtype",
            "ndim",
            "alignment_bytes",
            "row_alignment_bytes",
            "expanded",
            "repeated",
            "negated",
        ),
        *("last_stride", "contiguous"),
    }


def test_facts_that_are_read_too_late_say_so(facts):
    def load(facts):
        return lambda: facts.size("seq_q")

    late, _ = watch(load, facts, "mine: load")
    with pytest.raises(RuntimeError, match=r"mine: load: wanted all facts to be read before it returned.*'seq_q'"):
        late()
    with pytest.raises(RuntimeError, match="Read it first"):
        watch(lambda facts: facts.seen_in("BHSD"), facts)[0].tensors["key"].shape  # noqa: B018


def test_what_cannot_be_watched_reads_everything(facts):
    def custom(facts):
        return msgspec.structs.replace(facts.tensors["key"], shape=(1,))

    assert custom(facts).shape == (1,)
    assert reads_of(custom, facts) == {EVERYTHING}


@pytest.mark.parametrize(("limit", "alike"), [
    (limits.platform("cpu"), True),
    (limits.dtype("float32"), True),
    (limits.one_of("causal", True), True),
    (limits.one_of("group", 2), False),
    (limits.dim("seq_q", max=9), False),
    (limits.last_stride_one("key"), False),
    (limits.last_stride_one("attn_mask"), True),
    (limits.Custom("nothing", lambda facts: None), True),
    (limits.Custom("absent", lambda facts: facts.get("no such fact")), True),
    (limits.Custom("in one branch", lambda facts: None if facts["causal"] else facts["seq_q"] and None), True),
    (limits.Custom("in the other", lambda facts: facts["seq_q"] and None if facts["causal"] else None), False),
    (limits.Custom("everything", lambda facts: facts.sizes() and None), False),
])  # fmt: skip
def test_reads_tell_whether_calls_that_differ_in_sizes_agree(facts, limit, alike):
    assert names_no_size(reads_of(limit.check, facts), facts) is alike


def test_every_limit_of_a_kernel_can_be_watched():
    """One that cannot reads everything: each number of rows had a plan of its own, and was chosen for anew."""
    facts = {
        each.operation.name: each for each in (job.facts("cpu") for job in jobs_of_cases(OPERATIONS, ["bfloat16"]))
    }
    for kernel in REGISTRY.kernels():
        for each in kernel.limits:
            for name in facts.keys() & kernel.operations:
                answer, reads = watch(each.check, facts[name])
                assert bool(answer) is bool(each.check(facts[name])), (kernel.id, each)
                assert EVERYTHING not in reads, (kernel.id, each)


@pytest.mark.parametrize("made", [call_work, result_bytes], ids=lambda made: made.__name__)
def test_what_is_made_of_facts_is_made_of_watched_ones_and_reads_them(facts, made):
    watched = Watched(facts)
    assert made(watched) == made(facts)
    reads = watched.taken()
    assert reads
    assert made(watched) == made(facts)
    assert watched.taken() == reads


def test_derived_facts_have_to_be_declared():
    operation = OPERATIONS["norm.rms"]
    careless = replace(operation, derive=lambda arguments, values: {"hidden": 1, "twice": 2})
    with pytest.raises(lz.RegistrationError, match="derive gives twice"):
        FactsBuilder(careless).of_valid({"input": torch.ones(2, 3), "weight": torch.ones(3), "eps": 1e-6})


def test_an_operation_says_which_axes_a_fact_follows_from():
    behind = OPERATIONS["norm.rms"].behind
    assert behind["rows"] == {"..."}
    assert behind["eps"] == behind["dtype"] == behind["input_ndim"] == frozenset()
    assert OPERATIONS["attention.standard.prefill"].behind["seq_q"] == {"seq_q"}
    for operation in OPERATIONS.values():
        assert set(operation.derived) <= set(operation.derived_from), (
            "a derived fact without its axes keeps calls exact"
        )
