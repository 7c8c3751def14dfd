"""Gradients through torch's operators: of functions that write in compiled code; and gradients of gradients."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from torch.autograd.functional import hessian
from torch.utils.flop_counter import FlopCounterMode

import layerzero as lz
from drawing import examples, mostly
from layerzero.backends.gradients import once
from layerzero.engine.functions import CALLS
from layerzero.ops import FUNCTIONS
from layerzero.testing.generate import random_call

pytestmark = pytest.mark.filterwarnings("ignore::layerzero.LayerZeroFallbackWarning")

CODES = {"append_quantized_kv_"}
"""What writes codes, which have no gradient."""

TABLES = {"cos", "sin"}
"""What no model learns: torch cannot write into queries that the gradient of these needs as they were."""


def written(name):
    return sorted({each for operation in FUNCTIONS[name].operations for each in operation.schema.mutated})


WRITE = sorted(name for name in FUNCTIONS if written(name) and name not in CODES)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def learns(name, value):
    return isinstance(value, torch.Tensor) and value.is_floating_point() and name not in TABLES


def loss_of(name):
    """A number that reads all that a call gives, and what it wrote."""

    def loss(leaves):
        given = {key: value * 1 if learns(key, value) else value for key, value in leaves.items()}
        found = CALLS[name].fast(**given)
        results = [*(found if isinstance(found, tuple) else (found,)), *(given[each] for each in written(name))]
        return sum((each * each).sum() for each in results if each is not None)

    return loss


def gradients(loss, arguments):
    leaves = {key: each.clone().requires_grad_() if learns(key, each) else each for key, each in arguments.items()}
    loss(leaves).backward()
    return {key: each.grad for key, each in leaves.items() if learns(key, each)}


def test_which_functions_write():
    assert {"add_residual_rms_norm_", "add_rms_norm_", "rope_", "append_kv_", "add_residual_"} <= set(WRITE)


QUICK = {"add_residual_rms_norm_", "rope_", "append_kv_"}


@pytest.mark.parametrize(
    "name", [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in WRITE]
)
def test_gradients_are_those_of_calls_that_are_not_compiled(name):
    arguments = random_call(5, 0, function=name, dtype=torch.float32).arguments
    wanted = gradients(loss_of(name), arguments)
    got = gradients(torch.compile(loss_of(name), backend="aot_eager", fullgraph=True), arguments)
    assert wanted
    for key, each in wanted.items():
        torch.testing.assert_close(got[key], each, rtol=1e-4, atol=1e-4, msg=lambda told, key=key: f"{key}: {told}")


def test_under_autocast_the_reference_keeps_its_types():
    arguments = random_call(5, 0, function="add_residual_rms_norm_", dtype=torch.float32).arguments
    with torch.autocast("cpu", torch.bfloat16):
        wanted = gradients(loss_of("add_residual_rms_norm_"), arguments)
        got = gradients(
            torch.compile(loss_of("add_residual_rms_norm_"), backend="aot_eager", fullgraph=True), arguments
        )
    for key, each in wanted.items():
        torch.testing.assert_close(got[key], each, rtol=1e-4, atol=1e-4)


def test_gradients_of_what_was_drawn_are_those_of_the_draw():
    """A result is linear in its values, so that their gradient gives it again, if the same weights were dropped."""
    arguments = {key: torch.randn(2, 5, 3, 8, requires_grad=True) for key in ("query", "key", "value")}
    factors = torch.randn(2, 5, 3, 8)

    def attend():
        return (lz.attention(**arguments, dropout_p=0.5, layout="BSHD") * factors).sum()

    for compiled in (True, False):
        with contextlib.nullcontext() if compiled else FlopCounterMode(display=False):
            found = [(torch.compile(attend, backend="aot_eager", fullgraph=True) if compiled else attend)()]
            found += [attend()]
        assert found[0] != found[1]
        for each in found:
            (gradient,) = torch.autograd.grad(each, arguments["value"])
            torch.testing.assert_close((arguments["value"] * gradient).sum(), each)


def test_gradients_of_gradients_lead_back_through_operators():
    """What a dispatch mode counts runs as an operator, whose gradients were constants to the next pass."""
    arguments = random_call(5, 0, function="rms_norm", dtype=torch.float64).arguments

    def second(mode):
        leaves = {key: each.clone().requires_grad_() if learns(key, each) else each for key, each in arguments.items()}
        wanted = [each for each in leaves.values() if learns("", each)]
        with mode:
            result = CALLS["rms_norm"].fast(**leaves)
        first = torch.autograd.grad(result.sum(), wanted, create_graph=True)
        return torch.autograd.grad(sum(each.square().sum() for each in first), wanted)

    torch.testing.assert_close(second(FlopCounterMode(display=False)), second(contextlib.nullcontext()))


def rounded(value):
    """A leaf of float64, or what no gradient leads to."""
    return isinstance(value, torch.Tensor) and value.dtype is torch.float64


def drawn(name):
    """Random calls in float64: the tensors that gradients lead to, and a loss of them."""
    for number in range(max(3, examples(12))):
        arguments = random_call(7, number, function=name, dtype=torch.float64).arguments
        arguments = {key: each for key, each in arguments.items() if not key.startswith("packed")}
        leaves = {key: each.detach() for key, each in arguments.items() if rounded(each)}

        def loss(*tensors, arguments=arguments, names=tuple(leaves)):
            copies = {key: each.clone() for key, each in arguments.items() if key in written(name)}
            given = arguments | copies | {key: each * 1 for key, each in zip(names, tensors, strict=True)}
            found = CALLS[name].fast(**given)
            results = [*(found if isinstance(found, tuple) else (found,)), *(given[each] for each in written(name))]
            seen = [each.masked_fill(each.isinf(), 0.0) for each in results if rounded(each)]
            return sum((each * (0.7 + 0.5 * each)).sum() for each in seen)

        yield arguments, leaves, loss


def seconds(loss, leaves, directions):
    """How a gradient along given directions changes with each leaf; None where there is no gradient."""
    tensors = [each.clone().requires_grad_() for each in leaves.values()]
    found = loss(*tensors)
    if not isinstance(found, torch.Tensor) or not found.requires_grad:
        return None
    first = torch.autograd.grad(found, tensors, create_graph=True, allow_unused=True)
    along = sum((one * each).sum() for one, each in zip(first, directions, strict=True) if one is not None)
    if not along.requires_grad:
        return tuple(map(torch.zeros_like, tensors))
    return torch.autograd.grad(along, tensors, allow_unused=True, materialize_grads=True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own jvp
@pytest.mark.parametrize("name", mostly(sorted(FUNCTIONS), {"attention", "linear_cross_entropy", "append_paged_kv_"}))
def test_gradients_of_gradients_are_right_or_refused(name):
    """Of each kernel that may run, and inside torch.func, where the reference does."""
    for arguments, leaves, loss in drawn(name):
        directions = tuple(each.sin() for each in leaves.values())
        try:
            report = explained(name, arguments)
            with lz.scope(locks={report.operation: "reference"}):
                wanted = seconds(loss, leaves, directions)
        except (RuntimeError, lz.InvalidCallError):  # collectives, and views that torch lets nothing write into
            continue
        if wanted is None:
            continue

        def transformed(loss=loss, leaves=leaves, directions=directions):
            gradient = torch.func.grad(loss, argnums=tuple(range(len(leaves))))
            return torch.func.jvp(gradient, tuple(leaves.values()), directions)[1]

        ways = {"torch.func": ("reference", transformed)}
        for each in report.candidates:
            if not each.reasons:
                ways[each.kernel.id] = each.kernel.id, functools.partial(seconds, loss, leaves, directions)
        for way, (kernel, compute) in ways.items():
            try:
                with lz.scope(locks={report.operation: kernel}):
                    got = compute()
            except RuntimeError:
                continue
            torch.testing.assert_close(
                got, wanted, rtol=1e-6, atol=1e-6, equal_nan=True, msg=lambda told, way=way: f"{way}: {told}"
            )


def explained(name, arguments):
    given = {key: each.clone().requires_grad_() * 1 if rounded(each) else each for key, each in arguments.items()}
    return lz.explain(getattr(lz, name), **given)


def test_a_token_without_a_slot_leaves_the_gradient_of_the_token_that_stands_for_it():
    key, cache = torch.ones(3, 2, 4, requires_grad=True), torch.ones(2, 2, 2, 4)
    lz.append_paged_kv_(key, key.detach(), cache, cache.clone(), torch.tensor([1, -1, 2]))
    cache.sum().backward()
    assert key.grad[:, 0, 0].tolist() == [1.0, 0.0, 1.0]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # from torch's own jvp
def test_a_hessian_of_a_kernel_whose_gradients_have_none_is_refused():
    """torch.autograd.functional takes a gradient without a graph for a constant: it was 0."""
    hidden, weight, target = torch.randn(4, 8), torch.randn(16, 8), torch.arange(4)

    def loss(hidden):
        return lz.linear_cross_entropy(hidden, weight, target)

    with pytest.raises(RuntimeError, match=r"without create_graph, got create_graph=True.*'reference'"):
        hessian(loss, hidden)
    with lz.scope(locks={"loss.linear_cross_entropy": "reference"}):
        wanted = hessian(loss, hidden)
    assert wanted.any()
    torch.testing.assert_close(torch.func.hessian(loss)(hidden), wanted)


def test_a_kernel_that_gives_a_list_or_a_number_is_refused_the_same_way():
    leaf = torch.ones(2, requires_grad=True)
    doubled, number = once(lambda given: [given * 2, 3], "an operation")(leaf)
    assert number == 3
    with pytest.raises(RuntimeError, match="an operation: wanted a backward pass without create_graph"):
        torch.autograd.grad(doubled.sum(), leaf, create_graph=True)


def test_a_kernel_that_gives_its_input_back_leaves_the_callers_graph_alone():
    leaf = torch.ones(2, requires_grad=True)
    rows = leaf.square()
    assert once(lambda each: (each, each * each), "norm.rms")(rows)[0] is rows
    (first,) = torch.autograd.grad(rows.sum(), leaf, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(first.sum(), leaf), (torch.full((2,), 2.0),))
