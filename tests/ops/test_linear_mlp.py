"""Feed-forward blocks: the reference against products apart, every kernel, what calls refuse, gradients, choices."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import layerzero as lz
from drawing import at_once
from layerzero.core.recipe import CallRecipe
from layerzero.engine.functions import CALLS
from layerzero.engine.registry import REGISTRY
from layerzero.ops.linear.fused import mlp
from layerzero.ops.recipes import arguments_of_recipe
from layerzero.testing import check
from layerzero.testing.generate import RandomCall

KINDS = ("plain", "gated", "joined")
OPERATIONS = {"plain": "mlp.fused", "gated": "mlp.fused.gated", "joined": "mlp.fused.joined"}
AFTER = {
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
    "relu2": lambda x: functional.relu(x).square(),
}
PACKED = sorted({kernel.id for kernel in lz.list_kernels("mlp.fused") if "packed" in kernel.id})


def call(kind, rows=(3,), dtype=torch.float64, inputs=64, inner=32, outputs=48, *, biased=True, **arguments):
    torch.manual_seed(0)

    def weight(*shape):
        return torch.randn(shape, dtype=torch.float64).div(shape[1] ** 0.5).to(dtype)

    up = 2 * inner if kind == "joined" else inner
    made = {"up_weight": weight(up, inputs), "down_weight": weight(outputs, inner)}
    if kind == "gated":
        made["gate_weight"] = weight(inner, inputs)
    for name in list(made) if biased else ():
        made[name.replace("weight", "bias")] = torch.randn(made[name].shape[0], dtype=torch.float64).to(dtype)
    return {"input": torch.randn(*rows, inputs, dtype=torch.float64).to(dtype), **made, **arguments}


def packed(given):
    names = [name.removesuffix("_weight") for name in given if name.endswith("_weight")]
    return {f"packed_{name}": lz.PackedWeight(given[f"{name}_weight"]) for name in names}


def by_hand(input, up_weight, down_weight, gate_weight=None, *, activation="silu", **biases):
    through = functional.linear(input, up_weight, biases.get("up_bias"))
    if gate_weight is not None:
        through = AFTER[activation](functional.linear(input, gate_weight, biases.get("gate_bias"))) * through
    elif up_weight.shape[0] == 2 * down_weight.shape[1]:
        gate, up = through.chunk(2, -1)
        through = AFTER[activation](gate) * up
    else:
        through = AFTER[activation](through)
    return functional.linear(through, down_weight, biases.get("down_bias"))


@at_once("biased", [True, False])
@at_once("activation", AFTER)
@at_once("kind", KINDS)
def test_the_reference_is_products_one_after_the_other(kind, activation, biased):
    given = call(kind, biased=biased, activation=activation)
    tensors = [given.pop(name) for name in ("input", "up_weight", "down_weight")]
    gate = (given.pop("gate_weight"),) if kind == "gated" else ()
    got = mlp(*tensors, *gate, **given)
    torch.testing.assert_close(got, by_hand(*tensors, *gate, **given))


@at_once("rows", [(), (1,), (5,), (2, 3), (0,)])
@at_once("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@at_once("kind", KINDS)
def test_a_call_is_routed_by_its_weights_and_right(path, kind, dtype, rows):
    given = call(kind, rows, dtype)
    assert lz.explain("mlp", **given).operation == OPERATIONS[kind]
    assert not check(RandomCall("mlp", given))


@at_once("kernel", PACKED)
@at_once("activation", AFTER)
@at_once("dtype", [torch.float32, torch.bfloat16])
@at_once("kind", KINDS)
def test_a_kernel_with_packed_weights_is_right(path, kind, dtype, activation, kernel):
    kernel = f"{kernel.removesuffix('.gated')}{'.gated' if kind == 'gated' else ''}"
    given = call(kind, (2, 3), dtype, activation=activation)
    given |= packed(given)
    reasons = lz.explain("mlp", **given).reasons(kernel)
    if reasons:
        pytest.skip("; ".join(map(str, reasons)))
    with lz.scope(locks={OPERATIONS[kind]: kernel}):
        assert not check(RandomCall("mlp", given))
    assert all(given[name].bytes > 0 for name in given if name.startswith("packed_"))


@pytest.mark.parametrize("kind", KINDS)
def test_nan_passes(path, kind):
    for activation in AFTER:
        given = call(kind, dtype=torch.float32, activation=activation)
        given["input"][1, 3] = torch.nan
        got = lz.mlp(**given, **packed(given))
        assert got[1].isnan().all()
        assert got[[0, 2]].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_torchs(path, kind):
    ours, theirs = ({name: each.requires_grad_() for name, each in call(kind).items()} for _ in range(2))
    lz.mlp(**ours, **packed(ours)).square().sum().backward()
    by_hand(**theirs).square().sum().backward()
    for name, leaf in ours.items():
        torch.testing.assert_close(leaf.grad, theirs[name].grad)


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_code_has_one_graph(kind):
    given = call(kind, dtype=torch.float32)
    torch._dynamo.reset()  # the limit of recompilations counts what other functions compiled
    compiled = torch.compile(lz.mlp, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**given), by_hand(**given), rtol=1e-5, atol=1e-5)


@at_once(
    "kind, wrong, message",
    [
        ("plain", {"up_weight": torch.randn(31, 64)}, "down_weight: wanted inner_features 31 as in up_weight, got 32"),
        ("gated", {"gate_weight": torch.randn(31, 64)}, "gate_weight: wanted inner_features 32 as in"),
        ("plain", {"gate_bias": torch.randn(32)}, "gate_bias: wanted None without gate_weight, got one"),
        ("joined", {"up_bias": torch.randn(32)}, "up_bias: wanted joined_features 64 as in up_weight, got 32"),
        ("plain", {"down_bias": torch.randn(32)}, "down_bias: wanted out_features 48 as in down_weight, got 32"),
        (
            "plain",
            {"activation": "relu6"},
            "activation: wanted relu, gelu, gelu_tanh, silu, relu2 or None, got 'relu6'",
        ),
        ("plain", {"activation": None}, "activation: wanted str, got None"),
        ("plain", {"up_weight": torch.randn(64)}, "up_weight: wanted a 2D tensor"),
        ("plain", {"packed_up": lz.PackedWeight(torch.randn(3, 3))}, "packed_up: wanted the PackedWeight of this very"),
    ],
)
def test_what_means_nothing_is_refused(path, kind, wrong, message):
    with pytest.raises(lz.InvalidCallError) as caught:
        lz.mlp(**{**call(kind, dtype=torch.float32), **wrong})
    assert message in str(caught.value)


def test_a_packed_weight_that_was_written_into_is_refused(path):
    given = call("gated", dtype=torch.float32)
    given |= packed(given)
    lz.mlp(**given)
    given["down_weight"].mul_(2)
    with pytest.raises(lz.InvalidCallError, match="packed_down: wanted one of down_weight as it is"):
        lz.mlp(**given)
    given["packed_down"].refresh()
    assert not check(RandomCall("mlp", given))


@pytest.mark.parametrize("kind", KINDS)
def test_three_hundred_row_counts_are_chosen_for_a_dozen_times(path, kind):
    given = call(kind, dtype=torch.float32)
    given |= packed(given)
    dispatcher, chosen = CALLS["mlp"].dispatcher, []
    choose = dispatcher.miss
    dispatcher.miss = lambda *each: chosen.append(each) or choose(*each)
    try:
        for rows in range(1, 301):
            lz.mlp(**{**given, "input": torch.zeros(rows, 64)})
    finally:
        del dispatcher.miss
    assert len(chosen) <= 12


@pytest.mark.parametrize("operation", ["mlp.linear", "mlp.fused", "mlp.fused.gated"])
def test_a_call_that_was_written_down_is_made_again_with_weights_like_a_models(operation):
    """With unit normal ones, hundreds lay between two products, and right kernels of bfloat16 were banned."""
    weights = {"mlp.linear": [(64, 512)], "mlp.fused": [(512, 512), (64, 512)]}
    weights["mlp.fused.gated"] = [*weights["mlp.fused"], (512, 512)]
    tensors = [torch.randn(3, 512), *map(torch.randn, weights[operation])]
    function = "linear" if operation == "mlp.linear" else "mlp"
    recipe = CallRecipe.of(lz.facts(function, *(each.bfloat16() for each in tensors)))
    _, arguments = arguments_of_recipe(recipe, REGISTRY.operation(operation))
    for name, value in arguments.items():
        if name.endswith("weight") and value is not None:
            assert value.dtype is torch.bfloat16
            assert 0.5 < value.float().std() * 512**0.5 < 2
