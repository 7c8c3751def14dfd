"""Activations: the references against formulas on single numbers, torch's kernels, what calls refuse, gradients."""

from __future__ import annotations

import math

import pytest
import torch

import layerzero as lz
from drawing import at_once, mostly
from layerzero.engine.functions import CALLS
from layerzero.ops import FUNCTIONS, OPERATIONS
from layerzero.testing import check
from layerzero.testing.generate import RandomCall

NUMBERS = [-30.0, -3.0, -1.0, -0.1, 0.0, 0.1, 1.0, 3.0, 30.0]


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def gelu(x):
    return x / 2 * (1 + math.erf(x / math.sqrt(2)))


def gelu_tanh(x):
    return x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def oai(g, u, alpha=1.702, limit=7.0):
    g, u = min(g, limit), max(-limit, min(u, limit))
    return g * sigmoid(alpha * g) * (u + 1)


ALONE = {
    ("activation.gelu", ()): gelu,
    ("activation.gelu", (("approximate", "tanh"),)): gelu_tanh,
    ("activation.silu", ()): lambda x: x * sigmoid(x),
    ("activation.relu2", ()): lambda x: max(x, 0.0) ** 2,
}
GATED = {
    ("mlp.silu_mul", ()): lambda g, u: g * sigmoid(g) * u,
    ("mlp.gelu_mul", ()): lambda g, u: gelu(g) * u,
    ("mlp.gelu_mul", (("approximate", "tanh"),)): lambda g, u: gelu_tanh(g) * u,
    ("mlp.swiglu_oai", ()): oai,
    ("mlp.swiglu_oai", (("alpha", 1.0), ("limit", 2.0))): lambda g, u: oai(g, u, 1.0, 2.0),
}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
NAMES = ("gelu", "silu", "relu2", "silu_mul", "gelu_mul", "swiglu_oai")


def close(got, wanted):
    torch.testing.assert_close(got, torch.tensor(wanted, dtype=got.dtype).view(got.shape), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("key", ALONE, ids=str)
def test_a_reference_of_one_tensor_is_the_formula(key):
    name, params = key
    x = torch.tensor(NUMBERS, dtype=torch.float64)
    close(OPERATIONS[name].reference(x, **dict(params)), [ALONE[key](value) for value in NUMBERS])


@pytest.mark.parametrize("key", GATED, ids=str)
def test_a_reference_of_two_tensors_is_the_formula_apart_and_in_one(key):
    name, params = key
    pairs = [(g, u) for g in NUMBERS for u in (-9.0, -0.5, 2.0, 9.0)]
    wanted = [GATED[key](*pair) for pair in pairs]
    gate, up = (torch.tensor(each, dtype=torch.float64) for each in zip(*pairs, strict=True))
    close(OPERATIONS[name].reference(gate, up, **dict(params)), wanted)
    if name.endswith("oai"):
        together, operation = torch.stack((gate, up), -1).flatten(), OPERATIONS[f"{name}.interleaved"]
    else:
        together, operation = torch.cat((gate, up)), OPERATIONS[f"{name}.joined"]
    close(operation.reference(together, **dict(params)), wanted)


def arguments(name, shape=(4, 33), dtype=torch.float32, *, together=False):
    torch.manual_seed(0)
    if together:
        shape = (*shape[:-1], 2 * shape[-1])
    gated = name in ("silu_mul", "gelu_mul", "swiglu_oai") and not together
    return {each: (torch.randn(shape) * 3).to(dtype) for each in (("input", "up") if gated else ("input",))}


@at_once("dtype", DTYPES)
@at_once("shape", [(5,), (1, 8), (4, 33), (2, 3, 16), (0, 8), (3, 0)])
@at_once("name", NAMES)
def test_a_call_gives_what_its_reference_gives(path, name, shape, dtype):
    for together in (False, True):
        assert not check(RandomCall(name, arguments(name, shape, dtype, together=together)))


@at_once("name", NAMES)
def test_nan_passes(path, name):
    given = arguments(name, (2, 8))
    given["input"][1, 3] = torch.nan
    got = getattr(lz, name)(**given)
    assert got[1, 3].isnan()
    assert int(got.isnan().sum()) == 1
    if "up" in given:
        given["input"][1, 3] = 1.0
        given["up"][0, 0] = torch.nan
        assert getattr(lz, name)(**given)[0, 0].isnan()


@at_once("name", NAMES)
def test_gradients_are_torchs(path, name):
    ours, theirs = ({n: t.requires_grad_() for n, t in arguments(name).items()} for _ in range(2))
    getattr(lz, name)(**ours).square().sum().backward()
    operation = FUNCTIONS[name].operations[0]
    operation.reference(**theirs).square().sum().backward()
    for each, leaf in ours.items():
        torch.testing.assert_close(leaf.grad, theirs[each].grad)
    assert lz.which(name, **ours)["kernel_id"] == f"torch.{name}"


@pytest.mark.parametrize("together", mostly([False, True], {True}))
@pytest.mark.parametrize("name", NAMES)
def test_compiled_code_has_one_graph(name, together):
    given = arguments(name, (4, 32), together=together)
    torch._dynamo.reset()  # the limit of recompilations counts what other functions compiled
    compiled = torch.compile(getattr(lz, name), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**given), getattr(lz, name)(**given))


@pytest.mark.parametrize("name", NAMES)
def test_inputs_are_left_as_they_are(name):
    for together in (False, True):
        given = arguments(name, together=together)
        before = {each: tensor.clone() for each, tensor in given.items()}
        getattr(lz, name)(**given)
        assert all(torch.equal(given[each], before[each]) for each in given)


@at_once(
    "name, given, message",
    [
        ("silu_mul", {"input": torch.ones(2, 7)}, "wanted gate and up in one tensor, an even last axis, got (2, 7)"),
        ("silu_mul", {"input": torch.ones(2, 7), "up": torch.ones(1, 7)}, "up: wanted shape (2, 7) like input"),
        ("silu_mul", {"input": torch.ones(2, 8), "up": torch.ones(2, 4)}, "up: wanted features 8 as in input, got 4"),
        ("silu_mul", {"input": torch.ones(2, 8), "up": torch.ones(2, 8).half()}, "up: wanted dtype float32"),
        ("gelu", {"input": torch.ones(3), "approximate": "erf"}, "approximate: wanted 'none' or 'tanh', got 'erf'"),
        ("gelu", {"input": torch.ones(3).int()}, "input: wanted dtype"),
        ("relu2", {"input": torch.tensor(1.0)}, "input: wanted at least a 1D tensor"),
        ("swiglu_oai", {"input": torch.ones(4), "limit": 0.0}, "limit: wanted a finite number above 0, got 0.0"),
        ("swiglu_oai", {"input": torch.ones(4), "alpha": math.nan}, "alpha: wanted a finite number, got nan"),
    ],
)
def test_what_means_nothing_is_refused(path, name, given, message):
    with pytest.raises(lz.InvalidCallError) as caught:
        getattr(lz, name)(**given)
    assert message in str(caught.value)


@at_once("name", NAMES)
def test_three_hundred_row_counts_are_chosen_for_a_dozen_times(path, name):
    dispatcher, chosen = CALLS[name].dispatcher, []
    choose = dispatcher.miss
    dispatcher.miss = lambda *given: chosen.append(given) or choose(*given)
    try:
        for rows in range(1, 301):
            getattr(lz, name)(torch.zeros(rows, 16))
    finally:
        del dispatcher.miss
    assert len(chosen) <= 12
