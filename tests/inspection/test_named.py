"""Questions take a function as itself, and the drop-in for torch's attention as the call that it makes."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import layerzero as lz
from drawing import at_once, examples
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.functions import CALLS
from layerzero.ops import FUNCTIONS, PLAIN_FUNCTIONS
from layerzero.ops.attention import layout

X, W = torch.randn(3, 8), torch.randn(8)


def heads(queries=5, keys=5, heads=4, kv=4, dtype=torch.float32):
    shapes = (2, heads, queries, 8), (2, kv, keys, 8), (2, kv, keys, 8)
    return tuple(torch.randn(shape).to(dtype) for shape in shapes)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("question", [lz.explain, lz.which, lz.facts])
def test_a_function_is_as_good_as_its_name(question):
    def plain(answer):
        return answer.to_dict() if hasattr(answer, "to_dict") else answer

    assert plain(question(lz.rms_norm, X, W)) == plain(question("rms_norm", X, W))
    assert plain(question(CALLS["rms_norm"].python, X, W)) == plain(question("rms_norm", X, W))
    operation = lz.facts("rms_norm", X, W).operation
    assert plain(question(operation, X, W)) == plain(question("norm.rms", X, W))


@at_once("name", [*FUNCTIONS, *PLAIN_FUNCTIONS])
def test_every_public_function_names_itself(name):
    assert lz.list_kernels(getattr(lz, name)) == lz.list_kernels(name)


def test_functions_without_tensors():
    pytest.importorskip("tiktoken", reason="needs tiktoken, which knows the encoding by its name")
    assert lz.which(lz.detokenize, [1, 2], "cl100k_base") == lz.which("detokenize", [1, 2], "cl100k_base")


def test_what_names_nothing_is_told_with_what_would():
    wanted = "wanted a function of LayerZero or its name, an operation or an alias"
    for question in (lz.explain, lz.which, lz.facts, lz.bind):
        for asked, got in ((len, "<built-in function len>"), (None, "None"), (X, r"a tensor \(3, 8\) of float32")):
            with pytest.raises(TypeError, match=f"^{question.__name__}: {wanted}.*, got {got}; lz.list_operations"):
                question(asked, X, W)
    with pytest.raises(TypeError, match=f"^list_kernels: {wanted}"):
        lz.list_kernels(3)
    with pytest.raises(KeyError, match="did you mean 'scaled_dot_product_attention'"):
        lz.explain("scaled_dot_product_atention", *heads())


def test_validate_takes_the_function_before_its_arguments():
    tensors, kernel = heads(), "torch.sdpa.cpu_flash"
    assert lz.validate(kernel, lz.attention, *tensors, layout="BHSD") == (True, ())
    assert lz.validate(kernel, lz.scaled_dot_product_attention, *tensors, is_causal=True) == (True, ())
    assert lz.validate("torch.rms_norm", lz.rms_norm, X, W) == lz.validate("torch.rms_norm", X, W) == (True, ())
    valid, reasons = lz.validate(kernel, lz.rms_norm, X, W)
    assert not valid
    assert [reason.fact for reason in reasons] == ["operation"]


def test_validate_says_that_the_kernel_comes_first():
    wanted = "^validate: wanted the id of a kernel first, got"
    for function, name in (
        (lz.rms_norm, "rms_norm"),
        (lz.scaled_dot_product_attention, "scaled_dot_product_attention"),
    ):
        behind = rf"{wanted} the function {name}, which goes behind it; lz\.list_kernels\('{name}'\) has them$"
        with pytest.raises(TypeError, match=behind):
            lz.validate(function, X, W)
    with pytest.raises(TypeError, match=rf"{wanted} a tensor \(3, 8\) of float32; lz\.list_kernels\(\) has them$"):
        lz.validate(X, W)


def test_the_drop_in_by_name_and_as_itself():
    q, k, v = heads(queries=3, keys=7)
    asked = lz.explain("attention", q, k, v, False, layout="BHSD")
    for name in ("scaled_dot_product_attention", lz.scaled_dot_product_attention):
        report = lz.explain(name, q, k, v)
        assert (report.kernel_id, report.notes) == (asked.kernel_id, asked.notes)
        assert (report.facts["causal"], report.facts.layout) == (False, "BHSD")
        assert dict(lz.facts(name, q, k, v)) == dict(asked.facts)
        assert lz.which(name, q, k, v)["kernel_id"] == asked.kernel_id
        assert lz.list_kernels(name) == lz.list_kernels("attention")


def test_causality_is_told_from_the_top_left():
    report = lz.explain(lz.scaled_dot_product_attention, *heads(queries=3, keys=7), is_causal=True)
    assert (report.facts["seq_q"], report.facts["seq_k"], report.facts["causal"]) == (3, 3, True)
    assert report.notes[-1].endswith("causal from the top left: 3 of 7 keys are seen, the others left out")


def test_autocast_is_told():
    with torch.autocast("cpu", torch.bfloat16):
        report = lz.explain(lz.scaled_dot_product_attention, *heads())
    assert (report.facts["dtype"], report.facts["autocast"]) == (torch.bfloat16, True)
    assert report.notes[-1] == "scaled_dot_product_attention casts to bfloat16 first, as autocast has it"


def test_of_another_device_its_own_autocast_counts():
    on_meta = [each.to("meta") for each in heads()]
    with torch.autocast("cpu", torch.bfloat16):
        report = lz.explain(lz.scaled_dot_product_attention, *on_meta, device="H100")
    assert (report.facts["dtype"], report.facts["platform"]) == (torch.float32, "cuda")


def test_tensors_without_memory_know_no_autocast():
    on_meta = [each.to("meta") for each in heads()]
    with torch.autocast("cpu", torch.bfloat16):
        assert lz.scaled_dot_product_attention(*on_meta).shape == (2, 4, 5, 8)
        assert lz.explain(lz.scaled_dot_product_attention, *on_meta).facts["dtype"] == torch.float32


Q, K, V = heads()
OF_TORCH = {
    layout.RANK: ((Q[0], K[0], V[0]), {}),
    layout.TWO_MASKS: ((Q, K, V), {"attn_mask": torch.ones(5, 5, dtype=torch.bool), "is_causal": True}),
    layout.EMPTY: ((Q[:, :, :0], K, V), {}),
    layout.BROADCAST: ((Q, K[:1], V[:1]), {}),
    layout.HEADS: ((Q, K[:, :2], V[:, :2]), {}),
    layout.QUERIES: ((Q, K[:, :, :4], V[:, :, :4]), {"is_causal": True}),
    layout.NESTED: ((torch.nested.nested_tensor([*Q], layout=torch.jagged),) * 3, {}),
    "since lz.attention does not take it: dropout_p: wanted 0 <= p < 1": ((Q, K, V), {"dropout_p": 1.5}),
}


@pytest.mark.parametrize("why", OF_TORCH)
def test_where_torchs_own_function_runs_the_reason_is_told(why):
    tensors, arguments = OF_TORCH[why]
    with pytest.raises(lz.InvalidCallError) as told:
        lz.explain(lz.scaled_dot_product_attention, *tensors, **arguments)
    assert str(told.value).startswith("scaled_dot_product_attention: torch's own function runs this call")
    assert why in str(told.value)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_of_the_older_kind():
    nested = torch.nested.nested_tensor([*Q])
    with pytest.raises(lz.InvalidCallError, match=layout.NESTED.partition(";")[0]):
        lz.explain(lz.scaled_dot_product_attention, nested, nested, nested)


def test_a_mode_that_listens_is_a_reason():
    with torch.device("cpu"), pytest.raises(lz.InvalidCallError, match="a mode listens to torch's functions"):
        lz.explain(lz.scaled_dot_product_attention, Q, K, V)


@pytest.mark.parametrize(("arguments", "wanted"), [
    ({"value": 1}, r"^scaled_dot_product_attention: value: wanted a tensor, got 1"),
    ({"value": V, "attn_mask": [1]}, r"attn_mask: wanted a tensor, got \[1\]"),
    ({"value": V, "causal": True}, r"unexpected keyword argument 'causal'; did you mean 'is_causal'"),
    ({}, r"^scaled_dot_product_attention: missing a required argument: 'value'"),
])  # fmt: skip
def test_calls_that_fit_no_signature(arguments, wanted):
    with pytest.raises((lz.InvalidCallError, TypeError), match=wanted):
        lz.explain(lz.scaled_dot_product_attention, Q, K, **arguments)


def test_what_changes_its_tensors_first_is_not_bound():
    for name in ("scaled_dot_product_attention", lz.scaled_dot_product_attention):
        with pytest.raises(lz.InvalidCallError, match=r"lz\.bind\(lz\.attention, \.\.\., causal=False, layout="):
            lz.bind(name, Q, K, V)


def test_a_function_is_locked_as_itself_and_a_kernel_by_its_id():
    rows, weight = torch.randn(3, 8), torch.ones(8)
    lz.lock(lz.rms_norm, "reference.*")
    try:
        assert lz.explain(lz.rms_norm, rows, weight).kernel_id == "reference.norm.rms"
        with pytest.raises(TypeError, match=r"lock: wanted a kernel's id.*lz.list_kernels\('rms_norm'\) lists them"):
            lz.lock(lz.rms_norm, lz.rms_norm)
    finally:
        lz.unlock(lz.rms_norm)
    with pytest.raises(TypeError, match="unlock: wanted a function of LayerZero or its name"):
        lz.unlock(len)


@st.composite
def calls(draw):
    """Calls of the drop-in, with sizes that do not always fit together."""
    queries, keys = draw(st.integers(0, 6)), draw(st.integers(1, 6))
    kv = draw(st.sampled_from([1, 2, 4]))
    tensors = heads(queries, keys, 4, kv, draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64])))
    given = {"is_causal": draw(st.booleans()), "enable_gqa": draw(st.booleans())}
    if draw(st.booleans()):
        given["attn_mask"] = torch.rand(queries, keys + draw(st.sampled_from([0, 0, 0, 1]))) > 0.3
    if draw(st.integers(0, 5)) == 0:
        tensors = tuple(each[0] for each in tensors)
    return tensors, given, draw(st.booleans())


@settings(max_examples=examples(150), deadline=None)
@given(calls())
def test_what_is_told_is_what_runs(call):
    tensors, arguments, casts = call
    ran, problem = [], ""

    def saw(function, plan):
        ran.append((function.name, plan.kernel_id, plan.report.facts["dtype"], plan.report.facts["seq_k"]))

    ENGINE.watch(saw)
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=casts):
            try:
                report = lz.explain(lz.scaled_dot_product_attention, *tensors, **arguments)
                told = [("attention", report.kernel_id, report.facts["dtype"], report.facts["seq_k"])]
            except lz.InvalidCallError as error:
                told, problem = [], str(error)
            with contextlib.suppress(RuntimeError, IndexError):  # torch's own
                lz.scaled_dot_product_attention(*tensors, **arguments)
    finally:
        ENGINE.unwatch(saw)
    assert ran == told
    assert bool(told) != ("torch's own function runs this call" in problem)
