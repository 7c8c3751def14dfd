"""One capture of one kernel through the public functions, in a process that may die of it; and kernels that are unsafe.

Imported where there is a GPU, it registers them. ``work`` is what :mod:`layerzero.testing.children` runs.
"""

from __future__ import annotations

import importlib
import os
import time
from typing import Any

import msgspec
import torch
from torch import Tensor

import layerzero as lz
from layerzero.core.device import Device
from layerzero.core.kernel import Kernel
from layerzero.core.recipe import CallRecipe
from layerzero.engine.functions import CALLS
from layerzero.engine.registry import REGISTRY
from layerzero.testing import compare, execution
from layerzero.testing.child_main import Tell
from layerzero.testing.single_run import attempt, build, lost_context, other_values, raised, tensors
from layerzero.tuning.verification.child import rebuilt

UNSAFE = ("waits", "reads", "remembers", "elsewhere", "dies", "hangs")
"""What must not be captured: each is right outside of a capture, and says of itself that it is graph-safe."""

_KEPT: dict[tuple[int, ...], Tensor] = {}


class CaptureTask(msgspec.Struct, frozen=True):
    """A kernel and a call; ``modules`` register kernels."""

    kernel: str
    call: CallRecipe
    modules: list[str]


class CaptureFound(msgspec.Struct, frozen=True):
    """What came of it.

    Attributes:
        state: equal, wrong, refused, lost (the capture, which nothing refused), or left (no call of this kernel).
        detail: why.
        usable: whether eager calls and another capture work afterwards.
    """

    state: str
    detail: str = ""
    usable: bool = True


def _act(kind: str, data: Tensor, weight: Tensor, eps: float) -> Tensor:
    inside = torch.cuda.is_current_stream_capturing()
    if kind == "waits":
        torch.cuda.synchronize()
    elif kind == "reads":
        eps += float(data.flatten()[0]) * 0.0
    elif kind == "dies" and inside:
        os.abort()
    while kind == "hangs" and inside:
        time.sleep(1.0)
    if kind == "remembers" and inside:
        return _KEPT[tuple(data.shape)] * 1.0
    if kind == "elsewhere" and inside:  # on a stream that the capture does not have
        with torch.cuda.stream(torch.cuda.Stream()):
            return torch.rms_norm(data, weight.shape, weight, eps)
    result = _KEPT[tuple(data.shape)] = torch.rms_norm(data, weight.shape, weight, eps)
    return result


def _register() -> None:
    for kind in UNSAFE:
        lz.register_kernel("norm.rms", f"unsafe.{kind}", platform="cuda", graph_safe=True)(_named(kind))


def _named(kind: str) -> Any:
    def kernel(input: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        return _act(kind, input, weight, eps)

    return kernel


if torch.cuda.is_available():
    _register()


def work(job: CaptureTask, tell: Tell) -> None:
    """Capture a call as a user does, replay it with other values, and see what is left of the stream."""
    for module in job.modules:
        importlib.import_module(module)
    kernel = REGISTRY.kernel(job.kernel)
    tell.begins()
    try:
        with lz.scope(locks={job.call.operation: kernel.id}, allow_jit_compile=True, graph_strict_mode=True):
            found = _captured(kernel, job)
    except Exception as error:  # noqa: BLE001  # of making the call or of comparing
        found = CaptureFound("left", raised(error))
    if lost := lost_context(Device.detect(job.call.device)):  # what comes after it in this process is not to blame
        tell.leave(f"{found.state}: {found.detail}; {lost}")
    problem = _stream_problem(job.call.device)
    tell.found(msgspec.structs.replace(found, usable=not problem, detail=f"{found.detail} {problem}".strip()))


def _captured(kernel: Kernel, job: CaptureTask) -> CaptureFound:
    operation, first = REGISTRY.operation(job.call.operation), rebuilt(job.call)
    trial = attempt(kernel, operation, first)
    if trial is None or trial.reasons:
        return CaptureFound("left", trial.codes if trial else "no call")
    if kernel.jit:
        build(kernel, operation, first)
    call, second = execution._with_handles(trial), other_values(first)
    fixed = {name: first.arguments[name] for name in execution._packed(trial, call)}
    second = type(second)(second.function, {**second.arguments, **fixed}, second.name)
    truth = compare.for_kernel(compare.expected(second), kernel)
    function, graph = CALLS[call.function].fast, torch.cuda.CUDAGraph()
    with torch.no_grad():
        for _ in range(3):
            function(**call.arguments)
        torch.cuda.synchronize()
        try:
            with lz.capturing(graph):
                result = function(**call.arguments)
        except lz.CudaGraphUnsafeError as error:
            why = error.reasons.get(kernel.id)
            return CaptureFound("refused", str(why.got) if why else "its own limits")
        except (lz.NoKernelFoundError, lz.InvalidCallError) as error:
            return CaptureFound("refused", raised(error))
        except Exception as error:  # noqa: BLE001  # this is what is counted
            return CaptureFound("lost", raised(error))
        for name in tensors(second).keys() - fixed.keys():
            call.arguments[name].copy_(second.arguments[name])
        if not fixed:
            execution._refresh(trial, call)
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        problems = compare.problems(result, call.arguments, truth)
    return CaptureFound("wrong", "; ".join(problems)) if problems else CaptureFound("equal")


def _stream_problem(device: str) -> str:
    """What is wrong with the current stream: an eager call and another capture have to work."""
    try:
        with torch.no_grad(), lz.scope(locks={"norm.rms": "torch.rms_norm"}):
            x, weight, graph = torch.randn(4, 64, device=device), torch.ones(64, device=device), torch.cuda.CUDAGraph()
            want = torch.rms_norm(x, (64,), weight)
            eager = lz.rms_norm(x, weight)
            with lz.capturing(graph):
                captured = lz.rms_norm(x, weight) * 1.0
            graph.replay()
            torch.cuda.synchronize()
        right = all(torch.allclose(each, want, atol=1e-5) for each in (eager, captured))
    except Exception as error:  # noqa: BLE001  # this is what is counted
        return f"afterwards it {raised(error)}"
    return "" if right else "afterwards an eager call or another capture was wrong"
