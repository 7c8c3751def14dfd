"""Reuse where policy, kernels and scopes change, and where a table is full."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reused_calls import EXAMPLES, arguments_of, plan_that_served, run, table

import layerzero as lz
from drawing import examples
from layerzero.core.evidence import Measurement
from layerzero.core.kernel import Kernel
from layerzero.engine import health
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.function_kernels import USER_BACKEND
from layerzero.engine.functions import CALLS
from layerzero.testing import expected, random_call
from layerzero.testing.generate import RandomCall
from paths import IN_C

pytestmark = [
    pytest.mark.filterwarnings("ignore::layerzero.LayerZeroWarning"),
    pytest.mark.usefixtures("path", "one_thread"),
]


# Policies: three right kernels that write down that they ran.


SPIES = ("spy.first", "spy.second", "spy.third")


@pytest.fixture
def ran(monkeypatch):
    """Ids of the kernels that ran, latest last; one that failed rests, however long a busy machine takes."""
    monkeypatch.setattr(health, "FIRST_RETRY_S", 3600.0)
    names = []

    def spy(name, deterministic):
        def load(facts):
            def kernel(input, weight, *, eps):
                names.append(name)
                return torch.nn.functional.rms_norm(input, weight.shape, weight, eps)

            return kernel

        backend = dataclasses.replace(USER_BACKEND, name=name.split(".")[1])
        priority = {"spy.first": 90, "spy.second": 85, "spy.third": 80}[name]
        return Kernel(
            id=name,
            operations=("norm.rms",),
            backend=backend,
            load=load,
            accepts=("eps",),
            priority=priority,
            deterministic=deterministic,
            grad=True,
        )

    lz.register_backend([spy("spy.first", False), spy("spy.second", True), spy("spy.third", True)])
    return names


X, W = torch.ones(2, 8), torch.ones(8)

STEPS = st.one_of(
    st.tuples(
        st.just("configure"),
        st.sampled_from(["prefer_sources", "avoid_sources", "deny", "allow"]),
        st.sampled_from([[], ["second"], ["spy.third"], ["spy.f*"], ["spy.*"], ["torch"]]),
    ),
    st.tuples(st.just("lock"), st.sampled_from(["norm.rms", "rms_norm", "norm.*"]), st.sampled_from(SPIES)),
    st.tuples(st.just("unlock"), st.just(""), st.just("")),
    st.tuples(st.just("rule"), st.sampled_from([2, 3]), st.sampled_from(SPIES)),
    st.tuples(
        st.just("enter"),
        st.sampled_from(["prefer_sources", "deny", "avoid_sources"]),
        st.sampled_from([["spy.third"], ["spy.second"], ["spy.first"]]),
    ),
    st.tuples(st.just("enter"), st.just("deterministic"), st.booleans()),
    st.tuples(st.just("enter"), st.just("enabled"), st.booleans()),
    st.tuples(st.just("leave"), st.just(""), st.just("")),
    st.tuples(st.just("torch_deterministic"), st.just(""), st.booleans()),
    st.tuples(st.just("time"), st.sampled_from(SPIES), st.sampled_from([1.0, 10.0, 100.0])),
    st.tuples(st.just("fail"), st.sampled_from(SPIES), st.just("")),
    st.tuples(st.just("recover"), st.just(""), st.just("")),
    st.tuples(st.just("nothing"), st.just(""), st.just("")),
)


def take(step, scopes, stack):
    kind, name, value = step
    if kind == "configure":
        lz.configure(**{name: value})
    elif kind == "lock":
        lz.lock(name, value, otherwise="select")
    elif kind == "unlock":
        lz.configure(locks=None)
    elif kind == "rule":
        lz.configure(rules=[{"match": {"rows": f"<{name}"}, "prefer": value}])
    elif kind == "enter":
        scopes.append(stack.enter_context(contextlib.ExitStack()))
        scopes[-1].enter_context(lz.scope(**{name: value}))
    elif kind == "leave" and scopes:
        scopes.pop().close()
    elif kind == "torch_deterministic":
        torch.use_deterministic_algorithms(value)
    elif kind == "time":
        ENGINE.ledger.record_time(kernel_named(name), lz.facts("rms_norm", X, W), Measurement(value, value, 0.0, 1))
        ENGINE.bump()  # what a tuning window does when the winner changes
    elif kind == "fail":
        ENGINE.health.failed(kernel_named(name), "norm.rms", RuntimeError("planted"))
    elif kind == "recover":
        ENGINE.health.reset()


def kernel_named(kernel_id):
    return next(kernel for kernel in lz.list_kernels("norm.rms") if kernel.id == kernel_id)


@IN_C
@settings(EXAMPLES, max_examples=examples(250))
@given(steps=st.lists(STEPS, min_size=3, max_size=15))
def test_no_change_of_policy_is_served_by_a_stale_choice(ran, steps):
    forget()
    try:
        with contextlib.ExitStack() as stack:
            scopes = []
            for step in steps:
                take(step, scopes, stack)
                for _ in range(2):  # the second is a hit
                    ran.clear()
                    lz.rms_norm(X, W)
                    wanted = lz.which("rms_norm", X, W)["kernel_id"]
                    assert ran == ([wanted] if wanted.startswith("spy.") else [])
            while scopes:
                scopes.pop().close()
    finally:
        forget()


def forget():
    torch.use_deterministic_algorithms(False)
    ENGINE.ledger = type(ENGINE.ledger)()
    ENGINE.health.reset()
    lz.configure(prefer_sources=None, avoid_sources=None, deny=None, allow=None, locks=None, rules=None)


def test_registering_and_removing_a_kernel_empties_the_table(ran):
    lz.rms_norm(X, W)
    lz.unregister_kernel("spy.first")
    lz.rms_norm(X, W)
    lz.register_kernel("norm.rms", "user.best", priority=100)(lambda x, w, *, eps: ran.append("user.best") or x)
    lz.rms_norm(X, W)
    assert ran == ["spy.first", "spy.second", "user.best"]


def test_a_plan_chosen_before_a_change_is_not_kept_after_it(ran):
    def load(facts):
        lz.unregister_kernel("user.slow")  # as another thread may while this one chooses
        return lambda x, w, *, eps: ran.append("user.slow") or x

    slow = {"operations": ("norm.rms",), "backend": USER_BACKEND, "accepts": ("eps",), "priority": 100}
    lz.register_backend([Kernel(id="user.slow", load=load, **slow)])
    lz.rms_norm(X, W)  # chosen while it was there
    assert not CALLS["rms_norm"].dispatcher.cache.current
    lz.rms_norm(X, W)
    assert ran == ["user.slow", "spy.first"]


def test_a_scope_leaves_the_plans_outside_it_alone(ran):
    lz.rms_norm(X, W)
    kept = dict(CALLS["rms_norm"].dispatcher.cache.current)
    with lz.prefer("spy.third"):
        lz.rms_norm(X, W)
    with lz.prefer("spy.third"):
        assert len(table(RandomCall("rms_norm", {}))) == 1  # an equal scope finds its table again
        lz.rms_norm(X, W)
    lz.rms_norm(X, W)
    assert CALLS["rms_norm"].dispatcher.cache.current == kept
    assert ran == ["spy.first", "spy.third", "spy.third", "spy.first"]


# Eviction


@settings(EXAMPLES, max_examples=examples(40))
@given(st.integers(0, 12), st.lists(st.integers(1, 30), min_size=1, max_size=60))
def test_a_table_never_grows_beyond_its_bound(bound, rows):
    lz.configure(**{"cache.max_size": bound})
    for count in rows:
        result = lz.rms_norm(torch.full((4, count), 2.0), torch.ones(count))  # each length of a row has its own plan
        assert result.shape == (4, count)
        assert CALLS["rms_norm"].dispatcher.cache.size() <= bound
    if bound:
        assert CALLS["rms_norm"].dispatcher.cache.size() >= min(bound, len(set(rows))) // 2


def test_what_is_used_outlives_what_is_not():
    lz.configure(**{"cache.max_size": 16})
    weight = torch.ones(4)
    often = torch.ones(1, 4)
    lz.rms_norm(often, weight)
    for count in range(5, 100):
        lz.rms_norm(torch.ones(2, count), torch.ones(count))
        _, plan = plan_that_served(RandomCall("rms_norm", {"input": often, "weight": weight}))
        assert plan is not None


def test_truth_does_not_depend_on_what_is_kept():
    call = random_call(5, 3, function="attention")
    first = expected(call)
    run(call)
    for mine, theirs in zip(first.results, expected(call).results, strict=True):
        assert torch.equal(mine.nan_to_num(), theirs.nan_to_num())


def test_what_is_judged_again_has_its_tensors_in_the_order_of_the_facts():
    """The plan names a call's tensors as the function does, facts as the operation does; a limit may read the order."""
    call = random_call(2, 5, function="verify_speculative")
    facts = lz.facts(call.function, **arguments_of(call))
    backwards = dict(reversed(facts.tensors.items()))
    assert list(facts.with_tensors(backwards).tensors) == list(facts.tensors) != list(backwards)
