"""The hit path, in C and in Python: what makes a key, what a size class serves, that nothing leaks or goes stale."""

from __future__ import annotations

import inspect
import pickle
import re

import pytest
import torch
from planted_calls import both, copied, native_only, plans
from torch.autograd import forward_ad

import layerzero as lz
from layerzero.core.kernel import Kernel
from layerzero.core.operation import Case
from layerzero.engine.cache import InClass
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.function_kernels import USER_BACKEND
from layerzero.engine.functions import CALLS
from layerzero.ops import FUNCTIONS
from layerzero.ops.attention.reference import attention_reference


def misses(monkeypatch, function):
    """A list that grows with every choice."""
    dispatcher, chosen = CALLS[function].dispatcher, []
    choose = dispatcher.choose

    def counted(*args, **kwargs):
        chosen.append(1)
        return choose(*args, **kwargs)

    monkeypatch.setitem(vars(dispatcher), "choose", counted)
    return chosen


# Size classes


@both
def test_a_growing_cache_is_chosen_for_once_in_each_class(monkeypatch):
    chosen = misses(monkeypatch, "attention")
    query = torch.randn(2, 1, 8, 16)
    cache = torch.randn(2, 2, 130, 2, 16)
    for length in range(17, 130):
        for keys, values in (cache[:, :, :length], cache[:, :, :length].contiguous()):
            result = lz.attention(query, keys, values, layout="BSHD")
            torch.testing.assert_close(result, attention_reference(query, keys, values))
    assert len(chosen) <= 12  # four classes of lengths, and a few of what strides are multiples of
    assert all(isinstance(key, InClass) for key in plans("attention"))


@both
def test_calls_of_a_class_that_do_not_fit_together_are_errors(norm_twice):
    query, key = torch.randn(2, 1, 4, 16), torch.randn(2, 25, 4, 16)
    lz.attention(query, key, key, layout="BSHD")
    for keys, values in ((key, key[:, :24]), (key[:, :16], key[:, :17]), (key[:1], key[:1]), (key, key[:1])):
        with pytest.raises(lz.InvalidCallError, match="wanted"):
            lz.attention(query, keys, values, layout="BSHD")
    x, w = torch.randn(5, 8), torch.randn(8)
    lz.rms_norm(x, w)
    lz.rms_norm(torch.randn(7, 8), w)
    with pytest.raises(lz.InvalidCallError, match="hidden"):
        lz.rms_norm(torch.randn(7, 9), w)
    with pytest.raises(lz.InvalidCallError, match="residual"):
        lz.add_residual_rms_norm_(x.clone(), torch.randn(7, 8), w)


@both
@pytest.mark.parametrize("limits", [
    [lz.limits.dim("seq_k", max=20)],
    [lz.limits.dim("seq_k", multiple=2)],
    [lz.limits.dim("seq_k", one_of=(16, 18, 20))],
    [lz.limits.equal("seq_k", "kv_heads")],
    [lz.limits.contiguous("key", "value")],
    [lz.limits.Custom("even", lambda f: None if f["seq_k"] % 2 == 0 else lz.Reason(
        lz.ReasonCode.CONSTRAINT_FAILED, "seq_k", "even", f["seq_k"]))],
])  # fmt: skip
def test_limits_hold_for_every_call_of_a_class(limits):
    def attend(query, key, value, *, scale=None):
        report = lz.explain("attention", query, key, value, layout="BSHD")
        assert report.reasons("user.picky") == ()
        return attention_reference(query, key, value, scale=scale)

    lz.register_kernel("attention.standard.decode", "user.picky", priority=100, limits=limits)(attend)
    query = torch.randn(2, 1, 16, 8)
    for length in (16, 17, 18, 19, 20, 21, 22, 24, 30, 31, 16, 18):
        for key in (torch.randn(2, length, 16, 8), torch.randn(2, 32, 16, 8)[:, :length]):
            result = lz.attention(query, key, key, layout="BSHD")
            torch.testing.assert_close(result, attention_reference(query, key, key))


@both
def test_what_a_loader_reads_is_not_varied():
    def load(facts):
        rows, hidden = facts.size("rows"), facts.size("hidden")

        def kernel(input, weight, *, eps):
            assert (input.numel() // input.shape[-1], input.shape[-1]) == (rows, hidden)
            return torch.nn.functional.rms_norm(input, weight.shape, weight, eps)

        return kernel

    declared = {"operations": ("norm.rms",), "backend": USER_BACKEND, "accepts": ("eps",), "priority": 100}
    lz.register_backend([Kernel(id="user.bound", load=load, **declared)])
    for rows in (4, 5, 6, 7, 5):
        lz.rms_norm(torch.ones(rows, 3), torch.ones(3))
    assert ENGINE.health.breakers() == {}


@both
def test_rules_and_workspaces_that_read_a_size_keep_it_exact(monkeypatch):
    ran = []

    @lz.register_kernel("attention.standard.decode", "user.short", priority=100)
    def short(query, key, value):
        ran.append(key.shape[1])
        return attention_reference(query, key, value)

    lz.configure(rules=[{"match": {"seq_len_k": ">20"}, "deny": "user.short"}])
    query = torch.randn(1, 1, 2, 8)
    for length in (18, 24, 19, 30, 20, 21):
        key = torch.randn(1, length, 2, 8)
        lz.attention(query, key, key, layout="BSHD")
    assert ran == [18, 19, 20]
    lz.configure(rules=None)

    @lz.register_kernel(
        "norm.rms", "user.hungry", priority=100, workspace_bytes=lambda facts: facts.size("rows") * 2**20
    )
    def hungry(input, weight, *, eps=1e-6):
        assert input.shape[0] <= 5, "more than it may take"
        return torch.nn.functional.rms_norm(input, weight.shape, weight, eps)

    with lz.scope(memory_headroom_mb=5):
        for rows in (4, 5, 6, 7, 4):
            lz.rms_norm(torch.ones(rows, 3), torch.ones(3))
    assert ENGINE.health.breakers() == {}


def resized(sizes, varies, operation, factor):
    """Sizes of the same class, each varied one moved within it."""
    moved = {}
    for name, size in sizes.items():
        low = 1 << max(size.bit_length() - 1, 0)
        moved[name] = low + (size - low + factor) % low if name in varies and size > 1 else size
    return moved


@pytest.mark.parametrize("name", ["attention.gqa.decode", "attention.standard.prefill", "kv.append.paged",
                                  "attention.gqa.decode.paged", "norm.rms", "norm.layer", "norm.add_rms"])  # fmt: skip
def test_a_route_gives_the_same_for_every_size_that_it_says_may_vary(name):
    from layerzero.engine.registry import REGISTRY
    from layerzero.ops import function_of
    from layerzero.ops.calls import accepted, arguments_of

    operation = REGISTRY.operation(name)
    function = function_of(name)
    for case in operation.cases[:2]:
        seen = set()
        for factor in range(4):
            sizes = resized(
                case.sizes, {"batch", "seq_q", "seq_k", "max_blocks", "pages", "tokens", "rows"}, name, factor
            )
            if sizes.get("pages"):
                sizes["pages"] = max(sizes["pages"], sizes.get("batch", 1) * sizes.get("max_blocks", 1))
            made = arguments_of(operation, Case("moved", sizes, case.params), torch.float32, "meta")
            routed = function.route(function.bind((), accepted(function, made)), None)
            values = tuple((key, routed.arguments[key]) for key in operation.schema.chosen if key in routed.arguments)
            seen.add((routed.operation.name, values, routed.layout, routed.varies))
            assert routed.varies
        assert len(seen) == 1


# Keys


@native_only
def test_both_paths_tell_the_same_calls_apart(monkeypatch):
    x, w = torch.randn(4, 8), torch.randn(8)
    variants = [
        (x, w), (x, w, 1e-5), (x, w, 0.0), (x.double(), w.double()), (x[:3], w), (x[None], w),
        (x.t().contiguous().t(), w),
        (torch.randn(33)[1:].view(4, 8), w), (x.bfloat16(), w.bfloat16()), (x.requires_grad_(), w),
    ]  # fmt: skip
    for call in variants:
        counts = []
        for way in (CALLS["rms_norm"].python, CALLS["rms_norm"].native.builtin()):
            ENGINE.bump()
            way(torch.ones(2, 3), torch.ones(3))
            way(*[each.detach() if isinstance(each, torch.Tensor) else each for each in variants[0]])
            before = len(plans())
            way(*call)
            counts.append(len(plans()) - before)
        assert counts[0] == counts[1], call


@both
def test_numbers_and_texts_that_only_look_alike(norm_twice):
    x, w, q = torch.randn(4, 8), torch.randn(8), torch.randn(2, 8, 4, 16)
    lz.rms_norm(x, w, 1.0)
    with pytest.raises(lz.InvalidCallError, match="eps: wanted float"):
        lz.rms_norm(x, w, True)
    lz.attention(q, q, q, layout="BSHD")
    lz.attention(q, q, q, layout=copied("BSHD"))
    for wrong in (1, 1.0, "yes"):
        with pytest.raises(lz.InvalidCallError, match="causal: wanted bool"):
            lz.attention(q, q, q, causal=wrong, layout="BSHD")
    with pytest.raises(lz.InvalidCallError, match="layout"):
        lz.attention(q, q, q, layout="BSDH")
    kept = len(plans("attention"))
    assert kept == 1


@both
def test_lists_and_tuples_of_sizes_are_the_same_call(monkeypatch):
    x = torch.randn(4, 2, 8)
    lz.layer_norm(x, (2, 8))
    chosen = misses(monkeypatch, "layer_norm")
    for shape in ((2, 8), [2, 8], torch.Size((2, 8)), x.shape[1:]):
        torch.testing.assert_close(lz.layer_norm(x, shape), torch.nn.functional.layer_norm(x, (2, 8)))
    assert len(chosen) <= 1
    torch.testing.assert_close(lz.layer_norm(x, [8]), torch.nn.functional.layer_norm(x, (8,)))


@both
def test_wrong_arguments_are_named_as_a_python_function_names_them():
    x, w = torch.randn(4, 8), torch.randn(8)
    for args, kwargs in (((x,), {}), ((x, w, 1e-6, 1), {}), ((x, w), {"epsilon": 1}), ((x, w), {"input": x}), ((), {})):
        with pytest.raises(TypeError) as mine:
            lz.rms_norm(*args, **kwargs)
        with pytest.raises(TypeError) as theirs:
            CALLS["rms_norm"].function.signature(*args, **kwargs)
        assert str(mine.value).startswith(str(theirs.value))
    for wrong, hint in (("epsilon", "; did you mean 'eps'?"), ("zzz", "; it has input, weight, eps")):
        with pytest.raises(TypeError, match=f"'{wrong}'{re.escape(hint)}$"):
            lz.rms_norm(x, w, **{wrong: 1})
    names = {copied("weight"): w, copied("input"): x}  # not the objects that the compiler interned
    torch.testing.assert_close(lz.rms_norm(**names), lz.rms_norm(x, w))


@both
@pytest.mark.parametrize(
    ("function", "given", "wanted"),
    [
        ("rms_norm", {"input": (2, 8)}, "'weight'; wanted weight (hidden), got input (2, 8)"),
        ("rms_norm", {}, "'input' and 'weight'; wanted input (..., hidden), weight (hidden), got no tensor"),
        ("quantize", {"input": (2, 8)}, "'dtype'; wanted dtype: str, got input (2, 8)"),
        ("quantized_linear", {"input": (2, 8)}, "wanted weight (out_features, in_features), got "),
    ],
    ids=str,
)
def test_what_a_call_lacks_is_told_with_its_shape(function, given, wanted):
    tensors = {name: torch.randn(shape) for name, shape in given.items()}
    with pytest.raises(TypeError, match=re.escape(f"{function}() missing ") + ".*" + re.escape(wanted)):
        getattr(lz, function)(**tensors)
    with pytest.raises(TypeError, match=f"^{function}: missing a required argument.*; wanted "):
        lz.explain(function, **tensors)


@native_only
def test_the_builtin_shows_its_signature_and_survives_pickling():
    for name in FUNCTIONS:
        call = CALLS[name]
        shown = inspect.signature(getattr(lz, name))
        assert [(each.name, each.kind, each.default) for each in shown.parameters.values()] == [
            (each.name, each.kind, each.default)
            for each in call.function.parameters
            if each.name not in call.function.given_as
        ]
        assert getattr(lz, name).__doc__ == inspect.getdoc(call.function.signature)
        assert pickle.loads(pickle.dumps(getattr(lz, name))) is getattr(lz, name)


# States beyond those of test_eager_state.py, after a plan was kept for a plain call


@both
@pytest.mark.parametrize("change", [
    lambda x: x.to(torch.complex64), lambda x: x.to_sparse(), lambda x: x.to(torch.int8),
    lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), lambda x: torch.nested.nested_tensor([x, x]),
    lambda x: x.to(torch.complex64).conj(), lambda x: x.to_mkldnn(), lambda x: None, lambda x: x.numpy(),
    lambda x: x[0, 0],
], ids=["complex", "sparse", "int8", "quantized", "nested", "conj", "mkldnn", "none", "numpy", "0-d"])  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*(prototype|nested|quantize|deprecated)")
def test_what_no_kernel_takes_is_the_same_error_when_warm(change, norm_twice):
    x, w = torch.randn(4, 8), torch.randn(8)
    odd = change(x)
    with pytest.raises(lz.InvalidCallError) as cold:
        lz.rms_norm(odd, w)
    lz.rms_norm(x, w)
    lz.rms_norm(x, w)
    for _ in range(3):
        with pytest.raises(lz.InvalidCallError) as warm:
            lz.rms_norm(odd, w)
        assert str(warm.value) == str(cold.value)
    torch.testing.assert_close(lz.rms_norm(x, w), torch.nn.functional.rms_norm(x, (8,), w, 1e-6))


@both
def test_the_negative_bit_reaches_no_kernel_that_misreads_it(norm_twice):
    def raw(input, weight, *, eps=1e-6):
        assert not input.is_neg()
        return torch.nn.functional.rms_norm(input, weight.shape, weight, eps)

    lz.register_kernel("norm.rms", "user.raw", priority=100)(raw)
    lz.unregister_kernel("user.first")
    x, w = torch.randn(4, 8), torch.randn(8)
    for _ in range(3):
        torch.testing.assert_close(lz.rms_norm(x, w), raw(x, w))
        torch.testing.assert_close(lz.rms_norm(torch._neg_view(x), w), raw(-x, w))
        torch.testing.assert_close(lz.rms_norm(torch.complex(x, x).conj().imag, w), raw(-x, w))
    assert lz.which("rms_norm", x, w)["kernel_id"] == "user.raw"


@both
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_forward_mode_tangents_are_not_lost(norm_twice):
    x, w = torch.randn(4, 8), torch.randn(8)
    for _ in range(2):
        lz.rms_norm(x, w)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        mine = forward_ad.unpack_dual(lz.rms_norm(dual, w)).tangent
        theirs = forward_ad.unpack_dual(torch.nn.functional.rms_norm(dual, (8,), w, 1e-6)).tangent
    torch.testing.assert_close(mine, theirs)


@both
def test_the_callers_switches_are_seen_when_warm():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q = torch.randn(2, 8, 4, 16)
    for _ in range(2):
        lz.attention(q, q, q, layout="BSHD")
    with sdpa_kernel(SDPBackend.MATH):
        result = lz.attention(q, q, q, layout="BSHD")
        assert lz.which("attention", q, q, q, layout="BSHD")["kernel_id"] != "torch.sdpa.cpu_flash"
    torch.testing.assert_close(result, lz.attention(q, q, q, layout="BSHD"))
    assert {plan.kernel.id for plan in plans("attention").values()} > {"torch.sdpa.cpu_flash"}
