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

import msgspec
import torch
from torch import Tensor

from layerzero.asking.answers import facts as facts_of
from layerzero.core.errors import KernelExecutionError, LayerZeroError
from layerzero.core.kernel import Kernel
from layerzero.core.recipe import CallRecipe
from layerzero.engine.config import SCOPES
from layerzero.engine.failing import out_of_memory
from layerzero.engine.functions import CALLS
from layerzero.engine.registry import REGISTRY
from layerzero.ops.recipes import arguments_of_recipe
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
    random = [each.name for each in schema.params if each.random and recipe.params.get(each.name) != each.neutral]
    if random:
        return PASSED, f"it ran; {', '.join(random)} leaves nothing to compare"
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
    function, arguments = arguments_of_recipe(recipe, REGISTRY.operation(recipe.operation))
    return RandomCall(function.name, arguments)


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
