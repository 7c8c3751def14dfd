"""A collective that compiles: every rank runs it at the same call, or none does, whatever lies built on its disk."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
import torch

import layerzero as lz
from layerzero.core.plan import Candidate
from layerzero.engine import jit as compiling
from layerzero.engine import legality
from layerzero.engine.config import current_policy
from layerzero.engine.frozen_choices import Agreed, Frozen, by_priority, choice_of, class_name
from layerzero.engine.registry import REGISTRY

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch was built without torch.distributed"
)


def report_of(name, *given, **named):
    """A call's report with two kernels more: one that compiles in a second, and one whose files are looked for."""
    report = lz.explain(name, *given, **named)
    own = report.chosen.kernel
    quick = dataclasses.replace(own, id="quick", jit=True)
    slow = dataclasses.replace(own, id="slow", jit=True, prebuilt=lambda facts: False)
    new = [Candidate(each, ()) for each in (slow, quick)]
    return msgspec.structs.replace(report, chosen=new[0], ranked=(*new, report.chosen)), own.id


@pytest.mark.parametrize(("jit", "chosen"), [("background", "quick"), ("inline", "slow"), ("never", None)])
def test_all_ranks_compile_a_collective_in_the_same_call(jit, chosen, monkeypatch):
    lz.configure(jit=jit)
    monkeypatch.setattr(compiling, "has_compiler", lambda: True)
    report, own = report_of("all_reduce", torch.ones(8), group=lz.Ranks.alone())
    assert by_priority(report, current_policy()).chosen.kernel.id == (chosen or own)
    refused = [
        bool(legality.built_reasons(each.kernel, report.facts, current_policy(), [])) for each in report.candidates[:2]
    ]
    assert refused == {"background": [True, False], "inline": [False, False], "never": [True, True]}[jit]


def test_without_a_c_compiler_ranks_run_what_is_compiled(monkeypatch):
    lz.configure(jit="background")
    monkeypatch.setattr(compiling, "has_compiler", lambda: False)
    report, own = report_of("all_reduce", torch.ones(8), group=lz.Ranks.alone())
    assert by_priority(report, current_policy()).chosen.kernel.id == own


@pytest.mark.parametrize("frozen", [None, "gone"])
def test_no_build_of_one_host_decides_where_choices_are_frozen(frozen, monkeypatch):
    """For a class that is new, and for one whose kernel cannot run."""
    lz.configure(jit="background")
    monkeypatch.setattr(compiling, "has_compiler", lambda: True)
    report, own = report_of("all_reduce", torch.ones(8), group=lz.Ranks.alone())
    gone = choice_of(dataclasses.replace(REGISTRY.kernel(own), id="gone"), report.facts, current_policy())
    choices = {class_name(report.facts, current_policy()): gone} if frozen else {}
    for held in (Frozen(choices), Agreed(choices)):
        assert held.held(report, current_policy()).chosen.kernel.id == "quick"


def test_what_each_rank_runs_alone_is_not_compiled_before_ranks_agree():
    lz.configure(jit="inline")
    report, own = report_of("rms_norm", torch.ones(2, 8), torch.ones(8))
    assert by_priority(report, current_policy()).chosen.kernel.id == own
