"""Write a plan: the straight-line Python that adapts the arguments, calls the kernel and adapts the results.

This is the only place that moves layouts, copies, cuts batches and guards devices; what else a plan may do to the
arguments of an operation, the operation writes (``Operation.adapters``).
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from layerzero.backends.gradients import once
from layerzero.core import indices
from layerzero.core.arguments import TensorSchema, moving
from layerzero.core.errors import refuse
from layerzero.core.fact_reads import EVERYTHING, Reads, Watched, watch
from layerzero.core.facts import Facts
from layerzero.core.handle import FOREIGN, STALE
from layerzero.core.kernel import REFERENCE_BACKEND, Kernel
from layerzero.core.ledger import Ledger
from layerzero.core.operation import Function, Operation
from layerzero.core.plan import Candidate, Plan, Report
from layerzero.engine import accelerator, batch_split, isolation, proofs
from layerzero.engine.accelerator import ArgumentPlaces, Passed
from layerzero.engine.function_kernels import USER_BACKEND
from layerzero.engine.judgements import EpochValues
from layerzero.engine.legality import checked, flag_findings
from layerzero.engine.policy import Policy

_DIFFERENTIATED_TWICE = ("torch", REFERENCE_BACKEND.name, USER_BACKEND.name)
"""Backends whose gradients torch can differentiate or refuses to, and a program's own functions."""


class PlanUnusableError(Exception):
    """A kept plan must not run now: a capture is open and its kernel is not graph-safe. Never leaves the engine."""


def build(
    function: Function, candidate: Candidate, report: Report, policy: Policy, ledger: Ledger | None = None
) -> Plan:
    """Load the kernel's library and bind it to the facts of this call.

    ``ledger`` knows whether a capture may have the kernel. Raises whatever the library raises when it does not load.
    """
    kernel, facts = candidate.kernel, report.facts
    chunk = _chunk(candidate, facts)
    apart = bool(policy.isolating) and isolation.isolated(kernel, policy)
    loaded = isolation.elsewhere(kernel) if apart else kernel
    if chunk:
        target, reads = batch_split.load(loaded, facts, chunk), frozenset({EVERYTHING})
    elif apart:  # other sizes may not fit into what the processes share
        target, reads = loaded.load(facts.seen_in(kernel.layout)), frozenset({EVERYTHING})
    else:
        target, reads = watch(kernel.load, facts.seen_in(kernel.layout), f"{kernel.id}: load")
    if facts["requires_grad"] and kernel.source not in _DIFFERENTIATED_TWICE:
        target = once(target, facts.operation.name)
    made, look = facts.operation.guard, facts.operation.number_guard
    guard = None if made is None else made(function.name, facts.layout)
    number_guard = None if look is None else look(function.name, facts.layout)
    graphs = facts.device.supports_graphs
    barred = graphs and ledger is not None and proofs.barred(kernel, facts, policy, ledger)
    text = _text_of(function, candidate, facts, policy, reads, guarded=guard is not None, barred=barred)
    rules = _rules(facts)
    namespace: dict[str, Any] = {
        **_NAMES,
        **{name: value for each in facts.operation.adapters.values() for name, value in each.names.items()},
        "kernel": target,
        "capturing": torch.cuda.is_current_stream_capturing if graphs else _never,
        "check_indices": functools.partial(_check_values, function.name, rules, None),
        "check_values": functools.partial(_check_values, function.name, rules, facts.operation),
        "guard": guard,
        "number_guard": number_guard,
        "no_autocast": functools.partial(torch.autocast, facts.device.torch_type, enabled=False),
        "on_device": functools.partial(torch.cuda.device, facts.device.index),
    }
    exec(text.code, namespace)  # noqa: S102  # our own text, made of identifiers and reprs of checked values
    direct = None if text.places is None else accelerator.direct(target, text.places)
    adapt, run = namespace.pop("adapt"), namespace.pop("run")  # left there, they and what a kernel holds are a cycle
    adaptations = candidate.adaptations
    return Plan(kernel, report, text.source, adapt, run, adaptations, direct=direct, reads=reads)


class _Text(NamedTuple):
    """What a plan consists of apart from the kernel itself.

    Attributes:
        source, code: its text, and what that compiles to.
        places: where the kernel's arguments come from, if all it does is call the kernel.
    """

    source: str
    code: types.CodeType
    places: ArgumentPlaces | None


TEXTS: EpochValues[_Text] = EpochValues()
"""Texts that name no size, by everything that they were made of."""


def _text_of(
    function: Function, candidate: Candidate, facts: Facts, policy: Policy, reads: Reads, *, guarded: bool, barred: bool
) -> _Text:
    """Write a plan, or take the text of a call that differed in sizes only."""
    guards = _guards(candidate.kernel, facts, reads, barred=barred)
    if guarded:
        guards.append(f"guard({_by_name(facts.tensors)})")
    adapters = facts.operation.adapters
    for adaptation in candidate.adaptations:
        adapter = adapters.get(adaptation.kind)
        if adaptation.kind in ("split", "apart") or (adapter is not None and adapter.names_sizes):
            return _written(function, candidate, facts, policy, guards)
    named = function.name, facts.operation.name, candidate.kernel, candidate.adaptations, facts.layout
    state = facts.sizeless(), _ranks(facts), policy.debug, _on_device(candidate.kernel, facts), tuple(guards)
    return TEXTS.get((named, state), lambda: _written(function, candidate, facts, policy, guards))


def _written(function: Function, candidate: Candidate, facts: Facts, policy: Policy, guards: Sequence[str]) -> _Text:
    names = tuple([parameter.name for parameter in function.parameters])
    lines = _adapting(candidate, facts)
    adapting = [*lines, "return " + _dict_of(function, facts)]
    passed = _passed(candidate, facts)
    running = [*guards, *_checks(candidate.kernel, facts, policy), *lines, *_calling(candidate, passed, facts, policy)]
    source = _function("adapt", names, adapting) + "\n" + _function("run", names, running)
    only_calls = running == [_call_text(passed), "return output"]
    return _Text(source, _compiled(source), accelerator.places(names, passed) if only_calls else None)


def _ranks(facts: Facts) -> tuple[int, ...]:
    """Ranks of the tensors: a text names axes that move, and gives those that broadcast the axes that they lack."""
    return tuple([len(tensor.shape) for tensor in facts.tensors.values()])


_NAMES: dict[str, Any] = {
    "PlanUnusableError": PlanUnusableError,
    "synchronize": torch.cuda.synchronize,
    "contiguous_format": torch.contiguous_format,
    "torch": torch,
    **batch_split.NAMES,
    **indices.NAMES,
}
"""What the text of every plan may name."""


def _never() -> bool:
    return False


def _check_values(function: str, rules: list[indices.IndexRule], operation: Operation | None, **arguments: Any) -> None:
    refuse(function, indices.problems(rules, arguments, operation))


@functools.lru_cache(maxsize=1024)
def _compiled(source: str) -> types.CodeType:
    """Compile a plan's text; calls that differ in size only share it."""
    return compile(source, "<layerzero plan>", "exec")


def _function(name: str, parameters: tuple[str, ...], lines: list[str]) -> str:
    body = "".join(f"    {line}\n" for line in lines)
    return f"def {name}({', '.join(parameters)}):\n{body}"


def _chunk(candidate: Candidate, facts: Facts) -> int:
    """Sequences that run at once, 0 where all do."""
    if not candidate.adaptations:
        return 0
    kinds = [adaptation.kind for adaptation in candidate.adaptations]
    if "apart" in kinds:
        return 1
    return batch_split.chunk(candidate.kernel, facts) if "split" in kinds else 0


def _dict_of(function: Function, facts: Facts) -> str:
    names = {*facts.tensors, *(each.gives for each in facts.operation.adapters.values())}
    return "{" + ", ".join(f"{name!r}: {name}" for name in function.tensors if name in names) + "}"


def _adapting(candidate: Candidate, facts: Facts) -> list[str]:
    """Statements that make of the caller's tensors what the kernel wants."""
    kernel, operation = candidate.kernel, facts.operation
    kinds: dict[str, list[str]] = {}
    for adaptation in candidate.adaptations:
        kinds.setdefault(adaptation.kind, []).append(adaptation.argument)
    asked = [(kinds[kind], adapter) for kind, adapter in operation.adapters.items() if kind in kinds]
    lines = [  # torch 2.13 loses the sign of a negated view that it copies into another dtype
        f"{each.argument} = {each.argument}.resolve_neg().to({each.dtype!r}, memory_format=contiguous_format)"
        for each in candidate.adaptations
        if each.kind == "cast" and each.argument
    ]
    lines += [f"{name} = {name}.resolve_neg()" for name in kinds.get("negate", ())]
    for arguments, adapter in asked:
        if not adapter.moved:
            lines += adapter.write(arguments, facts, facts.layout)
    given = {adapter.gives for _, adapter in asked}
    for each in operation.schema.optional:  # kernels see what broadcasts with all its axes
        rank = len(facts.tensors[each.name].shape) if each.name in facts.tensors else len(each.broadcast)
        if rank < len(each.broadcast) and each.name not in given:
            lines.append(f"{each.name} = {each.name}[{'None, ' * (len(each.broadcast) - rank)}...]")
    lines += [
        f"{each.name} = {each.name}{_move(each, facts, facts.layout, kernel.layout)}" for each in _moved(kernel, facts)
    ]
    for arguments, adapter in asked:
        if adapter.moved:
            lines += adapter.write(arguments, facts, kernel.layout or facts.layout)
    dense = {name for _, adapter in asked for name in adapter.writes_anew}
    for name in kinds.get("copy", ()):
        if name not in dense and operation.schema.mutated.count(name) == 0:
            lines.append(f"{name} = {name}.clone(memory_format=contiguous_format)")
    return lines


def _moved(kernel: Kernel, facts: Facts) -> list[TensorSchema]:
    if kernel.layout is None or facts.layout is None or kernel.layout == facts.layout:
        return []
    inputs = facts.operation.schema.inputs
    return [schema for schema in inputs if schema.has_layout and schema.name in facts.tensors]


def _move(schema: TensorSchema, facts: Facts, source: str | None, target: str | None) -> str:
    """The call that moves a tensor's axes from one layout to another; empty where nothing moves."""
    if not schema.has_layout or source is None or target is None:
        return ""
    return moving(source, target, schema.ndim or _rank(schema, facts))


def _rank(schema: TensorSchema, facts: Facts) -> int:
    """How many axes a tensor with any number of leading ones has: as many of those as the call's tensors."""
    leading = [
        len(facts.tensors[each.name].shape) - len(each.shape_vars)
        for each in facts.operation.schema.inputs
        if each.name in facts.tensors and each.ndim is None
    ]
    return leading[0] + len(schema.shape_vars)


def _plain(value: object) -> object:
    """A value that Python can read back; subclasses (a NumPy float) as what they stand for."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, torch.dtype):
        return value
    raise TypeError(f"cannot write {type(value).__name__} {value!r} into a plan")


def _guards(kernel: Kernel, facts: Facts, reads: Reads, *, barred: bool) -> list[str]:
    """Refuse to run in a capture what a capture refuses; the key of a kept plan does not say whether one is open.

    Where ``load`` or a limit reads that, the call is chosen for again in the capture, which pins what it uses.
    """
    if not facts.device.supports_graphs or facts["capturing"]:
        return []
    captured = facts.on(facts.device, capturing=True).seen_in(kernel.layout)
    watched = Watched(captured)
    findings = [finding for limit in kernel.limits for finding in checked(limit, watched)]
    asked = "capturing" in reads or "capturing" in watched.close()
    if not barred and not asked and all(finding.repair for finding in (*findings, *flag_findings(kernel, captured))):
        return []
    return ["if capturing():", "    raise PlanUnusableError"]


def _checks(kernel: Kernel, facts: Facts, policy: Policy) -> list[str]:
    """Look at indices that lie in this process's memory; at all values, wherever, in debug mode.

    Debug mode waits for the device once a call; in a capture, which does not allow that, nothing is looked at.
    """
    rules = _rules(facts)
    numbers = [] if facts.operation.number_guard is None else [f"number_guard({_by_name(facts.tensors)})"]
    given = [f"{name}={name}" for name in (*facts.tensors, *facts.operation.schema.passed)]
    if policy.debug and not facts["capturing"]:
        chosen = [f"{name}={facts[name]!r}" for name in facts.operation.looked_at]
        layout = [f"layout={facts.layout!r}"] if facts.layout else []
        looks = bool(rules) or facts.operation.check_values is not None
        look = ["if not capturing():", f"    check_values({', '.join(given + chosen + layout)})"] if looks else []
        return [*numbers, *look]
    if facts.device.platform != "cpu" or kernel.checks_indices or not rules:
        return numbers
    conditions = " and ".join(indices.condition(rule) for rule in rules)
    return _once_for_a_handle(
        facts, rules, [*numbers, f"if not ({conditions}):", f"    check_indices({', '.join(given)})"]
    )


def _by_name(tensors: Iterable[str]) -> str:
    return ", ".join(f"{name}={name}" for name in tensors)


def _once_for_a_handle(facts: Facts, rules: Sequence[indices.IndexRule], looking: list[str]) -> list[str]:
    """Look at numbers once for a handle that is made of their tensors, as long as nothing is written into these.

    All layers of a step share the numbers: looking at them took 20 of 30 us that a call cost over its kernel, ten times
    that where other work had emptied the caches (EPYC Zen 5, 2026-11-26).
    """
    schema = facts.operation.schema
    indexed = {rule.tensor.name for rule in rules}
    for name in schema.handles:
        if facts[name] not in ("none", FOREIGN, STALE) and indexed <= {*schema.param(name).made_of}:
            key = ", ".join([repr(facts.operation.name), *indices.sizes_read(rules)])
            remember = f"{name}.looked_at.add(({key}))"
            return [f"if ({key}) not in {name}.looked_at:", *[f"    {line}" for line in (*looking, remember)]]
    return looking


def _rules(facts: Facts) -> list[indices.IndexRule]:
    return indices.rules_of(facts.operation.schema, facts.layout, facts.tensors)


def _passed(candidate: Candidate, facts: Facts) -> list[Passed]:
    """What the kernel is called with."""
    kernel, schema = candidate.kernel, facts.operation.schema
    kinds = {adaptation.kind for adaptation in candidate.adaptations}
    absorbing = [each for kind, each in facts.operation.adapters.items() if kind in kinds and each.absorbs]
    absorbed = {name for each in absorbing for name in each.absorbed}
    made = {each.gives for each in absorbing}
    passed = [Passed("", tensor.name) for tensor in schema.required]
    for tensor in schema.optional:
        given = tensor.name in made or (tensor.name in facts.tensors and tensor.name not in absorbed)
        if tensor.name in kernel.accepts and given:
            passed.append(Passed(kernel.renames.get(tensor.name, tensor.name), tensor.name))
    for name in schema.chosen:
        if name in kernel.accepts:
            value = schema.neutral.get(name) if name in absorbed else facts[name]
            passed.append(Passed(kernel.renames.get(name, name), "", _plain(value)))
    passed += [Passed(kernel.renames.get(name, name), name) for name in schema.passed if name in kernel.accepts]
    return passed


def _text(passed: Passed) -> str:
    return (f"{passed.keyword}=" if passed.keyword else "") + (passed.parameter or repr(passed.constant))


def _call_text(passed: Sequence[Passed]) -> str:
    return f"output = kernel({', '.join(map(_text, passed))})"


def _calling(candidate: Candidate, passed: Sequence[Passed], facts: Facts, policy: Policy) -> list[str]:
    """Statements that call the kernel and give its results the caller's layout."""
    kernel, schema = candidate.kernel, facts.operation.schema
    lines = [_call_text(passed)]
    chunk = _chunk(candidate, facts)
    if chunk:
        rows = facts.size(batch_split.cut_axis(schema))
        lines = [batch_split.calling(list(map(_text, passed)), batch_split.split_tensors(facts), rows, chunk)]
    if facts["autocast"]:
        lines = ["with no_autocast():", *(f"    {line}" for line in lines)]
    if _on_device(kernel, facts):
        lines = ["with on_device():", *(f"    {line}" for line in lines)]
    if policy.debug and facts.device.torch_type == "cuda":
        lines += ["if not capturing():", "    synchronize()"]
    moves = [_move(each, facts, kernel.layout, facts.layout) for each in schema.results(facts)]
    gives = [each.dtype for each in candidate.adaptations if each.kind == "cast" and not each.argument]
    if gives:
        found = schema.results(facts)
        moves = [f"{move}{_given(each, gives[0])}" for each, move in zip(found, moves, strict=True)]
    if not moves:
        return lines
    if len(moves) == 1 or not any(moves):
        return [*lines, f"return output{moves[0]}"]
    return [*lines, "return " + ", ".join(f"output[{number}]{move}" for number, move in enumerate(moves))]


def _given(result: TensorSchema, dtype: torch.dtype | None) -> str:
    """The cast of a result to the dtype that the caller gets; empty for one with a dtype of its own."""
    return "" if result.own_dtype else f".to({dtype!r})"


def _on_device(kernel: Kernel, facts: Facts) -> bool:
    """Whether the plan has to make the tensors' device the current one."""
    return facts.device.torch_type == "cuda" and not kernel.device_guard and torch.cuda.device_count() > 1


def adapted_tensors(plan: Plan, arguments: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors that the kernel would get, made by the plan's own statements."""
    adapted = plan.adapt(**arguments)
    return {name: tensor for name, tensor in adapted.items() if isinstance(tensor, torch.Tensor)}
