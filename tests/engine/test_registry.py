"""Registering kernels and operations: what is refused, and what a decorated function is offered."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import layerzero as lz
from layerzero.core import limits as limit
from layerzero.core.kernel import Backend, Kernel
from layerzero.engine.settings import nearest
from layerzero.ops import FUNCTIONS


def declare(**changes):
    declared = {
        "id": "x.y",
        "operations": ("norm.rms",),
        "backend": Backend(name="x", summary=""),
        "load": lambda f: None,
    }
    return Kernel(**(declared | changes))


def test_a_mistake_about_an_operation_is_one_class_wherever_it_is_made():
    for say in (
        lambda: lz.explain("rms_nrom", torch.zeros(1, 2)),
        lambda: lz.lock("rms_nrom", "torch.rms_norm"),
        lambda: lz.configure(rules=[{"match": {"op": "rms_nrom"}, "deny": "torch"}]),
        lambda: lz.list_kernels("rms_nrom"),
        lambda: lz.register_kernel("rms_nrom", "mine.rms")(lambda input, weight: input),
    ):
        with pytest.raises(
            lz.UnknownOperationError, match="unknown operation 'rms_nrom'; did you mean 'rms_norm'"
        ) as told:
            say()
        assert isinstance(told.value, lz.PolicyError)
        assert isinstance(told.value, lz.RegistrationError)
        assert isinstance(told.value, KeyError)
        assert not str(told.value).startswith('"')


def test_hints_are_near_and_never_the_word_itself():
    with pytest.raises(lz.UnknownOperationError) as told:
        lz.list_kernels("nope")
    assert "rope" not in str(told.value)
    with pytest.raises(lz.RegistrationError, match="no 'platfrom'; did you mean 'platform'"):
        lz.register_kernel("norm.rms", "mine.rms", platfrom="cpu")(lambda input, weight: input)
    with pytest.raises(TypeError, match="wanted an operation, as lz"):
        lz.SelectionContextBuilder(lz.list_operations()[0].schema)
    with pytest.raises(ValueError, match="unknown dtype 'bfloat61'; did you mean 'bfloat16'"):
        lz.register_kernel("norm.rms", "mine.rms", supported_dtypes=["bfloat61"])(lambda input, weight: input)


@pytest.mark.parametrize(("make", "text"), [
    (lambda: lz.register_backend([declare(operations=("norm.rmz",))]), "unknown operation 'norm.rmz'; did you mean"),
    (lambda: lz.register_backend([declare(accepts=("epz",))]), "accepts .'epz'., which norm.rms does not have"),
    (lambda: lz.register_backend([declare(id="torch.rms_norm")]), "registered already; ids are unique"),
    (lambda: declare(build_key=lambda facts: 1), "jit: wanted True with build_key, prebuilt or cache_folder"),
    (lambda: declare(priority=101), "priority must be 0 to 100"),
    (lambda: declare(priority="high"), "priority must be 0 to 100, is 'high'"),
    (lambda: declare(operations=()), "declares no operation"),
    (lambda: declare(deterministic=1), "deterministic: wanted a function or a bool, got 1"),
    (lambda: declare(stock=1), "stock: wanted a function or a bool, got 1"),
    (lambda: declare(graph_safe=lambda facts: True), "graph_safe: wanted a bool, got <function"),
    (lambda: lz.register_backend([declare(layout="SBHD")]), "layout: norm.rms wants none: its axes"),
    (lambda: declare(renames={"eps": "epsilon"}), "without accepting them"),
    (
        lambda: lz.register_backend([declare(operations=("attention.gqa.prefill",), folds=("causal",))]),
        "folds into attn_mask without accepting it",
    ),
    (lambda: lz.register_kernel("norm.rms", "x.y", supports_gqa=True)(lambda i, w: i), "register for attention.gqa"),
    (lambda: lz.register_kernel("norm.rms", "x.y", graph_saef=True)(lambda i, w: i), "did you mean 'graph_safe'"),
    (lambda: lz.register_kernel("norm.rms", "x.y")(lambda i: i), "wanted a function that takes input, weight"),
    (lambda: lz.register_kernel("norm.rms", "x.y")(lambda i, w, epsilon=1: i), "epsilon is no argument of norm.rms"),
])  # fmt: skip
def test_wrong_declarations_are_refused_where_they_are_made(make, text):
    with pytest.raises(lz.RegistrationError, match=text):
        make()
    with pytest.raises(KeyError):
        lz.validate("x.y", torch.zeros(2, 3), torch.zeros(3))


def test_a_backend_sets_flags_for_all_of_its_kernels_but_those_that_say_no():
    backend = Backend(name="x", summary="", flags=("deterministic", "jit"))
    plain, other = declare(backend=backend), declare(backend=backend, deterministic=False, grad=True)
    assert (plain.deterministic, plain.jit, plain.grad) == (True, True, False)
    assert (other.deterministic, other.jit, other.grad) == (False, True, True)
    with pytest.raises(lz.RegistrationError, match=r"x: flags: wanted names among .*grad.*, got \['priority'\]"):
        Backend(name="x", summary="", flags=("priority",))


def test_a_backend_bounds_the_capability_of_all_of_its_kernels_but_those_that_bound_it_themselves():
    backend = Backend(name="x", summary="", platforms=("cuda",), least_sm=(8, 0))
    plain = declare(backend=backend, limits=(limit.dtype("float16"),))
    assert plain.limits == (limit.arch(min=(8, 0)), limit.dtype("float16"))
    assert replace(plain, priority=7).limits == plain.limits
    own = (limit.arch(min=(9, 0), max=(9, 9)),)
    assert declare(backend=backend, limits=own).limits == own


def test_the_name_of_a_function_stands_for_all_of_its_operations():
    @lz.register_kernel("attention", "mine.attention", supported_dtypes=["float32"], priority=100)
    def everything(query, key, value, *, causal=False, scale=None):
        return torch.ones_like(query)

    names = {operation.name for operation in FUNCTIONS["attention"].operations}
    assert set(lz.explain("attention", *[torch.randn(1, 3, 2, 8)] * 3, layout="BSHD").chosen.kernel.operations) == names
    for seq, kv_heads in ((3, 4), (3, 2), (1, 4), (1, 2)):
        query, key = torch.randn(1, seq, 4, 8), torch.randn(1, 3, kv_heads, 8)
        assert lz.attention(query, key, key, layout="BSHD").eq(1).all()

    with pytest.raises(
        lz.RegistrationError, match=r"default for causal, which attention.standard.decode does not have"
    ):
        lz.register_kernel("attention", "mine.other")(lambda query, key, value, *, causal: query)
    with pytest.raises(lz.RegistrationError, match=r"windw is no argument of attention; it has query"):
        lz.register_kernel("attention", "mine.other")(lambda query, key, value, *, windw=None: query)


def test_a_misspelt_dtype_in_a_limit_is_refused():
    with pytest.raises(ValueError, match="unknown dtype 'float17'"):
        lz.limits.dtype("float17")


def test_a_decorated_function_takes_part_like_a_built_in_one():
    calls = []

    @lz.register_kernel(
        operation="attention.causal",
        kernel_id="my_org.custom_attention",
        platform="cpu",
        supported_dtypes=[torch.float32, "bfloat16"],
        max_head_dim=128,
        priority=95,
    )
    def custom(q, k, v, scale=None, causal=True):
        calls.append((q.shape, scale, causal))
        return torch.nn.functional.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (q, k, v)), is_causal=causal, scale=scale
        ).transpose(1, 2)

    query = torch.randn(2, 16, 4, 32)
    result = lz.attention(query, query, query, scale=0.5, layout="BSHD")
    assert calls == [((2, 16, 4, 32), 0.5, True)]
    assert result.shape == query.shape
    assert "my_org.custom_attention" in [kernel.id for kernel in lz.list_kernels("attention.causal")]
    assert lz.which("attention.causal", query, query, query, layout="BSHD")["kernel_id"] == "my_org.custom_attention"
    wide = torch.randn(1, 4, 2, 136)
    valid, reasons = lz.validate("my_org.custom_attention", wide, wide, wide, layout="BSHD")
    assert not valid
    assert [str(reason.code) for reason in reasons] == ["HEAD_DIM_TOO_LARGE"]
    full, reasons = lz.validate("my_org.custom_attention", query, query, query, causal=False, layout="BSHD")
    assert not full


def test_the_flat_name_does_not_promise_grouped_heads():
    @lz.register_kernel("attention.causal", "user.flat", priority=100)
    def flat(q, k, v):
        return q

    query, key = torch.randn(2, 16, 4, 32), torch.randn(2, 16, 2, 32)
    assert lz.which("attention", query, key, key, layout="BSHD")["kernel_id"] != "user.flat"
    valid, (reason,) = lz.validate("user.flat", query, key, key, layout="BSHD")
    assert not valid
    assert reason.code is lz.ReasonCode.GQA_UNSUPPORTED


def test_a_function_is_never_offered_what_it_does_not_declare():
    offered = []

    @lz.register_kernel("norm.layer", "user.layer", priority=100)
    def layer(input, *, normalized_shape, weight=None, eps=1e-5):
        offered.append(weight is not None)
        return torch.nn.functional.layer_norm(input, normalized_shape, weight, None, eps)

    x, w, b = torch.randn(4, 8), torch.randn(8), torch.randn(8)
    assert lz.which("layer_norm", x, 8, w, b)["kernel_id"] != "user.layer"  # it has no bias
    torch.testing.assert_close(lz.layer_norm(x, 8, w), torch.nn.functional.layer_norm(x, (8,), w))
    torch.testing.assert_close(lz.layer_norm(x, 8), torch.nn.functional.layer_norm(x, (8,)))
    assert offered == [True, False]


def test_a_new_operation_needs_one_block():
    def double(x, *, times=2.0):
        return x * times

    operation = lz.Operation(
        schema=lz.OperationSchema(
            "test.double",
            (lz.TensorSchema("x", ("...", "n")),),
            (lz.TensorSchema("y", ("...", "n")),),
            (lz.Param("times", float, 2.0),),
        ),
        summary="for the test",
        reference=double,
        fake=lambda x, **_: torch.empty_like(x),
        cases=(),
        tolerance={},
        tolerance_reason="exact",
        has_fallback=False,
    )
    before = {each.name for each in lz.list_operations()}
    if "test.double" not in before:
        lz.register_operation(operation)
    with pytest.raises(lz.RegistrationError, match="registered already"):
        lz.register_operation(operation)
    assert lz.list_kernels("test.double") == []  # has_fallback is false: not even a reference
    facts = lz.FactsBuilder(operation).build(torch.zeros(3))
    with pytest.raises(lz.NoKernelFoundError):
        from layerzero.engine.pick import require

        require(lz.explain(facts))


def test_operations_name_the_facts_that_they_derive():
    x, w = torch.zeros(2, 3), torch.zeros(3)
    query = torch.zeros(2, 4, 2, 8)
    for facts in (
        lz.facts("rms_norm", x, w),
        lz.facts("layer_norm", x, 3),
        lz.facts("add_residual_rms_norm_", x, x.clone(), w),
        lz.facts("attention", query, query, query, layout="BSHD"),
        lz.facts("attention", query[:, :1], query, query, layout="BSHD"),
    ):
        derived = facts.operation.derive(
            {"input": x, "normalized_shape": (3,)}, {"heads": 2, "kv_heads": 2, "dtype": x.dtype}
        )
        assert set(derived) == set(facts.operation.derived)
        assert set(derived) <= set(facts)


@pytest.mark.parametrize(("question", "text"), [
    (lambda: lz.list_kernels("attention.cusal"), "did you mean 'attention.causal'"),
    (lambda: lz.which("atention", 1, 2, 3), "did you mean 'attention'"),
    (lambda: lz.validate("torch.rms", torch.zeros(1, 2), torch.zeros(2)), "did you mean 'torch.rms_norm'"),
])  # fmt: skip
def test_questions_about_nothing_name_the_nearest(question, text):
    with pytest.raises(KeyError, match=text):
        question()


MISFITS = {
    "layout": (
        {"operations": ("attention.gqa.decode.paged",), "layout": "BSHD"},
        r"mine\.misfit: layout: attention\.gqa\.decode\.paged wants NHD or HND, got 'BSHD'",
    ),
    "layout of none": (
        {"operations": ("norm.rms",), "layout": "BSHD"},
        r"layout: norm\.rms wants none: its axes have no layout, got 'BSHD'",
    ),
    "a name taken": (
        {"operations": ("norm.rms",), "accepts": ("eps",), "renames": {"eps": "weight"}},
        r"renames 'eps' to 'weight', which is another argument of norm\.rms",
    ),
    "one name for two": (
        {
            "operations": ("attention.standard.prefill",),
            "layout": "BSHD",
            "accepts": ("scale", "causal"),
            "renames": {"scale": "x", "causal": "x"},
        },
        "renames two arguments to one name",
    ),
    "a mask that is not there": (
        {"operations": ("attention.standard.prefill", "norm.rms"), "accepts": ("attn_mask",), "folds": ("window",)},
        r"folds \['window'\], but norm\.rms can fold nothing",
    ),
    "a dtype that is not there": (
        {"operations": ("norm.rms",), "tolerance": {"int8": lz.Tolerance(1.0, 1.0)}, "tolerance_reason": "because"},
        "tolerance for int8, a dtype that its operations do not have",
    ),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_a_kernel_that_does_not_fit_its_operations_is_refused(misfit):
    declared, text = MISFITS[misfit]
    backend = lz.Backend(name="mine", summary="for the test")
    kernel = lz.Kernel(id="mine.misfit", backend=backend, load=lambda facts: None, **declared)
    with pytest.raises(lz.RegistrationError, match=text):
        lz.register_backend([kernel])
    assert "mine.misfit" not in {each.id for each in lz.list_kernels()}


def test_an_operation_has_the_tensors_that_its_kind_has():
    from dataclasses import replace

    operation = next(each for each in lz.list_operations() if each.name == "norm.rms")
    schema = replace(operation.schema, operation="test.words")
    words = replace(operation, schema=schema, kind=lz.OpKind.TOKENIZATION)
    with pytest.raises(lz.RegistrationError, match="of kind tokenization: wanted no tensors among its inputs"):
        lz.register_operation(words)
    assert "test.words" not in {each.name for each in lz.list_operations()}


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("mine.own", ""),
        ("something.else", ""),
        ("attention.standrd.prefill", "attention.standard.prefill"),
        ("mlp.liner.quant", "mlp.linear.quant"),
        ("torch.sdpa.mth", "torch.sdpa.math"),
        ("rmsnorm", "rms_norm"),
        ("epz", "eps"),
        ("rope", ""),
    ],
)
def test_a_typo_is_guessed_and_another_name_is_not(word, meant):
    known = ["mlp.linear.quant", "attention.standard.prefill", "torch.sdpa.math", "rms_norm", "eps", "nope", "scale"]
    assert nearest(word, known) == (f"; did you mean {meant!r}?" if meant else "")
