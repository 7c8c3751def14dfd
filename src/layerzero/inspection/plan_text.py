"""Documents of choices as text: the decision table of a plan, and what differs between two documents."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from layerzero.engine.frozen_choices import FrozenChoice
from layerzero.inspection.plan_document import Solved

if TYPE_CHECKING:
    from layerzero.inspection.freeze import Frost


MOST = 200
"""Characters of a value in a line; JSON has all of it."""


class Difference(msgspec.Struct, frozen=True):
    """Where two documents differ: what, and what each says; None where it says nothing."""

    what: str
    first: Any
    second: Any

    def __str__(self) -> str:
        return f"{self.what}: {_said(self.first)} -> {_said(self.second)}"


def _said(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= MOST else f"{text[:MOST]}…"


def differences(first: Frost, second: Frost) -> list[Difference]:
    """Everything in which two documents differ, but for their hashes; nothing of a document and itself."""
    one, other = _flat(first), _flat(second)
    for name in {*first.choices} & {*second.choices}:  # of a choice that one of them lacks, its kernel says enough
        calls = [msgspec.to_builtins((each.choices[name].call, each.choices[name].state)) for each in (first, second)]
        one[f"example call of {name}"], other[f"example call of {name}"] = calls
    return [
        Difference(key, one.get(key), other.get(key))
        for key in dict.fromkeys([*one, *other])
        if one.get(key) != other.get(key)
    ]


def _flat(document: Frost) -> dict[str, Any]:
    """What a document says, by one name each."""
    found = {name: getattr(document, name) for name in ("format", "layerzero", "torch", "device", "settings")}
    solved = document.solved
    if solved is not None:
        found |= {f"plan.{name}": getattr(solved, name) for name in ("model", "configuration_hash", "fallback")}
        for part in ("configuration", "hardware", "libraries", "shape_buckets"):
            found |= {f"{part}.{key}": value for key, value in getattr(solved, part).items()}
        found |= {f"bucket {_point(each.sizes)}": each.calls for each in solved.plans}
        found |= {f"together {_point(each.sizes)}": each.note for each in solved.joint}
        found |= {f"build of {name}": f"{each.kernel} {each.build}" for name, each in solved.jit_artifacts.items()}
    return found | {name: f"{each.kernel} ({_library(each)})" for name, each in document.choices.items()}


def table(document: Frost) -> Iterator[str]:
    """A plan as lines: what it was solved for, then each bucket's operations with their kernels."""
    solved = document.solved
    assert solved is not None
    yield f"plan of {solved.model} on {solved.hardware['name']}, hash {document.hash[:12]}"
    yield f"  hardware: {_listed(solved.hardware)}"
    yield f"  libraries: {_listed(solved.libraries)}"
    yield f"  model: configuration {solved.configuration_hash[:12]}, {_listed(solved.configuration, most=8)}"
    buckets = "; ".join(f"{name} {', '.join(map(str, ends))}" for name, ends in solved.shape_buckets.items())
    yield f"  buckets: {buckets or 'the sizes of the inputs'}"
    yield f"  builds: {len(solved.jit_artifacts)}; calls outside of all buckets: {solved.fallback}"
    for points, calls in _alike(document, solved).items():
        yield points
        rows = [(name.partition(" ")[0], each.kernel, _library(each), name.partition(" ")[2]) for name, each in calls]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        for row, (_, each) in zip(rows, calls, strict=True):
            yield "  " + "  ".join([*(text.ljust(width) for text, width in zip(row, widths, strict=False)), row[3]])
            if each.why:
                yield f"    for its neighbours: {each.why}"
    for joint in solved.joint:
        yield f"together, {_point(joint.sizes)}: {joint.note}"
        if joint.together_us:
            yield f"  a run takes {joint.together_us:.0f} us; {joint.alone_us:.0f} with each kernel chosen for itself"
        if joint.lost:
            others = ", ".join(f"{kernel} for {name.partition(' ')[0]}" for name, kernel in joint.lost.items())
            yield f"  the next path has {others}"


def _alike(document: Frost, solved: Solved) -> dict[str, list[tuple[str, FrozenChoice]]]:
    """The calls of each bucket; buckets with the same calls are one."""
    points: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for each in solved.plans:
        points[tuple(each.calls)].append(_point(each.sizes))
    return {" and ".join(those): [(name, document.choices[name]) for name in calls] for calls, those in points.items()}


def _point(sizes: Mapping[str, int]) -> str:
    return " ".join(f"{name}<={size}" for name, size in sizes.items()) or "the calls of these inputs"


def _library(choice: FrozenChoice) -> str:
    return f"{choice.library} {choice.version}".strip()


def _listed(values: Mapping[str, Any], most: int = 100) -> str:
    shown = [f"{name} {value}" for name, value in values.items() if value != ""]
    return ", ".join(shown[:most]) + (f" and {len(shown) - most} more" if len(shown) > most else "")
