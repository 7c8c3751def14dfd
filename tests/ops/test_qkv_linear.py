"""lz.qkv_linear: what it computes of three weights and of one, packed weights, gradients, what is refused."""

from __future__ import annotations

import pytest
import torch

import layerzero as lz
from drawing import at_once
from layerzero.ops import OPERATIONS

WEIGHTS = ("q_weight", "k_weight", "v_weight")
BIASES = ("q_bias", "k_bias", "v_bias")


def call(*rows, joined=False, biased=True, inputs=64, query=32, kv=16, dtype=torch.float32):
    torch.manual_seed(inputs)
    sizes = (query, kv, kv)
    weights = [(torch.randn(size, inputs) / inputs**0.5).to(dtype) for size in sizes]
    biases = [torch.randn(size).to(dtype) if biased else None for size in sizes]
    arguments = {"input": torch.randn(*rows, inputs).to(dtype)}
    pairs = zip(weights, biases, strict=True)
    wanted = [torch.nn.functional.linear(arguments["input"], weight, bias) for weight, bias in pairs]
    if joined:
        arguments |= {"q_weight": torch.cat(weights), "kv_features": kv}
        return arguments | ({"q_bias": torch.cat(biases)} if biased else {}), wanted
    arguments |= dict(zip(WEIGHTS, weights, strict=True))
    return arguments | (dict(zip(BIASES, biases, strict=True)) if biased else {}), wanted


def close(got, wanted, tolerance=1e-5):
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@at_once("joined", [False, True])
@at_once("biased", [False, True])
@at_once("rows", [(), (5,), (2, 3)])
def test_it_is_a_product_with_each_weight(rows, biased, joined):
    arguments, wanted = call(*rows, joined=joined, biased=biased)
    close(lz.qkv_linear(**arguments), wanted)


@pytest.mark.parametrize("kernel", ["torch.qkv_linear.joined", "torch.qkv_linear_apart.joined"])
def test_each_way_of_a_joined_weight(kernel):
    arguments, wanted = call(2, 3, joined=True)
    with lz.scope(locks={"qkv_linear": kernel}):
        close(lz.qkv_linear(**arguments), wanted)


@pytest.mark.parametrize("kernel", ["torch.qkv_linear", "torch.qkv_linear_joining"])
@pytest.mark.parametrize("given", [BIASES, ("q_bias", "v_bias"), ()])
def test_each_way_of_three_weights_with_some_of_the_biases(kernel, given):
    arguments, _ = call(2, 3)
    for name in set(BIASES) - set(given):
        del arguments[name]
    wanted = [
        torch.nn.functional.linear(arguments["input"], arguments[weight], arguments.get(bias))
        for weight, bias in zip(WEIGHTS, BIASES, strict=True)
    ]
    with lz.scope(locks={"qkv_linear": kernel}):
        close(lz.qkv_linear(**arguments), wanted)


def test_results_of_a_joined_weight_are_one_product():
    arguments, _ = call(5, joined=True)
    with lz.scope(locks={"qkv_linear": "torch.qkv_linear.joined"}):
        results = lz.qkv_linear(**arguments)
    assert len({each.untyped_storage().data_ptr() for each in results}) == 1


@pytest.mark.parametrize("joined", [False, True])
def test_packed_weights_change_no_result_and_are_never_stale(joined):
    arguments, wanted = call(5, joined=joined)
    names = ("q",) if joined else ("q", "k", "v")
    packed = {f"packed_{name}": lz.PackedWeight(arguments[f"{name}_weight"]) for name in names}
    close(lz.qkv_linear(**arguments, **packed), wanted)
    arguments["q_weight"].mul_(2)
    with pytest.raises(lz.InvalidCallError, match=r"packed_q: .* call refresh"):
        lz.qkv_linear(**arguments, **packed)
    packed["packed_q"].refresh()
    close(lz.qkv_linear(**arguments, **packed), lz.qkv_linear(**arguments))
    foreign = {"packed_q": lz.PackedWeight(arguments["q_weight"].clone())}
    with pytest.raises(lz.InvalidCallError, match=r"packed_q: .* got that of another"):
        lz.qkv_linear(**arguments, **foreign)


@pytest.mark.parametrize("kernel", ["torch.onednn_qkv_packed", "zentorch.qkv_packed", "vllm.cpu.qkv_packed"])
@pytest.mark.parametrize("joined", [False, True])
def test_each_library_of_packed_products(kernel, joined):
    arguments, wanted = call(5, joined=joined, dtype=torch.bfloat16)
    for name in ("q",) if joined else ("q", "k", "v"):
        arguments[f"packed_{name}"] = lz.PackedWeight(arguments[f"{name}_weight"])
    name = f"{kernel}.joined" if joined else kernel
    report = lz.explain("qkv_linear", **arguments)
    if report.reasons(name):
        pytest.skip(str(report.reasons(name)[0]))
    with lz.scope(locks={"qkv_linear": name}):
        close(lz.qkv_linear(**arguments), wanted, 3e-2)


@pytest.mark.parametrize("joined", [False, True])
def test_gradients_by_finite_differences(joined):
    arguments, _ = call(3, joined=joined, inputs=5, query=4, kv=2, dtype=torch.float64)
    names = [name for name, each in arguments.items() if isinstance(each, torch.Tensor)]
    leaves = [arguments[name].clone().requires_grad_() for name in names]

    def function(*tensors):
        return lz.qkv_linear(**(arguments | dict(zip(names, tensors, strict=True))))

    assert torch.autograd.gradcheck(function, leaves)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("joined", [False, True])
def test_compiled_as_one_graph_and_rotated_in_place_after(joined):
    arguments, _ = call(3, joined=joined)
    cos = sin = torch.full((3, 8), 0.5)

    def model(input):
        query, key, value = lz.qkv_linear(**(arguments | {"input": input}))
        query, key = query.view(3, 2, 16), key.view(3, 1, 16)
        lz.rope_(query, key, cos, sin)
        return query, key, value

    got = torch.compile(model, fullgraph=True, backend="aot_eager")(arguments["input"])
    close(got, model(arguments["input"]))


@pytest.mark.parametrize("joined", [False, True])
def test_stock_computes_the_same(joined):
    arguments, wanted = call(2, 3, joined=joined)
    name = "mlp.qkv.joined" if joined else "mlp.qkv"
    close(OPERATIONS[name].stock(**arguments)(), wanted)


@pytest.mark.parametrize(
    ("joined", "change", "words"),
    [
        (False, {"v_weight": None}, "v_weight: wanted a tensor, got None"),
        (False, {"kv_features": 16}, "kv_features: wanted None with three weights, got 16"),
        (False, {"k_weight": torch.zeros(16, 63)}, "k_weight: wanted in_features 64"),
        (False, {"k_bias": torch.zeros(15)}, "k_bias: wanted k_features 16 as in k_weight, got 15"),
        (False, {"v_weight": torch.zeros(16, 64).half()}, "v_weight: wanted dtype float32"),
        (True, {"kv_features": None}, "kv_features: wanted the rows of keys in q_weight, or k_weight and v_weight"),
        (True, {"kv_features": 0}, "kv_features: wanted the rows of keys in q_weight"),
        (True, {"kv_features": 32}, r"q_weight: wanted more than 2 \* 32 rows"),
        (True, {"k_bias": torch.zeros(16)}, "k_bias: wanted None without k_weight, got one"),
        (True, {"q_bias": torch.zeros(32)}, "q_bias: wanted joined_features 64 as in q_weight, got 32"),
    ],
)
def test_what_means_nothing_is_refused_with_wanted_and_got(joined, change, words):
    arguments, _ = call(3, joined=joined)
    with pytest.raises(lz.InvalidCallError, match=words):
        lz.qkv_linear(**(arguments | change))
