"""Kernels that fail: who runs next, what is remembered, what is said, and what is never retried."""

from __future__ import annotations

import pickle
import re
import time
import warnings

import pytest
import torch

import layerzero as lz
from layerzero.core.errors import NotPreparedError
from layerzero.core.kernel import Kernel
from layerzero.engine import health as health_module
from layerzero.engine.cache import Key
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.first_run import Recent
from layerzero.engine.functions import CALLS
from layerzero.engine.health import Health
from layerzero.engine.registry import REGISTRY
from layerzero.ops.linear.packed import BELONGS


@pytest.fixture
def norm():
    return torch.randn(4, 32), torch.randn(32)


def register(function, kernel_id="user.planted", operation="norm.rms", **declared):
    lz.register_kernel(operation, kernel_id, priority=100, **declared)(function)
    return kernel_id


def breaks(error):
    def broken(input, weight, *, eps=1e-6):
        raise error

    return broken


def right(x, w):
    return torch.nn.functional.rms_norm(x, w.shape, w, 1e-6)


def right_with_eps(input, weight, *, eps=1e-6):
    return torch.nn.functional.rms_norm(input, weight.shape, weight, eps)


def test_the_next_kernel_runs_and_it_is_said_once(norm):
    register(breaks(RuntimeError("planted")))
    with pytest.warns(lz.LayerZeroFallbackWarning, match=r"user\.planted failed in norm\.rms .* ran in its place"):
        torch.testing.assert_close(lz.rms_norm(*norm), right(*norm))
    torch.testing.assert_close(lz.rms_norm(*norm), right(*norm))  # silent now: another plan is kept
    assert lz.which("rms_norm", *norm)["kernel_id"] != "user.planted"
    assert ("user.planted", "norm.rms") in ENGINE.health.breakers()
    assert ENGINE.ledger.failures()[("user.planted", "norm.rms")] == ("RuntimeError: planted",)
    assert "user.planted in norm.rms" in lz.doctor().resting


def test_a_wrong_result_is_told_once(norm, caplog):
    register(lambda input, weight, *, eps=1e-6: input[:1])
    with pytest.warns(lz.LayerZeroFallbackWarning) as told:
        torch.testing.assert_close(lz.rms_norm(*norm), right(*norm))
    texts = [str(each.message) for each in told] + [each.getMessage() for each in caplog.records]
    (only,) = [text for text in texts if "user.planted" in text]
    assert "user.planted failed in norm.rms (WrongResultError: result 0: wanted " in only
    assert "ran in its place" in only


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
        lz.add_residual_rms_norm_(x, residual, w)
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
    breaker, suspicion = lz.explain("rms_norm", *norm).reasons("user.planted")
    assert breaker.code is suspicion.code is lz.ReasonCode.UNHEALTHY
    assert breaker.wanted == "no failure"  # for the life of the process


def test_whoever_was_chosen_last_is_suspected_when_the_context_dies(norm, monkeypatch):
    def still_broken():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", still_broken)
    earlier = register(right_kernel, "user.earlier", "norm.layer", platform="cuda")
    ENGINE.recent.add(plan_of(earlier, torch.empty(4, 32, device="meta"), (32,), device="H100", function="layer_norm"))
    register(breaks(torch.AcceleratorError("CUDA error: an illegal memory access was encountered")))
    with pytest.raises(lz.KernelExecutionError) as caught:
        lz.rms_norm(*norm)
    message = str(caught.value)
    assert message.index("user.planted for norm.rms float32") < message.index("user.earlier for norm.layer float32")
    assert "layerzero doctor --confirm" in message
    assert [suspect.kernel_id for suspect in ENGINE.ledger.suspects()] == ["user.planted", "user.earlier"]
    assert all("context died" in suspect.why for suspect in lz.doctor().suspects)


@pytest.mark.parametrize("code", [900, None])
def test_a_capture_that_is_lost_accuses_nobody_and_rests_who_lost_it(norm, monkeypatch, code):
    error = torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing")
    if code is not None:
        error.error_code = code
    monkeypatch.setattr(torch.cuda, "synchronize", pytest.fail)  # it ends what is left of a capture
    earlier = register(right_kernel, "user.earlier", "norm.layer", platform="cuda")
    ENGINE.recent.add(plan_of(earlier, torch.empty(4, 32, device="meta"), (32,), device="H100", function="layer_norm"))
    register(breaks(error))
    with pytest.raises(lz.KernelExecutionError, match=r"the CUDA graph capture is lost.*begin a new one"):
        lz.rms_norm(*norm)
    assert list(ENGINE.ledger.suspects()) == []
    assert len(ENGINE.health.breakers()) == 1
    torch.testing.assert_close(lz.rms_norm(*norm), right(*norm))


def test_who_comes_after_a_capture_was_lost_is_not_at_fault(norm):
    register(breaks(torch.AcceleratorError("CUDA error: operation failed due to a previous error during capture")))
    with pytest.raises(lz.KernelExecutionError, match="the CUDA graph capture is lost"):
        lz.rms_norm(*norm)
    assert ENGINE.health.breakers() == {}


def right_kernel(input, normalized_shape):
    return input


def plan_of(kernel_id, *tensors, device, function="rms_norm"):
    facts = lz.facts(function, *tensors, device=device)
    kernel = next(each for each in lz.list_kernels() if each.id == kernel_id)
    return lz.Plan(kernel, lz.Report(str(facts["operation"]), facts, (), None), "", dict, lambda: None)


def test_only_third_parties_on_a_gpu_are_remembered_and_each_class_once():
    register(lambda input, weight: input, platform=("cuda", "cpu"))
    recent = Recent()
    around = [size + more for size in (32, 64, 128, 256, 512) for more in (-1, 0, 1)]
    for rows in (*range(1, 20), *around, 599, 3):
        tensors = (torch.empty(rows, 32, device="meta"), torch.empty(32, device="meta"))
        recent.add(plan_of("user.planted", *tensors, device="H100"))
        recent.add(plan_of("user.planted", *tensors, device="CPU"))
        recent.add(plan_of("torch.rms_norm", *tensors, device="H100"))
    last = plan_of("torch.rms_norm", *tensors, device="H100")
    accused = recent.accuse(last, ENGINE.ledger, RuntimeError("planted"))
    assert len(accused) == 10, "a class for each power of two up to 1024"
    assert "rows<4" in accused[0], "the latest first"
    assert len(ENGINE.ledger.suspects()) == 10


def test_a_library_without_code_for_the_device_is_out(norm):
    register(breaks(RuntimeError("CUDA error: no kernel image is available for execution on the device")))
    with pytest.warns(lz.LayerZeroFallbackWarning, match="no kernel image"):
        torch.testing.assert_close(lz.rms_norm(*norm), right(*norm))
    (reason,) = lz.explain("rms_norm", *norm).reasons("user.planted")
    assert reason.code is lz.ReasonCode.BACKEND_ERROR
    assert "Install a build of user for" in reason.message
    assert ENGINE.health.breakers()["user.planted", "norm.rms"].retry_at == float("inf")


def test_a_driver_that_does_not_fit_is_an_ordinary_failure(norm):
    register(breaks(RuntimeError("CUDA driver version is insufficient for CUDA runtime version")))
    with pytest.warns(lz.LayerZeroFallbackWarning, match="driver version is insufficient"):
        torch.testing.assert_close(lz.rms_norm(*norm), right(*norm))
    assert lz.which("rms_norm", *norm)["kernel_id"] != "user.planted"


def test_failures_and_fallbacks_are_counted(norm):
    register(breaks(RuntimeError("planted")))
    with pytest.warns(lz.LayerZeroFallbackWarning):
        lz.rms_norm(*norm)
    diagnosis = lz.doctor()
    assert diagnosis.to_dict()["health"] == {"user.planted in norm.rms": {"failures": 1, "fallbacks": 1}}
    assert diagnosis.failures == {"user.planted in norm.rms": "RuntimeError: planted"}
    assert "1 failures in this process, 1 times another kernel ran instead" in str(diagnosis)
    with lz.scope(fallback_enabled=False, allow=["user"]):
        ENGINE.health.reset()
        with pytest.raises(lz.KernelExecutionError):
            lz.rms_norm(*norm)
    assert lz.doctor().to_dict()["health"] == {"user.planted in norm.rms": {"failures": 1, "fallbacks": 0}}


def test_a_library_that_repeats_device_errors_is_disabled_with_all_its_kernels():
    health = Health(lambda: None)
    backend = lz.Backend(name="planted", summary="breaks devices")
    first, second = (
        Kernel(id=f"planted.{each}", operations=("norm.rms",), backend=backend, load=lambda facts: None)
        for each in "ab"
    )
    for _ in range(health_module.MAX_DEVICE_ERRORS - 1):
        health.device_error(backend, RuntimeError("CUDA error: unspecified launch failure"))
    assert not health.reasons(second, "norm.rms")
    health.device_error(backend, RuntimeError("CUDA error: unspecified launch failure"))
    for kernel in (first, second):
        (reason,) = health.reasons(kernel, "norm.rms")
        assert reason.code is lz.ReasonCode.UNHEALTHY
        assert "3 device errors, last: CUDA error" in reason.message
    assert list(health.disabled()) == ["planted"]
    torchs = next(kernel for kernel in lz.list_kernels("norm.layer") if kernel.source == "torch")
    for _ in range(9):
        health.device_error(torchs.backend, RuntimeError("CUDA error"))
    assert torchs.backend.name not in health.disabled()


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
    monkeypatch.setattr(dispatcher, "choose", lambda *_, **__: pytest.fail("what runs instead was chosen before"))
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
    monkeypatch.setattr(dispatcher, "choose", lambda *args, **more: (chosen.append(1), usual(*args, **more))[1])
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
