"""The states that eager code can be in: each gives the right result, and none a plan of another state."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Parameter

import layerzero as lz
from layerzero.engine.functions import CALLS

pytestmark = pytest.mark.usefixtures("path")


@pytest.fixture
def call():
    torch.manual_seed(0)
    return torch.randn(2, 8, 4, 16), torch.randn(2, 8, 2, 16), torch.randn(2, 8, 2, 16)


def expected(query, key, value, **arguments):
    from layerzero.ops.attention.reference import attention_reference

    return attention_reference(query, key, value, causal=True, **arguments)


def run(*tensors, **arguments):
    return lz.attention(*tensors, layout="BSHD", **arguments)


def keys():
    return len(CALLS["attention"].dispatcher.cache.current)


def test_gradients_flow_through_the_chosen_kernel(call):
    leaves = [tensor.clone().requires_grad_() for tensor in call]
    again = [tensor.clone().requires_grad_() for tensor in call]
    run(*leaves).square().sum().backward()
    expected(*again).square().sum().backward()
    for mine, theirs in zip(leaves, again, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5)


def test_a_kernel_without_backward_is_not_used_for_gradients(call):
    @lz.register_kernel("attention.gqa.prefill", "user.no_grad", priority=100)
    def forward_only(query, key, value, *, causal=False, scale=None):
        return expected(query, key, value).detach()

    with torch.no_grad():
        run(*call)
        assert lz.which("attention", *call, layout="BSHD")["kernel_id"] == "user.no_grad"
    leaves = [tensor.clone().requires_grad_() for tensor in call]
    assert run(*leaves).requires_grad
    with torch.no_grad():
        assert not run(*leaves).requires_grad


def test_parameters_and_inference_mode(call):
    with torch.no_grad():
        torch.testing.assert_close(run(Parameter(call[0]), *call[1:]), expected(*call))
    with torch.inference_mode():
        torch.testing.assert_close(run(*(tensor.clone() for tensor in call)), expected(*call))


def test_subclasses_go_through_torch_function(call):
    seen = []

    class Watched(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(getattr(func, "__name__", str(func)))
            return super().__torch_function__(func, types, args, kwargs or {})

    watched = call[0].as_subclass(Watched)
    result = run(watched, *call[1:])
    assert "attention" in seen
    assert isinstance(result, Watched)
    torch.testing.assert_close(result.as_subclass(torch.Tensor), expected(*call))


def test_function_modes_see_the_call(call):
    seen = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    with Mode():
        result = run(*call)
    assert "attention" in seen
    torch.testing.assert_close(result, expected(*call))


def test_a_default_device_changes_no_call(call):
    seen = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    def modes():
        return torch.overrides._get_current_function_mode_stack()

    with torch.device("cpu"), torch.device("meta"):
        before = modes()
        torch.testing.assert_close(run(*call), expected(*call))
        with pytest.raises(lz.InvalidCallError):
            lz.attention(torch.empty(1, device="cpu"), torch.empty(2, device="cpu"), torch.empty(3, device="cpu"))
        assert modes() == before
        with Mode(), torch.device("meta"):
            torch.testing.assert_close(run(*call), expected(*call))
    assert "attention" in seen, "who looks from outside still sees it"


def test_dispatch_modes_see_one_operator(call):
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Mode():
        result = run(*call)
    assert "layerzero.attention.default" in seen
    torch.testing.assert_close(result, expected(*call))


def test_a_class_of_tensors_that_knows_no_operator_of_ours_is_told_what_to_do():
    class Unknowing(torch.Tensor):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return NotImplemented

    rows = torch.Tensor._make_wrapper_subclass(Unknowing, (3, 4))
    with pytest.raises(lz.InvalidCallError, match=r"input: wanted a class .*, got Unknowing; call it on plain tensors"):
        lz.rms_norm(rows, torch.ones(4))


@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
def test_fake_and_meta_tensors_get_shapes(layout):
    shape = (2, 8, 4, 16) if layout == "BSHD" else (2, 4, 8, 16)
    with FakeTensorMode():
        query = torch.empty(shape)
        output, lse = lz.attention(query, query, query, layout=layout, return_lse=True)
        assert (output.shape, lse.shape, lse.dtype) == (query.shape, (2, 4, 8), torch.float32)
    meta = torch.empty(shape, device="meta")
    assert lz.attention(meta, meta, meta, layout=layout).shape == shape
    assert lz.rms_norm(torch.empty(3, 4, device="meta"), torch.empty(4, device="meta")).is_meta
    assert keys() == 0 or all(plan.proved for plan in CALLS["attention"].dispatcher.cache.current.values())


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # from torch's own jvp
def test_vmap_grad_and_jvp(call):
    query, key, value = call
    batched = torch.stack([query, query * 2])
    mapped = torch.func.vmap(lambda q: run(q, key, value))(batched)
    torch.testing.assert_close(mapped[1], expected(query * 2, key, value))
    gradient = torch.func.grad(lambda q: run(q, key, value).sum())(query)
    leaf = query.clone().requires_grad_()
    expected(leaf, key, value).sum().backward()
    torch.testing.assert_close(gradient, leaf.grad)
    _, tangent = torch.func.jvp(lambda q: run(q, key, value), (query,), (torch.ones_like(query),))
    _, wanted = torch.func.jvp(lambda q: expected(q, key, value), (query,), (torch.ones_like(query),))
    torch.testing.assert_close(tangent, wanted)


def test_negative_views_are_read_rightly(call):
    negated = torch.randn(2, 8, 4, 16, dtype=torch.complex64).conj().imag
    assert negated.is_neg()
    torch.testing.assert_close(run(negated, *call[1:]), expected(negated.resolve_neg(), *call[1:]))

    @lz.register_kernel("norm.rms", "user.raw", priority=100)
    def raw(input, weight, *, eps=1e-6):
        assert not input.is_neg()
        return torch.nn.functional.rms_norm(input, weight.shape, weight, eps)

    x = torch.randn(4, 16, dtype=torch.complex64).conj().imag
    torch.testing.assert_close(lz.rms_norm(x, torch.ones(16)), raw(x.resolve_neg(), torch.ones(16)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_does_not_change_what_is_computed(call, dtype):
    tensors = [tensor.to(dtype) for tensor in call]
    outside = run(*tensors)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        lz.scope(allow=["torch"], deny=["*_sinks"]),
    ):  # no other takes sinks
        inside = run(*tensors)
        reference = lz.explain("attention", *tensors, layout="BSHD", sinks=torch.zeros(4))
        assert reference.kernel_id.startswith("reference")
        with pytest.warns(lz.LayerZeroFallbackWarning):
            lz.attention(*tensors, layout="BSHD", sinks=torch.zeros(4))
    assert inside.dtype == dtype
    torch.testing.assert_close(inside, outside)


def test_copy_on_write_and_misaligned_storage(call):
    lazy = torch._lazy_clone(call[0])
    torch.testing.assert_close(run(lazy, *call[1:]), expected(*call))
    storage = torch.zeros(call[0].numel() + 1)
    shifted = storage[1:].view(call[0].shape)
    shifted.copy_(call[0])
    before = keys()
    torch.testing.assert_close(run(shifted, *call[1:]), expected(*call))
    assert keys() == before + 1, "another alignment is another key"


def test_sizes_of_zero_and_one(call):
    query, key, value = call
    assert run(query[:0], key[:0], value[:0]).shape == (0, 8, 4, 16)
    assert run(query[:, :0], key, value).shape == (2, 0, 4, 16)
    nothing = run(query, key[:, :0], value[:, :0])
    assert torch.equal(nothing, torch.zeros_like(query))
    odd = torch.randn(2, 1, 4, 16).as_strided((2, 1, 4, 16), (64, 999, 16, 1))
    torch.testing.assert_close(run(odd, key, value), expected(odd.contiguous(), key, value))


def test_torch_compile_sees_one_operator_and_no_graph_break(call):
    compiled = torch.compile(lambda q, k, v: run(q, k, v) * 2, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*call), expected(*call) * 2)
    leaves = [tensor.clone().requires_grad_() for tensor in call]
    compiled(*leaves).sum().backward()
    again = [tensor.clone().requires_grad_() for tensor in call]
    (expected(*again) * 2).sum().backward()
    torch.testing.assert_close(leaves[1].grad, again[1].grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["attention", "attention_lse", "rms_norm", "layer_norm", "add_residual_rms_norm_"])
def test_operators_pass_torchs_own_check(name, call):
    x, w = torch.randn(4, 16), torch.randn(16)
    arguments = {
        "attention": (*call, 0.3, True, "BSHD"),
        "attention_lse": (*call, None, True, "BSHD"),
        "rms_norm": (x, w, 1e-5),
        "layer_norm": (x, [16], w, w),
        "add_residual_rms_norm_": (x, x.clone(), w),
    }[name]
    torch.library.opcheck(getattr(torch.ops.layerzero, name).default, arguments)


def test_the_operator_keeps_its_argument_order(call):
    result = torch.ops.layerzero.attention(*call, 0.3, True, "BSHD")
    torch.testing.assert_close(result, expected(*call, scale=0.3))


def test_operators_have_gradients(call):
    x, w = torch.randn(4, 16, requires_grad=True), torch.randn(16, requires_grad=True)
    torch.ops.layerzero.layer_norm(x, [16], w, None).square().sum().backward()
    y, v = x.detach().clone().requires_grad_(), w.detach().clone().requires_grad_()
    torch.nn.functional.layer_norm(y, (16,), v, None).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(w.grad, v.grad, rtol=1e-4, atol=1e-5)


def test_a_kept_plan_keeps_no_tensor(call):
    import gc
    import weakref

    query = torch.randn(2, 8, 4, 16)
    watched = weakref.ref(query)
    run(query, *call[1:])
    del query
    gc.collect()
    assert watched() is None


def test_a_question_about_another_device_has_that_devices_precision():
    """What the processor multiplies in says nothing about a GPU, and the other way round."""
    given = torch.randn(4, 64), torch.randn(8, 64)
    before = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        assert lz.explain("linear", *given).facts["matmul_precision"] == "medium"
        assert lz.explain("linear", *given, device="H100").facts["matmul_precision"] == "highest"
        assert lz.explain("linear", *given, device="cpu").facts["matmul_precision"] == "medium"
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before
