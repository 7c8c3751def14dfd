"""What a process does before its first result, and what it does not do twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch

import layerzero as lz
from layerzero.engine import dispatch, legality
from layerzero.engine.config import CONFIGURATION, Configuration, current_policy
from layerzero.engine.functions import CALLS
from layerzero.ops import FUNCTIONS

FRESH = """
import json, sys, torch, warnings
warnings.simplefilter("ignore")
import layerzero as lz
from layerzero.engine import dispatch

made, loaded, choose = [], [], dispatch.Dispatcher.choose

def counted(self, *args, **kwargs):
    plan = choose(self, *args, **kwargs)
    made.append(plan.kernel_id)
    return plan

dispatch.Dispatcher.choose = counted
x, w, q = torch.randn(4, 64), torch.randn(64), torch.randn(1, 8, 2, 16)
told = {}
"""


def fresh(script, **environment):
    """What a new process tells."""
    done = subprocess.run(
        [sys.executable, "-c", FRESH + script + "\nprint(json.dumps(told))"],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("native", [pytest.param("0", marks=pytest.mark.slow), "1"])
def test_the_first_choice_of_a_process_is_kept_and_can_be_frozen(native):
    told = fresh(
        """
counts = []
for _ in range(3):
    lz.rms_norm(x, w)
    counts.append(len(made))
for _ in range(2):
    lz.attention(q, q, q, layout="BSHD")
    counts.append(len(made))
told["counts"] = counts
told["held"] = [each.kernel for each in lz.freeze().choices.values()]
""",
        LAYERZERO_NATIVE=native,
    )
    assert told["counts"] == [1, 1, 1, 2, 2]
    assert len(told["held"]) == 2


@pytest.mark.slow
def test_a_recording_sees_the_first_call(tmp_path):
    told = fresh(f"""
with lz.record({str(tmp_path / "calls.json")!r}):
    lz.rms_norm(x, w)
told["calls"] = [each["call"]["operation"] for each in json.load(open({str(tmp_path / "calls.json")!r}))["calls"]]
""")
    assert told["calls"] == ["norm.rms"]


@pytest.fixture
def asked(monkeypatch):
    """How often a call was judged, completely or not."""
    times = []
    explain = dispatch.Dispatcher.explain

    def counted(self, *args, **kwargs):
        times.append(kwargs.get("complete", True))
        return explain(self, *args, **kwargs)

    monkeypatch.setattr(dispatch.Dispatcher, "explain", counted)
    return times


@pytest.mark.filterwarnings("ignore::layerzero.LayerZeroWarning")
def test_a_call_that_ends_at_the_reference_is_judged_once(asked, monkeypatch):
    query = torch.randn(1, 4, 2, 8)
    lz.attention(query, query, query, softcap=1.0, return_lse=True, layout="BSHD")  # which tells so, once
    asked.clear()
    completed = []
    monkeypatch.setattr(legality, "completed", lambda candidate, *rest: completed.append(candidate) or candidate)
    for length in (300, 700):
        longer = torch.randn(1, length, 2, 8)
        lz.attention(longer, longer, longer, softcap=1.0, return_lse=True, layout="BSHD")
    assert asked == [False, False]
    assert completed == []


UNLASTING = {lz.ReasonCode.JIT_DISABLED, lz.ReasonCode.VERSION_UNSUPPORTED, lz.ReasonCode.NOT_VETTED}


@pytest.mark.filterwarnings("ignore::layerzero.LayerZeroWarning")
@pytest.mark.parametrize("arguments", [
    {"softcap": 1.0, "return_lse": True},
    {"softcap": 1.0, "window": (2, 0), "return_lse": True},
    {"softcap": 1.0, "sinks": torch.zeros(2)},
])  # fmt: skip
def test_the_report_of_a_choice_has_every_reason_once_it_is_read(arguments):
    query = torch.randn(1, 4, 2, 8)
    dispatcher = CALLS["attention"].dispatcher
    bound = dispatcher.function.bind((query, query, query), {"layout": "BSHD", **arguments})
    whole, _ = dispatcher.explain(bound, current_policy())
    report = dispatcher.choose(bound, current_policy()).report
    assert report.kernel_id == whole.kernel_id
    assert report.chosen.kernel.is_reference
    for name, reasons in whole.failures.items():
        # whether a kernel that is refused anyway was built or vetted, too, changes from day to day
        lasting = {each for each in reasons if each.code not in UNLASTING}
        assert lasting <= set(report.failures[name]) <= set(reasons)


def test_where_nothing_is_legal_the_error_has_every_reason(asked):
    query = torch.randn(1, 4, 2, 8)
    with lz.scope(fallback_enabled=False), pytest.raises(lz.NoKernelFoundError) as caught:
        lz.attention(query, query, query, softcap=1.0, window=(2, 0), return_lse=True, layout="BSHD")
    assert asked == [False]
    codes = {reason.code for reason in caught.value.failures["torch.sdpa.math"]}
    assert codes >= {lz.ReasonCode.SOFTCAP_UNSUPPORTED}


def test_a_function_that_is_made_while_settings_change_hears_of_it(monkeypatch):
    """An epoch between its first table and its place among the others left hits under the policy before."""

    class Slow(dispatch.PlanCache):
        def publish(self, policy):
            super().publish(policy)
            if not changing:
                changing.append(threading.Thread(target=lambda: lz.configure(strict_mode=True)))
                changing[0].start()
                changing[0].join(0.2)  # done, or it waits for this thread

    changing = []
    monkeypatch.setattr(dispatch, "PlanCache", Slow)
    made = dispatch.Dispatcher(FUNCTIONS["rms_norm"])
    changing[0].join()
    try:
        assert CONFIGURATION.policy.strict_mode
        assert made.cache.current is made.cache.table(CONFIGURATION.policy)
    finally:
        dispatch.ENGINE.forget("none", made.cache)


@pytest.mark.parametrize("first", ["keep_current", "bump"])
def test_the_first_reader_of_the_settings_waits_for_no_thread_that_changes_them(first, monkeypatch):
    """A change holds the settings and waits for the engine, which was held by what waited for the settings."""
    changing = threading.Event()

    class Slow(Configuration):
        def _read_environment(self):
            changing.set()
            time.sleep(0.2)  # meanwhile the other thread comes as far as it can
            super()._read_environment()

    settings = Slow({})
    monkeypatch.setattr(dispatch, "CONFIGURATION", settings)
    engine = dispatch.Engine(SimpleNamespace(on_change=lambda _: None, has_own=False))
    reads = {"keep_current": lambda: engine.keep_current(dispatch.PlanCache()), "bump": engine.bump}[first]
    threads = [threading.Thread(target=each, daemon=True) for each in (settings.reset, reads)]
    for thread in threads:
        thread.start()
        assert changing.wait(60)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "each of the two waits for the other"
    assert engine.epoch == (2 if first == "bump" else 1)
