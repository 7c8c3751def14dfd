"""Kernels that fail: who runs next, what is remembered, what is said, and what is never retried."""

from __future__ import annotations

import time

import pytest
import torch

import layerzero as lz
from layerzero.core.kernel import Kernel
from layerzero.engine import health as health_module
from layerzero.engine.cache import Key
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.functions import CALLS
from layerzero.engine.health import Health


@pytest.fixture
def norm():
    return torch.randn(4, 32), torch.randn(32)


def register(function, kernel_id="user.planted", operation="norm.rms", **declared):
    lz.register_kernel(operation, kernel_id, priority=100, **declared)(function)


def breaks(error):
    def broken(input, weight, *, eps=1e-6):
        raise error

    return broken


def right(x, w):
    return torch.nn.functional.rms_norm(x, w.shape, w, 1e-6)


def test_the_next_kernel_runs_and_it_is_said_once(norm):
    register(breaks(RuntimeError("planted")))
    with pytest.warns(lz.LayerZeroFallbackWarning, match=r"user\.planted failed in norm\.rms .* ran in its place"):
        torch.testing.assert_close(lz.rms_norm(*norm), right(*norm))
    torch.testing.assert_close(lz.rms_norm(*norm), right(*norm))  # silent now: another plan is kept
    assert lz.which("rms_norm", *norm)["kernel_id"] != "user.planted"
    assert ("user.planted", "norm.rms") in ENGINE.health.breakers()
    assert ENGINE.ledger.failures()[("user.planted", "norm.rms")] == ("RuntimeError: planted",)
    assert "user.planted in norm.rms" in lz.doctor().resting


def test_a_kernel_that_fails_later_is_replaced_on_a_hit(norm):
    state = {"fail": False}

    def sometimes(input, weight, *, eps=1e-6):
        if state["fail"]:
            raise RuntimeError("later")
        return right(input, weight)

    register(sometimes)
    lz.rms_norm(*norm)
    state["fail"] = True
    with pytest.warns(lz.LayerZeroFallbackWarning, match="later"):
        torch.testing.assert_close(lz.rms_norm(*norm), right(*norm))


def test_without_fallback_the_error_is_raised_with_its_cause(norm):
    register(breaks(RuntimeError("planted")))
    with lz.scope(fallback_enabled=False), pytest.raises(lz.KernelExecutionError, match="fallback_enabled") as caught:
        lz.rms_norm(*norm)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert caught.value.kernel_id == "user.planted"


def test_a_kernel_that_mutates_is_never_retried():
    ran = []

    def broken(input, residual, weight, *, eps=1e-6):
        residual.add_(input)
        raise RuntimeError("after writing")

    def spy(input, residual, weight, *, eps=1e-6):
        ran.append("spy")
        return residual

    register(broken, operation="norm.add_rms")
    lz.register_kernel("norm.add_rms", "user.spy", priority=99)(spy)
    x, residual, w = torch.randn(4, 32), torch.randn(4, 32), torch.randn(32)
    with pytest.raises(lz.KernelExecutionError, match="may have written into residual"):
        lz.add_rms_norm(x, residual, w)
    assert ran == []


def test_running_out_of_memory_is_nobodys_fault(norm):
    register(breaks(torch.OutOfMemoryError("planted: tried to allocate")))
    with pytest.raises(torch.OutOfMemoryError):
        lz.rms_norm(*norm)
    assert ENGINE.health.breakers() == {}
    assert lz.which("rms_norm", *norm)["kernel_id"] == "user.planted"


def test_a_device_error_that_does_not_stay_is_an_ordinary_failure(norm, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    register(breaks(torch.AcceleratorError("CUDA error: no kernel image is available for execution on the device")))
    with pytest.warns(lz.LayerZeroFallbackWarning, match="no kernel image"):
        torch.testing.assert_close(lz.rms_norm(*norm), right(*norm))


def test_a_dead_context_is_not_papered_over(norm, monkeypatch):
    def still_broken():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", still_broken)
    register(breaks(torch.AcceleratorError("CUDA error: an illegal memory access was encountered")))
    with pytest.raises(lz.KernelExecutionError, match="restart the process"):
        lz.rms_norm(*norm)
    (reason,) = lz.explain("rms_norm", *norm).reasons("user.planted")
    assert reason.code is lz.ReasonCode.UNHEALTHY
    assert reason.wanted == "no failure"  # for the life of the process


def test_an_interrupt_is_not_a_failure(norm):
    register(breaks(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        lz.rms_norm(*norm)
    assert ENGINE.health.breakers() == {}


@pytest.mark.parametrize("wrong", [
    lambda x, w: right(x, w).double(),
    lambda x, w: right(x, w)[:2],
    lambda x, w: None,
    lambda x, w: (right(x, w), right(x, w)),
], ids=["dtype", "shape", "nothing", "two results"])  # fmt: skip
def test_a_result_of_the_wrong_kind_never_reaches_the_caller(norm, wrong):
    register(lambda input, weight: wrong(input, weight))
    with pytest.warns(lz.LayerZeroFallbackWarning, match="wanted"):
        torch.testing.assert_close(lz.rms_norm(*norm), right(*norm))


def test_a_library_that_does_not_load_is_out_and_tried_once(norm):
    attempts = []

    def load(facts):
        attempts.append(1)
        raise OSError("libplanted.so: undefined symbol: torch_planted")

    backend = lz.Backend(name="planted", summary="broken", install="pip install planted")
    declared = {"operations": ("norm.rms",), "backend": backend, "load": load, "accepts": ("eps",), "priority": 100}
    lz.register_backend([Kernel(id="planted.a", **declared), Kernel(id="planted.b", **declared)])
    torch.testing.assert_close(lz.rms_norm(*norm), right(*norm))
    lz.rms_norm(torch.randn(5, 32), norm[1])
    assert attempts == [1]
    finding = next(each for each in lz.doctor().libraries if each.name.startswith("planted"))
    assert finding.reason.code is lz.ReasonCode.BACKEND_IMPORT_FAILED
    assert "undefined symbol" in finding.reason.message
    assert "pip install planted" in finding.reason.message


def test_the_reference_runs_last_and_says_so_once(norm):
    with lz.scope(allow=["nobody"]):
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
    deadline = time.monotonic() + 5
    while CALLS["rms_norm"].dispatcher.cache.epoch == epoch and time.monotonic() < deadline:
        time.sleep(0.01)
    lz.rms_norm(*norm)
    assert lz.which("rms_norm", *norm)["kernel_id"] == "user.planted"
    assert ENGINE.health.breakers() == {}, "the trial went well and closed the breaker"


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
