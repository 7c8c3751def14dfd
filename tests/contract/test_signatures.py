"""What the public functions promise by their names: what writes ends in ``_``, and former names say today's."""

from __future__ import annotations

import inspect
from functools import partial

import pytest
import torch
from torch.nn import functional

import layerzero as lz
from layerzero.engine.config import current_policy
from layerzero.engine.functions import CALLS
from layerzero.ops import DROP_INS, FORMER_NAMES, FUNCTIONS, PLAIN_FUNCTIONS


def test_a_function_ends_in_an_underscore_if_it_writes_into_an_argument():
    writes = {name: each.mutates for name, each in FUNCTIONS.items()}
    assert {name: what for name, what in writes.items() if name.endswith("_") != bool(what)} == {}


@pytest.mark.parametrize("old", sorted(FORMER_NAMES))
def test_a_former_name_is_the_function_of_today_with_a_warning(old):
    assert old not in lz.__all__
    for _ in range(2):  # the name is not kept: it warns each time
        with pytest.warns(DeprecationWarning, match=f"lz.{old} is now lz.{FORMER_NAMES[old]}; version 0.2 removes"):
            assert getattr(lz, old) is getattr(lz, FORMER_NAMES[old])


def test_questions_and_locks_know_former_names():
    with pytest.warns(DeprecationWarning, match=r"lz.append_kv is now lz.append_kv_"):
        assert lz.list_kernels("append_kv") == lz.list_kernels("append_kv_")
    kernel = lz.list_kernels("append_kv_")[0].id
    with (
        pytest.warns(DeprecationWarning, match=r"lz.append_kv is now lz.append_kv_"),
        lz.scope(locks={"append_kv": kernel}),
    ):
        (lock,) = current_policy().locks
    assert (lock.operation, lock.kernel) == ("append_kv_", kernel)
    with pytest.warns(DeprecationWarning, match=r"lz.append_kv is now lz.append_kv_"):
        assert torch.ops.layerzero.append_kv is torch.ops.layerzero.append_kv_


RENAMED = sorted((name, old, new) for name, each in FUNCTIONS.items() for old, new in each.renamed.items())


@pytest.mark.parametrize(("name", "old", "new"), [each for each in RENAMED if each[0] != each[2]])
def test_a_former_argument_is_an_error_that_names_the_one_of_today(name, old, new):
    parameters = inspect.signature(getattr(lz, name)).parameters
    assert new in parameters
    given = [torch.zeros(2, 4) for each in parameters.values() if each.default is each.empty]
    for call in (getattr(lz, name), partial(lz.explain, name), partial(lz.bind, name)):
        with pytest.raises(TypeError, match=rf"unexpected keyword argument '{old}'; it is '{new}' now"):
            call(*given, **{old: 1})


BY_ROW = sorted((name, number) for name, each in FUNCTIONS.items() for number in each.given_as.values())


def test_a_number_or_a_tensor_with_one_for_each_row_have_one_argument():
    for name, number in BY_ROW:
        parameters = inspect.signature(FUNCTIONS[name].signature).parameters
        assert "Tensor" in str(parameters[number].annotation), name
        assert not [each for each in parameters if each.startswith("row_") or each.endswith("_by_row")], name


def test_a_tensor_and_a_number_give_the_same_by_every_way():
    """Called, compiled, bound and asked about; and the tensor's values decide, not the first call's."""
    logits, twos = torch.randn(3, 50), torch.full((3,), 2)
    wanted = lz.sample_topk(logits, 2, seed=1)
    compiled = torch.compile(lambda x, k: lz.sample_topk(x, k, seed=1), backend="eager", fullgraph=True)
    for call in (partial(lz.sample_topk, seed=1), compiled, partial(CALLS["sample_topk"].python, seed=1)):
        assert torch.equal(call(logits, twos), wanted)
        assert torch.equal(call(logits, torch.ones_like(twos)), logits.argmax(-1))
    bound = lz.bind(lz.sample_topk, logits, twos)
    assert torch.equal(bound(logits, torch.ones_like(twos)), logits.argmax(-1))
    assert "top_k_by_row" in lz.explain("sample_topk", logits, top_k=twos).facts.tensors


# torch's functions of the same name: by position nothing means another thing here

TORCHS = {
    "conv1d": ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
    "conv2d": ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
    "cross_entropy": ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction"),
    "dequantize": ("tensor",),
    "embedding": ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"),
    "gelu": ("input",),
    "layer_norm": ("input", "normalized_shape", "weight", "bias", "eps"),
    "linear": ("input", "weight", "bias"),
    **(
        {"linear_cross_entropy": ("input", "linear_weight", "target")}
        if hasattr(functional, "linear_cross_entropy")
        else {}
    ),
    "rms_norm": ("input", "normalized_shape", "weight", "eps"),
    "scaled_dot_product_attention": (
        *("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"),
    ),
    "silu": ("input", "inplace"),
    "softmax": ("input", "dim", "_stacklevel", "dtype"),
}
"""The positional arguments of ``torch.nn.functional``; of ``torch`` where that has none."""

SAME = {
    ("cross_entropy", "logits"): "input",
    ("dequantize", "quantized"): "tensor",
    ("embedding", "ids"): "input",
    ("linear_cross_entropy", "hidden"): "input",
    ("linear_cross_entropy", "weight"): "linear_weight",
}
"""Other names for the same thing."""

X, W = torch.randn(2, 8), torch.ones(8)
REFUSED = {
    "rms_norm": (
        ({"weight", "eps"}),
        [
            ((X, (8,)), r"weight: wanted a tensor, got tuple; torch's normalized_shape is the shape of weight here"),
            ((X, [8], W), r"weight: wanted a tensor, got list; torch's normalized_shape is the shape of weight here"),
            ((X, (8,), None, 1e-6), r"positional arguments"),
        ],
    )
}
"""Where the specification has another order: no call that torch takes computes anything."""


def positional(name):
    parameters = inspect.signature(getattr(lz, name)).parameters.values()
    return [each.name for each in parameters if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]


def test_every_namesake_in_torch_is_known():
    names = [*FUNCTIONS, *PLAIN_FUNCTIONS, *DROP_INS]
    assert {name for name in names if hasattr(functional, name) or hasattr(torch, name)} == set(TORCHS)
    for name, theirs in TORCHS.items():
        try:
            known = inspect.signature(getattr(functional, name, None) or getattr(torch, name)).parameters
        except ValueError:  # a builtin, which says nothing
            continue
        assert tuple(known)[: len(theirs)] == theirs, name


@pytest.mark.parametrize("name", sorted(TORCHS))
def test_a_position_means_what_it_means_in_torch(name):
    theirs, (another, _) = TORCHS[name], REFUSED.get(name, (set(), []))
    for ours, meant in zip(positional(name), theirs, strict=False):  # further ones mean nothing in torch
        assert SAME.get((name, ours), ours) == meant or ours in another, f"{name}: wanted {meant}, got {ours}"


@pytest.mark.parametrize(("name", "arguments", "words"), [
    (name, arguments, words) for name, (_, calls) in REFUSED.items() for arguments, words in calls
])  # fmt: skip
def test_torchs_own_call_is_refused_where_a_position_means_another_thing(name, arguments, words):
    getattr(functional, name)(*arguments)
    with pytest.raises((TypeError, lz.InvalidCallError), match=words):
        getattr(lz, name)(*arguments)


@pytest.mark.parametrize("fourth", [torch.ones(1, 1, 4, 4, dtype=torch.bool), 0.0, 0.1])
def test_a_mask_or_a_dropout_by_the_place_of_causal_is_refused(fourth):
    """The fourth of torch's attention is a mask, that of flash_attn_func a dropout."""
    query = torch.zeros(1, 4, 2, 8)
    with pytest.raises(lz.InvalidCallError, match=r"causal: wanted bool"):
        lz.attention(query, query, query, fourth, layout="BSHD")
