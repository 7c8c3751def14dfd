"""``python -m layerzero.tuning.proving.child ANSWER < question``: run a kernel on a call, where a crash hurts nobody.

The question is a :class:`Question` in JSON on stdin. The answer is a file: from before the kernel is called it says
``running``, so that a process that dies leaves the truth, and then what was found.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from layerzero.asking.answers import facts as facts_of
from layerzero.core.dtypes import dtype_named
from layerzero.core.errors import KernelExecutionError, LayerZeroError
from layerzero.core.kernel import Kernel
from layerzero.core.operation import Case
from layerzero.core.recipe import CallRecipe, TensorRecipe
from layerzero.engine.config import SCOPES
from layerzero.engine.failing import out_of_memory
from layerzero.engine.functions import CALLS
from layerzero.engine.registry import REGISTRY
from layerzero.ops import function_of
from layerzero.testing.compare import copied
from layerzero.testing.generate import RandomCall
from layerzero.tuning.measuring.truth import truth_of

UNKNOWN, RUNNING, PASSED, WRONG, CRASHED = "unknown", "running", "passed", "wrong", "crashed"


class Question(msgspec.Struct, frozen=True):
    """Which kernel, which call, the modules to import first, and whether the result is compared with the reference."""

    kernel: str
    call: CallRecipe
    modules: list[str]
    compare: bool = True


class Reply(msgspec.Struct, frozen=True):
    """What was found, and a line about it."""

    state: str
    detail: str = ""


def main(answer: Path, question: Question) -> None:
    """Answer a question."""

    def say(state: str, detail: str = "") -> None:
        answer.write_bytes(msgspec.json.encode(Reply(state, detail)))

    ask(question, say)


def ask(question: Question, say: Callable[..., None]) -> None:
    """Run a kernel on a call; say that it runs, then what was found."""
    try:
        kernel = _kernel(question)
        call = rebuilt(question.call)
        locks = {question.call.operation: kernel}
        with SCOPES.scope({"locks": locks, "fallback_enabled": False, "allow_jit_compile": True}):
            say(RUNNING)
            say(*_found(call, question, REGISTRY.kernel(kernel)))
    except KernelExecutionError as error:
        say(CRASHED, f"it raised {type(error.__cause__).__name__}: {error.__cause__}")
    except (LayerZeroError, LookupError, ImportError, ValueError) as error:  # not legal here, not known here
        say(UNKNOWN, str(error))
    except Exception as error:  # noqa: BLE001  # of making the call or of comparing: it says nothing about the kernel
        short = "too little memory" if out_of_memory(error) else f"it could not be asked: {type(error).__name__}"
        say(UNKNOWN, f"{short}: {error}")


def _kernel(question: Question) -> str:
    """The kernel's id, once somebody registered it."""
    for module in question.modules:
        importlib.import_module(module)
    try:
        return REGISTRY.kernel(question.kernel).id
    except KeyError:
        raise LookupError(
            f"{question.kernel} cannot be run in a child process, which does not know it: register it through an entry "
            "point, or name the module that registers it with --module"
        ) from None


def _found(call: RandomCall, question: Question, kernel: Kernel) -> tuple[str, str]:
    """Run the call, with its backward pass where it had one, then compare with the reference."""
    recipe = question.call
    arguments = {name: copied(value) for name, value in call.arguments.items()}
    schema = REGISTRY.operation(recipe.operation).schema
    backward = recipe.requires_grad and not schema.mutated
    with torch.set_grad_enabled(backward):
        for tensor in schema.required if backward else ():
            arguments[tensor.name].requires_grad_()
        result = CALLS[call.function].fast(**arguments)
        first = result[0] if isinstance(result, tuple) else result
        if isinstance(first, Tensor) and first.requires_grad:
            first.float().sum().backward()  # type: ignore[no-untyped-call]
    if recipe.device == "cuda":
        torch.cuda.synchronize()
    if not question.compare:
        return PASSED, "it ran"
    if call.arguments.get("dropout_p"):
        return PASSED, "it ran; dropout leaves nothing to compare"
    try:
        facts = facts_of(call.function, **call.arguments)
        problems = truth_of(call, facts).problems(kernel, CALLS[call.function].fast)
    except Exception as error:
        if not out_of_memory(error):
            raise
        return PASSED, "it ran; the call is too large to compare with the reference"
    return (WRONG, "; ".join(problems)) if problems else (PASSED, "its result is the reference's")


def rebuilt(recipe: CallRecipe) -> RandomCall:
    """Make the call again, with random data in the same sizes, strides and alignment."""
    torch.manual_seed(0)
    function = function_of(recipe.operation)
    if function is None:
        raise LookupError(f"{recipe.operation} belongs to no public function, so nothing can call it")
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in recipe.params.items()
    }
    values |= {name: _tensor(name, each, recipe) for name, each in recipe.tensors.items()}
    for name, indices in _indices(recipe).items():
        values[name].copy_(indices)
    for name in REGISTRY.operation(recipe.operation).schema.bounds:  # what the call promised, its values keep
        if values[name] is not None:
            values[f"{name.removeprefix('max_')}s"].clamp_(max=values[name])
    for name in function.handles:  # of the kind that the call had
        kind, param = values.pop(name, "none"), function.param(name)
        if kind != "none" and param is not None and param.make is not None:
            values[name] = param.make(values, kind == "capturable")
    values["layout"] = recipe.layout
    values.setdefault("causal", False)  # a single query's operation has no such argument, but its function does
    accepted = {parameter.name for parameter in function.parameters}
    return RandomCall(function.name, {name: value for name, value in values.items() if name in accepted})


def _indices(recipe: CallRecipe) -> dict[str, Tensor]:
    """Values of the tensors that hold indices, as the operation's own examples have them at these sizes."""
    operation = REGISTRY.operation(recipe.operation)
    names = [name for name, each in recipe.tensors.items() if _holds_indices(name, each)]
    if not names:
        return {}
    if operation.examples is None:
        raise LookupError(f"{names[0]} holds indices, whose values are not known: the call cannot be made again")
    sizes: dict[str, int] = {}
    for schema in operation.schema.inputs:
        if schema.name in recipe.tensors:
            sizes |= zip(
                schema.axes_in(recipe.layout, operation.schema.canonical),
                recipe.tensors[schema.name].shape,
                strict=True,
            )
    # On the call's device: an H200's host took most of a minute for a large cache that is thrown away (2026-11-21).
    made = operation.examples(Case("again", sizes), torch.bfloat16, torch.device(recipe.device), None)
    return {name: made[name] for name in names}


def _holds_indices(name: str, recipe: TensorRecipe) -> bool:
    return recipe.dtype.startswith("int") and name != "kv_lens"


def _tensor(name: str, recipe: TensorRecipe, call: CallRecipe) -> Tensor:
    dtype = dtype_named(recipe.dtype)
    offset = recipe.alignment_bytes // dtype.itemsize if recipe.alignment_bytes < 16 else 0
    last = sum(max(size - 1, 0) * step for size, step in zip(recipe.shape, recipe.strides, strict=True))
    count = offset + last + 1
    if dtype.is_floating_point:
        memory = torch.randn(count, device=call.device, dtype=torch.float32).to(dtype)
    elif dtype is torch.bool:
        memory = torch.rand(count, device=call.device) < 0.9
    elif name == "kv_lens":
        axis = 1 if call.layout == "BSHD" else 2
        memory = torch.full((count,), call.tensors["key"].shape[axis], device=call.device, dtype=dtype)
    else:
        memory = torch.zeros(count, device=call.device, dtype=dtype)
    return memory.as_strided(recipe.shape, recipe.strides, offset)


@contextmanager
def quiet() -> Iterator[None]:
    """Warnings are for a call's user, who is not here."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


if __name__ == "__main__":
    with quiet():
        main(Path(sys.argv[1]), msgspec.json.decode(sys.stdin.buffer.read(), type=Question))
