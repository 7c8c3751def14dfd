"""Write the hit path of a function in Python: its public signature, an exact key of its arguments, one table lookup.

It serves where the C path is missing, and whatever that one cannot read; the key holds the same.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

from layerzero.core.arguments import Role
from layerzero.core.eager_state import declared
from layerzero.core.facts import told_bytes
from layerzero.core.operation import Function

_NO_KEY = "(TypeError, RuntimeError, AttributeError)"
"""What reading a key raises: no hash (a list), no strides and address (sparse, nested), no handle where one belongs."""


def source(function: Function) -> str:
    """Write the fast path of a function.

    The key holds, for every tensor, shape, strides, dtype, device, the low bits of its address and whether it asks for
    gradients; every other argument by value; and the eager state. Whatever a limit reads is in it, so a plan that is
    found is legal for the call that found it. The negative bit alone is checked where the plan's kernel would misread
    it: a plan chosen for a call without it is the one that a call with it gets, too, if its kernel reads it rightly.
    """
    names = [parameter.name for parameter in function.parameters]
    given = ", ".join(names)
    required, optional = _tensors(function)
    negated = " or ".join(
        f"{name}.is_neg()" if name in required else f"({name} is not None and {name}.is_neg())"
        for name in [*required, *optional]
    )
    lines = [
        f"def {function.name}({_signature(function)}, **_unknown):",
        "    if _unknown or _beyond:",
        f"        return _misfit(_unknown, _beyond, {given})",
        *(
            line
            for name, number in function.given_as.items()
            for line in (f"    if isinstance({number}, _Tensor):", f"        {name}, {number} = {number}, None")
        ),
        "    if _compiling():",
        f"        return _operator({given})",
        f"    if {_unusual_text(function)}:",
        f"        return _unusual({given})",
        "    try:",
        f"        _key = {_key_text(function)}",
        "        _table = _cache.current if not _scopes.active else _scoped()",
        "        _last, _plan = _table.last",
        "        if _key != _last:  # comparing costs less than hashing, and most calls are like the one before",
        "            _plan = _table.seen.get(_key)",
        "            if _plan is not None:",
        "                _table.last = _key, _plan",
        f"    except {_NO_KEY}:",
        f"        return _unusual({given})",
        f"    if _plan is None or (not _plan.reads_negated and ({negated})):",
        f"        return _miss(_key, {given})",
        "    _plan.used = True",
        "    try:",
        f"        return _plan.run({given})",
        "    except Exception as _error:",
        f"        return _failed(_plan, _error, {given})",
    ]
    return "\n".join(lines) + "\n"


def key_source(function: Function) -> str:
    """Write ``key_of``: the same key of the same arguments, all given; None for a call that makes none."""
    lines = [
        f"def key_of({', '.join(parameter.name for parameter in function.parameters)}):",
        f"    if {_unusual_text(function)}:",
        "        return None",
        "    try:",
        f"        return {_key_text(function)}",
        f"    except {_NO_KEY}:",
        "        return None",
    ]
    return "\n".join(lines) + "\n"


def _tensors(function: Function) -> tuple[list[str], list[str]]:
    parameters = function.parameters
    required = [p.name for p in parameters if p.name in function.tensors and p.default is inspect.Parameter.empty]
    return required, [name for name in function.tensors if name not in required]


def _unusual_text(function: Function) -> str:
    """The test for what makes no key: subclasses, modes, transforms, and values that only look like legal ones."""
    names = [parameter.name for parameter in function.parameters]
    required, optional = _tensors(function)
    checks = [f"(type({name}) is not _Tensor and type({name}) not in _PLAIN)" for name in required]
    checks += [f"({name} is not None and type({name}) not in _PLAIN)" for name in optional]
    checks += _odd_values(function, names)
    for name in function.mutates:  # what makes writing into it an error is looked at on every call
        pairs = {each: frozenset({name, each}) for each in required if each != name}
        others = [each for each, pair in pairs.items() if pair not in function.may_share_storage]
        checks += [f"({name}.requires_grad and {name}.is_leaf)", f"{name}.is_inference() and not _inference()"]
        checks += [f"_shares_memory({name}, {other})" for other in others]
    for pair in function.may_share_storage:
        checks.append(" == ".join(f"{name}.data_ptr()" for name in sorted(pair)) + " != 0")  # 0 of empty tensors
    checks += [f"({name} is not None and (type({name}) is not int or {name} < 1))" for name in function.bounds]
    checks += [_unpassable(function, name) for name in function.scalars]
    checks += ["_dispatch_modes()", "_function_modes()", "_transforms() is not None", "_forward_ad._current_level >= 0"]
    checks.append("_tracing()")
    return " or ".join(checks)


def _key_text(function: Function) -> str:
    names = [parameter.name for parameter in function.parameters]
    required, optional = _tensors(function)
    parts = [
        _tensor_key(name) if name in required else f"None if {name} is None else {_tensor_key(name, asked=True)}"
        for name in names
        if name in function.tensors
    ]
    parts += [_value_key(function, name) for name in names if name not in function.tensors]
    parts += ["_grad_enabled() and (" + _any_grad(required, optional) + ")", "_deterministic()", "_autocast()"]
    parts += _asked(function, required, optional)
    pairs = [sorted(pair) for pair in function.may_share_storage if pair & set(function.mutates)]
    parts += [
        f"_apart_by({', '.join(pair)})" for pair in pairs
    ]  # what was proved of one place is not believed of another
    parts.append("_threads()")  # the last, where a bound callable looks for it
    return f"({', '.join(parts)})"


def _asked(function: Function, required: list[str], optional: list[str]) -> list[str]:
    """The answers to what the function's state is read by; None where a question means nothing for the tensors."""
    found = []
    for state in declared(function.state):
        of_dtype = [f"{name}.dtype is _dtype_{state.name}" for name in required]
        of_dtype += [f"({name} is not None and {name}.dtype is _dtype_{state.name})" for name in optional]
        on_cuda = [f"{name}.is_cuda" for name in required]
        on_cuda += [f"({name} is not None and {name}.is_cuda)" for name in optional if not required]
        for place, question in enumerate(state.questions):
            tests = [f"({' or '.join(of_dtype)})"] if state.dtype is not None else []
            if question.cuda is not None:
                tests.append(f"{'' if question.cuda else 'not '}({' or '.join(on_cuda[:1] or on_cuda)})")
            asked = f"_ask_{state.name}_{place}({', '.join(map(repr, question.given))})"
            found.append(f"({asked} if {' and '.join(tests)} else None)" if tests else asked)
    return found


def _tensor_key(name: str, *, asked: bool = False) -> str:
    gradient = f", {name}.requires_grad" if asked else ""
    memory = f"{name}.shape, {name}.stride(), {name}.dtype, {name}.device, {name}.data_ptr() & 15"
    return f"({memory}{gradient})"


def _value_key(function: Function, name: str) -> str:
    """An argument by value; a bound by the power of two above it; a handle by its kind and whether it belongs here."""
    if name in function.bounds:
        return f"None if {name} is None else ({name} - 1).bit_length()"
    if name in function.scalars:
        return f"{name} is None"
    param = function.param(name)
    if param is not None and param.role is Role.HANDLE:
        made_of = ", ".join((name, *param.made_of))
        kind = f"{name}.kind_for({', '.join(param.made_of)})" if param.kind is None else f"_kind_{name}({made_of})"
        return f"None if {name} is None else {kind}"
    if _takes(function, name, tuple):
        alone = f"{name} is None or type({name}) is int"
        return f"{name} if {alone} else (*{name}, *map(type, {name}))"  # (1, 0) equals (1.0, False)
    return name


def _unpassable(function: Function, name: str) -> str:
    """The test of what reaches the kernel without being in the key: its type, and bounds of a number."""
    param = function.param(name)
    assert param is not None
    types = sorted(each.__name__ for each in param.plain - {type(None)})
    numbers = {"int", "float"} & set(types)
    tests = [f"type({name}) not in _types_{name}"]
    if numbers:
        tests.append(f"(type({name}) in (int, float) and not {param.least!r} <= {name} <= {param.most!r})")
    return f"({name} is not None and ({' or '.join(tests)}))"


def names_of(function: Function) -> dict[str, object]:
    """What the text of a function's hit path may name besides its arguments and the engine's own words."""
    found: dict[str, object] = {"inf": math.inf}
    for parameter in function.parameters:
        param = function.param(parameter.name)
        if param is not None and param.role is Role.CHOSEN:
            sequences = {tuple, list, int} if tuple in param.kinds else set()
            left_out = {type(None)} if parameter.default is None else set()  # as calls of its other operations have it
            plain = param.plain | sequences | left_out
            found |= {f"_plain_{param.name}": plain, f"_problem_{param.name}": param.problem}
    for state in declared(function.state):
        found[f"_dtype_{state.name}"] = state.dtype
        found |= {f"_ask_{state.name}_{place}": each.ask for place, each in enumerate(state.questions)}
    for name in (*function.scalars, *function.handles):
        param = function.param(name)
        assert param is not None
        found |= {f"_types_{name}": param.plain - {type(None)}, f"_kind_{name}": param.kind}
    return found


def _takes(function: Function, name: str, kind: type) -> bool:
    """Whether a parameter is of this kind in the operations that have it."""
    param = function.param(name)
    return param is not None and param.role is Role.CHOSEN and kind in param.kinds


def _odd_values(function: Function, names: list[str]) -> list[str]:
    """What equals a legal value without being one: 1 is no flag, True and Decimal(1) are no numbers."""
    flags = [name for name in names if _takes(function, name, bool)]
    chosen = [each for each in map(function.param, names) if each is not None and each.role is Role.CHOSEN]
    others = [each.name for each in chosen if each.name not in flags]
    unsaid = {each.name for each in function.parameters if each.default is None}  # a flag that others decide then
    told = {name: f" and {name} is not None" if name in unsaid else "" for name in flags}
    return [f"({name} is not True and {name} is not False{told[name]})" for name in flags] + [
        f"(type({name}) not in _plain_{name} and _problem_{name}({name}))" for name in others
    ]


def _any_grad(required: list[str], optional: list[str]) -> str:
    tests = [f"{name}.requires_grad" for name in required]
    tests += [f"({name} is not None and {name}.requires_grad)" for name in optional]
    return " or ".join(tests)


def _signature(function: Function) -> str:
    """All parameters with defaults, so that an error names what a call lacks."""
    texts = [
        f"{each.name}={'_MISSING' if each.default is each.empty else repr(each.default)}"
        for each in function.parameters
    ]
    positional = sum(each.kind is not inspect.Parameter.KEYWORD_ONLY for each in function.parameters)
    return ", ".join([*texts[:positional], "*_beyond", *texts[positional:]])


def coarse_key(
    exact: tuple[Any, ...], order: tuple[str, ...]
) -> tuple[tuple[Any, ...], list[tuple[int, ...]], list[tuple[int, ...]]]:
    """The coarse key behind an exact one, and the shapes and strides of the tensors, empty where one is absent."""
    coarse: list[Any] = []
    shapes: list[tuple[int, ...]] = []
    strides: list[tuple[int, ...]] = []
    for part in exact[: len(order)]:
        if part is None:
            coarse.append(None)
            shapes.append(())
            strides.append(())
            continue
        shape, steps, *rest = part
        shapes.append(shape)
        strides.append(steps)
        told = max(told_bytes(rest[0]) // rest[0].itemsize, 1)
        coarse.append((*rest, *map(int.bit_length, shape), *(_stride_class(step, told) for step in steps)))
    return (*coarse, *exact[len(order) :]), shapes, strides


def _stride_class(step: int, told: int) -> int:
    """0 and 1 are themselves; else which power of two, up to so many elements, divides it."""
    return step if step in (0, 1) else 1 + min(step & -step, told)
