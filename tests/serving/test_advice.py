"""What would make a machine faster is said in at most five lines, with gains where times tell them."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

import layerzero as lz
from layerzero.cli.app import main
from layerzero.core.evidence import Measurement
from layerzero.core.recipe import CallRecipe
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.registry import REGISTRY
from layerzero.serving import advice as advising
from layerzero.serving.advice import advice

CALL = torch.empty(8, 64), torch.empty(64)


@pytest.fixture
def called(monkeypatch):
    """One call was made here; torch's own kernel takes 30 us, and one that nobody built 10."""
    kernel = lz.Kernel(
        id="mine.compiled",
        operations=("norm.rms",),
        backend=lz.Backend("mine", "compiles", origin="code"),
        load=lambda _: None,
        accepts=("eps",),
        jit=True,
    )
    lz.register_backend([kernel])
    facts = lz.facts("rms_norm", *CALL)
    monkeypatch.setattr(type(ENGINE.ledger), "calls", lambda _: [(1, CallRecipe.of(facts))])
    for name, us in (("torch.rms_norm", 30.0), ("mine.compiled", 10.0)):
        ENGINE.ledger.record_time(REGISTRY.kernel(name), facts, Measurement(us, us, 0.01, 20))


@pytest.mark.usefixtures("called")
def test_what_is_not_built_is_told_with_its_gain():
    first = advice("cpu")[0]
    assert (first.gain, first.calls) == (pytest.approx(3.0), 1)
    assert "build mine: set jit: background" in first.text
    with lz.scope(jit="background"):
        assert "behind the first calls" in advice("cpu")[0].text


@pytest.mark.usefixtures("called")
def test_a_single_thread_is_told(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(advising, "thread_advice", lambda threads: f"{threads} thread of 4")
    assert any("1 thread of 4" in each.text for each in advice("cpu"))


def test_without_any_call_it_says_what_to_do_first():
    assert "run your program" in " ".join(each.text for each in advice("cpu"))
    assert len(advice("cpu")) <= advising.MOST


def test_doctor_ends_with_it():
    shown = CliRunner().invoke(main, ["doctor"]).stdout
    assert "to be faster here:" in shown.splitlines()[-2 * advising.MOST - 1 :]
    told = json.loads(CliRunner().invoke(main, ["doctor", "--json"]).stdout)
    assert told["jit"]["setting"] == "never"
    assert len(told["faster"]) <= advising.MOST
