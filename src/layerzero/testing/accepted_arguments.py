"""Every argument that a kernel accepts, away from the value at which it does nothing: else it could be ignored unseen.

Calls that have it are made of the base case, then looked for among random calls. One counts only if the truth without
the argument is another: a kernel that ignores it is wrong there.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from layerzero.core.arguments import REQUIRED, Param, Role
from layerzero.core.errors import InvalidCallError
from layerzero.core.kernel import Kernel
from layerzero.core.operation import Operation
from layerzero.ops.calls import drawn, dtype_for, in_layout, shape_of
from layerzero.ops.draw import Draw
from layerzero.testing import compare
from layerzero.testing.compare import draws
from layerzero.testing.generate import RandomCall
from layerzero.testing.randomness import drawn_fairly
from layerzero.testing.single_run import Finding, Trial, attempt

LOOKS = 12
"""Calls whose truth is compared with that of the same call without the argument, at most."""


def checked(kernel: Kernel, operation: Operation) -> list[str]:
    """The arguments that the kernel accepts and that a call may leave out or leave neutral."""
    neutral = {each.name for each in operation.schema.params if each.neutral is not REQUIRED}
    optional = {tensor.name for tensor in operation.schema.optional}
    return [name for name in kernel.accepts if name in neutral | optional]


def exercised(base: Trial, name: str, pool: Callable[[], Iterable[RandomCall]]) -> Finding:
    """Run the kernel on a call in which the argument matters."""
    operation = base.facts.operation
    schema = operation.schema
    param = next((each for each in schema.params if each.name == name), None)
    if param is not None and param.random:
        return _said_by_properties(operation, name)
    seeds = any(each.seeds for each in schema.inputs if each.name == name) or (param is not None and param.seeds)
    silent = name in schema.promises or seeds
    refused, seen, looks = Counter[str](), 0, 0
    for call in itertools.chain(_made(base, name, param), pool()):
        if not _away(call, name, param):
            continue
        seen += 1
        trial = attempt(base.kernel, operation, call)
        if trial is None or trial.reasons:
            refused[trial.codes if trial else "no call"] += 1
            continue
        try:
            truth = trial.truth()
        except InvalidCallError:  # a tensor that was drawn for it means nothing: no probabilities, say
            refused["a value that means nothing"] += 1
            continue
        if not silent:
            looks += 1
            if looks > LOOKS:
                break
            if not _matters(call, name, param, truth):
                continue
        outcome = drawn_fairly(trial) if draws(operation) else trial.outcome(truth)
        if outcome.status == "wrong":
            return Finding("wrong", f"{call.name}: {call.text}: {outcome.message}")
        return Finding(outcome.status, outcome.message or call.name)
    return Finding("not tried", f"{name}: {_why(seen, refused, looks)}")


def _said_by_properties(operation: Operation, name: str) -> Finding:
    claims = [each.name for each in operation.properties if name in each.arguments]
    if claims:
        return Finding("passed", f"see property {', '.join(claims)}")
    return Finding("not tried", f"{name}: its results are random, and no property of {operation.name} speaks of it")


def _why(seen: int, refused: Counter[str], looks: int) -> str:
    if not seen:
        return "no call gives it a value of its own: it has no example, and no random call has it"
    if looks:
        return f"it changes the result of none of {min(looks, LOOKS)} calls"
    ((codes, _),) = refused.most_common(1)
    return f"refused with {codes} in each of {seen} calls that give it a value of its own"


def _away(call: RandomCall, name: str, param: Param | None) -> bool:
    value = call.arguments.get(name)
    if param is None or param.role is not Role.CHOSEN:
        return value is not None
    return name in call.arguments and value != param.neutral


def _matters(call: RandomCall, name: str, param: Param | None, truth: compare.Expected) -> bool:
    """Whether the same call without the argument has another truth."""
    plain = RandomCall(call.function, {**call.arguments, name: None if param is None else param.neutral}, call.name)
    try:
        without = compare.expected(plain)
    except InvalidCallError:  # the call needs it
        return True
    if any(not _alike(given.basis, without.judges[key][1].basis) for key, (_, given) in truth.judges.items()):
        return True
    rounded = tuple(result.to(dtype) for result, dtype in zip(without.results, without.dtypes, strict=True))
    written = {key: value.to(call.arguments[key].dtype) for key, value in without.mutated.items()}
    return bool(compare.problems(rounded or None, written, truth))


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())
    if isinstance(one, tuple) and isinstance(other, tuple):
        return all(_alike(*pair) for pair in zip(one, other, strict=True))
    return True


def _made(base: Trial, name: str, param: Param | None) -> Iterator[RandomCall]:
    """The base call, if it has the argument; else with it, alone and with every other parameter neutral."""
    if _away(base.call, name, param):
        yield base.call
        return
    others = [each for each in base.facts.operation.schema.params if each.name in base.call.arguments]
    neutral = {each.name: each.neutral for each in others if each.neutral is not REQUIRED}
    for arguments in (base.call.arguments, {**base.call.arguments, **neutral}):
        value = _tensor(base, name) if param is None else _value(param, base, arguments)
        if value is not None:
            yield RandomCall(base.call.function, {**arguments, name: value}, f"{base.call.name}, {name} given")


def _value(param: Param, base: Trial, arguments: Mapping[str, Any]) -> object:
    if param.role is Role.HANDLE and param.make is not None:
        return param.make(arguments, False)
    if param.example is not None:
        return param.example
    if param.role is Role.BOUND and param.made_of:
        return max(base.facts.operation.schema.tensor(param.made_of[0]).most(base.facts.sizes()), 1)
    if bool in param.kinds:
        return not param.neutral
    return 1 if param.seeds and int in param.kinds else None


def _tensor(base: Trial, name: str) -> Tensor | None:
    """An optional tensor for the sizes of the base call; None where the schema does not say its shape."""
    operation, sizes = base.facts.operation, base.facts.sizes()
    tensor = operation.schema.tensor(name)
    shape = shape_of(tensor, sizes, operation.schema.leading)
    if shape is None:
        return None
    draw = Draw(f"{base.call.name}, {name}", 0, base.facts.device.torch_type)
    dtype = dtype_for(tensor, compare.call_dtype(base.routed))
    made = drawn(tensor, shape, dtype, torch.device(base.facts.device.torch_type), sizes, draw.data)
    layout = base.facts.layout
    return in_layout(made, layout, operation) if tensor.has_layout and layout is not None else made
