"""``lz.trace``: which kernel each layer of a model runs, and why.

Hooks on every module say where a call is made; the engine tells what ran. While a model is traced no plan is kept, so
that calls that were chosen before are seen as well. Nothing is timed, and nothing of it is on a hit.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import msgspec
import torch
from torch.nn import Module

from layerzero.core.dtypes import dtype_name
from layerzero.core.eager_state import uncompiled
from layerzero.core.operation import Function
from layerzero.core.plan import Plan
from layerzero.core.system import forking
from layerzero.engine.dispatch import ENGINE, Watcher
from layerzero.engine.logging_once import TRIED
from layerzero.engine.pick import PLACE, why
from layerzero.engine.scopes import holding

_OF_COMPILING = "_orig_mod"
"""What ``torch.compile`` puts into the path of a module that it wraps."""

_TRACED: ContextVar[Trace | None] = ContextVar("layerzero_traced", default=None)


class TraceRow(msgspec.Struct, frozen=True):
    """Calls that one layer made alike.

    Attributes:
        layer: the path of the module whose code made them; empty for the model itself.
        module: the name of its class.
        function, operation: what was called, and what that was routed to.
        kernel, source: what ran, and the library that it is from.
        why: why it did: its time and where that is from, a lock, its priority, or why the reference had to.
        adapts: what was done to the arguments for it.
        dtype, shapes: of the first of these calls.
        calls: how many there were.
    """

    layer: str
    module: str
    function: str
    operation: str
    kernel: str
    source: str
    why: str
    adapts: tuple[str, ...]
    dtype: str
    shapes: dict[str, tuple[int, ...]]
    calls: int

    @property
    def kind(self) -> tuple[object, ...]:
        """What rows have in common whose calls count as alike."""
        return self.layer, self.function, self.operation, self.kernel, self.adapts, self.dtype


class Trace:
    """What a model ran, in the order in which its layers first did.

    Attributes:
        rows: one for calls that a layer made alike.
        others: modules without submodules that ran and made no call of LayerZero, by the name of their class.
        elsewhere: calls that other threads made meanwhile, for this model or not; their layer is unknown.
    """

    def __init__(self) -> None:
        self._lock = forking.lock()
        self._rows: dict[tuple[object, ...], TraceRow] = {}
        self._ran: dict[str, bool] = {}  # whether it has no submodules
        self._modules: dict[str, str] = {}
        self.elsewhere = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (), {name: each for name, each in vars(self).items() if name != "_lock"}

    @property
    def rows(self) -> list[TraceRow]:
        """The rows, in the order of their first calls."""
        return list(self._rows.values())

    @property
    def others(self) -> dict[str, int]:
        served = {row.layer for row in self.rows}
        leaves = (path for path, is_leaf in self._ran.items() if is_leaf)
        return dict(Counter(self._modules[path] for path in leaves if path not in served).most_common())

    def as_dict(self) -> dict[str, object]:
        return {
            "layers": [msgspec.to_builtins(row) for row in self.rows],
            "others": self.others,
            "elsewhere": self.elsewhere,
        }

    def __str__(self) -> str:
        lines = as_table(self.rows) if self.rows else ["no call of LayerZero was made"]
        if self.others:
            told = ", ".join(f"{count} {name}" for name, count in self.others.items())
            lines.append(f"modules that made no call of LayerZero: {told}")
        if self.elsewhere:
            lines.append(f"{self.elsewhere} calls were made by other threads, whose layers are not known")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<lz.trace: {len(self._rows)} rows of {sum(row.calls for row in self.rows)} calls>"

    def _saw(self, function: Function, plan: Plan) -> None:
        if _TRACED.get() is not self:
            with self._lock:
                self.elsewhere += 1
            return
        facts, layer = plan.report.facts, PLACE.get()
        row = TraceRow(
            layer,
            self._modules.get(layer, ""),
            function.name,
            plan.report.operation,
            plan.kernel_id,
            plan.kernel.source,
            why(plan.report),
            plan.transforms,
            dtype_name(facts["dtype"]),  # type: ignore[arg-type]
            {name: tensor.shape for name, tensor in facts.tensors.items()},
            1,
        )
        with self._lock:
            before = self._rows.get(row.kind)
            self._rows[row.kind] = row if before is None else msgspec.structs.replace(before, calls=before.calls + 1)

    @contextmanager
    def _follow(self, model: Module) -> Iterator[None]:
        """Know the module that runs, in whichever order hooks and errors come."""
        entered: list[tuple[Module, str]] = []

        def enters(path: str) -> Callable[..., None]:
            def hook(module: Module, _: object) -> None:
                if _TRACED.get() is not self:  # another thread's
                    return
                entered.append((module, PLACE.get()))
                # torch.compile puts a module of the same path around this one, whose hook comes before
                self._ran[path] = next(module.children(), None) is None
                PLACE.set(path)

            return hook

        def leaves(module: Module, _: object, __: object) -> None:
            while entered and _TRACED.get() is self:  # one without a hook at its end ends with those around it
                inner, outside = entered.pop()
                PLACE.set(outside)
                if inner is module:
                    break

        with ExitStack() as stack:
            stack.callback(PLACE.reset, PLACE.set(""))
            for name, module in model.named_modules():
                if isinstance(module, torch.jit.ScriptModule):  # it takes no hooks; its calls are those around it
                    continue
                path = ".".join(part for part in name.split(".") if part != _OF_COMPILING)
                self._modules[path] = type(module).__name__
                stack.callback(module.register_forward_pre_hook(enters(path), prepend=True).remove)
                stack.callback(module.register_forward_hook(leaves, always_call=True).remove)
            yield


def trace(model: Any, /, *inputs: Any, **arguments: Any) -> Trace:
    """Run a model once and tell which kernel each of its layers ran.

        print(lz.trace(model, tokens))
        lz.trace(model.generate, tokens, max_new_tokens=4).as_dict()

    The model is called as it is, in the caller's grad mode and under the caller's settings. A module that
    ``torch.compile`` wraps runs uncompiled for this once, so that its layers can be distinguished.

    On meta and fake tensors nothing runs, and each row says what would. A fake tensor names its device; meta tensors
    mean the current CUDA device, else the CPU. Calls through ``lz.bind(..., guard=False)``, calls inside of
    torch.func's transforms and replays of a CUDA graph are not seen. :attr:`Trace.others` has the modules of what a
    model computes without LayerZero.

    Args:
        model: a module, or a method of one.
        inputs, arguments: what it is called with.
    Raises: TypeError for what has no modules; whatever the model raises.
    """
    module = model if isinstance(model, Module) else getattr(model, "__self__", None)
    if not isinstance(module, Module):
        raise TypeError(f"trace: wanted a torch.nn.Module or a method of one, got {type(model).__name__}")
    return traced(module, lambda: model(*inputs, **arguments))


@contextmanager
def calls_told(saw: Watcher, *, tried: bool = False) -> Iterator[None]:
    """Tell it of every call that runs meanwhile; none of those ``tried`` warns of a slow reference."""
    ENGINE.watch(saw)
    try:
        with holding(TRIED, tried):
            yield
    finally:
        ENGINE.unwatch(saw)


def traced(module: Module, run: Callable[[], object]) -> Trace:
    """Tell which kernels the layers of a module ran, whatever runs it."""
    found = Trace()
    with holding(_TRACED, found), found._follow(module), uncompiled(), calls_told(found._saw):
        run()
    return found


_HEADERS = ("layer", "calls", "operation", "kernel", "why")


def as_table(rows: Sequence[TraceRow]) -> list[str]:
    """Lines of a table, one for rows that say the same of numbered layers; their calls are those of each layer."""
    cells = [_HEADERS, *_cells(rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_HEADERS))]
    lines = []
    for line in cells:
        padded = (text.ljust(width) for text, width in zip(line, widths, strict=True))
        lines.append("  ".join(padded).rstrip())
    return [lines[0], "  ".join("-" * width for width in widths[:-1]) + "  ---", *lines[1:]]


def _cells(rows: Sequence[TraceRow]) -> Iterator[tuple[str, str, str, str, str]]:
    alike: dict[tuple[object, ...], list[int]] = defaultdict(list)
    first: dict[tuple[object, ...], tuple[TraceRow, str, str]] = {}
    for row in rows:
        before, number, after = numbered(row.layer)
        kind = (before, number is None, after, row.module, *row.kind[1:], row.why, row.calls)
        alike[kind] += [] if number is None else [number]
        first.setdefault(kind, (row, before, after))
    for kind, (row, before, after) in first.items():
        path = f"{before}{ranges(alike[kind])}{after}" or "(model)"
        adapts = f" [{'; '.join(row.adapts)}]" if row.adapts else ""
        yield f"{path} {row.module}", str(row.calls), row.operation, row.kernel, row.why + adapts


def numbered(path: str) -> tuple[str, int | None, str]:
    """A path around its first number: ``layers.3.norm`` is ``layers.``, 3 and ``.norm``."""
    parts = path.split(".")
    for place, part in enumerate(parts):
        if part.isdecimal():
            before, after = parts[:place], parts[place + 1 :]
            return "".join(f"{each}." for each in before), int(part), "".join(f".{each}" for each in after)
    return path, None, ""


def ranges(numbers: Sequence[int]) -> str:
    """Numbers in few characters: ``0-2,5``."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in found)
