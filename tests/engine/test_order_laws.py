"""Laws of the order of kernels, whatever is known of them: total, whatever order they come in, times as measured."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

import layerzero as lz
from layerzero.core.evidence import Evidence, Provenance
from layerzero.core.operation import Routed
from layerzero.core.plan import Adaptation, Candidate
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.engine.config import CONFIGURATION, current_policy
from layerzero.engine.order import POINTS_PER_DOUBLING, order
from layerzero.engine.pick import pick
from layerzero.engine.policy import Lock

CALL = torch.randn(8, 64), torch.randn(64)

DRAWN = st.lists(
    st.tuples(
        st.integers(0, 100),
        st.floats(1.0, 1e4),
        st.one_of(st.none(), st.floats(0.1, 1.0)),
        st.sampled_from(list(Provenance)),
        st.floats(0.0, 1.0),
        st.floats(0.0, 0.9),
        st.sampled_from(["legal", "legal", "refused", "untimed", "adapted", "stock", "planning"]),
    ),
    min_size=1,
    max_size=7,
)
"""Priority, time, the device's share of it, where the time comes from, confidence, noise, and what else is so."""

BACKEND = lz.Backend("plug", "a library", origin="entry_point")
WISHES = st.sampled_from(
    [{}, {"unmeasured": "priority"}, {"prefer_sources": ["plug.0"]}, {"avoid_sources": ["plug.1"]}]
)


def candidates_of(drawn):
    made, known = [], {}
    for number, (priority, time_us, share, provenance, confidence, noise, kind) in enumerate(drawn):
        kernel = lz.Kernel(
            id=f"plug.{number}", operations=("norm.rms",), backend=BACKEND, load=lambda _: None, accepts=("eps",),
            priority=priority, stock=kind == "stock", plans_sizes=kind == "planning",
        )  # fmt: skip
        reasons = (Reason(ReasonCode.POLICY_DENIED, "deny", "another", kernel.id),) if kind == "refused" else ()
        copies = (Adaptation("copy", "input", "copy input"),) if kind == "adapted" else ()
        made.append(Candidate(kernel, reasons, copies))
        if kind not in ("untimed", "refused"):
            device_us = None if share is None else share * time_us
            known[kernel.id] = Evidence(time_us, provenance, confidence, noise, device_us=device_us)
    return made, known


@given(drawn=DRAWN, wishes=WISHES, data=st.data())
def test_the_order_is_total_and_the_same_however_the_candidates_come(drawn, wishes, data):
    candidates, known = candidates_of(drawn)
    policy = CONFIGURATION.effective(wishes)
    facts = lz.facts("rms_norm", *CALL)
    ordered = order(candidates, facts, policy, known)
    shuffled = data.draw(st.permutations(candidates))
    times = dict(data.draw(st.permutations(list(known.items()))))
    assert order(shuffled, facts, policy, times) == ordered
    assert order(ordered, facts, policy, known) == ordered
    assert sorted(each.kernel.id for each in ordered) == sorted(each.kernel.id for each in candidates)
    assert [each.legal for each in ordered] == sorted([each.legal for each in ordered], reverse=True)


@given(drawn=DRAWN, wishes=WISHES)
def test_times_stay_as_they_were_measured_and_the_cost_is_a_term_of_its_own(drawn, wishes):
    candidates, known = candidates_of(drawn)
    policy = CONFIGURATION.effective(wishes)
    for each in order(candidates, lz.facts("rms_norm", *CALL), policy, known):
        names = [term.name for term in each.terms]
        assert len(names) == len(set(names))
        assert set(names) <= {"cost", "priority", "stock", "unmeasured", "adaptation", "prefer", "avoid"}
        assert ("cost" in names) == (each.evidence is not None)
        assert each.legal == bool(names)
        if each.evidence is None:
            continue
        given = known[each.kernel.id]
        told = (each.evidence.time_us, each.evidence.device_us, each.evidence.noise, each.evidence.provenance)
        assert told == (given.time_us, given.device_us, given.noise, given.provenance)
        assert each.to_dict()["time_us"] == given.time_us
        assert each.evidence.told.startswith(f"{given.time_us:.1f} us")


@given(drawn=DRAWN, number=st.integers(0, 6), otherwise=st.sampled_from(["error", "select"]))
def test_what_is_picked_is_legal_and_what_a_lock_names_where_that_is_legal(drawn, number, otherwise):
    candidates, known = candidates_of(drawn)
    facts, policy = lz.facts("rms_norm", *CALL), current_policy()
    ordered = order(candidates, facts, policy, known)
    routed = Routed(facts.operation, {})
    free = pick(ordered, routed, facts, policy, None)
    assert (free.chosen is None) == (not any(each.legal for each in candidates))
    assert free.chosen is None or free.chosen is ordered[0]
    name = f"plug.{number}"
    held = pick(ordered, routed, facts, policy, Lock("norm.rms", name, otherwise))
    if any(each.legal and each.kernel.id == name for each in candidates):
        assert held.kernel_id == name
    else:
        assert held.kernel_id == (free.kernel_id if otherwise == "select" else None)


@given(drawn=DRAWN)
def test_no_kernel_with_a_higher_score_than_the_noise_of_the_best_is_passed(drawn):
    candidates, known = candidates_of(drawn)
    ordered = order(candidates, lz.facts("rms_norm", *CALL), current_policy(), known)
    legal = [each for each in ordered if each.legal]
    if not legal:
        return
    top = max(each.score for each in legal)
    widest = max([0.0, *(each.evidence.cost_noise for each in legal if each.evidence is not None)])
    assert top - legal[0].score <= POINTS_PER_DOUBLING * math.log2(1 + widest) + 1e-9
