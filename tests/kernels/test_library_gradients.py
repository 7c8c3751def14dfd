"""Libraries' kernels with backward passes: results and gradients are the reference's, with every argument.

On a GPU all that is installed is run. On a CPU Triton's interpreter runs Liger's, where TRITON_INTERPRET=1 is set and
``pip install --no-deps triton==3.9.0 liger-kernel==0.8.5`` came beside a torch for CPUs. It shows no race between
threads, and nothing of what a GPU's compiler makes of the kernels. Skipped elsewhere.
"""

from __future__ import annotations

import pytest
import torch
from triton_interpreter import CALLS, DEVICE, DRAWS, here, interpreting

import layerzero as lz
from layerzero.engine.registry import REGISTRY
from layerzero.testing.generate import RandomCall, draw, drawn_numbers
from layerzero.testing.quick_checks import gradients
from layerzero.testing.single_run import attempt

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(r"ignore:cutlass\..* is deprecated:DeprecationWarning"),  # the CuTe DSL, of quack's use
    pytest.mark.filterwarnings("ignore:Argument aux_data .*JitArgument:UserWarning"),  # of FlashAttention 4's
]

LIBRARIES = ("liger", "quack", "flash_attn")
PAIRS = [(kernel, each) for kernel in REGISTRY.kernels() if kernel.backend.name in LIBRARIES and kernel.grad
         for each in kernel.operations]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def interpreter():
    """CUDA's functions are not the interpreter's."""
    with interpreting() as found:
        if found is None:
            yield
            return
        pytest.importorskip("liger_kernel")
        patch, tl = found
        from liger_kernel.ops import cross_entropy, geglu, layer_norm, rms_norm

        for module in (cross_entropy, geglu):
            patch.setattr(module, "tanh", lambda value: 2.0 * tl.sigmoid(2.0 * value) - 1.0)
        for module in (rms_norm, layer_norm):
            patch.setattr(module, "rsqrt", lambda value: tl.math.rsqrt(value))
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kernel", "name"), PAIRS, ids=[f"{kernel.id} of {name}" for kernel, name in PAIRS])
def test_results_and_gradients(kernel, name, dtype):
    kernel, operation, passed, refused = here(kernel), REGISTRY.operation(name), 0, "no call"
    by_chance = {each.name for each in operation.schema.params if each.random}
    for number in drawn_numbers(operation, dtype, 0, DRAWS):
        call = draw(operation, dtype, 0, number, DEVICE)
        if by_chance & call.arguments.keys():
            continue
        with lz.scope(allow_jit_compile=True):
            trial = attempt(kernel, operation, call)
            if trial.reasons:
                refused = trial.codes
                continue
            found = trial.outcome()
            assert found.status == "passed", (call.text, found.message)
            if all(each.isfinite().all() for each in call.arguments.values() if isinstance(each, torch.Tensor)):
                found = gradients(trial)
                assert found.status in ("passed", "refused"), (call.text, found.message)
                passed += found.status == "passed"
        if passed == CALLS:
            break
    if not passed:
        pytest.skip(f"it takes none of these calls here: {refused}")


def test_backward_passes_leave_what_they_were_given_alone():
    """Liger's own functions write over gate, up and logits, and multiply gradients again in a second pass."""
    gate, up, logits, target = torch.randn(3, 8), torch.randn(3, 8), torch.randn(4, 8), torch.tensor([0, 7, -100, 3])
    for name, arguments in (("mlp.silu_mul", (gate, up)), ("loss.cross_entropy", (logits, target))):
        kernel = here(next(kernel for kernel, each in PAIRS if each == name and kernel.backend.name == "liger"))
        given = [each.to(DEVICE).clone().requires_grad_(each.is_floating_point()) for each in arguments]
        schema = REGISTRY.operation(name).schema
        call = RandomCall(name.split(".")[1], dict(zip([each.name for each in schema.required], given, strict=True)))
        with lz.scope(allow_jit_compile=True):
            result = attempt(kernel, REGISTRY.operation(name), call).run(**call.arguments)
        result.sum().backward(retain_graph=True)
        assert all(map(torch.equal, (each.detach().cpu() for each in given), arguments))
        first = given[0].grad.clone()
        if name == "mlp.silu_mul":
            result.sum().backward()
            torch.testing.assert_close(given[0].grad, 2 * first)
        else:
            with pytest.raises(RuntimeError, match="wanted one backward pass"):
                result.sum().backward()
