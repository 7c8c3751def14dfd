"""A plan answers under the names that the specification gives it."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import layerzero as lz
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.functions import CALLS


def plan_of(name, *arguments, **options):
    """The plan that a call was just given."""
    cache = CALLS[name].dispatcher.cache
    ENGINE.bump()
    getattr(lz, name)(*arguments, **options)
    ((_, plan),) = cache.plans()
    return plan


def test_the_names_of_the_specification_say_what_the_plan_does():
    x = torch.randn(3, 71)
    plan = plan_of("rms_norm", x, torch.randn(71))
    assert plan.transform_cost_total == plan.transform_bytes == 0
    assert not plan.uses_fallback
    assert plan.debug_info is plan.report


def test_the_reference_is_the_fallback():
    with lz.scope(locks={"norm.rms": "reference.norm.rms"}):
        plan = plan_of("rms_norm", torch.randn(3, 73), torch.randn(73))
    assert plan.uses_fallback


def test_only_what_moves_data_has_a_cost():
    query = torch.randn(1, 5, 4, 36).transpose(2, 3).contiguous().transpose(2, 3)
    plan = plan_of("attention", query, query, query, layout="BSHD")
    assert plan.kernel_id == "torch.sdpa.cpu_flash"
    assert plan.transform_cost_total == 3  # query, key and value are copied; the layout is a view
    assert plan.transform_bytes == plan.report.to_dict()["transform_bytes"] == 3 * query.nbytes


def test_a_report_counts_kernels_of_other_devices_and_keeps_their_reasons():
    report = lz.explain("rms_norm", torch.randn(4, 64), torch.ones(64))
    elsewhere = [
        name for name, reasons in report.failures.items() if any("this device is cpu" in str(each) for each in reasons)
    ]
    text = str(report)
    assert f"{len(elsewhere)} more are not for this device" in text
    assert "PLATFORM_MISMATCH" not in text
    assert not any(f"  {name}: refused" in text for name in elsewhere)
    assert report.reasons("flashinfer.rms_norm")


def test_a_deep_copy_of_what_holds_a_plan_holds_the_same_plan():
    bound = lz.bind(lz.rms_norm, torch.randn(3, 74), torch.randn(74))
    held = copy.deepcopy({"plan": bound.plan, "report": bound.report})
    assert held["plan"] is bound.plan
    assert held["report"] == bound.report
    assert copy.copy(bound.plan) is bound.plan
    with pytest.raises(TypeError, match=r"got the plan of .*; pickle plan\.report, or keep choices"):
        pickle.dumps(bound.plan)
