"""What is kept between misses: it judges as explaining does, and the schema tells results as the fake functions do."""

from __future__ import annotations

import dataclasses
import gc
import warnings
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import layerzero as lz
from drawing import examples
from layerzero.core import limits
from layerzero.core.evidence import Measurement
from layerzero.core.ledger import Ledger
from layerzero.engine import failures, plan_source, reuse
from layerzero.engine.config import current_policy
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.functions import CALLS
from layerzero.engine.reference import as_tuple, fake_call
from layerzero.engine.registry import REGISTRY
from layerzero.testing import random_call
from layerzero.testing.generate import FUNCTIONS

pytestmark = pytest.mark.filterwarnings("ignore::layerzero.LayerZeroWarning")

CALLED = st.tuples(st.sampled_from(sorted(FUNCTIONS)), st.integers(0, 10_000))


def noop(query, key, value, *, causal=False, scale=None):
    return query


def asked(function, seed):
    call = random_call(function, seed)
    dispatcher = CALLS[call.function].dispatcher
    return dispatcher, dispatcher.function.bind((), call.arguments)


@settings(max_examples=examples(400), deadline=None)
@given(CALLED)
def test_choosing_and_explaining_agree_about_every_kernel(called):
    dispatcher, arguments = asked(*called)
    complete, _ = dispatcher.explain(arguments, current_policy())
    chosen, _ = dispatcher.explain(arguments, current_policy(), complete=False)
    everything = {each.kernel.id: each for each in complete.candidates}
    assert chosen.kernel_id == complete.kernel_id
    assert {each.kernel.id for each in chosen.candidates} == set(everything)
    for each in chosen.candidates:
        whole = everything[each.kernel.id]
        if each.legal:
            assert each == whole
        else:
            assert each.reasons
            assert set(each.reasons) <= set(whole.reasons)


@settings(max_examples=examples(200), deadline=None)
@given(CALLED)
def test_the_schema_tells_results_as_the_fake_function_does(called):
    dispatcher, arguments = asked(*called)
    report, _ = dispatcher.explain(arguments, current_policy())
    routed = dispatcher.function.route(dict(arguments), current_policy().layout)
    on_meta = {n: each.to("meta") if isinstance(each, torch.Tensor) else each for n, each in routed.arguments.items()}
    results = as_tuple(fake_call(dataclasses.replace(routed, arguments=on_meta)))
    schema = report.facts.operation.schema
    untold = {"...", *schema.scalars}  # sizes that no fact has
    on_cpu = tuple(torch.empty(each.shape, dtype=each.dtype) for each in results)
    told = failures._as_declared(on_cpu, report.facts, arguments, None)
    assert (
        told
        or len(results) != 1
        or any(
            not output.shape_vars or untold.intersection(output.shape_vars)
            for output in schema.outputs  # of no axes: a number
        )
    )
    if told and on_cpu:
        for wrong in (torch.empty(1, *on_cpu[0].shape), on_cpu[0].to(torch.int8), on_cpu[0].to("meta"), None):
            assert not failures._as_declared((wrong,), report.facts, arguments, None)


@settings(max_examples=examples(200), deadline=None)
@given(CALLED)
def test_texts_and_conditions_that_are_kept_are_those_that_would_be_written_anew(called):
    dispatcher, arguments = asked(*called)
    policy = current_policy()
    kept = dispatcher.choose(arguments, policy)
    conditions = reuse.conditions_of(kept, policy, dispatcher.order)
    others = plan_source.TEXTS, reuse.OUTLINES
    before = [each._kept for each in others]
    try:
        for each in others:
            each.forget()
        anew = dispatcher.choose(arguments, policy)
        assert anew.source == kept.source
        assert (anew.direct is None) is (kept.direct is None)
        assert reuse.conditions_of(anew, policy, dispatcher.order) == conditions
    finally:
        for each, values in zip(others, before, strict=True):
            each._kept = values


def test_no_kernel_outlives_its_epoch():
    kernel = lz.register_kernel("attention.standard.prefill", "user.gone", priority=100)(
        lambda query, key, value: query
    )
    gone = weakref.ref(kernel)
    tensors = [torch.randn(1, 4, 2, 8) for _ in range(3)]
    assert lz.attention(*tensors, causal=False, layout="BSHD") is tensors[0]
    lz.unregister_kernel("user.gone")
    del kernel
    gc.collect()
    assert gone() is None


def test_a_changed_setting_and_a_new_kernel_are_seen(noop_call):
    assert noop_call() is not None
    with lz.scope(deny=["torch.*"]):
        report, _ = asked_again()
        refused = {each.kernel.id for each in report.candidates if not each.legal}
    assert "torch.sdpa.math" in refused
    report, _ = asked_again()
    assert "torch.sdpa.math" in {each.kernel.id for each in report.candidates if each.legal}
    lz.register_kernel("attention.standard.prefill", "user.late", priority=100)(noop)
    try:
        assert "user.late" in {each.kernel.id for each in asked_again()[0].candidates}
    finally:
        lz.unregister_kernel("user.late")
    assert "user.late" not in {each.kernel.id for each in asked_again()[0].candidates}


def test_what_cannot_win_is_judged_when_somebody_looks_as_it_was_when_the_choice_was_made():
    lz.register_kernel("attention.standard.prefill", "user.best", priority=100)(noop)
    lz.register_kernel("attention.standard.prefill", "user.suspect", priority=90)(noop)
    try:
        facts = asked_again()[0].facts
        ENGINE.ledger.suspect(REGISTRY.kernel("user.suspect"), facts, "planted")
        report, judged = asked_again()
        assert report.kernel_id == "user.best"
        assert callable(report.ranked)
        assert not any(each.legal for each in judged[1:])
        ENGINE.ledger = Ledger()
        ENGINE.health.failed(REGISTRY.kernel("torch.sdpa.math"), facts.operation.name, RuntimeError("later"))
        assert report.reasons("user.suspect")[0].got == "planted"
        assert report.reasons("torch.sdpa.math") == ()
        assert report.candidates[0] == report.chosen
        assert isinstance(report.ranked, tuple)
    finally:
        lz.unregister_kernel("user.best")
        lz.unregister_kernel("user.suspect")


@pytest.mark.parametrize("settings", [{"prefer_sources": ["torch"]}, {"avoid_sources": ["user"]}])
def test_nothing_is_left_for_later_where_policy_bends_priority(settings):
    assert callable(asked_again()[0].ranked)
    with lz.scope(**settings):
        assert isinstance(asked_again()[0].ranked, tuple)


def test_nothing_is_left_for_later_where_a_time_is_known():
    facts = asked_again()[0].facts
    ENGINE.ledger.record_time(REGISTRY.kernel("torch.sdpa.math"), facts, Measurement(10.0, 12.0, 0.01, 20))
    assert isinstance(asked_again()[0].ranked, tuple)


def asked_again():
    tensors = {name: torch.randn(1, 4, 2, 8) for name in ("query", "key", "value")}
    dispatcher = CALLS["attention"].dispatcher
    arguments = dispatcher.function.bind((), {**tensors, "layout": "BSHD"})
    return dispatcher.explain(arguments, current_policy(), complete=False)


@pytest.fixture
def noop_call():
    def call():
        tensors = [torch.randn(1, 4, 2, 8) for _ in range(3)]
        return lz.attention(*tensors, layout="BSHD")

    return call


def test_a_call_that_only_differs_in_size_is_judged_by_its_size():
    lz.register_kernel("attention.standard.prefill", "user.short", limits=(limits.dim("seq_q", max=4),))(noop)
    try:
        for length, legal in ((4, True), (5, False), (4, True)):
            tensors = {name: torch.randn(1, length, 2, 8) for name in ("query", "key", "value")}
            dispatcher = CALLS["attention"].dispatcher
            arguments = dispatcher.function.bind((), {**tensors, "layout": "BSHD"})
            report, _ = dispatcher.explain(arguments, current_policy(), complete=False)
            assert next(each.legal for each in report.candidates if each.kernel.id == "user.short") is legal
    finally:
        lz.unregister_kernel("user.short")


def test_memory_does_not_grow_with_values_that_are_new_each_time():
    dispatcher = CALLS["attention"].dispatcher
    tensors = {name: torch.randn(1, 4, 2, 8) for name in ("query", "key", "value")}
    for step in range(600):
        arguments = dispatcher.function.bind((), {**tensors, "layout": "BSHD", "scale": 1.0 + step})
        dispatcher.explain(arguments, current_policy(), complete=False)
    assert len(ENGINE.standings._kept) <= 256


def test_masks_of_other_ranks_get_plans_of_their_own():
    query, key = torch.randn(2, 4, 3, 16), torch.randn(2, 4, 5, 16)
    mask = torch.randn(3, 5)
    told = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error", lz.LayerZeroWarning)  # a plan that fails is told before the next one runs
        for each in (mask, mask.expand(2, 1, 3, 5).contiguous(), mask):
            told[each.ndim] = lz.attention(query, key, key, attn_mask=each, causal=False, layout="BHSD")
    assert torch.equal(told[2], told[4])
