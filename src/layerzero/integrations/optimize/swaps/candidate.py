"""A module that may be replaced: why not, how, what for, and whether both give the same on random input."""

from __future__ import annotations

import builtins
import copy
import dis
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, MultiheadAttention, Parameter, TransformerEncoderLayer

import layerzero as lz
from layerzero.backends.torch.conv import misread
from layerzero.backends.torch.cpu_half import leaking_rows
from layerzero.core import emulation
from layerzero.core.device import Device
from layerzero.core.dtypes import dtype_name
from layerzero.core.errors import in_short
from layerzero.core.plan import Report
from layerzero.integrations.optimize.swaps.reads import (
    BUILT_IN,
    HARMLESS,
    IN_C,
    LIBRARIES,
    TYPES,
    Listening,
    functions_of,
    is_called,
    is_object,
    is_own,
    kept_by,
    names_in,
)
from layerzero.integrations.optimize.swaps.stamp import Stamp, is_recorder
from layerzero.integrations.optimize.swaps.swap import (
    Forward,
    State,
    Swap,
    has_own_forward,
    is_swapped,
    stock_forward,
    trying,
)

TOLERANCE: Mapping[torch.dtype, float] = {
    torch.float64: 1e-12,
    torch.float32: 2e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}
"""Largest difference from the original, in units of the original's largest value: a few roundings, of results and of
what lies between them."""

PROMPT = 16
"""How many times an example's rows stand for a prompt."""

MORE = 3
"""How many times the rows of an example are proved besides it: a branch on sizes may take another way."""

STRUCTURE = 1e-4
"""The same where float32 copies are compared to learn a formula: another formula is off by far more."""


@dataclass
class Candidate:
    """What would be put in a module's place.

    Attributes:
        kind: what such modules are, for people: those of one kind are timed together.
        calls: what the new forward calls.
        swap: the new forward.
        example: input to try it on.
        others: what it is called with besides that, by place.
        asked: the call that the new forward makes of the example, to ask which kernel gets it: a function's name, its
            arguments by place and by name.
        stock: whether the module is torch's own function already, so that only another kernel than torch's is a gain.
        timed: whether it is timed without a caller's inputs.
        may_read: whether its own code may read numbers and sizes, as that of experts does, which asks which are hit.
        error: how far it is from the original, in units of the largest value; set by :func:`compared`.
        mends: whether the module's own code gives wrong numbers on this CPU, or lets one row's NaN into another; set by
            :func:`compared`. A convolution that lets a NaN into another place of its picture alone is left.
    """

    kind: str
    calls: str
    swap: Swap
    example: Tensor
    asked: tuple[str, tuple[Any, ...], Mapping[str, Any]]
    stock: bool = False
    timed: bool = True
    may_read: bool = False
    error: float = 0.0
    mends: bool = False
    covered: tuple[Module, ...] = field(default=())
    others: tuple[Tensor, ...] = ()

    @property
    def kernel(self) -> str | None:
        """The kernel that its example gets now."""
        name, given, named = self.asked
        with torch.no_grad():
            found = lz.which(name, *given, **named)["kernel_id"]
        return None if found is None else str(found)

    def is_mended(self, *, differs: bool) -> bool:
        """Whether torch's own code lets one row of a product into another, or gives wrong results of a convolution."""
        name, given, named = self.asked
        with torch.no_grad():
            facts = lz.facts(name, *given, **named)
        return leaking_rows(facts) is not None or (differs and misread(facts) is not None)

    @property
    def is_torchs(self) -> bool:
        """Whether torch's own kernel would be chosen for what is torch's function already, and is right."""
        if not self.stock or self.mends:
            return False
        name, (rows, *others), named = self.asked
        sizes = [rows]
        if emulation.emulates(Device.detect(rows.device), rows.dtype):  # a prompt may have another kernel than few rows
            if self.others:  # what comes with each row, as its experts: times tell
                return False
            sizes.append(rows.repeat(PROMPT, *[1] * (rows.ndim - 1)))
        with torch.no_grad():
            return all(_runs_torchs(lz.explain(name, each, *others, **named)) for each in sizes)


def _runs_torchs(report: Report) -> bool:
    chosen = report.chosen
    return chosen is None or (chosen.kernel.backend.name == "torch" and chosen.kernel.grad)


def candidate(module: Module, forward: Forward, state: State, **fields: Any) -> Candidate:
    """Make one for a module."""
    return Candidate(swap=Swap(module, forward, state), covered=tuple(each for _, each in state.covers), **fields)


def compared(found: Candidate) -> str:
    """Run the original and the new forward on the example; say what is wrong, empty where they agree."""
    module, dtype = found.swap.module, found.example.dtype
    example = found.example.clone()
    flat, stamp = found.example.ndim < 4, Stamp(module, whole=False)
    with quiet(module):
        try:
            with Listening(module) as reads:
                expected = stock_forward(module)(example, *found.others)
        except Exception as error:  # noqa: BLE001  # a bias of another shape, or whatever else it raises
            return f"its own code does not compute on an example: {in_short(error)}"
        if not torch.equal(example, found.example):
            return "its code writes into its input"
        why = reads.why(may_read=found.may_read, may_compare=not flat) or unfollowed(module)
        if why or not stamp.last.same:
            return why or WRITES
        got = _new(found, found.example, *found.others)
        if not isinstance(expected, Tensor) or got.shape != expected.shape:
            own = tuple(expected.shape) if isinstance(expected, Tensor) else type(expected).__name__
            return f"its output is another one ({own}) than that of {found.calls} (a tensor of {tuple(got.shape)})"
        found.error = distance(got, expected)
        differs = not agrees(found.error, dtype)
        found.mends = found.is_mended(differs=differs)
        if differs and found.mends:
            try:
                twin = copy.deepcopy(module).float()
                found.error = distance(got, stock_forward(twin)(example.float(), *found.others))
            except Exception as error:  # noqa: BLE001  # torch copies no tensor that was computed
                return f"its own code is wrong with AMX, and no copy in float32 computes: {in_short(error)}"
        if got.dtype != expected.dtype or not agrees(found.error, dtype):
            wanted = f"at most {TOLERANCE.get(dtype, 0.0):.2g} of the largest value in {dtype_name(dtype)}"
            off = f"{found.kernel} was off by {found.error:.2g} on random input, wanted {wanted}"
            return f"its output is not that of {found.calls}: {off}"
        if flat and not found.others and not all(_agrees(found, each, reads) for each in _elsewhere(found)):
            return ELSEWHERE
        return reads.why(may_read=found.may_read, may_compare=not flat)


UNFOLLOWED = "its code reads {}, whose changes nothing tells"
WRITES = "its code writes into its attributes or buffers, or what it names"
ELSEWHERE = "its code gives other values for more or larger rows, as one with limits does"

LARGE = 64
"""How large numbers are that a limit (7 in gpt-oss's gate) would change; half precision holds products of them."""

HUGE = 1e8
"""The same where a dtype holds products of four of them."""


def _elsewhere(found: Candidate) -> Iterator[Tensor]:
    """Many rows of one token; a row of large ones, one small, for a norm's eps, one with NaN; then far larger ones."""
    rows = found.example.flatten(0, -2).repeat(MORE, 1)
    large = rows * LARGE / rows.abs().mean()
    large[0] /= LARGE**3
    large[-1, :1] = torch.nan
    yield from (rows.unsqueeze(1), large.unsqueeze(0)) if found.example.ndim == 3 else (rows, large)
    if torch.finfo(rows.dtype).max > HUGE**4:
        yield (rows * HUGE).view(1, -1, rows.shape[-1]) if found.example.ndim == 3 else rows * HUGE


def _agrees(found: Candidate, rows: Tensor, reads: Listening) -> bool:
    """Whether both agree on such rows, too, where the module takes them."""
    try:
        with reads:
            expected = stock_forward(found.swap.module)(rows.clone())
    except Exception:  # noqa: BLE001  # a convolution reads axes as channels, others count theirs
        return True
    got, finite = _new(found, rows), expected.isfinite()  # an own forward in half precision may overflow before
    if not isinstance(got, Tensor) or got.shape != expected.shape:
        return False
    same = torch.equal(got[..., -1, :].isnan(), expected[..., -1, :].isnan())
    return same and agrees(distance(*(torch.where(finite, each, 0.0) for each in (got, expected))), rows.dtype)


def unfollowed(root: Module) -> str:
    """Say which name in own code is of what may change unseen: a module of the process, an object without a dict."""
    for module in root.modules():
        names = set[str]()
        for function in functions_of(module):
            if is_own(str(function.__globals__.get("__name__"))):  # a wrapper bears its function's module
                names |= names_in(function.__code__)
                named = {**vars(builtins), **function.__globals__, **kept_by(function)}
                for name, value in _read_by(function.__code__, named):
                    if _is_strange(value):
                        return UNFOLLOWED.format(name)
        for name in names & vars(module).keys():
            if _is_strange(vars(module)[name]):
                return UNFOLLOWED.format(name)
    return ""


def _read_by(code: CodeType, named: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What code reads of globals, of functions around it and of imports, an own one of which counts as strange.

    A function in C that it calls at once is none of that: a call is heard when it runs.
    """
    yield from ((name, named.get(name, 0)) for name in code.co_freevars)
    read = list(dis.get_instructions(code))
    for place, each in enumerate(read):
        if each.opname == "LOAD_GLOBAL":
            value = named.get(each.argval, 0)
            calls, of = is_called(each), isinstance(value, ModuleType)
            if of:
                after, *more = read[place + 1 : place + 3]
                calls |= is_called(after) or "PUSH_NULL" in {last.opname for last in more}
            called = getattr(value, str(after.argval), value) if of else value
            if not calls or not isinstance(called, (BuiltinFunctionType, FunctionType)):
                yield each.argval, value
        elif each.opname == "IMPORT_NAME":
            yield each.argval, map if is_own(each.argval) else sys.modules.get(each.argval, 0)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _read_by(inner, named)


def _is_strange(value: Any) -> bool:
    if isinstance(value, ModuleType):
        first = value.__name__.partition(".")[0]
        return first == "numpy" or (first in sys.stdlib_module_names - HARMLESS and first not in IN_C | {"operator"})
    if isinstance(value, BuiltinFunctionType) and value.__module__ == "builtins":
        return value.__name__ not in BUILT_IN
    if isinstance(value, type):
        return value in {map, filter} or is_own(type(value).__module__)
    if isinstance(value, Module):  # no part of this one
        return True
    if type(value) in {list, tuple, dict}:
        return any(_is_strange(each) for each in (value.values() if isinstance(value, dict) else value))
    if isinstance(value, (FunctionType, BuiltinFunctionType, *TYPES)) or value is None:
        return False
    first = type(getattr(value, "__self__", value)).__module__.partition(".")[0]
    slots = any(vars(each).get("__slots__") for each in type(value).__mro__ if is_own(each.__module__))
    strange = slots or first == "_thread" or isinstance(value, MethodType) or not is_object(value)
    return first not in LIBRARIES and strange


def _new(found: Candidate, rows: Tensor, *others: Tensor) -> Any:
    """What the new forward gives, which is on meanwhile."""
    with trying(found.swap):
        return found.swap.module.forward(rows.clone(), *others)


def agrees(error: float, dtype: torch.dtype) -> bool:
    """Whether a difference is within what the dtype's rounding explains; NaN and other dtypes are not."""
    return error <= TOLERANCE.get(dtype, 0.0)


def distance(got: Any, expected: Any) -> float:
    """The largest difference of two results in units of the largest value; infinity for what cannot be compared."""
    if not isinstance(got, Tensor) or not isinstance(expected, Tensor) or got.shape != expected.shape:
        return float("inf")
    if not expected.is_floating_point():
        return 0.0 if torch.equal(got, expected) else float("inf")
    if expected.numel() == 0:
        return 0.0
    wide = expected.double()
    largest, error = wide.abs().max().item(), (got.double() - wide).abs().max().item()
    return error / largest if largest > 0 else error


def random_rows(module: Module, size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Six rows in three axes, their mean away from 0, made without a draw from the caller's random numbers."""
    generator = torch.Generator().manual_seed(len(list(module.parameters())) + size)
    return (torch.randn(2, 3, size, generator=generator, device="cpu", dtype=torch.float32) + 0.25).to(device, dtype)


@contextmanager
def quiet(module: Module) -> Iterator[None]:
    """Run a module as it is served: no gradients, no autocast, not training whatever mode it is in, and after no call.

    Qwen2-VL keeps how far a call's pictures moved positions: two rows of text raised behind one row with a picture.
    """
    states = [(each, each.training, vars(each).get("rope_deltas")) for each in module.modules()]
    for each, _, moved in states:
        each.training = False
        if moved is not None:
            vars(each)["rope_deltas"] = None
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield
    finally:
        for each, training, moved in states:
            each.training = training
            if "rope_deltas" in vars(each):
                vars(each)["rope_deltas"] = moved


@contextmanager
def watching(
    modules: Iterable[Module], before: Callable[..., None] | None = None, after: Callable[..., None] | None = None
) -> Iterator[None]:
    """Tell of each call of the modules meanwhile: module, arguments by place and by name; module, arguments, output."""
    with ExitStack() as hooks:
        for each in modules:
            if before is not None:
                hooks.callback(each.register_forward_pre_hook(before, with_kwargs=True).remove)
            if after is not None:
                hooks.callback(each.register_forward_hook(after).remove)
        yield


_HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"

ADAPTERS = ("peft.",)
"""Packages whose modules compute with others' weights and exchange them meanwhile."""


def refusal(module: Module, parent: Module | None = None) -> str:
    """Say why a module, or what it covers, may not be replaced; empty where nothing speaks against it."""
    for path, each in module.named_modules():
        where = f" of {path}" if path else ""
        if isinstance(each, torch.jit.ScriptModule):
            return f"its code{where} is TorchScript's, whose forward is none of Python"
        if is_swapped(each):
            return f"its forward{where} is LayerZero's already; undo() the first report to begin anew"
        exchanged = has_own_forward(each)
        hooked = any(not is_recorder(hook) for name in _HOOKS for hook in getattr(each, name).values())
        if (exchanged or hooked) and getattr(each, "_is_hooked", False):  # Transformers marks modules so
            return f"its calls{where} go through Transformers' tensor parallel (tp_plan), which divides it among ranks"
        if exchanged:
            return f"its forward{where} was exchanged on the instance, as accelerate's offloading does"
        if hooked:
            return f"it has hooks{where}, which wait for its calls"
        for name, parameter in each.named_parameters(recurse=False):
            if problem := weight_problem(parameter):
                return f"{path + '.' if path else ''}{name} {problem}"
        if "parametrizations" in each._modules:
            return f"its parameters{where} are computed anew for each call (parametrizations)"
    if parent is not None and type(parent).__module__.startswith(ADAPTERS):
        return f"it lies under an adapter ({type(parent).__name__}); merge and unload that first"
    if getattr(type(parent), "forward", None) is MultiheadAttention.forward or _is_fused(parent):
        return f"torch's {type(parent).__name__} reads its weight and does not call it"
    return ""


def _is_fused(layer: Any) -> bool:
    """Whether torch runs the layer as one operator where nothing records gradients."""
    if getattr(type(layer), "forward", None) is not TransformerEncoderLayer.forward:
        return False
    attends, (eps, other) = layer.self_attn, (getattr(each, "eps", None) for each in (layer.norm1, layer.norm2))
    fits = isinstance(attends, MultiheadAttention) and attends.batch_first and attends.num_heads % 2 == 0
    alike = eps is not None and eps == other and layer.activation_relu_or_gelu
    return bool(fits and alike and attends.in_proj_bias is not None and torch.backends.mha.get_fastpath_enabled())


def weight_problem(parameter: Parameter) -> str:
    """Why a parameter has no values that can be compared; empty where it has."""
    if parameter.is_meta:
        return "is on the meta device and has no values"
    if type(parameter.data) is not Tensor:
        return f"is no plain tensor but a {type(parameter.data).__name__}: quantised or sharded"
    if parameter.layout is not torch.strided:
        return f"is no dense tensor but {str(parameter.layout).removeprefix('torch.')}"
    if parameter.is_neg():
        return "is a negated view"
    if not parameter.is_floating_point():
        return f"is {str(parameter.dtype).removeprefix('torch.')}: quantised"
    return ""
