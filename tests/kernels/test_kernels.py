"""Every kernel, for each operation and dtype that it has, on the operation's own cases and on random calls.

A kernel that cannot run here is skipped with the reasons that a user would get.
"""

from __future__ import annotations

import collections
import functools
import math

import pytest
import torch

import layerzero as lz
from layerzero.core import layouts
from layerzero.core.device import Device
from layerzero.engine.functions import CALLS
from layerzero.engine.probe import this_machine
from layerzero.engine.registry import REGISTRY
from layerzero.testing import case_call, check, compare, fuzz, generate, random_call
from layerzero.testing.generate import RandomCall

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RANDOM_CALLS = 30
# Kernels that compile take seconds for each class of sizes; tests/kernels/test_inductor.py covers them on a few.
KERNELS = [kernel for kernel in REGISTRY.kernels() if not kernel.jit]
PAIRS = [(kernel.id, operation) for kernel in KERNELS for operation in sorted(kernel.operations)]

pytestmark = pytest.mark.filterwarnings("ignore::layerzero.LayerZeroWarning")


@pytest.fixture(params=PAIRS, ids=lambda pair: f"{pair[0]}-{pair[1]}" if pair[0] != f"reference.{pair[1]}" else pair[0])
def pair(request):
    return REGISTRY.kernel(request.param[0]), REGISTRY.operation(request.param[1])


@pytest.fixture(params=generate.DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request):
    return request.param


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors gain nothing from more, and lose much where something else is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def locked(kernel, operation):
    return lz.scope(locks={operation.name: kernel.id}, fallback_enabled=kernel.is_reference)


def reasons(kernel, call):
    report = lz.explain(call.function, **call.arguments)
    return report.operation, report.reasons(kernel.id) if report.operation in kernel.operations else ("another",)


def small(operation):
    smallest = sorted(operation.cases, key=lambda case: math.prod(case.sizes.values()))
    return smallest[: 1 if operation.layouts else 2]


def cases(kernel, operation, dtype, layout=layouts.CANONICAL):
    """Calls of the smaller cases that the kernel may run; skips where there is none."""
    calls = [case_call(operation, case, dtype, layout=layout, device=DEVICE) for case in small(operation)]
    refused = [(call, reasons(kernel, call)[1]) for call in calls]
    legal = [call for call, why in refused if not why]
    if not legal:
        pytest.skip("; ".join(str(reason) for reason in refused[0][1]))
    return legal


def changed(call, change):
    tensors = {n: change(t) if isinstance(t, torch.Tensor) and t.ndim > 1 else t for n, t in call.arguments.items()}
    return RandomCall(call.function, tensors, call.name)


def strided(tensor):
    """The last axis in steps of two, in rows that are too long, at an odd address."""
    room = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1] + 3), math.nan)
    return room[..., 1 : 1 + 2 * tensor.shape[-1] : 2].copy_(tensor)


def transposed(tensor):
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


def with_nan(call):
    name = "query" if "query" in call.arguments else "input"
    tensor = call.arguments[name].clone()
    tensor.view(-1)[5] = math.nan
    return RandomCall(call.function, {**call.arguments, name: tensor}, f"{call.name} with NaN")


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
def test_cases(pair, dtype, layout):
    kernel, operation = pair
    if layout != layouts.CANONICAL and not operation.layouts:
        pytest.skip("the operation has no layouts")
    for call in cases(kernel, operation, dtype, layout):
        with locked(kernel, operation):
            assert check(call) == []
            assert check(with_nan(call)) == []
            for change in (strided, transposed):
                other = changed(call, change)
                if not reasons(kernel, other)[1]:
                    assert check(other) == []


def test_random_calls(pair, dtype):
    kernel, operation = pair
    function = cases(kernel, operation, dtype)[0].function
    numbers = legal_calls(function, dtype)[operation.name, kernel.id][:RANDOM_CALLS]
    assert len(numbers) >= RANDOM_CALLS // 3
    for number in numbers:
        call = random_call(1, number, function=function, dtype=dtype, device=DEVICE)
        with locked(kernel, operation):
            assert check(call) == [], call.text


@functools.cache
def legal_calls(function, dtype):
    """Numbers of random calls by the operation they are routed to and the kernels that may run them."""
    numbers = collections.defaultdict(list)
    for number in range(600 if function == "attention" else 60):
        call = random_call(1, number, function=function, dtype=dtype, device=DEVICE)
        report = lz.explain(function, **call.arguments)
        for candidate in report.candidates:
            if candidate.legal:
                numbers[report.operation, candidate.kernel.id].append(number)
    return numbers


@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_gradients(pair, wide):
    kernel, operation = pair
    if not kernel.grad:
        pytest.skip("declares no backward pass")
    call = cases(kernel, operation, wide)[0]
    exact = {name: compare.widened(value) for name, value in call.arguments.items()}
    mine, theirs = gradients(call, pair, call.arguments), gradients(call, None, exact)
    relative = 2e-2 if wide is torch.bfloat16 else 1e-4
    for name, gradient in theirs.items():
        limit = relative * gradient.abs().max().item()
        torch.testing.assert_close(
            mine[name].double(), gradient, rtol=relative, atol=limit, msg=lambda text: f"{name}: {text}"
        )


def gradients(call, pair, arguments):
    """Gradients of a weighted sum of the results, through a locked kernel or, without one, through the reference."""
    leaves = {n: t.detach().clone().requires_grad_() for n, t in arguments.items() if isinstance(t, torch.Tensor)}
    given = {name: leaves[name] * 1.0 if name in leaves else value for name, value in arguments.items()}
    kernel, operation = pair or (None, None)
    if kernel is None:
        result = compare.reference_call(compare.route(RandomCall(call.function, given)))
    else:
        with locked(kernel, operation):
            result = getattr(lz, call.function)(**given)
    result = torch.cat([each.double().flatten() for each in (result if isinstance(result, tuple) else (result,))])
    (result * torch.linspace(-1, 1, result.numel(), dtype=torch.float64, device=DEVICE)).sum().backward()
    return {name: leaf.grad for name, leaf in leaves.items()}


def test_a_deterministic_kernel_repeats_its_bits(pair, dtype):
    kernel, operation = pair
    if not kernel.deterministic:
        pytest.skip("does not promise it")
    call = cases(kernel, operation, dtype)[0]
    copies = [{n: t.clone() if isinstance(t, torch.Tensor) else t for n, t in call.arguments.items()} for _ in range(3)]
    with locked(kernel, operation):
        first, *others = (getattr(lz, call.function)(**arguments) for arguments in copies)
    assert all(torch.equal(first, other) for other in others)


def test_fuzzing_finds_a_wrong_kernel_and_says_how_to_see_it_again():
    @lz.register_kernel("norm.rms", "user.rounds_weights", priority=100)
    def rounds_weights(input, weight, *, eps=1e-6):
        return torch.nn.functional.rms_norm(input, weight.shape, weight.bfloat16().to(weight.dtype), eps)

    report = fuzz.run(60, seed=0)
    assert not report.ok
    failure = report.failures[0]
    assert failure.kernel_id == "user.rounds_weights"
    assert "times the tolerance" in failure.problem
    assert failure.reproducer in str(report)
    again = fuzz.replay(failure.seed, failure.number)
    assert [each.problem for each in again.failures if each.way == failure.way] == [failure.problem]
    only = fuzz.run(60, seed=0, kernels=["user.rounds_weights"])
    assert set(only.kernels) == {"user.rounds_weights"}


def test_fuzzing_finds_a_kernel_that_raises_or_writes_into_its_arguments():
    @lz.register_kernel("norm.rms", "user.raises", priority=100, supported_dtypes=["float32"])
    def raises(input, weight, *, eps=1e-6):
        raise RuntimeError("planted")

    @lz.register_kernel("norm.rms", "user.writes", priority=99, supported_dtypes=["bfloat16"])
    def writes(input, weight, *, eps=1e-6):
        result = torch.nn.functional.rms_norm(input, weight.shape, weight, eps)
        input.zero_()
        return result

    found = {(failure.kernel_id, failure.problem.split(":")[0]) for failure in fuzz.run(60, seed=0).failures}
    assert ("user.raises", "user.raises failed in norm.rms (RuntimeError") in found
    assert ("user.writes", "input") in found


def test_fuzzing_covers_every_function_and_every_kernel_that_can_run_here():
    assert set(generate.FUNCTIONS) == set(CALLS)
    report = fuzz.run(600, seed=0, device=DEVICE)
    assert report.ok, str(report)
    assert report.calls == 600
    assert report.reused > 20
    device = Device.detect(DEVICE)
    here = {
        kernel.id
        for kernel in REGISTRY.kernels()
        if this_machine().state(kernel.backend, device).reason is None and device.platform in kernel.backend.platforms
    }
    ran = set(report.kernels)
    assert ran <= here
    assert {each for each in here if each.startswith(("reference.", "torch.sdpa.math", "torch.rms"))} <= ran


def test_a_call_is_the_same_wherever_it_is_drawn():
    for number in range(20):
        first, again = random_call(3, number), random_call(3, number)
        other = random_call(3, number, data=1)
        assert first.text == again.text == other.text
        for name, value in first.arguments.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value.nan_to_num(7), again.arguments[name].nan_to_num(7))
