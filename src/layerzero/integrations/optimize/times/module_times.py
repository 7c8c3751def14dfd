"""Where a model's time goes: in modules that were replaced, in others, and outside of any; on host and device."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch.nn import Module

from layerzero.inspection.trace import numbered, ranges
from layerzero.integrations.optimize.swaps.candidate import watching
from layerzero.integrations.optimize.times import timing

ROUNDS = 3
"""Runs of each, in turn."""

WIDEST = 40
"""Characters of a list in a table, where its entries allow it."""

_Alike = tuple[str, str, tuple[str, ...], bool]
"""What rows of a table have in common that stand in one line: their path around its number, what they say."""

OUTSIDE = "outside any module"
"""The code of models that hold others, and of the caller: masks, caches, loops."""


COMPILED = "its calls run what torch.compile made of its own code"


def compiled_parts(root: Module) -> tuple[str, ...]:
    """Paths of the modules whose calls run code that torch.compile made, of them or of functions that they hold."""

    def is_compiled(module: Module) -> bool:
        classes = type(module).__mro__[: type(module).__mro__.index(Module)]
        held = [each for of in (module, *classes) for each in vars(of).values() if isinstance(each, FunctionType)]
        compiled = [each for each in held if hasattr(each, "_torchdynamo_orig_callable")]  # disabled ones, too
        return module._compiled_call_impl is not None or any(
            not hasattr(each, "_torchdynamo_disable") for each in compiled
        )

    return tuple(path for path, each in root.named_modules() if is_compiled(each))


def is_compiled_with(path: str, parts: Iterable[str]) -> bool:
    """Whether a module is one of those parts, lies in one, or holds one."""
    own = f"{path}." if path else ""
    return any(own.startswith(f"{each}." if each else "") or f"{each}.".startswith(own) for each in parts)


@dataclass(frozen=True)
class Share:
    """Seconds of a run in modules of one kind.

    Attributes:
        host_s: on the clock of the host, from a module's call to its return.
        device_s: on the device's own, between what a module launches first and last; None where that is the host.
    """

    host_s: float
    device_s: float | None = None


@dataclass
class Spent:
    """Time by kinds of modules.

    Attributes:
        modules: how many there are of each kind.
        before, after: the share of each kind with the model's own code, and with what was put in its place; after is
            empty where nothing was.
        steps_off: whether captured steps, which run no modules, were off meanwhile.
    """

    modules: dict[str, int] = field(default_factory=dict)
    before: dict[str, Share] = field(default_factory=dict)
    after: dict[str, Share] = field(default_factory=dict)
    steps_off: bool = False

    def lines(self) -> list[str]:
        """A table: kinds, the longest first."""
        on_device = any(each.device_s is not None for each in self.before.values())
        columns = ("before", "after", "device before", "device after")[: 4 if on_device else 2]
        columns = columns if self.after else ("now", "device now")[: len(columns) // 2]
        name = "time of a run" + (", captured steps off" if self.steps_off else "")
        rows: list[tuple[str, ...]] = [(name, "modules", *columns)]
        for kind, before in sorted(self.before.items(), key=lambda each: -each[1].host_s):
            shares = [before, self.after[kind]] if self.after else [before]
            times = [_ms(each.host_s) for each in shares]
            times += [_ms(each.device_s) for each in shares] if on_device else []
            rows.append((kind, str(self.modules.get(kind) or ""), *times))
        return _aligned(rows)


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.2f} ms"


def spent(
    root: Module,
    replaced: Mapping[str, str],
    run: Callable[[], Any],
    switch: Callable[[bool], None] | None,
    device: Any,
) -> Spent:
    """Time a run by modules, as it was and as it is, in turn.

    Args:
        replaced: the kind of each path that has another forward.
        run: runs the model once.
        switch: puts the new forwards on or off; None where there are none, and two times of one model say nothing.
    """
    kinds = dict(_units(root, replaced))
    found = Spent({kind: list(kinds.values()).count(kind) for kind in dict.fromkeys(kinds.values())})
    if switch is None:
        found.before = _medians([_timed(kinds, run, device) for _ in range(ROUNDS)])
        return found
    times: dict[bool, list[dict[str, Share]]] = {False: [], True: []}
    try:
        for _ in range(ROUNDS):
            for on in (False, True):
                switch(on)
                times[on].append(_timed(kinds, run, device))
    finally:
        switch(True)
    found.before, found.after = (_medians(times[on]) for on in (False, True))
    return found


def _units(root: Module, replaced: Mapping[str, str]) -> Iterator[tuple[Module, str]]:
    """The outermost modules that are replaced, and those that hold none; each with its kind."""
    done: list[str] = []
    parts = compiled_parts(root)  # a hook would be compiled, too
    for path, module in root.named_modules():
        if any(path.startswith(f"{each}.") for each in done) or is_compiled_with(path, parts):
            continue
        kind = replaced.get(path)
        if kind is None and path and not any(each.startswith(f"{path}.") for each in replaced):
            kind = f"{type(module).__name__}, untouched"
        elif kind is not None:
            kind = f"{kind}, LayerZero's"
        if kind is not None:
            done.append(path)
            yield module, kind


def _timed(kinds: Mapping[Module, str], run: Callable[[], Any], device: Any) -> dict[str, Share]:
    on_device = device.type == "cuda"
    host: dict[str, float] = dict.fromkeys([*kinds.values(), OUTSIDE], 0.0)
    events: dict[str, list[tuple[Any, Any]]] = {kind: [] for kind in host}
    begun: list[tuple[float, Any]] = []

    def mark() -> Any:
        if not on_device:
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event

    def enter(*_: Any) -> None:
        begun.append((timing.WALL(), mark()))

    def leave(module: Module, *_: Any) -> None:
        started, event = begun.pop()
        host[kinds[module]] += timing.WALL() - started
        events[kinds[module]].append((event, mark()))

    with watching(kinds, enter, leave), torch.no_grad():
        timing.wait(device)
        first, started = mark(), timing.WALL()
        run()
        host[OUTSIDE] = timing.WALL() - started - sum(host.values())
        last = mark()
        timing.wait(device)
    if not on_device:
        return {kind: Share(seconds) for kind, seconds in host.items()}
    of_device = {kind: sum(a.elapsed_time(b) for a, b in pairs) / 1e3 for kind, pairs in events.items()}
    of_device[OUTSIDE] = first.elapsed_time(last) / 1e3 - sum(of_device.values())
    return {kind: Share(seconds, of_device[kind]) for kind, seconds in host.items()}


def _medians(runs: list[dict[str, Share]]) -> dict[str, Share]:
    found = {}
    for kind in runs[0]:
        on_device = [each[kind].device_s for each in runs]
        known = [each for each in on_device if each is not None]
        host_s = statistics.median(each[kind].host_s for each in runs)
        found[kind] = Share(host_s, statistics.median(known) if known else None)
    return found


def table(headers: Sequence[str], rows: Iterable[tuple[tuple[str, ...], str, float | None]]) -> list[str]:
    """Lines of a table, one for rows that say the same of numbered modules, with the largest of their errors."""
    alike: dict[_Alike, list[int]] = defaultdict(list)
    errors: dict[_Alike, list[float]] = defaultdict(list)
    rows = list(rows)
    parts = [path.split(".") for _, path, _ in rows if path]
    alike_so_far = itertools.takewhile(lambda each: len(set(each)) == 1, zip(*parts, strict=False))
    shared = len(list(alike_so_far))  # a pipeline's number of the model is not the layer's
    for texts, path, error in rows:
        outside, inside = path.split(".")[:shared], path.split(".")[shared:]
        before, number, after = numbered(".".join(inside))
        before = ".".join((*outside, before)) if path else ""
        kind = before, after, texts, number is None
        alike[kind] += [] if number is None else [number]
        errors[kind] += [] if error is None else [error]
    cells = [tuple(headers)]
    for kind, numbers in alike.items():
        before, after, texts, _ = kind
        path = f"{before}{ranges(numbers)}{after}".rstrip(".") or "(model)"
        worst = f"{max(errors[kind]):.1e}" if errors[kind] else ""
        cells.append((path, *texts, worst)[: len(headers)])
    return _aligned([line for cell in cells for line in _folded(cell)])


def _aligned(lines: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def _folded(cells: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The lines of a row: lists before its last column, as of a layer's seven kernels, have lines of :data:`WIDEST`."""
    columns = [_lines(text) for text in cells[:-1]]
    columns.append([cells[-1]])
    yield from itertools.zip_longest(*columns, fillvalue="")


def _lines(text: str) -> list[str]:
    lines = [""]
    for each in text.split(", "):
        if lines[-1] and len(lines[-1]) + len(each) > WIDEST:
            lines.append("")
        lines[-1] += f"{each}, "
    lines[-1] = lines[-1].removesuffix(", ")
    return [line.rstrip() for line in lines]
