"""Arguments that mean nothing: one text from every entry, nothing kept, no kernel blamed. Empty ones mean something."""

from __future__ import annotations

import contextlib
import warnings
from decimal import Decimal
from fractions import Fraction

import pytest
import torch
from planted_calls import INF, NAN, attention, rms, zeros

import layerzero as lz
from drawing import at_once
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.functions import CALLS
from layerzero.ops import FUNCTIONS
from layerzero.testing import random_call


def masked(mask):
    return attention(causal=False, attn_mask=mask)


def layer(**changes):
    return "layer_norm", {
        "input": zeros(3, 8),
        "normalized_shape": (8,),
        "weight": zeros(8),
        "bias": zeros(8),
        **changes,
    }


def add_rms(**changes):
    return "add_residual_rms_norm_", {"input": zeros(3, 8), "residual": zeros(3, 8), "weight": zeros(8), **changes}


def nested(*shapes, layout=torch.strided):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls its nested tensors a prototype
        return torch.nested.nested_tensor([zeros(shape) for shape in shapes], layout=layout)


def all_of(dtype):
    return attention(**{name: zeros(2, 4, 2, 8).to(dtype) for name in ("query", "key", "value")})


ONE = zeros(3, 8)
HEADS = "query heads must be a multiple of kv heads"
BAD = {
    "devices": (attention(key=zeros(2, 6, 2, 8, device="meta")), "key: wanted device cpu like query, got meta"),
    "devices, mask": (masked(zeros(4, 6, device="meta")), "attn_mask: wanted device cpu like query, got meta"),
    "devices, lengths": (attention(kv_lens=zeros(2, dtype=torch.int32, device="meta")), "kv_lens: wanted device cpu"),
    "dtypes": (attention(value=zeros(2, 6, 2, 8, dtype=torch.bfloat16)), "value: wanted dtype float32 like query"),
    "three axes": (attention(query=zeros(2, 4, 8)), "query: Expected 4D tensor (BSHD or BHSD), got 3D (2, 4, 8)"),
    "five axes": (attention(key=zeros(1, 2, 6, 2, 8)), "key: Expected 4D tensor (BSHD or BHSD), got 5D"),
    "no axes": (attention(value=zeros(())), "value: Expected 4D tensor (BSHD or BHSD), got 0D ()"),
    "heads": (attention(query=zeros(2, 4, 3, 8)), f"{HEADS}: got 3 query heads and 2 kv heads in BSHD"),
    "more kv heads": (attention(query=zeros(2, 4, 1, 8)), f"{HEADS}: got 1 query heads and 2 kv heads in BSHD"),
    "BSHD read as BHSD": (attention(layout="BHSD"), f"{HEADS}: got 4 query heads and 6 kv heads in BHSD"),
    "more kv heads, no layout": (
        attention(query=zeros(2, 2, 2, 8), key=zeros(2, 4, 4, 8), value=zeros(2, 4, 4, 8), layout=None),
        f"{HEADS}: got 2 query heads and 4 kv heads",
    ),
    "no query heads": (attention(query=zeros(2, 4, 0, 8)), "wanted at least one head and a head dim above 0"),
    "no kv heads": (attention(key=zeros(2, 6, 0, 8), value=zeros(2, 6, 0, 8)), "wanted at least one head"),
    "no head dim": (
        attention(query=zeros(2, 4, 4, 0), key=zeros(2, 6, 2, 0)),
        "a head dim above 0, got query (2, 4, 4, 0)",
    ),
    "value heads": (attention(value=zeros(2, 6, 1, 8)), "value: wanted kv_heads 2 as in key, got 1"),
    "value length": (attention(value=zeros(2, 5, 2, 8)), "value: wanted seq_k 6 as in key, got 5"),
    "batch": (attention(key=zeros(3, 6, 2, 8)), "key: wanted batch 2 as in query, got 3"),
    "head dims": (attention(key=zeros(2, 6, 2, 16)), "key: wanted head_dim 8 as in query, got 16"),
    "mask with causal": (
        attention(attn_mask=zeros(4, 6), causal=True),
        "wanted one of them, got both; pass causal=False",
    ),
    "mask shape": (masked(zeros(5, 6)), "broadcastable to (B, H, S_q, S_k) = (2, 4, 4, 6), got (5, 6)"),
    "mask of keys": (masked(zeros(2, 6)), "got (2, 6); a mask of each sequence's keys is attn_mask[:, None, None, :]"),
    "causal: a mask": (attention(causal=zeros(4, 6).bool()), "causal: wanted bool, got a tensor (4, 6) of bool"),
    "eps: a tensor": (rms(eps=torch.tensor(1e-6)), "eps: wanted float, got a tensor () of float32; .item() gives"),
    "eps: many words": (rms(eps="x" * 999), "xxx... (str)"),
    "mask axes": (
        masked(zeros(1, 1, 1, 4, 6)),
        "broadcastable to (B, H, S_q, S_k) = (2, 4, 4, 6), got (1, 1, 1, 4, 6)",
    ),
    "mask of ints": (masked(zeros(4, 6, dtype=torch.int64)), "attn_mask: wanted dtype bfloat16 or bool or"),
    "mask dtype": (
        masked(zeros(4, 6, dtype=torch.float64)),
        "wanted dtype bool, float32 or that of the query, got float64",
    ),
    "mask list": (masked([[True]]), "attn_mask: wanted a tensor, got list"),
    "complex": (
        all_of(torch.complex64),
        "query: wanted dtype bfloat16 or float16 or float32 or float64, got complex64",
    ),
    "ints": (all_of(torch.int32), "query: wanted dtype bfloat16 or float16 or float32 or float64, got int32"),
    "float8": (
        all_of(torch.float8_e4m3fn),
        "query: wanted dtype bfloat16 or float16 or float32 or float64, got float8_e4m3",
    ),
    "list": (attention(query=[1.0]), "query: wanted a tensor, got list"),
    "None": (attention(key=None), "key: wanted a tensor, got NoneType"),
    "nested": (attention(query=nested((4, 4, 8), (4, 4, 8))), "got a nested one; lz.ragged_attention takes its"),
    "jagged": (
        attention(query=nested((4, 4, 8), (3, 4, 8), layout=torch.jagged)),
        "query: wanted a dense tensor, got a nested one",
    ),
    "sparse": (attention(key=zeros(2, 6, 2, 8).to_sparse()), "key: wanted a dense tensor, got a sparse_coo one"),
    "sparse mask": (masked(zeros(4, 6).to_sparse()), "attn_mask: wanted a dense tensor, got a sparse_coo one"),
    "scale NaN": (attention(scale=NAN), "scale: wanted a finite number, got nan"),
    "scale inf": (attention(scale=-INF), "scale: wanted a finite number, got -inf"),
    "scale text": (attention(scale="1"), "scale: wanted float, got '1'"),
    "window number": (
        attention(window=3),
        "window: wanted (left, right), each -1 (unbounded) or a count of keys, got 3",
    ),
    "window of three": (attention(window=(1, 2, 3)), "a count of keys, got (1, 2, 3)"),
    "window below -1": (attention(window=(-2, 0)), "a count of keys, got (-2, 0)"),
    "window of floats": (attention(window=(1.5, 0)), "a count of keys, got (1.5, 0)"),
    "window text": (attention(window="ab"), "a count of keys, got 'ab'"),
    "softcap 0": (attention(softcap=0.0), "softcap: wanted a finite number above 0 or None, got 0.0"),
    "softcap below 0": (attention(softcap=-1.0), "softcap: wanted a finite number above 0 or None, got -1.0"),
    "softcap NaN": (attention(softcap=NAN), "softcap: wanted a finite number above 0 or None, got nan"),
    "softcap text": (attention(softcap="x"), "softcap: wanted float, got 'x'"),
    "dropout 1": (attention(dropout_p=1.0), "dropout_p: wanted 0 <= p < 1, got 1.0"),
    "dropout below 0": (attention(dropout_p=-0.1), "dropout_p: wanted 0 <= p < 1, got -0.1"),
    "dropout NaN": (attention(dropout_p=NAN), "dropout_p: wanted 0 <= p < 1, got nan"),
    "dropout text": (attention(dropout_p="x"), "dropout_p: wanted float, got 'x'"),
    "dropout None": (attention(dropout_p=None), "dropout_p: wanted float, got None"),
    "layout": (attention(layout="SBHD"), "layout: wanted BSHD or BHSD, got 'SBHD'"),
    "layout number": (attention(layout=4), "layout: wanted BSHD or BHSD, got 4"),
    "causal text": (attention(causal="yes"), "causal: wanted bool, got 'yes'"),
    "causal text, decode": (attention(query=zeros(2, 1, 4, 8), causal="yes"), "causal: wanted bool, got 'yes'"),
    "sinks": (attention(sinks=zeros(2)), "sinks: wanted heads 4 as in query, got 2"),
    "sinks of ints": (attention(sinks=zeros(4, dtype=torch.int32)), "sinks: wanted dtype"),
    "slopes": (attention(alibi_slopes=zeros(3)), "alibi_slopes: wanted shape (4,) or (2, 4), got (3,)"),
    "slopes list": (attention(alibi_slopes=[0.5]), "alibi_slopes: wanted a tensor, got list"),
    "lengths": (attention(kv_lens=zeros(3, dtype=torch.int32)), "kv_lens: wanted batch 2 as in query, got 3"),
    "lengths of floats": (attention(kv_lens=zeros(2)), "kv_lens: wanted dtype int32 or int64, got float32"),
    "lengths list": (attention(kv_lens=[1, 2]), "kv_lens: wanted a tensor, got list"),
    "rms devices": (rms(weight=zeros(8, device="meta")), "weight: wanted device cpu like input, got meta"),
    "rms dtypes": (
        rms(weight=zeros(8, dtype=torch.int32)),
        "weight: wanted dtype bfloat16 or float16 or float32 or float64, got int32",
    ),
    "rms weight": (rms(weight=zeros(7)), "weight: wanted hidden 8 as in input, got 7"),
    "rms weight axes": (rms(weight=zeros(1, 8)), "weight: wanted a 1D tensor (hidden), got 2D (1, 8)"),
    "rms jagged": (
        rms(input=nested((4, 8), (3, 8), layout=torch.jagged)),
        "input: wanted a dense tensor, got a nested",
    ),
    "rms of a scalar": (rms(input=zeros(())), "input: wanted at least a 1D tensor"),
    "rms of nothing": (rms(input=zeros(3, 0), weight=zeros(0)), "input: wanted a last axis above 0, got shape (3, 0)"),
    "rms eps below 0": (rms(eps=-1e-6), "eps: wanted a finite number of at least 0, got -1e-06"),
    "rms eps NaN": (rms(eps=NAN), "eps: wanted a finite number of at least 0, got nan"),
    "rms eps text": (rms(eps="x"), "eps: wanted float, got 'x'"),
    "rms eps None": (rms(eps=None), "eps: wanted float, got None"),
    "rms of ints": (rms(input=zeros(3, 8, dtype=torch.int64)), "input: wanted dtype"),
    "rms sparse": (rms(input=zeros(3, 8).to_sparse()), "input: wanted a dense tensor, got a sparse_coo one"),
    "rms list": (rms(input=[1.0]), "input: wanted a tensor, got list"),
    "rms without weight": (rms(weight=None), "weight: wanted a tensor, got nothing"),
    "layer shape": (
        layer(normalized_shape=(7,)),
        "input: wanted a shape that ends in normalized_shape (7,), got (3, 8)",
    ),
    "layer longer shape": (layer(normalized_shape=(2, 3, 8)), "ends in normalized_shape (2, 3, 8), got (3, 8)"),
    "layer empty shape": (layer(normalized_shape=()), "ends in normalized_shape (), got (3, 8)"),
    "layer shape text": (layer(normalized_shape=None), "normalized_shape: wanted an int or ints, got None"),
    "layer weight": (layer(weight=zeros(3, 8)), "weight: wanted shape (8,) like normalized_shape, got (3, 8)"),
    "layer bias dtype": (layer(bias=zeros(8, dtype=torch.float64)), "bias: wanted dtype float32 like input"),
    "layer nested": (layer(input=nested((8,), (8,))), "input: wanted a dense tensor, got a nested one"),
    "add residual": (add_rms(residual=zeros(2, 8)), "residual: wanted shape (3, 8) like input, got (2, 8)"),
    "add residual dtype": (add_rms(residual=zeros(3, 8, dtype=torch.bfloat16)), "residual: wanted dtype float32"),
    "add residual leaf": (add_rms(residual=zeros(3, 8).requires_grad_()), "got a leaf that requires gradients"),
    "add residual expanded": (
        add_rms(residual=zeros(1, 8).expand(3, 8)),
        "residual: wanted memory of its own, got an expanded",
    ),
    "add to itself": (
        add_rms(input=ONE, residual=ONE),
        "residual: wanted memory of its own, got memory that it shares with input",
    ),
}
TORCH_REFUSES = (
    "causal: a mask",
    "eps: ",
    "list",
    "text",
    "window number",
    "window of floats",
    "layout number",
    "dropout None",
    "eps None",
    "shape text",
)
"""What torch's own schema refuses before LayerZero sees it."""


def kept():
    return sum(call.dispatcher.cache.size() for call in CALLS.values())


def message_of(entry, arguments):
    with pytest.raises(lz.InvalidCallError) as caught:
        entry(**arguments)
    return str(caught.value)


@at_once("name", BAD)
def test_the_caller_is_told_what_was_wanted_and_what_came(name):
    (function, arguments), text = BAD[name]
    if name in ("dropout None", "rms eps None") and not ENGINE_REFUSES_NONE:
        pytest.xfail("None passes for any argument with a neutral value")
    told = message_of(getattr(lz, function), arguments)
    assert text in told
    assert f"{function}:" in told
    assert message_of(lambda **a: lz.explain(function, **a), arguments) == told
    assert message_of(lambda **a: lz.which(function, **a), arguments) == told
    if not any(part in name for part in (*TORCH_REFUSES, "nested", "jagged")):
        assert message_of(getattr(torch.ops.layerzero, function), arguments) == told
    for policy in ({"enabled": False}, {"strict_mode": True}, {"cache.enabled": False}):
        with lz.scope(**policy):
            assert message_of(getattr(lz, function), arguments) == told
    assert kept() == 0
    assert ENGINE.health.breakers() == {}


def none_is_refused():
    from layerzero.ops.norm.declare import RMS

    return bool(RMS.schema.validate(zeros(3, 8), zeros(8), eps=None))


ENGINE_REFUSES_NONE = none_is_refused()


def test_several_problems_are_told_at_once():
    told = message_of(lz.attention, all_of(torch.complex64)[1])
    assert [line.split(":")[0].strip() for line in told.splitlines()[1:]] == ["- query", "- key", "- value"]


def test_codes():
    def code(name):
        with pytest.raises(lz.InvalidCallError) as caught:
            getattr(lz, BAD[name][0][0])(**BAD[name][0][1])
        return caught.value.code

    assert code("heads") is code("more kv heads") is lz.ReasonCode.GQA_HEADS_MISMATCH
    assert code("mask with causal") is code("mask shape") is lz.ReasonCode.ATTN_MASK_INVALID
    assert code("scale NaN") is None


@pytest.mark.parametrize("names", [("query", "key", "value"), ("query",)], ids=str)
def test_unknown_and_missing_arguments_are_python_errors(names):
    arguments = {name: value for name, value in attention()[1].items() if name in names}
    with pytest.raises(TypeError):
        lz.attention(**arguments, nonsense=1)
    with pytest.raises(TypeError):
        lz.attention()
    assert kept() == 0


class Halves(float):
    """A number of a kind of its own."""


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(("good", "others"), [
    (attention(scale=1.0), [True, 1, Halves(1.0), Decimal(1), Fraction(1), 1 + 0j, torch.tensor(1.0)]),
    (attention(causal=False, dropout_p=0.0), [False, 0, Halves(0.0), Decimal(0)]),
    (attention(causal=True), [1, 1.0, torch.tensor(True)]),
    (attention(causal=False, window=(1, 0)), [[1, 0], (1.0, 0.0), (True, False), [1, False], (1, 0, 0)]),
    (rms(eps=1.0), [True, 1, Halves(1.0), Decimal(1)]),
    (layer(normalized_shape=(8,)), [[8], 8, (8.0,), [8.0], 8.0, torch.Size([8])]),
])  # fmt: skip
def test_what_equals_a_legal_value_is_judged_by_its_own_type(good, others):
    """A kept plan answers as choosing would: with a result, or with the same error."""
    function, arguments = good
    (name,) = {"scale", "dropout_p", "window", "eps", "normalized_shape"} & set(arguments) or {"causal"}

    def answer(value):
        try:
            return getattr(lz, function)(**{**arguments, name: value})
        except lz.InvalidCallError as error:
            return str(error)

    for value in others:
        ENGINE.bump()
        alone = answer(value)
        ENGINE.bump()
        kept = answer(arguments[name]), answer(arguments[name])
        assert all(isinstance(each, torch.Tensor) for each in kept)
        after = answer(value)
        assert isinstance(after, str) is isinstance(alone, str)
        assert after == alone if isinstance(alone, str) else torch.equal(after, alone)


def test_a_bad_call_does_not_spoil_a_good_one():
    query, key, value = torch.randn(2, 4, 2, 8), torch.randn(2, 4, 2, 8), torch.randn(2, 4, 2, 8)
    wanted = lz.attention(query, key, value, layout="BSHD")
    for changes in ({"window": (-2, 0)}, {"scale": NAN}, {"attn_mask": zeros(4, 4), "causal": True}):
        with pytest.raises(lz.InvalidCallError):
            lz.attention(query, key, value, layout="BSHD", **changes)
    assert torch.equal(lz.attention(query, key, value, layout="BSHD"), wanted)
    assert kept() == 1


@pytest.mark.filterwarnings("ignore::layerzero.LayerZeroFallbackWarning")
@pytest.mark.parametrize("value", [torch.zeros(0), INF, -1], ids=["no numbers", "inf", "-1"])
def test_an_odd_value_of_any_parameter_is_refused_in_words_or_means_something(value):
    """Neither torch's own error comes out, nor is a kernel blamed."""
    for name, function in FUNCTIONS.items():
        call = random_call(5, 3, function=name)
        for parameter in function.parameters:
            if not isinstance(call.arguments.get(parameter.name), torch.Tensor):
                with contextlib.suppress(lz.InvalidCallError, lz.NoKernelFoundError):
                    getattr(lz, name)(**{**call.arguments, parameter.name: value})
                assert ENGINE.health.breakers() == {}, f"{name}({parameter.name}={value})"
