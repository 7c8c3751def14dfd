"""A collective that compiles: every rank runs it at the same call, or none does, whatever lies built on its disk."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
import torch

import layerzero as lz
from layerzero.core.plan import Candidate
from layerzero.engine import legality
from layerzero.engine.config import current_policy
from layerzero.engine.frozen_choices import by_priority

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
def test_all_ranks_compile_a_collective_in_the_same_call(jit, chosen):
    lz.configure(jit=jit)
    report, own = report_of("all_reduce", torch.ones(8), group=lz.Ranks.alone())
    assert by_priority(report, current_policy()).chosen.kernel.id == (chosen or own)
    refused = [
        bool(legality.built_reasons(each.kernel, report.facts, current_policy(), [])) for each in report.candidates[:2]
    ]
    assert refused == {"background": [True, False], "inline": [False, False], "never": [True, True]}[jit]


def test_what_each_rank_runs_alone_is_not_compiled_before_ranks_agree():
    lz.configure(jit="inline")
    report, own = report_of("rms_norm", torch.ones(2, 8), torch.ones(8))
    assert by_priority(report, current_policy()).chosen.kernel.id == own
