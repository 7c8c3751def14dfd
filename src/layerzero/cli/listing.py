"""Kernels and operations: as plain values for ``--json``, as tables, and as capability descriptors.

Kernels and settings in words: what tables say about a declaration, about a setting, and what is wrong with a file.

Here, too, whether names of kernels name anything.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from layerzero import ops
from layerzero.cli.output import NO, Answer
from layerzero.cli.tables import counted, hardware, lines_of, new_row, table_of
from layerzero.core.device import Device, devices_here
from layerzero.core.dtypes import dtype_name
from layerzero.core.errors import DescriptorError, PolicyError
from layerzero.core.kernel import Kernel
from layerzero.core.limit_kinds import Dtype, Platform
from layerzero.core.operation import Operation
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.engine.config import plain_yaml
from layerzero.engine.policy import Policy, read_policy
from layerzero.engine.probe import this_machine
from layerzero.engine.registry import REGISTRY
from layerzero.engine.settings import SETTINGS, Setting, nearest
from layerzero.engine.settings import checked as checked_settings
from layerzero.inspection import descriptors
from layerzero.inspection.descriptors import DESCRIPTORS
from layerzero.ops import FUNCTIONS

FLAGS = {
    "grad": "its backward pass is right",
    "deterministic": "gives the same bits each time",
    "batch_invariant": "gives a row the same bits alone and in every batch",
    "tp_invariant": "gives the same bits for every number of ranks",
    "graph_safe": "may run under CUDA graph capture",
    "jit": "compiles; refused until `lz.warmup` built it",
    "untried": "written after its library's sources, proved on no device; refused until `layerzero vet` proved it",
}
"""Flags of a kernel that decide whether it is legal, and what they mean."""


def briefly(names: Sequence[str]) -> list[str]:
    """Name operations briefly: a function stands for all of its operations."""
    left, texts = list(names), []
    for function in FUNCTIONS.values():
        owned = [operation.name for operation in function.operations]
        if len(owned) > 1 and set(owned) <= set(left):
            texts.append(f"{function.name} (all {len(owned)})")
            left = [name for name in left if name not in owned]
    return [*texts, *left]


def function_of(operation: str) -> str:
    """Name the public function that leads to an operation, empty if there is none."""
    function = ops.function_of(operation) or ops.plain_function_of(operation)
    return function.name if function else ""


def platforms(kernel: Kernel) -> tuple[str, ...]:
    """Platforms that the kernel runs on."""
    named = [set(limit.names) for limit in kernel.limits if isinstance(limit, Platform)]
    return tuple(name for name in kernel.backend.platforms if all(name in names for names in named)) or tuple(
        sorted(set().union(*named))
    )


def dtypes(kernel: Kernel) -> tuple[str, ...]:
    """Dtypes that the kernel takes; empty if it names none."""
    return next((limit.names for limit in kernel.limits if isinstance(limit, Dtype)), ())


def limits(kernel: Kernel) -> list[str]:
    """Every limit other than platform and dtype."""
    return [limit.describe() for limit in kernel.limits if not isinstance(limit, (Platform, Dtype))]


def flags(kernel: Kernel) -> list[str]:
    """Names of the flags that the kernel sets."""
    return [f"{name} (some calls)" if callable(set_) else name for name in FLAGS if (set_ := getattr(kernel, name))]


def kind(type_: object) -> str:
    """Name a type as Python writes it in an annotation."""
    if isinstance(type_, tuple):
        return " | ".join(kind(each) for each in type_)
    return type_.__name__ if isinstance(type_, type) else str(type_).replace("typing.", "")


def problems(file: Path) -> list[str]:
    """List what is wrong, with file, key, wanted and got; empty if the file is fine.

    A name that no kernel has is wrong although the engine takes it: the plugin that brings it may not be installed, but
    far more often it is misspelt, and a denied kernel would run.
    """
    values: dict[str, Any] = {}
    found: list[str] = []
    try:
        said = plain_yaml(file)
    except PolicyError as error:
        return list(error.problems)
    for key, value in said.items():  # each by itself: names are checked whatever is wrong elsewhere
        try:
            values |= checked_settings({key: value}, str(file))
        except PolicyError as error:
            found += error.problems
    defaults = {name: setting.default for name, setting in SETTINGS.items()}
    policy, wrong = read_policy(defaults | values)
    wrong += _wrong_descriptors(policy)
    REGISTRY.ready()
    return [*found, *(f"{file}: {problem}" for problem in wrong), *REGISTRY.names.problems(policy, str(file))]


def _wrong_descriptors(policy: Policy) -> Iterator[str]:
    for path in policy["descriptors"]:
        try:
            DESCRIPTORS.check(path)
        except DescriptorError as error:
            yield from (f"descriptors: {path}: {problem}" for problem in error.problems)


def effective(settings: Mapping[str, tuple[Any, str]]) -> Iterator[RenderableType]:
    """A row for each setting; those that were set stand out."""
    table = table_of("key", "value", "origin")
    for key, (value, origin) in settings.items():
        style = "" if origin == "default" else "bold green"
        new_row(table, Text(key, style=style), Text(repr(value), style=style), Text(origin, style=style or "dim"))
    yield table


def keys(settings: Mapping[str, Setting]) -> Iterator[RenderableType]:
    """A row for each key."""
    table = table_of("key", "type", "default", "meaning")
    for key, setting in settings.items():
        new_row(table, key, kind(setting.kind), repr(setting.default), setting.meaning)
    yield table


@dataclass(frozen=True, slots=True)
class Listed:
    """A kernel on this machine: the version of its library, and why it cannot run here, None if it can.

    ``elsewhere``: it is made for other hardware.
    """

    kernel: Kernel
    version: str
    reason: Reason | None
    elsewhere: bool = False


def on_this_machine(kernels: Iterable[Kernel]) -> list[Listed]:
    """Look at each kernel's library and platforms; what a call must fulfil besides is not checked."""
    devices = devices_here()
    return [_listed(kernel, devices) for kernel in kernels]


def _listed(kernel: Kernel, devices: list[Device]) -> Listed:
    runs_on = platforms(kernel)
    device = next((each for each in reversed(devices) if each.platform in runs_on), devices[-1])
    state = this_machine().state(kernel.backend, device)
    reason = state.reason
    if reason is None and device.platform not in runs_on:
        reason = Reason(ReasonCode.PLATFORM_MISMATCH, "platform", " or ".join(runs_on), device.platform)
    return Listed(kernel, state.version or "", reason, elsewhere=device.platform not in runs_on)


def kernel_data(listed: Listed) -> dict[str, Any]:
    """One kernel for JSON."""
    kernel, reason, revision = listed.kernel, listed.reason, listed.kernel.revision
    return {
        "id": kernel.id,
        "operations": list(kernel.operations),
        "library": kernel.source,
        "version": listed.version or None,
        "usable": reason is None,
        "reason": str(reason.code) if reason else None,
        "message": reason.message if reason else None,
        "priority": kernel.priority,
        "priority_since": {f"{major}.{minor}": each for (major, minor), each in kernel.priority_since.items()},
        "platforms": list(platforms(kernel)),
        "dtypes": list(dtypes(kernel)),
        "layout": kernel.layout,
        "limits": [limit.describe() for limit in kernel.limits],
        "accepts": list(kernel.accepts),
        "aliases": list(kernel.aliases),
        "descriptor": {"name": revision.name, "sha256": revision.sha256} if revision else None,
        **{flag: "some calls" if callable(set_ := getattr(kernel, flag)) else set_ for flag in FLAGS},
    }


def operation_data(operation: Operation) -> dict[str, Any]:
    """One operation for JSON."""
    schema = operation.schema
    return {
        "name": operation.name,
        "summary": operation.summary,
        "function": function_of(operation.name) or None,
        "tensors": {each.name: {"axes": list(each.shape_vars), "required": each.required} for each in schema.inputs},
        "params": {each.name: kind(each.types) for each in schema.params},
        "mutates": list(schema.mutated),
        "tolerance": {
            dtype_name(dtype): {"rtol": each.rtol, "atol": each.atol} for dtype, each in operation.tolerance.items()
        },
        "judges": {name: f"{judge}: {judge.reason}" for name, judge in operation.judges.items()},
        "properties": [each.name for each in operation.properties],
        "cases": {case.name: {"sizes": dict(case.sizes), "params": dict(case.params)} for case in operation.cases},
        "kernels": [kernel.id for kernel in REGISTRY.kernels(operation.name)],
    }


def declared(operation: str, backend: str | None) -> Answer:
    """The descriptor of one library, or a list of all. Raises: ValueError if an operation was named, too."""
    if operation != "*":
        raise ValueError(f"--descriptor describes whole libraries: wanted --backend NAME or nothing, got {operation!r}")
    if backend is not None:
        data: object = descriptors.descriptor(backend)
    else:
        data = [descriptors.exported(owner, kernels) for owner, kernels in descriptors.by_backend().items()]
    return Answer(data, lambda: [json.dumps(data, indent=2)])


def of_backend(kernels: Sequence[Kernel], backend: str) -> list[Kernel]:
    """The kernels of one library. Raises: ValueError with the nearest name if it has none."""
    found = [kernel for kernel in kernels if backend == kernel.source]
    found = found or [kernel for kernel in kernels if backend in kernel.backend.distributions]
    if not found:
        known = sorted({kernel.source for kernel in kernels})
        raise ValueError(f"--backend: wanted one of {', '.join(known)}, got {backend!r}{nearest(backend, known)}")
    return found


def checked(file: Path) -> Answer:
    """Every problem of a file, or what it speaks of."""
    data: dict[str, object] = {"file": str(file)}
    try:
        loaded = descriptors.DESCRIPTORS.check(file)
    except DescriptorError as error:
        wrong = [f"{file}: {problem}" for problem in error.problems]
        return Answer(data | {"valid": False, "problems": list(error.problems)}, lambda: wrong, NO)
    fine = f"{file}: fine; sha256 {loaded.sha256}; kernels: {', '.join(loaded.kernels)}"
    data |= {"valid": True, "problems": [], "sha256": loaded.sha256, "kernels": list(loaded.kernels)}
    return Answer(data, lambda: [fine])


def libraries(found: Sequence[Listed]) -> Iterator[RenderableType]:
    """A row for each library that runs here: how many kernels it has, and of which functions."""
    table = table_of("library", "version", "kernels", "of", right=("kernels",))
    here = [each for each in found if each.reason is None and not each.kernel.is_reference]
    for name in sorted({each.kernel.source for each in here}):
        mine = [each for each in here if each.kernel.source == name]
        named = {function_of(operation) or operation for each in mine for operation in each.kernel.operations}
        new_row(table, name, mine[0].version, str(len(mine)), ", ".join(sorted(named)))
    yield table
    for repo, why in (REGISTRY.hub.told() if REGISTRY.hub else {}).items():
        yield Text(f"{repo} of the hub is not used: {why}", style="yellow")
    yield Text("`layerzero kernels FUNCTION`, --backend NAME and --all list kernels with their limits")


def kernels(found: Sequence[Listed], *, everything: bool = True) -> Iterator[RenderableType]:
    """A row for each kernel: whether it can run here, priority, what it runs, limits and flags.

    Those for other hardware are counted in one line, unless ``everything`` is listed.
    """
    elsewhere = Counter(hardware(platforms(each.kernel)) for each in found if each.elsewhere and not everything)
    found = [each for each in found if everything or not each.elsewhere]
    table = table_of("kernel", "priority", "runs, on, limits, flags", right=("priority",))
    references = [listed for listed in found if listed.kernel.is_reference]
    for listed in found:
        kernel = listed.kernel
        if kernel.is_reference:
            continue
        name = Text(kernel.id, style="bold" if listed.reason is None else "dim")
        here = Text(f"installed {listed.version}".strip() if listed.version else "usable here", style="green")
        if listed.reason is not None:
            here = Text(str(listed.reason.code), style="yellow")
        taken = ", ".join(dtypes(kernel)) or "any dtype"
        lines = [f"runs: {', '.join(briefly(kernel.operations))}", f"on: {', '.join(platforms(kernel))}; {taken}"]
        demands = limits(kernel)
        lines += [f"limits: {'; '.join(demands)}"] if demands else []
        lines.append(f"flags: {', '.join(flags(kernel)) or 'none'}")
        lines += [f"narrowed by: {kernel.revision}"] if kernel.revision else []
        new_row(table, lines_of(name, here), str(kernel.priority), lines_of(*lines))
        table.add_section()
    if references:
        runs = f"runs: {', '.join(briefly([listed.kernel.operations[0] for listed in references]))}"
        takes = "takes everything; the operation's own definition in plain PyTorch, the last candidate"
        new_row(
            table, lines_of("reference.<operation>", Text("usable here", style="green")), "0", lines_of(runs, takes)
        )
    yield table
    if elsewhere:
        yield counted("not for this machine", elsewhere)


def operations(found: Sequence[Operation]) -> Iterator[RenderableType]:
    """A row for each operation."""
    table = table_of("name", "function", "what it computes, named cases", "kernels", right=("kernels",))
    for operation in found:
        cases = f"cases: {', '.join(case.name for case in operation.cases)}"
        text = lines_of(operation.summary, Text(cases, style="dim"))
        count = len(REGISTRY.kernels(operation.name))
        new_row(table, operation.name, function_of(operation.name), text, str(count))
    yield table
