"""Bound callables: the function's results on both paths; what the guard proves, and when it chooses anew."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import layerzero as lz
from layerzero.engine import accelerator
from layerzero.engine.dispatch import ENGINE
from layerzero.ops.attention.reference import attention_reference

pytestmark = pytest.mark.usefixtures("path")


@pytest.fixture
def call():
    torch.manual_seed(0)
    return torch.randn(2, 8, 4, 16), torch.randn(2, 8, 2, 16), torch.randn(2, 8, 2, 16)


def test_a_bound_call_is_the_functions_call(call, path):
    attend = lz.bind(lz.attention, *call, causal=False, layout="BSHD", scale=0.3)
    wanted = attention_reference(*call, causal=False, scale=0.3)
    for _ in range(3):
        torch.testing.assert_close(attend(*call), wanted)
    torch.testing.assert_close(attend(value=call[2], query=call[0], key=call[1]), wanted)
    assert attend.plan.kernel_id == attend.report.kernel_id
    assert attend.parameters == ("query", "key", "value")
    assert "bound to" in repr(attend)
    assert type(attend).__module__ == ("layerzero._native.hot" if path == "native" else "layerzero.inspection.bind")
    with pytest.raises(AttributeError):
        attend.nothing  # noqa: B018


def test_names_of_functions_operations_and_aliases(call):
    query, key, value = call
    assert lz.bind("attention", *call, layout="BSHD")(*call).shape == query.shape
    operation = lz.explain("attention", *call, layout="BSHD").facts.operation
    assert lz.bind(operation, *call, layout="BSHD").plan.report.operation == "attention.gqa.prefill"
    assert lz.bind("attention.causal", query, query, query, layout="BSHD").report.facts["causal"] is True
    with pytest.raises(lz.InvalidCallError, match=r"wanted attention\.gqa\.decode"):
        lz.bind("attention.gqa.decode", *call, layout="BSHD")
    with pytest.raises(KeyError, match="unknown operation"):
        lz.bind("attentoin", *call)
    with pytest.raises(TypeError, match="wanted a function of LayerZero"):
        lz.bind(torch.add, *call)
    with pytest.raises(lz.InvalidCallError, match="key"):
        lz.bind(lz.attention, query, key[:, :4], value, layout="BSHD")


def test_what_is_fixed_is_not_taken(call):
    attend = lz.bind(lz.attention, *call, layout="BSHD")
    for args, kwargs in ((call[:2], {}), (call, {"causal": True}), ((*call, True), {}), (call[:2], {"key": call[1]})):
        with pytest.raises(TypeError, match="wanted query, key, value, got"):
            attend(*args, **kwargs)


def test_the_guard_names_what_is_not_as_it_was_bound(two_norms):
    x, w = torch.randn(4, 8), torch.randn(8)
    rms = lz.bind(lz.rms_norm, x, w)
    wanted = {
        "input: shape: wanted (4, 8) as bound, got (3, 8)": (x[:3], w),
        "input: strides: wanted (8, 1) as bound, got (1, 4)": (torch.randn(8, 4).t(), w),
        "input: dtype: wanted torch.float32 as bound, got torch.float64": (x.double(), w),
        "input: address modulo 16: wanted 0 as bound, got 4": (torch.randn(33)[1:].view(4, 8), w),
        "weight: shape: wanted (8,) as bound, got (9,)": (x, torch.randn(9)),
        "gradients are wanted: wanted False as bound, got True": (x.clone().requires_grad_(), w),
    }
    for warm in (False, True):
        for problem, arguments in wanted.items():
            with pytest.raises(lz.InvalidCallError) as caught:
                rms(*arguments)
            assert problem in str(caught.value), (warm, problem)
        rms(x, w)
    assert two_norms == ["first", "first"]
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(lz.InvalidCallError, match="deterministic algorithms: wanted False as bound, got True"):
            rms(x, w)
    finally:
        torch.use_deterministic_algorithms(False)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(lz.InvalidCallError, match="autocast"):
        rms(x, w)
    with pytest.raises(lz.InvalidCallError, match="bound"):
        rms(x.to(torch.complex64), w)
    torch.testing.assert_close(rms(x, w), torch.nn.functional.rms_norm(x, (8,), w, 1e-6))


@pytest.mark.usefixtures("path")
def test_a_tensor_that_a_bound_call_leaves_out_is_told():
    """One that the function may go without, but that the example had."""
    query, key, sinks = torch.randn(3, 4, 64), torch.randn(5, 2, 64), torch.randn(4)
    starts = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([0, 5], dtype=torch.int32)
    attend = lz.bind(lz.ragged_attention, query, key, key.clone(), *starts, sinks=sinks)
    for _warm in range(2):
        with pytest.raises(lz.InvalidCallError, match="sinks: wanted a tensor as bound, got None; bind again, or call"):
            attend(query, key, key.clone(), *starts, None)
        attend(query, key, key.clone(), *starts, sinks)


def test_the_callers_attention_switches_are_guarded(call):
    attend = lz.bind(lz.attention, *call, layout="BSHD")
    attend(*call)
    attend(*call)
    with sdpa_kernel(SDPBackend.MATH), pytest.raises(lz.InvalidCallError, match="torch's flash attention is enabled"):
        attend(*call)


def test_a_moved_epoch_chooses_anew_and_a_banned_kernel_does_not_run(two_norms):
    x, w = torch.randn(4, 8), torch.randn(8)
    rms, blind = lz.bind(lz.rms_norm, x, w), lz.bind(lz.rms_norm, x, w, guard=False)
    for each in (rms, blind, rms, blind):
        each(x, w)
    two_norms.clear()
    lz.configure(deny=["user.first"])
    rms(x, w)
    assert (two_norms, rms.plan.kernel_id) == (["second"], "user.second")
    blind(x, w)  # it was told to look at nothing
    assert two_norms == ["second", "first"]
    lz.configure(deny=None)
    rms(x, w)
    rms(x, w)
    assert two_norms[2:] == ["first", "first"]


def test_an_epoch_that_moved_before_the_first_call(two_norms):
    x, w = torch.randn(4, 8), torch.randn(8)
    for guard in (True, False):
        rms = lz.bind(lz.rms_norm, x, w, guard=guard)
        lz.configure(deny=["user.first"])
        rms(x, w)
        assert two_norms == ["second"], guard
        lz.configure(deny=None)
        two_norms.clear()


def test_a_failure_is_answered_as_everywhere(two_norms):
    x, w, bad = torch.randn(4, 8), torch.randn(8), torch.full((4, 8), 666.0)
    rms, blind = lz.bind(lz.rms_norm, x, w), lz.bind(lz.rms_norm, x, w, guard=False)
    for _ in range(2):
        rms(x, w)
        blind(x, w)
    with pytest.raises(ValueError, match="planted"):
        blind(bad, w)
    assert ENGINE.health.breakers() == {}
    lz.unregister_kernel("user.second")
    rms(x, w)
    with pytest.warns(lz.LayerZeroFallbackWarning, match="user.first failed"):
        torch.testing.assert_close(rms(bad, w), torch.ones(4, 8) * w, rtol=1e-4, atol=1e-4)
    assert ("user.first", "norm.rms") in ENGINE.health.breakers()
    two_norms.clear()
    rms(x, w)
    assert two_norms == []
    assert rms.plan.kernel_id != "user.first"


def test_scopes_decide_for_their_calls_and_where_it_was_bound(two_norms):
    x, w = torch.randn(4, 8), torch.randn(8)
    rms = lz.bind(lz.rms_norm, x, w)
    rms(x, w)
    with lz.scope(deny=["user.first"]):
        rms(x, w)
        inside = lz.bind(lz.rms_norm, x, w)
        inside(x, w)
        inside(x, w)
    inside(x, w)
    assert two_norms == ["first", "second", "second", "second", "second"]
    ENGINE.bump()
    inside(x, w)
    rms(x, w)
    assert two_norms[5:] == ["second", "first"]


def test_modes_transforms_and_subclasses_go_the_functions_way(two_norms):
    x, w = torch.randn(4, 8), torch.randn(8)
    rms = lz.bind(lz.rms_norm, x, w)
    rms(x, w)
    plain = torch.nn.functional.rms_norm(x, (8,), w, 1e-6)
    mapped = torch.func.vmap(lambda row: rms(row, w))(torch.stack([x, x]))
    torch.testing.assert_close(mapped[1], plain)
    torch.testing.assert_close(rms(torch._neg_view(x), w), -plain)
    seen = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    with Mode():
        torch.testing.assert_close(rms(x, w), plain)
    assert "rms_norm" in seen
    with torch.inference_mode():
        torch.testing.assert_close(rms(x.clone(), w.clone()), plain)


def test_examples_that_cannot_be_bound():
    x, w = torch.randn(4, 8), torch.randn(8)
    for odd in (x.to("meta"), torch._neg_view(x)):
        with pytest.raises(lz.InvalidCallError, match="wanted plain tensors with memory"):
            lz.bind(lz.rms_norm, odd, w.to(odd.device))
    with torch.overrides.BaseTorchFunctionMode(), pytest.raises(lz.InvalidCallError, match="outside of modes"):
        lz.bind(lz.rms_norm, x, w)


def test_gradients_flow_and_grad_mode_is_guarded(call):
    leaves = [tensor.clone().requires_grad_() for tensor in call]
    attend = lz.bind(lz.attention, *leaves, layout="BSHD")
    for _ in range(2):
        attend(*leaves).square().sum().backward()
    again = [tensor.clone().requires_grad_() for tensor in call]
    (2 * attention_reference(*again, causal=True).square().sum()).backward()
    for mine, theirs in zip(leaves, again, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5)
    with torch.no_grad(), pytest.raises(lz.InvalidCallError, match="gradients are wanted: wanted True"):
        attend(*leaves)


def test_a_step_and_a_bound_are_passed(path):
    from layerzero.engine.registry import REGISTRY
    from layerzero.ops.calls import arguments_of

    operation = REGISTRY.operation("attention.gqa.decode.paged")
    tensors = arguments_of(operation, operation.cases[0], torch.float32)
    del tensors["layout"]
    tables, lens = tensors["block_tables"], tensors["context_lens"]
    step = lz.StepMetadata(tables, lens)
    longest = int(lens.max())
    arguments = {**tensors, "step": step, "max_context_len": longest}
    paged = lz.bind(lz.paged_attention, **arguments)
    assert paged.parameters[-2:] in (("max_context_len", "step"), ("step", "max_context_len"))
    wanted = lz.paged_attention(**arguments)
    for _ in range(2):
        torch.testing.assert_close(paged(**arguments), wanted)
        torch.testing.assert_close(paged(*(arguments[name] for name in paged.parameters)), wanted)
    other = lz.StepMetadata(tables.clone(), lens)
    with pytest.raises(lz.InvalidCallError, match="step"):
        paged(**{**arguments, "step": other})


def test_writing_into_arguments_is_looked_at_on_every_call():
    x, residual, w = torch.randn(4, 8), torch.randn(4, 8), torch.randn(8)
    add = lz.bind(lz.add_residual_rms_norm_, x.clone(), residual.clone(), w)
    assert lz.which("add_residual_rms_norm_", x, residual, w)
    for _ in range(2):
        torch.testing.assert_close(
            add(x.clone(), residual.clone(), w), lz.add_residual_rms_norm_(x.clone(), residual.clone(), w)
        )


def test_the_example_is_not_kept_and_the_plan_is():
    x, w = torch.randn(4, 8), torch.randn(8)
    rms = lz.bind(lz.rms_norm, x, w)
    rms(x, w)
    watched = weakref.ref(x)
    del x
    gc.collect()
    assert watched() is None
    gone = weakref.ref(rms)
    del rms
    gc.collect()
    assert gone() is None


def test_a_compiled_caller_gets_the_same_result():
    x, w = torch.randn(4, 8), torch.randn(8)
    rms = lz.bind(lz.rms_norm, x, w)
    compiled = torch.compile(lambda x: rms(x, w) * 2, backend="aot_eager")
    torch.testing.assert_close(compiled(x), rms(x, w) * 2)


def test_bound_calls_are_right_while_epochs_move(path):
    """Two kernels take turns being denied; a denied one must not start after the epoch that denies it was seen."""
    x, w = torch.ones(4, 8), torch.ones(8)
    lz.register_kernel("norm.rms", "user.first", priority=100)(lambda input, weight: torch.ones_like(input))
    lz.register_kernel("norm.rms", "user.second", priority=100)(lambda input, weight: torch.zeros_like(input))
    rms = lz.bind(lz.rms_norm, x, w)
    stop, wrong, counts = threading.Event(), [], []

    def call():
        done = 0
        while not stop.is_set():
            if rms(x, w)[0, 0].item() not in (0.0, 1.0):
                wrong.append("neither")
            done += 1
        counts.append(done)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for turn in range(30):
        denied = ("user.first", "user.second")[turn % 2]
        lz.configure(deny=[denied])
        if rms(x, w)[0, 0].item() != float(denied == "user.second"):
            wrong.append(denied)
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert sum(counts) > 0
    assert ENGINE.health.breakers() == {}


@pytest.mark.skipif(accelerator.HOT is None, reason=accelerator.ABSENT or "built")
def test_a_kernel_is_called_with_its_constants_in_place():
    def kernel(*args, **kwargs):
        return args, kwargs

    passed = [
        accelerator.Passed("", "c"), accelerator.Passed("", "", 1.5), accelerator.Passed("first", "a"),
        accelerator.Passed("flag", "", True),
    ]  # fmt: skip
    direct = accelerator.direct(kernel, accelerator.places(("a", "b", "c"), passed))
    assert direct(1, 2, 3) == ((3, 1.5), {"first": 1, "flag": True})
    for args, kwargs in (((1, 2), {}), ((1, 2, 3), {"a": 1})):
        with pytest.raises(TypeError, match="wanted 3 values"):
            direct(*args, **kwargs)
    with pytest.raises(ValueError, match="number of a value"):
        accelerator.HOT.Direct(kernel, 1, (1,), (None,), ())


def test_whoever_watches_calls_sees_bound_ones_too():
    x, w = torch.randn(4, 8), torch.randn(8)
    rms, seen = lz.bind(lz.rms_norm, x, w), []
    rms(x, w)
    rms(x, w)

    def saw(function, plan):
        seen.append((function.name, plan.kernel_id))

    ENGINE.watch(saw)
    try:
        for _ in range(3):
            rms(x, w)
    finally:
        ENGINE.unwatch(saw)
    assert len(seen) == 3
    rms(x, w)
    assert len(seen) == 3


def test_a_layer_of_a_cache_stands_for_its_tensors():
    cache = lz.KVCache(1, 2, 16, pages=4, dtype=torch.float32)
    name = cache.allocate()
    key, query, layer = torch.randn(3, 2, 16), torch.randn(1, 1, 4, 16), cache.layers[0]
    with cache.writing([name], [2]) as step:
        lz.append_paged_kv_(key[:2], key[:2], layer, slot_mapping=step.slots)
    with cache.writing([name]) as step:
        append = lz.bind(lz.append_paged_kv_, key[2:], key[2:], layer, slot_mapping=step.slots)
        append(key[2:], key[2:], layer, slot_mapping=step.slots)
        wanted = lz.paged_attention(query, layer, step=step)
        attend = lz.bind(lz.paged_attention, query, layer, step=step)
        for _ in range(3):
            assert torch.equal(attend(query, layer, step), wanted)
            assert torch.equal(attend(query, key_cache=layer, step=step), wanted)
        tables, lens = step.block_tables, step.context_lens
        by_tensors = attend(query, layer.keys, layer.values, tables, lens, step)
        assert torch.equal(by_tensors, wanted)
        named = lz.bind(lz.paged_attention, query, layer, block_tables=tables, context_lens=lens)
        assert torch.equal(named(query, layer, tables, lens), wanted)
        with pytest.raises(TypeError, match="wanted query, key_cache, step as in the example, got #1, #2, #3, #4"):
            attend(query, layer, step, step)
        with pytest.raises(lz.InvalidCallError, match="query: shape"):
            attend(query[:, :, :2], layer, step)
    cache.close()
