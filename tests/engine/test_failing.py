"""Kernels that fail: who runs next, what is remembered, what is said, and what is never retried."""

from __future__ import annotations

import enum
import subprocess
import sys

import numpy as np
import pytest
import torch
from planted_calls import breaks, register, right

import layerzero as lz
from layerzero.core.kernel import Kernel
from layerzero.engine import health as health_module
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.first_run import Recent
from layerzero.engine.health import Health


def test_the_next_kernel_runs_and_it_is_said_once(norm):
    register(breaks(RuntimeError("planted")))
    with pytest.warns(lz.LayerZeroFallbackWarning, match=r"user\.planted failed in norm\.rms .* ran in its place"):
        torch.testing.assert_close(lz.rms_norm(*norm), right(*norm))
    torch.testing.assert_close(lz.rms_norm(*norm), right(*norm))  # silent now: another plan is kept
    assert lz.which("rms_norm", *norm)["kernel_id"] != "user.planted"
    assert ("user.planted", "norm.rms") in ENGINE.health.breakers()
    assert ENGINE.ledger.failures()[("user.planted", "norm.rms")] == ("RuntimeError: planted",)
    assert "user.planted in norm.rms" in lz.doctor().resting


def test_a_closed_error_stream_ends_no_call():
    lines = [
        "import sys, torch, layerzero as lz",
        "sys.stderr.close()  # as a service may do",
        "def fails(input, weight, eps): raise RuntimeError('planted')",
        "lz.register_kernel('norm.rms', 'user.planted', priority=99)(fails)",
        "x = torch.randn(2, 8)",
        "with lz.prefer('user.planted'): assert torch.allclose(lz.rms_norm(x, torch.ones(8)), torch.rms_norm(x, (8,)))",
    ]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)


def test_words_of_an_enumeration_are_those_that_they_stand_for():
    class Kind(enum.StrEnum):
        TANH = "tanh"

    rows = torch.randn(3, 64)
    wanted = torch.nn.functional.gelu(rows, approximate="tanh")
    torch.testing.assert_close(lz.gelu(rows, approximate=Kind.TANH), wanted)
    torch.testing.assert_close(lz.gelu(rows, approximate=np.str_("tanh")), wanted)
    assert ENGINE.health.breakers() == {}
    with pytest.raises(lz.InvalidCallError, match=r"eps: wanted float, got .*0\.5\)?; \.item\(\) gives its number"):
        lz.rms_norm(rows, None, np.float32(0.5))


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


def test_only_what_ran_is_said_to_have_run_in_the_place_of_another(norm, caplog):
    register(breaks(RuntimeError("planted")))
    register(breaks(RuntimeError("also planted")), "user.another")
    with pytest.warns(lz.LayerZeroFallbackWarning) as told:
        torch.testing.assert_close(lz.rms_norm(*norm), right(*norm))
    (said,) = [str(each.message) for each in told if "ran in its place" in str(each.message)]
    assert "user.planted ran in its place" not in said
    assert "user.another ran in its place" not in said
    failed = {name for each in caplog.records for name in ("user.planted", "user.another") if name in each.getMessage()}
    assert len(failed) == 1, "that of the first, which no warning tells of"
    counts = lz.doctor().to_dict()["health"]
    assert sorted(each["fallbacks"] for each in counts.values()) == [0, 1]


def test_an_inference_tensor_beside_gradients_is_the_callers_mistake(norm):
    x, weight = norm
    with torch.inference_mode():
        given = weight.clone()
    with pytest.raises(lz.InvalidCallError, match="made in inference mode"):
        lz.rms_norm(x.clone().requires_grad_(), given)
    assert not ENGINE.health.breakers()


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


@pytest.mark.parametrize("declared", [{"name": "torch"}, {"name": "planted", "import_name": "json"}])
def test_a_library_whose_module_is_there_loses_one_kernel_alone(norm, declared):
    backend = lz.Backend(summary="lacks a module", **declared)
    attempts = []

    def load(facts):
        attempts.append(1)
        raise ModuleNotFoundError("No module named 'of_one_kernel'")

    ours = {"operations": ("norm.rms",), "backend": backend, "accepts": ("eps",)}
    whole = Kernel(id=f"{backend.name}.whole", load=lambda facts: lambda x, w, *, eps: right(x, w), priority=99, **ours)
    lz.register_backend([Kernel(id=f"{backend.name}.lacks", load=load, priority=100, **ours), whole])
    with lz.scope(unmeasured="priority", prefer_sources=[f"{backend.name}.lacks", whole.id]):
        for rows in (norm[0], norm[0][:3]):
            lz.rms_norm(rows, norm[1])
            assert lz.which("rms_norm", rows, norm[1])["kernel_id"] == whole.id
    assert attempts == [1]


def test_a_kernels_own_inference_tensor_is_not_the_callers_mistake(norm):
    with torch.inference_mode():
        constant = torch.ones(norm[1].shape)
    norm_of = torch.nn.functional.rms_norm
    register(lambda input, weight, *, eps=1e-6: norm_of(input, weight.shape, constant, eps), grad=True)
    x = norm[0].clone().requires_grad_()
    with pytest.warns(lz.LayerZeroFallbackWarning, match=r"user\.planted failed in norm\.rms"):
        torch.testing.assert_close(lz.rms_norm(x, norm[1]), right(*norm))
