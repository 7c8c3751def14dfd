"""Kernels that failed rest and come back: breakers, epochs, first runs, and handles that are not prepared."""

from __future__ import annotations

import pickle
import re
import threading
import time
import warnings

import pytest
import torch
from planted_calls import breaks, register, right

import layerzero as lz
from layerzero.core.errors import NotPreparedError
from layerzero.engine import health as health_module
from layerzero.engine.cache import Key
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.functions import CALLS
from layerzero.engine.health import Health
from layerzero.engine.registry import REGISTRY
from layerzero.ops.linear.packed import BELONGS


def right_with_eps(input, weight, *, eps=1e-6):
    return torch.nn.functional.rms_norm(input, weight.shape, weight, eps)


def test_the_reference_runs_last_and_says_so_once(norm):
    with lz.scope(allow=["flashinfer"]):
        with pytest.warns(lz.LayerZeroFallbackWarning, match="slow reference") as caught:
            lz.rms_norm(*norm)
            lz.rms_norm(torch.randn(3, 32), norm[1])
    assert len([each for each in caught if each.category is lz.LayerZeroFallbackWarning]) == 1


def test_a_breaker_backs_off_tries_again_and_closes():
    now = {"s": 0.0}
    bumps = []
    health = Health(lambda: bumps.append(now["s"]), clock=lambda: now["s"])
    kernel = next(iter(lz.list_kernels("norm.rms")))
    try:
        health.failed(kernel, "norm.rms", RuntimeError("a"))
        assert health.reasons(kernel, "norm.rms")
        assert not health.reasons(kernel, "norm.layer"), "health is isolated per operation"
        now["s"] = health_module.FIRST_RETRY_S
        assert not health.reasons(kernel, "norm.rms"), "half open"
        health.failed(kernel, "norm.rms", RuntimeError("b"))
        now["s"] += health_module.FIRST_RETRY_S
        assert health.reasons(kernel, "norm.rms"), "rests twice as long"
        now["s"] += health_module.FIRST_RETRY_S
        assert not health.reasons(kernel, "norm.rms")
        health.worked(kernel, "norm.rms")
        health.failed(kernel, "norm.rms", RuntimeError("c"))
        assert health.breakers()[kernel.id, "norm.rms"].failures == 1
    finally:
        health.reset()


def test_a_kernel_fails_over_where_no_thread_can_be_started(norm, monkeypatch):
    def none(_):
        raise RuntimeError("can't start new thread")

    passing(1)
    monkeypatch.setattr(threading.Thread, "start", none)
    with pytest.warns(lz.LayerZeroFallbackWarning, match="passing"):
        torch.testing.assert_close(lz.rms_norm(*norm), right(*norm))


def passing(failures):
    """A kernel whose first calls raise, and the answers that it gave."""
    told = []

    def sometimes(input, weight, *, eps=1e-6):
        told.append(len(told) >= failures)
        if not told[-1]:
            raise RuntimeError("passing")
        return right(input, weight)

    register(sometimes)
    return told


@pytest.mark.parametrize("settings", [
    {"locks": {"rms_norm": "user.planted"}},
    {"allow": ["user"], "fallback_enabled": False},
    {"allow": ["user"], "deny": ["reference"]},
])  # fmt: skip
def test_a_passing_error_is_no_outage_where_nothing_else_may_run(norm, settings):
    told = passing(failures=3)
    with lz.scope(**settings):
        for _ in range(3):
            with pytest.raises(lz.KernelExecutionError, match=r"user\.planted failed in norm\.rms") as caught:
                lz.rms_norm(*norm)
            assert str(caught.value.__cause__) == "passing"
        epoch = ENGINE.epoch
        for _ in range(2):
            torch.testing.assert_close(lz.rms_norm(*norm), right(*norm))
        assert lz.explain("rms_norm", *norm).kernel_id == "user.planted"
    assert told == [False] * 3 + [True] * 2
    assert ENGINE.epoch == epoch, "what rests already is no news for other calls"
    assert ENGINE.health.breakers()["user.planted", "norm.rms"].failures == 3
    assert lz.which("rms_norm", *norm)["kernel_id"] != "user.planted", "it rests where another one may run"


def test_only_its_rest_is_passed_over_where_nothing_else_may_run(norm):
    limits = (lz.limits.dim("hidden", max=40),)
    register(breaks(RuntimeError("planted")), limits=limits)
    with lz.scope(locks={"rms_norm": "user.planted"}):
        with pytest.raises(lz.KernelExecutionError):
            lz.rms_norm(*norm)
        with pytest.raises(lz.NoKernelFoundError, match="hidden"):
            lz.rms_norm(torch.randn(2, 64), torch.randn(64))
        ENGINE.health.reset()
        ENGINE.health.failed(REGISTRY.kernel("user.planted"), "norm.rms", RuntimeError("sticky"), forever=True)
        with pytest.raises(lz.NoKernelFoundError, match="sticky"):
            lz.rms_norm(*norm)


def test_a_timer_starts_a_new_epoch_when_a_rest_is_over(norm, monkeypatch):
    monkeypatch.setattr(health_module, "FIRST_RETRY_S", 0.05)
    state = {"fail": True}

    def recovers(input, weight, *, eps=1e-6):
        if state["fail"]:
            raise RuntimeError("planted")
        return right(input, weight)

    register(recovers)
    with pytest.warns(lz.LayerZeroFallbackWarning):
        lz.rms_norm(*norm)
    state["fail"] = False
    epoch = CALLS["rms_norm"].dispatcher.cache.epoch
    while CALLS["rms_norm"].dispatcher.cache.epoch == epoch:  # a timer moves it
        time.sleep(0.01)
    lz.rms_norm(*norm)
    assert lz.which("rms_norm", *norm)["kernel_id"] == "user.planted"
    assert ENGINE.health.breakers() == {}, "the trial went well and closed the breaker"


@pytest.mark.usefixtures("path")
def test_a_first_run_is_marked_once_for_a_size_class():
    class Marking(type(ENGINE.ledger)):
        def begin(self, kernel, facts):
            marks.append(("begin", facts.size("rows")))
            return facts.size("rows")

        def accept(self, marker):
            marks.append(("accept", marker))

    marks, ENGINE.ledger = [], Marking()
    register(right_with_eps)
    for rows in (17, 25, 17, 31, 32, 40):  # 16 to 31 rows are a class, and 32 to 63
        lz.rms_norm(torch.ones(rows, 8), torch.ones(8))
    assert marks == [("begin", 17), ("accept", 17), ("begin", 32), ("accept", 32)]


@pytest.mark.parametrize(
    "own", [{"build_key": lambda facts: facts.size("rows")}, {"prebuilt": lambda facts: facts.size("rows") > 0}]
)
def test_what_is_compiled_for_a_size_does_not_serve_its_class(own):
    lz.configure(allow_jit_compile=True)
    register(right_with_eps, jit=True, **own)
    for rows in (17, 25):
        lz.rms_norm(torch.ones(rows, 8), torch.ones(8))
    assert [plan.kernel_id for plan in CALLS["rms_norm"].dispatcher.cache.current.values()] == ["user.planted"] * 2


def test_a_plan_chosen_under_an_old_epoch_is_not_kept(norm):
    def slow(input, weight, *, eps=1e-6):
        ENGINE.bump()  # something changed while this call was being chosen
        return right(input, weight)

    register(slow)
    cache = CALLS["rms_norm"].dispatcher.cache
    plan = CALLS["rms_norm"].dispatcher.choose({"input": norm[0], "weight": norm[1], "eps": 1e-6}, _policy())
    assert not cache.insert(Key("key", "class"), plan, _policy(), cache.epoch - 1, 10)
    assert cache.insert(Key("key", "class"), plan, _policy(), cache.epoch, 10)


def _policy():
    from layerzero.engine.config import current_policy

    return current_policy()


def test_the_next_kernel_is_captured_where_one_was_not_prepared(monkeypatch):
    """Calls before a capture ran another kernel, so that the best one there keeps nothing on the handle yet."""
    asked = []

    @lz.register_kernel("norm.rms", "user.unprepared", priority=100)
    def unprepared(input, weight, *, eps):
        asked.append("first")
        raise NotPreparedError("Step", ["handle: wanted one that was used before the capture, got a new one"])

    @lz.register_kernel("norm.rms", "user.also_unprepared", priority=99)
    def also_unprepared(input, weight, *, eps):
        asked.append("second")
        raise NotPreparedError("Step", ["handle: wanted one that was used before the capture, got a new one"])

    x, weight = torch.randn(3, 8), torch.ones(8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            torch.testing.assert_close(lz.rms_norm(x, weight), torch.nn.functional.rms_norm(x, (8,), weight, 1e-6))
    assert asked == ["first", "second"] * 2, "nothing is wrong with them: the next call asks again"
    dispatcher = CALLS["rms_norm"].dispatcher
    monkeypatch.setitem(vars(dispatcher), "choose", lambda *_, **__: pytest.fail("what runs instead was chosen before"))
    lz.rms_norm(x, weight)
    monkeypatch.undo()
    assert lz.which("rms_norm", x, weight)["kernel_id"] == "user.unprepared"
    with lz.scope(locks={"norm.rms": "user.unprepared"}), pytest.raises(NotPreparedError, match="before the capture"):
        lz.rms_norm(x, weight)


def test_a_kernel_that_refuses_a_weight_is_not_chosen_for_again_and_takes_the_next_one(monkeypatch):
    """To choose anew and to mark a first run took 8 ms of each call that ran 0.65 ms."""
    asked = []

    @lz.register_kernel("mlp.linear", "user.picky", priority=100, limits=(BELONGS,))
    def picky(input, weight, *, bias=None, packed):
        def form(weight):
            asked.append(bool(weight[0, 0] < 0))
            if weight[0, 0] < 0:
                raise NotPreparedError("linear", ["weight: wanted one that begins above 0"])
            return weight, 0

        return torch.nn.functional.linear(input, packed.form("user.picky", form), bias)

    x, good, bad = torch.randn(3, 8), torch.ones(4, 8), -torch.ones(4, 8)
    weights = [(each, lz.PackedWeight(each)) for each in (bad, good)]
    dispatcher, chosen = CALLS["linear"].dispatcher, []
    usual = dispatcher.choose
    monkeypatch.setitem(vars(dispatcher), "choose", lambda *args, **more: (chosen.append(1), usual(*args, **more))[1])
    for weight, packed in (weights[0], weights[0], weights[0], weights[1], weights[0], weights[1]):
        torch.testing.assert_close(lz.linear(x, weight, packed=packed), x @ weight.mT)
    assert (len(chosen), asked) == (2, [True, False]), "one choice for each kernel, one look at each weight"
    with lz.scope(locks={"mlp.linear": "user.picky"}):
        for _ in range(3):
            with pytest.raises(NotPreparedError, match="wanted one that begins above 0"):
                lz.linear(x, bad, packed=weights[0][1])
    plans = [each for each in dispatcher.cache.current.values() if each.kernel_id == "user.picky"]
    assert [each.run.__name__ for each in plans] == ["run"], "the plan that was proved took the other's place"


def test_a_handle_that_is_new_in_a_capture_says_what_to_do(monkeypatch):
    class OnDevice(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    handle = lz.Handle((torch.zeros(1).as_subclass(OnDevice),), "capturable")
    with pytest.raises(NotPreparedError, match="run one forward pass with it outside of the capture first"):
        handle.slot("owner", lambda _: None)


def test_the_error_fits_a_screen_and_keeps_every_reason():
    query = torch.randn(1, 16, 4, 64)
    with lz.scope(allow=["xformers"], fallback_enabled=False), pytest.raises(lz.NoKernelFoundError) as raised:
        lz.attention(query, query, query, layout="BSHD")
    error = raised.value
    first, *lines = str(error).splitlines()
    assert first == "no kernel of attention.standard.prefill is legal for this call"
    assert len(lines) <= 15
    named = {line.split(":")[0].strip() for line in lines} & error.failures.keys()
    assert "torch.sdpa.math" in named
    mismatch = lz.ReasonCode.PLATFORM_MISMATCH
    elsewhere = {name for name, reasons in error.failures.items() if mismatch in [each.code for each in reasons]}
    assert elsewhere, "counted in the message, told in full here"
    assert not elsewhere & named
    (others,) = [line for line in lines if line.startswith("  others: ")]
    assert re.search(r"\d+ for other hardware", others)
    counted = sum(map(int, re.findall(r"(\d+) (?:for|not|refused)", others)))
    assert counted + len(named) == len(error.failures)
    assert "`layerzero explain attention.standard.prefill --shape" in lines[-1]
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
