"""What a kernel and its limits read decides which calls share a plan; test_reuse.py draws it, here it is counted."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from reading import loading

import layerzero as lz
from layerzero.core import limits
from layerzero.core.facts import CallState
from layerzero.core.limit_kinds import NOTHING, Limit, violated
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.core.reuse_conditions import WITHIN
from layerzero.engine import dispatch, reuse
from layerzero.engine.config import current_policy
from layerzero.engine.function_kernels import USER_BACKEND
from layerzero.engine.functions import CALLS
from layerzero.engine.jit import BUILT
from layerzero.engine.registry import REGISTRY

pytestmark = [pytest.mark.filterwarnings("ignore::layerzero.LayerZeroWarning"), pytest.mark.usefixtures("path")]

ROWS = range(16, 32)
"""Sizes of one class."""


@pytest.fixture
def choices(monkeypatch):
    """The kernels that were chosen, one entry for each choice."""
    made = []
    choose = dispatch.Dispatcher.choose

    def counted(self, *args, **kwargs):
        plan = choose(self, *args, **kwargs)
        made.append(plan.kernel_id)
        return plan

    monkeypatch.setattr(dispatch.Dispatcher, "choose", counted)
    return made


def register(operation, read=lambda facts: None, **declared):
    """A kernel that is right, and reads what it is told to where it loads."""
    right = REGISTRY.kernel(f"reference.{operation}")
    load = declared.pop("load", loading(right.load, read))
    kernel = dataclasses.replace(right, id="user.reader", backend=USER_BACKEND, load=load, priority=100, **declared)
    lz.register_backend([kernel])
    return kernel


def norm(rows, hidden=8, step=0):
    return lz.rms_norm(torch.ones(rows, hidden + step)[:, :hidden], torch.ones(hidden))


def attend(queries, keys=None, *, causal=False):
    query, key = torch.randn(2, queries, 2, 8), torch.randn(2, keys or queries, 2, 8)
    return lz.attention(query, key, key, causal=causal, layout="BSHD")


@pytest.mark.parametrize(("read", "count"), [
    (lambda facts: None, 1),
    (lambda facts: facts.size("hidden"), 1),
    (lambda facts: (facts["dtype"], facts["eps"], facts.device.sm, facts["input_ndim"]), 1),
    (lambda facts: facts.size_bits("rows"), 1),
    (lambda facts: facts.size_classes(), 1),
    (lambda facts: facts.tensors["input"].ndim, 1),
    (lambda facts: facts.tensors["input"].last_stride, 1),
    (lambda facts: facts.tensors["input"].contiguous, 1),
    (lambda facts: facts.tensors["input"].row_alignment_bytes, 1),
    (lambda facts: facts.tensors["input"].strides, 1),
    (lambda facts: facts.tensors["weight"].shape, 1),
    (lambda facts: facts.size("rows"), len(ROWS)),
    (lambda facts: facts.tensors["input"].shape, len(ROWS)),
    (lambda facts: "rows" in facts, len(ROWS)),
    (lambda facts: facts.sizes(), len(ROWS)),
    (lambda facts: facts.only_this_call(), len(ROWS)),
    (lambda facts: facts.size("rows") if facts.size("hidden") > 100 else None, 1),
    (lambda facts: facts.size("rows") if facts.size("hidden") < 100 else None, len(ROWS)),
])  # fmt: skip
def test_calls_share_what_load_did_not_read(choices, read, count):
    register("norm.rms", read)
    for rows in (*ROWS, *ROWS):
        norm(rows)
    assert choices == ["user.reader"] * count


def test_a_size_that_was_read_stays_and_the_others_vary(choices):
    register("attention.standard.prefill", lambda facts: facts.size("seq_k"))
    for queries, keys in ((16, 20), (17, 20), (31, 20), (16, 21), (19, 21), (16, 20)):
        attend(queries, keys)
    assert len(choices) == 2


def test_strides_that_were_read_stay(choices):
    register("norm.rms", lambda facts: facts.tensors["input"].strides)
    for rows, step in ((16, 16), (17, 16), (16, 80), (31, 80), (16, 16)):
        norm(rows, 48, step)
    assert len(choices) == 2


def test_a_last_stride_that_was_read_stays():
    kernel = register("norm.rms", lambda facts: facts.tensors["input"].last_stride)
    dispatcher = CALLS["rms_norm"].dispatcher
    apart = {"input": torch.ones(4, 8, 6)[..., 0], "weight": torch.ones(8), "eps": 1e-6}
    plan = dispatcher.choose(apart, current_policy())
    assert plan.kernel is kernel
    conditions = reuse.conditions_of(plan, current_policy(), dispatcher.order)
    assert (WITHIN, (1 << 1 | 1,), (6, 6)) in conditions


def test_a_limit_keeps_what_it_reads_in_the_branch_that_it_takes(choices):
    def even(facts):
        if not facts["causal"] or facts.size("seq_q") % 2 == 0:
            return None
        return Reason(ReasonCode.CONSTRAINT_FAILED, "seq_q", "even under causal", facts["seq_q"])

    register("attention.standard.prefill", limits=(limits.Custom("even under causal", even),))
    for queries in ROWS:
        attend(queries)
    assert choices == ["user.reader"]
    for queries in (*ROWS[::2], *ROWS[::2]):
        attend(queries, causal=True)
    assert choices == ["user.reader"] * (1 + len(ROWS) // 2)
    for queries in (*ROWS[1::2], *ROWS[1::2]):
        attend(queries, causal=True)
    assert set(choices[9:]) == {"torch.sdpa.cpu_flash"}


class Short(Limit):
    """A limit of somebody's own: nothing says what it reads."""

    asked = 0

    def check(self, facts):
        Short.asked += 1
        if facts.get("causal") is not True or facts.size("seq_q") < 20:
            return NOTHING
        return violated(ReasonCode.CONSTRAINT_FAILED, "seq_q", "below 20", facts["seq_q"])

    def describe(self):
        return "short"


def test_a_limit_of_ones_own_needs_no_declaration(choices):
    register("attention.standard.prefill", limits=(Short(),))
    for queries in (16, 19, 20, 31, 16, 19):
        attend(queries, causal=True)
    assert choices.count("user.reader") == 2
    for queries in ROWS:
        attend(queries)
    assert choices.count("user.reader") == 3


def test_a_limit_that_reads_no_size_is_not_asked_for_every_size():
    register("attention.standard.prefill", limits=(Short(),))
    for causal, again in ((False, False), (True, True)):
        attend(4, causal=causal)
        before = Short.asked
        attend(300, causal=causal)
        assert (Short.asked > before) is again


def test_under_capture_a_limit_is_asked_each_time():
    """It may ask what earlier calls made."""
    made = set()

    def check(facts):
        if not facts["capturing"] or facts["dtype"] in made:
            return None
        return Reason(ReasonCode.CUDA_GRAPH_UNSAFE, "it", "made before", "not made")

    register("attention.standard.prefill", limits=(limits.Custom("made before", check),))
    dispatcher, tensor = CALLS["attention"].dispatcher, torch.randn(2, 4, 2, 8)
    arguments = dispatcher.function.bind((tensor, tensor, tensor), {"layout": "BSHD"})

    def chosen(capturing):
        state = CallState(capturing=capturing)
        return dispatcher.explain(arguments, current_policy(), call_state=state, complete=False)[0].kernel_id

    assert chosen(capturing=False) == "user.reader"
    assert chosen(capturing=True) != "user.reader"
    made.add(torch.float32)
    assert chosen(capturing=True) == "user.reader"


@pytest.mark.parametrize(("build_key", "prebuilt", "count"), [
    (lambda facts: facts.size("hidden"), None, 1),
    (lambda facts: facts.size_bits("rows"), None, 1),
    (None, None, 1),
    (lambda facts: facts.size("rows") > 0, None, len(ROWS)),
    (lambda facts: "never built", lambda facts: True, 1),
    (lambda facts: "never built", lambda facts: facts.size("rows") > 0, len(ROWS)),
])  # fmt: skip
def test_compiled_kernels_serve_what_their_artefact_does(choices, build_key, prebuilt, count):
    kernel = register("norm.rms", jit=True, build_key=build_key, prebuilt=prebuilt)
    if prebuilt is None:
        BUILT.add(kernel, lz.facts("rms_norm", torch.ones(16, 8), torch.ones(8)))
    for rows in ROWS:
        norm(rows)
    assert choices == ["user.reader"] * count


def test_what_is_read_too_late_is_an_error_that_says_so():
    def load(facts):
        def late(input, weight, *, eps):
            return input * facts.size("hidden")

        return late

    register("norm.rms", load=load)
    said = "user.reader: load: wanted all facts to be read before it returned, got a read of 'hidden'"
    with pytest.warns(lz.LayerZeroFallbackWarning, match=said):
        got = norm(4)
    torch.testing.assert_close(got, torch.nn.functional.rms_norm(torch.ones(4, 8), (8,), torch.ones(8), 1e-6))


@pytest.mark.parametrize("place", ["load", "limit", "nowhere"])
def test_the_negative_bit_is_asked_for_where_it_was_read(place):
    """No key tells it; a plan serves calls that have it only if nothing depends on it."""

    def negated(facts):
        assert facts.tensors["input"].negated is not None

    if place == "load":
        register("norm.rms", negated)
    else:
        register("norm.rms", limits=(limits.Custom("read", negated),) if place == "limit" else ())
    norm(4)
    (plan,) = CALLS["rms_norm"].dispatcher.cache.current.values()
    assert plan.kernel_id == "user.reader"
    assert plan.reads_negated is (place == "nowhere")
    norm(4)
    lz.rms_norm(torch._neg_view(torch.ones(4, 8)), torch.ones(8))


def test_a_derived_size_that_nobody_explains_keeps_calls_exact():
    """Verdicts belong to the class of all sizes, and nothing tells the class of this one."""
    register("norm.rms")
    dispatcher = CALLS["rms_norm"].dispatcher
    plan = dispatcher.choose({"input": torch.ones(4, 8), "weight": torch.ones(8), "eps": 1e-6}, current_policy())
    assert reuse.conditions_of(plan, current_policy(), dispatcher.order) is not None
    facts = plan.report.facts
    facts.operation = dataclasses.replace(facts.operation, derived_from={"hidden": ("hidden",), "input_ndim": ()})
    reuse.OUTLINES.forget()
    assert reuse.conditions_of(plan, current_policy(), dispatcher.order) is None


NORMS = {
    "norm.rms": lambda x, w: lz.rms_norm(x, w),
    "norm.layer": lambda x, w: lz.layer_norm(x, w.shape, w, w),
    "norm.add_rms": lambda x, w: lz.add_residual_rms_norm_(x, x.clone(), w),
}


@pytest.mark.parametrize("operation", NORMS)
def test_a_batch_of_tokens_that_differs_in_every_step_is_chosen_for_once_a_class(choices, operation):
    """Of 300 token counts, three classes; every norm that runs here and is not compiled first."""
    call, weight = NORMS[operation], torch.ones(64)
    legal = lz.explain(operation, *example(operation)).candidates
    names = [each.kernel.id for each in legal if each.legal]
    assert len(names) >= 2
    for name in names:
        with lz.scope(locks={operation: name}):
            choices.clear()
            for tokens in range(100, 400):
                call(torch.ones(tokens, 64), weight)
            assert choices == [name] * 3


def example(operation):
    x, w = torch.ones(100, 64), torch.ones(64)
    return {"norm.rms": (x, w), "norm.layer": (x, (64,), w, w), "norm.add_rms": (x, x.clone(), w)}[operation]
