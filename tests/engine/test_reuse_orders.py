"""Where times decide, a plan serves calls whose memory lies in the order of the one that it was chosen for."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.functional import rms_norm, scaled_dot_product_attention

import layerzero as lz
from drawing import at_once, examples
from layerzero.core.evidence import Measurement
from layerzero.core.reuse_conditions import DENSE, LOOSE, holds
from layerzero.engine import reuse
from layerzero.engine.config import current_policy
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.functions import CALLS
from layerzero.engine.registry import REGISTRY

pytestmark = pytest.mark.usefixtures("path")

KERNELS = ("user.first", "user.second")
RAN = []
ORDERS = ("plain", "view")
ALL = tuple(itertools.product(ORDERS, repeat=3))


def kernel_of(name, priority):
    def run(query, key, value, *, causal=False):
        RAN.append(name)
        return scaled_dot_product_attention(query, key, value, is_causal=causal)

    lz.register_kernel("attention.standard.prefill", name, layout="BHSD", priority=priority)(run)


@pytest.fixture(autouse=True)
def kernels():
    kernel_of("user.first", 90)
    kernel_of("user.second", 80)
    RAN.clear()


def tensor(order, length=20, batch=2):
    """One of BHSD: contiguous, a view of a contiguous BSHD one, or of more memory than it has elements."""
    if order == "plain":
        return torch.randn(batch, 4, length, 8)
    if order == "view":
        return torch.randn(batch, length, 4, 8).transpose(1, 2)
    return torch.randn(batch, 4, 64, 8)[:, :, :length]


def asked(tensors):
    return {"causal": False, "layout": "BHSD", **dict(zip(("query", "key", "value"), tensors, strict=True))}


def quickest(kernel, tensors):
    """Let a kernel take half as long as the other one on these tensors."""
    facts = lz.facts("attention", **asked(tensors))
    for name in KERNELS:
        time_us = 10.0 if name == kernel else 20.0
        ENGINE.ledger.record_time(REGISTRY.kernel(name), facts, Measurement(time_us, time_us, 0.0, 9))


def ran(tensors):
    RAN.clear()
    lz.attention(**asked(tensors))
    return RAN[-1]


def told(tensors):
    return lz.which("attention", **asked(tensors))["kernel_id"]


def conditions(tensors):
    dispatcher = CALLS["attention"].dispatcher
    arguments = dispatcher.function.bind((), asked(tensors))
    plan = dispatcher.choose(arguments, current_policy())
    found = reuse.conditions_of(plan, current_policy(), dispatcher.order)
    return sorted(each for each in found if each[0] == DENSE)


@pytest.mark.parametrize("first", ORDERS)
def test_what_runs_is_what_explain_says_whichever_order_came_first(first):
    calls = {order: [tensor(order) for _ in range(3)] for order in ORDERS}
    quickest("user.second", calls["plain"])
    quickest("user.first", calls["view"])
    ENGINE.bump()
    for order in (first, *ORDERS, *ORDERS):
        assert ran(calls[order]) == told(calls[order]) == KERNELS[order == "plain"]
    assert len(CALLS["attention"].dispatcher.cache.current) == 2, "a plan for each order, and hits of both"


@at_once("timed", [*ORDERS, "part"])
@at_once("first", ORDERS)
def test_times_of_one_order_count_though_a_call_of_another_came_first(first, timed):
    """Who has no time keeps the plan of a priority; it may serve nobody who has one."""
    calls = {order: [tensor(order) for _ in range(3)] for order in (*ORDERS, "part")}
    quickest("user.second", calls[timed])
    ENGINE.bump()
    for order in (first, timed, first):
        assert ran(calls[order]) == told(calls[order])
    assert ran(calls[timed]) == "user.second"


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.fixed_dictionaries({orders: st.sampled_from(KERNELS) for orders in ALL}),
    st.lists(st.sampled_from(ALL), min_size=2, max_size=12),
)
def test_each_tensor_counts(winners, calls):
    for orders, kernel in winners.items():
        quickest(kernel, [tensor(order) for order in orders])
    ENGINE.bump()
    for orders in calls:
        tensors = [tensor(order) for order in orders]
        assert ran(tensors) == told(tensors) == winners[orders]


@pytest.mark.parametrize("order", [*ORDERS, "part"])
def test_other_lengths_of_one_order_are_served_by_one_plan(order):
    """A cache that grows is chosen for once a class, whether what is seen of it is dense or not."""
    query = tensor("plain", 3)
    calls = [(query, tensor(order, length), tensor(order, length)) for length in range(17, 32)]
    for tensors in calls:
        quickest("user.second", tensors)
    ENGINE.bump()
    assert {ran(tensors) for tensors in (*calls, *calls)} == {"user.second"}
    assert len(CALLS["attention"].dispatcher.cache.current) == 1


def test_without_times_one_plan_serves_both_orders():
    calls = [[tensor(order) for _ in range(3)] for order in (*ORDERS, "part")]
    assert conditions(calls[0]) == []
    assert {ran(tensors) for tensors in calls} == {"user.first"}
    assert len(CALLS["attention"].dispatcher.cache.current) == 1


def test_conditions_name_the_order_in_which_a_tensor_is_dense():
    query, key, value = tensor("plain"), tensor("view"), tensor("part")
    quickest("user.first", (query, key, value))
    order = CALLS["attention"].dispatcher.order
    places = {name: order.index(name) << 8 for name in ("query", "key")}

    def dense(name, axes):
        return DENSE, tuple(places[name] | axis << 1 | step for step in (0, 1) for axis in axes), ()

    assert conditions((query, key, value)) == sorted([dense("query", (0, 1, 2, 3)), dense("key", (0, 2, 1, 3))])


@pytest.mark.parametrize(("function", "given", "counted"), [
    ("rms_norm", {"input": torch.randn(20, 8), "weight": torch.randn(8)}, "input"),
    ("embedding", {"ids": torch.ones(5, 4, dtype=torch.int64), "weight": torch.randn(20, 8)}, "weight"),
])  # fmt: skip
def test_vectors_and_indices_have_no_such_condition(function, given, counted):
    kernel = REGISTRY.kernel(lz.which(function, **given)["kernel_id"])
    ENGINE.ledger.record_time(kernel, lz.facts(function, **given), Measurement(9.0, 9.0, 0.0, 9))
    dispatcher = CALLS[function].dispatcher
    plan = dispatcher.choose(dispatcher.function.bind((), given), current_policy())
    found = reuse.conditions_of(plan, current_policy(), dispatcher.order)
    place = dispatcher.order.index(counted) << 8
    assert [each for each in found if each[0] == DENSE] == [(DENSE, (place, place | 2, place | 1, place | 3), ())]


def norm_of(name, priority):
    """A kernel of norms; one that takes no views."""

    def run(input, weight, *, eps):
        RAN.append(name)
        return rms_norm(input, weight.shape, weight, eps)

    limits = [lz.limits.contiguous("input")] if name == "user.dense" else []
    lz.register_kernel("norm.rms", name, priority=priority, limits=limits)(run)


@pytest.mark.parametrize("timed", [False, True])
def test_a_plan_for_a_view_that_is_dense_in_no_order_serves_no_dense_call(timed):
    """Who takes no views is refused for one and is the best for dense memory: which came first decides nothing."""
    norm_of("user.dense", 90)
    norm_of("user.any", 80)
    weight, views, dense = (
        torch.randn(64),
        [torch.randn(40, 64)[::2][:rows] for rows in (18, 19, 20)],
        torch.randn(18, 64),
    )
    if timed:
        for each in ("user.any", "user.dense"):
            time_us = 20.0 if each == "user.any" else 10.0
            measured = Measurement(time_us, time_us, 0.0, 9)
            ENGINE.ledger.record_time(REGISTRY.kernel(each), lz.facts("rms_norm", dense, weight), measured)
    with lz.scope(strict_mode=True):  # nobody copies a view
        RAN.clear()
        for tensor in (*views, dense, torch.randn(18, 64), views[0], dense):
            lz.rms_norm(tensor, weight)
            assert RAN[-1] == lz.which("rms_norm", tensor, weight)["kernel_id"]
    assert RAN == [*3 * ["user.any"], "user.dense", "user.dense", "user.any", "user.dense"]


@pytest.mark.parametrize("shape", [(3, 4), (1, 4), (3, 1), (0, 4)])
def test_loose_is_what_dense_is_not(shape):
    operands = (0, 2, 1, 3)
    for strides in ((4, 1), (1, 3), (8, 1), (8, 2), (0, 1), (1, 1)):
        dense, loose = (holds(((code, operands, ()),), [shape], [strides]) for code in (DENSE, LOOSE))
        assert dense is not loose
