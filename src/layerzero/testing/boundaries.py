"""A kernel's limits: the last legal value works, the first illegal one is refused, and whether that was needed.

A limit decides alone where the kernel is refused, and a copy of it without that limit is not. There the copy shows what
the library does: if it is right, the limit is too strict; if it raises, dies or is wrong, the limit is needed.

Every argument that a kernel accepts, away from the value at which it does nothing: else it could be ignored unseen.

Calls that have it are made of the base case, then looked for among random calls. One counts only if the truth without
the argument is another: a kernel that ignores it is wrong there.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from layerzero.core.arguments import REQUIRED, Param, Role
from layerzero.core.device import PLATFORMS, Device
from layerzero.core.dtypes import dtype_name
from layerzero.core.errors import InvalidCallError
from layerzero.core.kernel import Kernel
from layerzero.core.limit_kinds import Arch, Dim, Dtype, Instruction, Limit, OneOf, Platform
from layerzero.core.operation import Case, Operation
from layerzero.engine import legality
from layerzero.ops.calls import drawn, dtype_for, in_layout, shape_of
from layerzero.ops.draw import Draw
from layerzero.testing import compare
from layerzero.testing.compare import call_dtype, draws
from layerzero.testing.generate import RandomCall
from layerzero.testing.randomness import drawn_fairly
from layerzero.testing.single_run import FORMS, Finding, Trial, attempt, judged, reshaped, taken
from layerzero.testing.sizes import BOUNDARY_ELEMENTS, CheckSetting, elements, tied, with_axis

PROBES = 3
"""Calls on which the library runs beyond a limit: one may be right by chance."""


@dataclass(frozen=True, slots=True)
class LimitBreak:
    """One way in which a limit can be broken.

    Attributes:
        text: the bound in words, ``head_dim <= 256``.
        legal: calls on the legal side, with what they show; each must be right.
        illegal: calls that it alone refuses, with what they show.
        untried: why there are none, if so.
    """

    text: str
    legal: tuple[tuple[str, Trial], ...]
    illegal: tuple[tuple[str, Trial], ...]
    untried: str = ""


def without(kernel: Kernel, limit: Limit, instead: Limit | None = None) -> Kernel:
    """A copy of a kernel that lacks a limit, or has another one in its place."""
    kept = [instead if each is limit else each for each in kernel.limits]
    return replace(kernel, limits=tuple(each for each in kept if each is not None))


def size_bounds(kernel: Kernel, limit: Dim) -> Iterator[tuple[str, int, int, Kernel]]:
    """Each bound of a size: its text, the last legal size, the first illegal one, and the kernel without it."""
    name, step = limit.name, limit.multiple or 1
    least = max(limit.min or 0, step)
    least += -least % step
    if limit.one_of:
        sizes = sorted(limit.one_of)
        gap = min((high - low for low, high in itertools.pairwise(sizes)), default=sizes[0])
        missing = next(size for size in itertools.count(sizes[0], gap) if size not in sizes)
        yield f"{name} in {limit.one_of}", sizes[-1], missing, without(kernel, limit)
    if limit.max is not None:
        top = limit.max - limit.max % step
        yield f"{name} <= {limit.max}", top, top + step, without(kernel, limit, replace(limit, max=None))
    if limit.min is not None:
        yield f"{name} >= {limit.min}", least, least - step, without(kernel, limit, replace(limit, min=None))
    if limit.multiple is not None:
        odd = least + 1 if limit.max is None or least + 1 <= limit.max else least - 1
        yield f"{name} % {step} == 0", least, odd, without(kernel, limit, replace(limit, multiple=None))


def sized_bounds(kernel: Kernel, setting: CheckSetting, case: Case) -> Iterator[LimitBreak]:
    """The bounds of a kernel's sizes."""
    for limit in kernel.limits:
        if not isinstance(limit, Dim):
            continue
        for text, legal, illegal, lifted in size_bounds(kernel, limit):
            taken = _first(kernel, setting, case, limit.name, legal)
            beyond = _first(lifted, setting, case, limit.name, illegal)
            untried = "" if taken else f"no legal call has {limit.name} {legal}"
            untried = untried or ("" if beyond else f"no call that it alone refuses has {limit.name} {illegal}")
            shown = ((f"{legal}", taken),) if taken else ()
            yield LimitBreak(text, shown, ((f"{illegal}", beyond),) if beyond else (), untried)


def _first(kernel: Kernel, setting: CheckSetting, case: Case, fact: str, size: int) -> Trial | None:
    """The first call with this size that the kernel takes: the axis alone, then with those that go with it."""
    if size < 0:
        return None
    for changed in _cases_with(setting, case, fact, size):
        if elements(setting.operation, changed) <= BOUNDARY_ELEMENTS:
            trial = setting.taken(kernel, changed)
            if trial is not None and trial.facts.get(fact) == size:
                return trial
    return None


def _cases_with(setting: CheckSetting, case: Case, fact: str, size: int) -> Iterator[Case]:
    if fact in case.sizes:
        yield from with_axis(setting.operation, case, fact, size)
        return
    for axis, now in case.sizes.items():  # a derived size (heads a kv head) follows from one of the axes, or two
        for other in (size, size * now):
            yield from with_axis(setting.operation, case, axis, other)


def dtype_bounds(kernel: Kernel, limit: Dtype, settings: list[CheckSetting], case: Case) -> Iterator[LimitBreak]:
    """The dtypes that a kernel takes, then each of its operation that it does not."""
    lifted = without(kernel, limit)
    legal: list[tuple[str, Trial]] = []
    refused: list[LimitBreak] = []
    for setting in settings:
        name = dtype_name(setting.dtype)
        trial = setting.taken(kernel if name in limit.names else lifted, case)
        if trial is None:
            continue
        if name in limit.names:
            legal.append((name, trial))
        else:
            refused.append(LimitBreak(f"dtype {name}", (), ((name, trial),)))
    untried = "" if refused else "it takes every dtype of the operation"
    yield LimitBreak(f"dtype in {limit.describe()}", tuple(legal), (), untried)
    yield from refused


def other_bounds(
    kernel: Kernel, setting: CheckSetting, base: Trial, drawn: Callable[[], list[RandomCall]]
) -> Iterator[LimitBreak]:
    """The limits on arguments and memory; calls that break them are looked for among forms and random calls."""
    limits = [each for each in kernel.limits if not isinstance(each, (Dim, Dtype, Platform, Arch, Instruction))]
    if not limits:
        return
    pool = [changed for form in FORMS for _, changed in reshaped(base.call, form)] + [
        *_unequal(setting, base),
        *drawn(),
    ]
    trials = [trial for call in pool if (trial := attempt(kernel, setting.operation, call)) is not None]
    for limit in limits:
        lifted = without(kernel, limit)
        illegal: list[tuple[str, Trial]] = []
        for trial in trials:
            found = legality.checked(limit, trial.facts.seen_in(kernel.layout))
            if found and len(illegal) < PROBES and (alone := taken(lifted, setting.operation, trial.call)):
                illegal.append((found[0].reason.message, alone))
        untried = "" if illegal else f"none of {len(trials)} calls is refused by it alone"
        yield LimitBreak(limit.describe(), tuple(_legal(limit, base, trials)), tuple(illegal), untried)


def _unequal(setting: CheckSetting, base: Trial) -> Iterator[RandomCall]:
    """Calls in which axes that go together have different sizes."""
    sizes = {axis: base.facts.size(axis) for axis in setting.operation.cases[0].sizes if axis in base.facts}
    case = Case("unequal", sizes, setting.operation.cases[0].params)
    for axis, size in sizes.items():
        if len(tied(setting.operation, axis)) > 1:
            yield setting.call(Case(f"unequal {axis}", {**sizes, axis: 2 * size}, case.params))


def _legal(limit: Limit, base: Trial, trials: list[Trial]) -> Iterator[tuple[str, Trial]]:
    """A legal call for each value that a limit allows; for other limits the smallest case."""
    if not isinstance(limit, OneOf):
        yield "the smallest case", base
        return
    for value in limit.values:
        found = (each for each in (base, *trials) if not each.reasons and each.facts.get(limit.fact) == value)
        trial = next(found, None)
        if trial is not None:
            yield f"{limit.fact} {value}", trial


def device_bounds(kernel: Kernel, base: Trial) -> Iterator[tuple[str, Device, Limit]]:
    """Devices like this one that a limit on the device refuses; the kernel cannot run there, only be refused."""
    here = base.facts.device
    for limit in kernel.limits:
        if isinstance(limit, Platform):
            other = next(each for each in PLATFORMS if each not in limit.names)
            yield f"platform {limit.describe()}", replace(here, platform=other), limit
        elif isinstance(limit, Arch) and here.sm is not None:
            if limit.min is not None:
                older = (limit.min[0], limit.min[1] - 1) if limit.min[1] else (limit.min[0] - 1, 9)
                yield f"sm >= {limit.min[0]}.{limit.min[1]}", replace(here, sm=older), limit
            if limit.max is not None:
                newer = (limit.max[0], limit.max[1] + 1)
                yield f"sm <= {limit.max[0]}.{limit.max[1]}", replace(here, sm=newer), limit
        elif isinstance(limit, Instruction):
            yield limit.describe(), replace(here, instruction_sets=here.instruction_sets - {limit.name}), limit


def device_outcome(kernel: Kernel, base: Trial, device: Device, limit: Limit) -> Finding:
    """The kernel is refused on a device that the limit excludes, with the limit's own code."""
    facts = base.facts.on(device, capturing=False)
    codes = {str(finding.reason.code) for finding in legality.checked(limit, facts.seen_in(kernel.layout))}
    got = {str(reason.code) for reason in judged(kernel, facts).reasons}
    if not codes:
        return Finding("not tried", f"it says nothing about {dtype_name(call_dtype(base.routed))} there")
    if not codes <= got:
        wanted = ", ".join(sorted(codes))
        return Finding(
            "wrong", f"on {device.platform} {device.sm or ''}: wanted {wanted}, got {', '.join(got) or 'legal'}"
        )
    return Finding(
        "passed", f"refused elsewhere with {', '.join(sorted(codes))}; the library there: not tried: needs that device"
    )


def bound_outcome(kernel: Kernel, setting: CheckSetting, bound: LimitBreak) -> Finding:
    """The legal side is right; the illegal side is refused, or adapted and then right."""
    said = []
    for shown, trial in bound.legal:
        outcome = trial.outcome()
        if outcome.status == "wrong":
            return Finding("wrong", f"{shown} is legal by {bound.text!r}, but the result is wrong: {outcome.message}")
    if bound.legal:
        said.append(f"{', '.join(dict.fromkeys(shown for shown, _ in bound.legal))} right")
    for shown, lifted in bound.illegal:
        refused = attempt(kernel, setting.operation, lifted.call)
        assert refused is not None
        if refused.reasons:
            said.append(f"{shown} refused with {refused.codes}")
            continue
        adapting = [each.text for each in refused.candidate.adaptations if each.moves_data]
        if not adapting:
            return Finding("wrong", f"{shown} lies beyond {bound.text!r} and is not refused")
        outcome = refused.outcome()
        if outcome.status == "wrong":
            return Finding("wrong", f"{shown}, adapted ({'; '.join(adapting)}), is wrong: {outcome.message}")
        said.append(f"{shown} adapted: {'; '.join(adapting)}")
    if bound.untried:
        said.append(f"not tried: {bound.untried}")
    status = "passed" if bound.legal or bound.illegal else "not tried"
    return Finding(status, "; ".join(dict.fromkeys(said)))


def probe_outcome(shown: str, lifted: Trial) -> Finding:
    """What the library does on a call that only the lifted limit refuses."""
    outcome = lifted.outcome()
    if outcome.status == "passed":
        return Finding("too strict", f"{shown}: right")
    if outcome.status == "wrong":
        kind = "" if outcome.message.startswith("raised") else "wrong: "
        return Finding(
            "needed",
            f"{shown}: {kind}{outcome.message.replace('raised', 'raises', 1) if not kind else outcome.message}",
        )
    return Finding("not tried", f"{shown}: {outcome.message}")


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
