"""The one loop of tuning, comparing and tokens: order, children, what is measured again, and what is left."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

import layerzero as lz
from clock import Clock
from layerzero.core.ledger import Verdict, class_text
from layerzero.engine.registry import REGISTRY
from layerzero.tuning.measurement import loop, plain
from layerzero.tuning.measurement.loop import NO_TIME, Party, run_loop
from layerzero.tuning.measurement.timing import Deadline
from layerzero.tuning.verification.vetting import Vetted

FACTS = lz.facts("rms_norm", torch.empty(2, 8), torch.empty(8))


@dataclass(slots=True, kw_only=True)
class Words(Party[str]):
    """A party whose calls are words: what it is asked for, in order."""

    clock: Clock
    pausing: bool = False
    log: list[object] = field(default_factory=list)

    def look(self, number, job, todo, *, again=False):
        self.log.append((job, todo, "again") if again else (job, todo))
        self.clock.now += 1.0
        return NO_TIME if job == "large" else ""

    def to_build(self, jobs):
        self.log.append(tuple(jobs))
        return [(REGISTRY.kernel("torch.rms_norm"), FACTS)]

    def pauses(self, number, job, children):
        return self.pausing


@pytest.fixture
def party(monkeypatch):
    monkeypatch.setattr(loop, "build_apart", lambda *_, **__: None)

    def made(*words, seconds=100.0, **more):
        clock = Clock()
        return Words(jobs=words, device=torch.device("cpu"), deadline=Deadline(seconds, clock), clock=clock, **more)

    return made


def test_children_are_asked_by_growing_batches_and_calls_are_measured_again_behind_each(party):
    words = party("a", "b", "c", batch=1, growth=2)
    assert run_loop(words) == []
    asked = [each for each in words.log if each and each not in (("a", 3), ("b", 2), ("c", 1)) and "again" not in each]
    assert asked == [("a",), ("b", "c")]
    assert words.log[:3] == [("a",), ("a", 3), ("a", 1, "again")]
    assert words.log[-3:] == [("a", 3, "again"), ("b", 2, "again"), ("c", 1, "again")]


def test_where_the_measuring_pauses_children_come_first(party):
    words = party("a", "b", batch=2, pausing=True)
    run_loop(words)
    assert words.log == [("a", "b"), ("a", 2), ("b", 1)]


def test_what_time_does_not_suffice_for_is_left_in_its_order(party):
    words = party("a", "large", "b", "c", seconds=3.0, batch=4)
    assert run_loop(words) == ["large", "c"]


def test_a_call_that_is_too_large_is_never_measured_again(party):
    words = party("large", "a", batch=2)
    assert run_loop(words) == ["large"]
    assert ("a", 1, "again") in words.log
    assert not [each for each in words.log if each[0] == "large" and "again" in each]


def test_a_budget_of_nothing_proves_and_measures_no_tokens(place, monkeypatch):
    """Proofs went on without an end, and only then the budget was looked at."""
    asked = []
    monkeypatch.setattr(loop, "vet_calls", lambda pairs, **_: asked.append(pairs) or ())
    tuned = plain.tune_plain(plain.plain_jobs("tokenize.encode", {"tokenizer_id": place}), budget_s=0)
    assert (tuned.contests, tuned.known, asked) == ((), 0, [])


def test_tokens_are_proved_first_and_what_time_cut_is_asked_again(place, monkeypatch):
    rounds = []

    def vet_calls(pairs, *, stop, **_):
        rounds.append(len(pairs))
        reached = len(rounds) > 1
        return tuple(
            Vetted(kernel.id, class_text(facts), Verdict.WRONG if reached else None, "", reached)
            for kernel, facts in pairs
        )

    monkeypatch.setattr(loop, "vet_calls", vet_calls)
    monkeypatch.setattr(plain._PlainParty, "look", lambda *_, **__: "")
    waiting = list(plain.plain_pairs("tokenize.encode", {"tokenizer_id": place}))
    if not waiting:
        pytest.skip("no tokenizer library here has to prove itself")
    tuned = plain.tune_plain(plain.plain_jobs("tokenize.encode", {"tokenizer_id": place}), budget_s=1000.0)
    assert rounds == [len(waiting)] * 2
    assert all(each.reached for each in tuned.vetted)
