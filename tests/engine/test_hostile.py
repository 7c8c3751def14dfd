"""What a hostile user, a careless plugin and several threads do: right results or errors that say what was wrong."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch

import layerzero as lz
from drawing import at_once
from layerzero.core.kernel import Kernel
from layerzero.core.limit_kinds import OfTensors
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.engine.config import current_policy
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.frozen_choices import Frozen
from layerzero.engine.functions import CALLS
from layerzero.ops.attention.reference import attention_reference
from paths import IN_C

pytestmark = pytest.mark.usefixtures("path")

X, W = torch.randn(4, 32), torch.randn(32)
QUERY = torch.randn(2, 8, 4, 16)


def right(x=X, w=W):
    return torch.nn.functional.rms_norm(x, w.shape, w, 1e-6)


def register(function, kernel_id="user.planted", operation="norm.rms", **declared):
    lz.register_kernel(operation, kernel_id, **({"priority": 100} | declared))(function)


def codes(kernel_id, *tensors):
    return [str(reason.code) for reason in lz.explain("rms_norm", *tensors).reasons(kernel_id)]


def test_numpy_numbers_are_numbers():
    scale = 1 / np.sqrt(np.float64(16))
    torch.testing.assert_close(
        lz.attention(QUERY, QUERY, QUERY, scale=scale * 2, layout="BSHD"),
        attention_reference(QUERY, QUERY, QUERY, causal=True, scale=float(scale * 2)),
    )
    torch.testing.assert_close(lz.rms_norm(X, W, np.float64(1e-6)), right())
    assert ENGINE.health.breakers() == {}


@IN_C
@pytest.mark.parametrize("processes", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_several_threads_may_be_the_first_to_call(processes):
    script = """
import threading, torch, warnings
warnings.simplefilter("error")
import layerzero as lz
from layerzero.engine.functions import CALLS
barrier, errors = threading.Barrier(8), []
def call(rows):
    barrier.wait()
    try:
        lz.layer_norm(torch.randn(rows, 32), (32,))
    except Exception as error:
        errors.append(error)
threads = [threading.Thread(target=call, args=(rows,)) for rows in range(1, 9)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert not errors, errors
plans = CALLS["layer_norm"].dispatcher.cache.current.values()
assert not [plan for plan in plans if plan.kernel.is_reference]
"""
    for _ in range(processes):
        subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("warm", [False, True])
def test_a_residual_that_must_not_be_written_is_refused_on_every_call(warm):
    if warm:
        lz.add_residual_rms_norm_(X.clone(), X.clone(), W)
    memory = torch.randn(5, 32)
    leaf = X.clone().requires_grad_()
    with torch.inference_mode():
        inference = X.clone()
    same = X.clone()
    for first, second in ((same, same), (memory[:4], memory[1:]), (X.clone(), leaf), (X.clone(), inference)):
        with pytest.raises(lz.InvalidCallError, match="residual: wanted"):
            lz.add_residual_rms_norm_(first, second, W)
    assert ENGINE.health.breakers() == {}
    apart = torch.randn(8, 32)
    before = apart.clone()
    torch.testing.assert_close(lz.add_residual_rms_norm_(apart[:4], apart[4:], W), right(before[:4] + before[4:]))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo's tracing
def test_compiled_add_rms_norm_keeps_its_gradients():
    def step(x, residual, w):
        return lz.add_residual_rms_norm_(x, residual * 1, w).square().sum()

    mine = [tensor.clone().requires_grad_() for tensor in (X, X, W)]
    theirs = [tensor.clone().requires_grad_() for tensor in (X, X, W)]
    torch.compile(step, backend="aot_eager")(*mine).backward()
    step(*theirs).backward()
    for ours, eager in zip(mine, theirs, strict=True):
        torch.testing.assert_close(ours.grad, eager.grad)


def test_the_log_sum_exp_has_a_gradient():
    mine = QUERY.clone().requires_grad_()
    theirs = QUERY.clone().requires_grad_()
    with pytest.warns(lz.LayerZeroFallbackWarning, match="return_lse"):
        lz.attention(mine, QUERY, QUERY, layout="BSHD", return_lse=True)[1].sum().backward()
    attention_reference(theirs, QUERY, QUERY, causal=True, return_lse=True)[1].sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad)


def test_a_wrong_result_after_a_fallback_does_not_reach_the_caller_either():
    def broken(input, weight, *, eps=1e-6):
        raise RuntimeError("first")

    register(broken)
    register(lambda input, weight: input.double()[:1], "user.wrong", priority=99)
    with pytest.warns(lz.LayerZeroFallbackWarning):
        torch.testing.assert_close(lz.rms_norm(X, W), right())


def test_a_limit_or_workspace_that_raises_refuses_its_kernel_only():
    def check(facts):
        raise ZeroDivisionError("planted")

    def workspace(facts):
        raise KeyError("planted")

    register(lambda i, w: i, limits=[lz.limits.Custom("odd", check)])
    register(lambda i, w: i, "user.workspace", workspace_bytes=workspace)
    torch.testing.assert_close(lz.rms_norm(X, W), right())
    assert codes("user.planted", X, W) == ["CONSTRAINT_FAILED"]
    assert codes("user.workspace", X, W) == ["CONSTRAINT_FAILED"]


@pytest.mark.parametrize(("declared", "text"), [
    ({"max_head_dim": 128}, "have no fact 'head_dim'"),
    ({"limits": [lz.limits.contiguous("inptu")]}, "did you mean 'input'"),
    ({"limits": [lz.limits.one_of("epz", 1)]}, "did you mean 'eps'"),
    ({"implies": ("eps",)}, "a kernel has no 'implies'"),
])  # fmt: skip
def test_declarations_about_unknown_facts_are_refused(declared, text):
    with pytest.raises(lz.RegistrationError, match=text):
        register(lambda i, w: i, **declared)


def test_a_value_that_is_only_implied_is_refused():
    backend = lz.Backend(name="planted", summary="")
    careless = Kernel(id="planted.a", operations=("norm.rms",), backend=backend, load=lambda f: None, implies=("eps",))
    with pytest.raises(lz.RegistrationError, match="without a limit that pins it"):
        lz.register_backend([careless])


def test_only_what_a_mask_can_say_may_be_folded():
    def attend(query, key, value, *, attn_mask=None):
        return query

    with pytest.raises(lz.RegistrationError, match=r"folds .'softcap'.; only causal"):
        register(attend, operation="attention.standard.prefill", folds=("softcap", "attn_mask"))


def test_a_copy_that_does_not_repair_refuses_the_kernel(caplog):
    class Never(OfTensors):
        def problem(self, name, tensor, facts, /):
            return Reason(ReasonCode.NOT_CONTIGUOUS, name, "other memory", "this")

        def describe(self):
            return "never"

    register(lambda i, w: i, limits=[Never(("input",))])
    torch.testing.assert_close(lz.rms_norm(X, W), right())
    assert "does not satisfy its own limits" in caplog.text


def test_rows_that_no_copy_aligns_refuse_the_kernel_before_it_is_chosen(caplog):
    register(lambda i, w: i, limits=[lz.limits.aligned(16, "input")])
    narrow = torch.randn(4, 3)  # rows of 12 bytes
    torch.testing.assert_close(lz.rms_norm(narrow, W[:3]), right(narrow, W[:3]))
    assert codes("user.planted", narrow, W[:3]) == ["MISALIGNED"]
    assert "limits" not in caplog.text


def test_a_loader_that_fails_rests_one_kernel_and_not_its_library():
    def load(facts):
        raise ValueError("no such overload")

    backend = lz.Backend(name="planted", summary="")
    declared = {"backend": backend, "accepts": ("eps",), "priority": 100}
    lz.register_backend([Kernel(id="planted.a", operations=("norm.rms",), load=load, **declared)])
    lz.register_backend(
        [Kernel(id="planted.b", operations=("norm.rms",), load=lambda f: lambda i, w, *, eps: right(i, w), **declared)]
    )
    torch.testing.assert_close(lz.rms_norm(X, W), right())
    assert codes("planted.a", X, W) == ["UNHEALTHY"]
    assert codes("planted.b", X, W) == []


@pytest.mark.parametrize("error", [
    torch.OutOfMemoryError("planted"),
    MemoryError(),
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried"),
])  # fmt: skip
def test_running_out_of_memory_is_raised_as_it_is_wherever_it_happens(error):
    def hungry(input, weight, *, eps=1e-6):
        raise error

    def load(facts):
        raise error

    register(hungry)
    with pytest.raises(type(error)):
        lz.rms_norm(X, W)
    lz.unregister_kernel("user.planted")
    backend = lz.Backend(name="planted", summary="")
    lz.register_backend(
        [Kernel(id="p.a", operations=("norm.rms",), load=load, backend=backend, accepts=("eps",), priority=100)]
    )
    with pytest.raises(type(error)):
        lz.rms_norm(X, W)
    assert ENGINE.health.breakers() == {}


def test_a_warning_that_the_user_made_an_error_is_no_failure():
    def deprecated(input, weight, *, eps=1e-6):
        warnings.warn("old", DeprecationWarning, stacklevel=1)
        return right(input, weight)

    register(deprecated)
    with pytest.raises(DeprecationWarning, match="old"):
        lz.rms_norm(X, W)
    assert ENGINE.health.breakers() == {}


def test_a_locked_kernel_that_fails_says_why(caplog):
    def broken(input, weight, *, eps=1e-6):
        raise RuntimeError("the reason")

    register(broken)
    with lz.scope(locks={"rms_norm": "user.planted"}), pytest.raises(lz.KernelExecutionError) as caught:
        lz.rms_norm(X, W)
    assert str(caught.value.__cause__) == "the reason"
    assert "user.planted failed in norm.rms: RuntimeError: the reason" in caplog.text


def test_the_latest_lock_wins_and_reaches_only_where_its_kernel_is_declared():
    def attend(query, key, value, *, causal=False, scale=None):
        return query

    register(attend, "user.standard", "attention.standard.prefill", priority=1)
    grouped = torch.randn(2, 8, 2, 16)
    with lz.scope(locks={"attention": "user.standard"}):
        assert lz.which("attention", QUERY, QUERY, QUERY, layout="BSHD")["kernel_id"] == "user.standard"
        assert lz.which("attention", QUERY, grouped, grouped, layout="BSHD")["kernel_id"] != "user.standard"
    lz.configure(locks={"attention": "torch.sdpa.math", "attention.*": "user.standard"})
    with lz.scope(locks={"attention": "torch.sdpa.math"}):
        assert lz.which("attention", QUERY, QUERY, QUERY, layout="BSHD")["kernel_id"] == "torch.sdpa.math"


@at_once("match, holds", [
    ({"dtype": ["float32", "float16"]}, True),
    ({"dtype": "fp32"}, True),
    ({"dtype": "bf16"}, False),
    ({"rows": [4, 5]}, True),
    ({"rows": [5, 6]}, False),
    ({"rows": ">= 4"}, True),
])  # fmt: skip
def test_rules_mean_what_they_say(match, holds):
    with lz.scope(rules=[{"match": match, "deny": "torch.rms_norm"}]):
        assert codes("torch.rms_norm", X, W) == (["POLICY_DENIED"] if holds else [])


@pytest.mark.parametrize("match", [{"rows": ">= one"}, {"rows": ">=1e0x"}, {"dtype": "float31"}, {"rows": None}])
def test_rules_that_could_never_match_are_refused(match):
    with pytest.raises(lz.PolicyError, match=r"rules\[0\]"):
        lz.configure(rules=[{"match": match, "deny": "torch"}])


def test_transforms_obey_policy():
    square = torch.randn(3, 2, 8, 8, 16)
    with pytest.raises(lz.InvalidCallError, match="both fit query"):
        torch.func.vmap(lambda q: lz.attention(q, q, q))(square)
    with lz.scope(fallback_enabled=False), pytest.raises(lz.NoKernelFoundError, match="transform"):
        torch.func.vmap(lambda q: lz.attention(q, q, q, layout="BSHD"))(square)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = torch.func.vmap(lambda q: lz.attention(q, q, q, layout="BSHD"))(square)
    wanted = torch.stack([attention_reference(q, q, q, causal=True) for q in square])
    torch.testing.assert_close(inside, wanted)


def test_autocast_is_off_around_kernels():
    seen = []

    def watching(input, weight, *, eps=1e-6):
        seen.append(torch.is_autocast_enabled("cpu"))
        return right(input, weight)

    register(watching)
    lz.rms_norm(X, W)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lz.rms_norm(X, W)
        lz.rms_norm(X, W)
    assert seen == [False, False, False]


def test_a_late_success_lifts_no_ban():
    kernel = lz.list_kernels("norm.rms")[0]
    ENGINE.health.failed(kernel, "norm.rms", RuntimeError("sticky"), forever=True)
    ENGINE.health.worked(kernel, "norm.rms")
    assert ENGINE.health.reasons(kernel, "norm.rms")


def test_scopes_with_ever_new_settings_do_not_pile_up():
    from layerzero.engine.config import CONFIGURATION

    for size in range(300):
        with lz.scope(memory_headroom_mb=size + 1):
            lz.rms_norm(X, W)
    assert len(CONFIGURATION._interned) <= 256
    assert len(CALLS["rms_norm"].dispatcher.cache._tables) <= 32


@pytest.mark.parametrize("error", [
    lz.InvalidCallError("f", ["a", "b"]),
    lz.KernelExecutionError("k", "o", "w"),
    lz.CudaGraphUnsafeError("o", ["k"]),
    lz.NoKernelFoundError("o", {"k": [lz.Reason(lz.ReasonCode.SM_TOO_OLD, "sm", 9, 8)]}, "hint"),
], ids=lambda error: type(error).__name__)  # fmt: skip
def test_errors_survive_pickling(error):
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.__dict__) == (type(error), str(error), error.__dict__)


TWINS = [copy.copy, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))]


@pytest.mark.parametrize("again", TWINS)
def test_reports_and_facts_are_values_that_can_be_copied(again):
    report = lz.explain(lz.rms_norm, X, W)
    assert again(report) == report
    assert again(report.facts) == report.facts
    bound = lz.bind(lz.rms_norm, X, W)
    with pytest.raises(lz.InvalidCallError, match=r"bound function .*, got a copy or a pickle.*call lz.bind again"):
        again(bound)
    with lz.record() as held, pytest.raises(lz.InvalidCallError, match=r"recording .*; stop\(\) it"):
        again(held)
    with pytest.raises(lz.InvalidCallError, match=r"choices .*, got a copy or a pickle.*; write\(\)"):
        again(Frozen({}))
    told = lz.dry_run(torch.nn.Sequential(torch.nn.RMSNorm(8)), torch.ones(2, 8))
    assert str(again(told)) == str(told)
    with again(lz.scope(enabled=False)):
        assert not current_policy()["enabled"]
    assert current_policy()["enabled"]


@pytest.mark.parametrize("again", TWINS)
def test_a_handle_is_copied_without_what_kernels_keep_on_it(again):
    tables, lens = torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
    pages, query = torch.randn(2, 2, 4, 2, 8), torch.randn(1, 1, 2, 8)
    for make, given in (
        (lz.StepMetadata, (tables, lens)),
        (lz.RaggedMetadata, (lens,) * 2),
        (lz.BlockPattern, (lens,) * 2),
    ):
        handle = make(*given)
        handle.slot("a kernel", lambda _: object())
        twin = again(handle)
        assert (type(twin), twin.kind, twin._slots, twin.is_stale) == (type(handle), handle.kind, {}, False)
        lens.add_(0)
        assert again(handle).is_stale
    step = again(lz.StepMetadata(tables, lens))
    found = lz.paged_attention(query, *pages, step.block_tables, step.context_lens, step=step)
    torch.testing.assert_close(found, lz.paged_attention(query, *pages, tables, lens))


def test_normalized_shape_may_be_a_number_everywhere():
    wanted = torch.nn.functional.layer_norm(X, (32,))
    torch.testing.assert_close(lz.layer_norm(X, 32), wanted)
    torch.testing.assert_close(lz.layer_norm(X, [32]), wanted)
    torch.testing.assert_close(
        torch.compile(lambda x: lz.layer_norm(x, 32), backend="aot_eager", fullgraph=True)(X), wanted
    )
    for wrong in ("8", [8.7], None, "ab"):
        with pytest.raises(lz.InvalidCallError, match="normalized_shape"):
            lz.layer_norm(X, wrong)


def test_registering_several_kernels_is_all_or_nothing():
    backend = lz.Backend(name="planted", summary="")
    good = Kernel(id="planted.good", operations=("norm.rms",), backend=backend, load=lambda f: None)
    bad = Kernel(id="planted.bad", operations=("norm.none",), backend=backend, load=lambda f: None)
    with pytest.raises(lz.RegistrationError):
        lz.register_backend([good, bad])
    with pytest.raises(KeyError):
        lz.validate("planted.good", X, W)


def test_warmup_takes_the_operations_own_cases():
    with lz.scope(allow=["torch"]):  # nothing of it compiles
        assert lz.warmup("layer_norm", shapes=[(2, 8)]) == []
    assert lz.warmup("attention", shapes=[(1, 4, 2, 8)], dtype="float64") == []  # nothing of it compiles


def test_device_names_of_torch_mean_this_machine():
    assert lz.explain("rms_norm", X, W, device="cpu").facts.device == lz.Device.detect("cpu")
