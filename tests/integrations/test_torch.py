"""``lz.scaled_dot_product_attention`` against torch's function of that name."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

import layerzero as lz
from drawing import examples
from layerzero.engine.dispatch import ENGINE

TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-10, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@st.composite
def calls(draw: st.DrawFn) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    batch, kv, queries, keys = (draw(st.integers(1, top)) for top in (2, 3, 9, 21))
    group = draw(st.sampled_from([1, 1, 2, 4]))
    dim, value_dim = draw(st.sampled_from([(8, 8), (16, 16), (16, 8), (5, 5)]))
    dtype = draw(st.sampled_from(list(TOLERANCE)))
    torch.manual_seed(draw(st.integers(0, 99)))
    shapes = (batch, kv * group, queries, dim), (batch, kv, keys, dim), (batch, kv, keys, value_dim)
    tensors = tuple(torch.randn(shape).to(dtype) for shape in shapes)
    given: dict[str, Any] = {"enable_gqa": True} if group > 1 else {}
    masks = ["none", "none", "causal", "bool", "float", "row", "wide"]
    mask = draw(st.sampled_from(masks))
    if mask == "causal":
        given["is_causal"] = True
    elif mask in ("bool", "row"):
        given["attn_mask"] = torch.rand(queries, keys) > (0.3 if mask == "bool" else 2.0)
        given["attn_mask"][:, 0] = mask == "bool"
    elif mask == "float":
        given["attn_mask"] = torch.randn(1, kv * group, 1, keys).to(dtype)
    elif mask == "wide":
        given["attn_mask"] = torch.rand(batch, 1, queries, keys) > 0.5
        given["attn_mask"][..., 0] = True
    if draw(st.booleans()):
        given["scale"] = draw(st.sampled_from([0.25, 1.0]))
    return tensors, given


@settings(max_examples=examples(60), deadline=None)
@given(calls())
def test_it_is_torchs(call: tuple[tuple[torch.Tensor, ...], dict[str, Any]]) -> None:
    tensors, arguments = call
    expected = functional.scaled_dot_product_attention(*tensors, **arguments)
    got = lz.scaled_dot_product_attention(*tensors, **arguments)
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def test_the_signature_is_torchs() -> None:
    documented = "query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False"
    assert documented in (functional.scaled_dot_product_attention.__doc__ or "").replace("\n        ", " ")
    parameters = inspect.signature(lz.scaled_dot_product_attention).parameters.values()
    written = [each.name + ("" if each.default is each.empty else f"={each.default}") for each in parameters]
    assert ", ".join(written) == documented


def tensors(heads: int = 4, kv: int = 4, queries: int = 5, keys: int = 5) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return torch.randn(2, heads, queries, 8), torch.randn(2, kv, keys, 8), torch.randn(2, kv, keys, 8)


@pytest.mark.parametrize(("queries", "keys", "calls"), [(5, 5, 1), (3, 7, 1), (1, 7, 1), (7, 3, 0)])
def test_causality_starts_top_left(queries: int, keys: int, calls: int, seen: list[str]) -> None:
    q, k, v = tensors(queries=queries, keys=keys)
    got = lz.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(got, functional.scaled_dot_product_attention(q, k, v, is_causal=True))
    assert len(seen) == calls


@pytest.fixture
def seen() -> Any:
    """Names of the functions of LayerZero that are called."""
    found: list[str] = []

    def saw(function: Any, _: Any) -> None:
        found.append(function.name)

    ENGINE.watch(saw)
    yield found
    ENGINE.unwatch(saw)


@pytest.mark.parametrize(
    "shapes",
    [
        pytest.param([(4, 5, 8)] * 3, id="three axes"),
        pytest.param([(2, 3, 4, 5, 8)] * 3, id="five axes"),
        pytest.param([(2, 4, 5, 8), (1, 1, 5, 8), (1, 1, 5, 8)], id="axes to broadcast"),
    ],
)
def test_other_axes_are_torchs_business(shapes: list[tuple[int, ...]], seen: list[str]) -> None:
    q, k, v = map(torch.randn, shapes)
    expected = functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(lz.scaled_dot_product_attention(q, k, v), expected)
    assert not seen


def test_dropout_draws_what_torch_draws() -> None:
    q, k, v = tensors()
    torch.manual_seed(7)
    expected = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.4)
    torch.manual_seed(7)
    torch.testing.assert_close(lz.scaled_dot_product_attention(q, k, v, dropout_p=0.4), expected)


def test_gradients_are_torchs() -> None:
    grads = []
    for function in (functional.scaled_dot_product_attention, lz.scaled_dot_product_attention):
        leaves = [each.requires_grad_() for each in tensors(kv=2)]
        function(*leaves, is_causal=True, enable_gqa=True).square().sum().backward()
        grads.append([leaf.grad for leaf in leaves])
    torch.testing.assert_close(grads[0], grads[1])


def test_autocast_casts_as_torch_does() -> None:
    q, k, v = tensors()
    mask = torch.randn(5, 5)
    with torch.autocast("cpu", torch.bfloat16):
        expected = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        got = lz.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert got.dtype is expected.dtype is torch.bfloat16
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    "arguments",
    [
        {"attn_mask": torch.ones(5, 4, dtype=torch.bool)},
        {"attn_mask": torch.ones(5, 5, dtype=torch.int64)},
        {"attn_mask": torch.ones(5)},
        {"attn_mask": torch.tensor(1.0)},
        {"dropout_p": 1.5},
    ],
)
def test_errors_are_torchs(arguments: dict[str, Any]) -> None:
    q, k, v = tensors()
    with pytest.raises((RuntimeError, ValueError, IndexError)) as expected:
        functional.scaled_dot_product_attention(q, k, v, **arguments)
    with pytest.raises(expected.type) as got:
        lz.scaled_dot_product_attention(q, k, v, **arguments)
    assert str(got.value) == str(expected.value)


def test_a_mask_beside_causality_is_torchs_business(seen: list[str]) -> None:
    q, k, v = tensors()
    arguments: dict[str, Any] = {"attn_mask": torch.rand(5, 5) > 0.2, "is_causal": True}
    try:
        expected = functional.scaled_dot_product_attention(q, k, v, **arguments)
    except RuntimeError as refused:  # from torch 2.14 on
        with pytest.raises(RuntimeError, match=re.escape(str(refused).partition("\n")[0])):
            lz.scaled_dot_product_attention(q, k, v, **arguments)
    else:
        torch.testing.assert_close(lz.scaled_dot_product_attention(q, k, v, **arguments), expected, equal_nan=True)
    assert not seen


def test_several_heads_share_keys_only_where_that_was_said() -> None:
    q, k, v = tensors(kv=2)
    with pytest.raises(RuntimeError):
        lz.scaled_dot_product_attention(q, k, v)


def test_it_may_stand_in_torchs_place(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors()
    expected = functional.scaled_dot_product_attention(q, k, v)
    monkeypatch.setattr(functional, "scaled_dot_product_attention", lz.scaled_dot_product_attention)
    torch.testing.assert_close(functional.scaled_dot_product_attention(q, k, v), expected)


def test_it_compiles_without_a_break() -> None:
    q, k, v = tensors()
    compiled = torch.compile(lz.scaled_dot_product_attention, fullgraph=True, backend="eager")
    expected = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(compiled(q, k, v, is_causal=True), expected)


@pytest.mark.parametrize("arguments", [{"query": None}, {"key": [1.0]}, {"is_causal": 1}, {"enable_gqa": None}])
def test_what_is_of_another_type_is_refused_in_torchs_words(arguments: dict[str, Any]) -> None:
    given = dict(zip(("query", "key", "value"), tensors(), strict=True)) | arguments
    first = [given.pop(name) for name in ("query", "key", "value")]
    with pytest.raises(TypeError) as expected:
        functional.scaled_dot_product_attention(*first, **given)
    with pytest.raises(TypeError) as got:
        lz.scaled_dot_product_attention(*first, **given)
    assert str(got.value) == str(expected.value)
