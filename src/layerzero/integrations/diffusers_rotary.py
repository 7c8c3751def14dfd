"""Rotations in processors of diffusers, by ``lz.rope_`` in one call a tensor in place of eight torch calls.

A processor rotates queries and keys one after the other, by a function that its module imports (Flux and most others:
``embeddings.apply_rotary_emb``) or that its ``__call__`` defines within itself (Wan). A rotated processor is an
instance of a subclass whose ``__call__`` is the same code with that function bound to ours, and shares its attributes
with the processor that it stands for. Neither a class nor a module of diffusers changes.

A function's name does not say which formula it is: both are tried on random input (diffusers 0.42).

One call a tensor in place of eight torch calls, in float32: the heads' two halves are given as queries and keys.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

import layerzero as lz
from layerzero.core.errors import LayerZeroWarning, in_short
from layerzero.core.graph_capture import capture_of
from layerzero.core.system import warn
from layerzero.integrations.diffusers import Served, served_class
from layerzero.integrations.optimize.layers.inner import Table
from layerzero.integrations.optimize.swaps.candidate import agrees, distance
from layerzero.integrations.optimize.swaps.swap import Together

Rotation = Callable[..., Any]

_MADE = "_layerzero_diffusers_table"
"""On the tensor of cosines, which a model hands to each of its layers."""

_UNVERSIONED = (
    "diffusers: rotations run by diffusers' own function: wanted tables whose changes are counted, got some that were "
    "made under torch.inference_mode; run the model under torch.no_grad instead"
)
"""Looking whether both halves of a table are the same waits for a GPU: once for a table, not in each layer."""


@functools.cache  # a class is made for each, and kept
def _of_pair(original: Rotation) -> Rotation:
    """``f(x, (cos, sin), use_real, use_real_unbind_dim, sequence_dim)``, each angle twice in (S, D) tables."""

    def rotate(
        x: Tensor, freqs_cis: Any, use_real: bool = True, use_real_unbind_dim: int = -1, sequence_dim: int = 2
    ) -> Any:
        layout = {1: "BSHD", 2: "BHSD"}.get(sequence_dim)
        known = use_real is True and layout is not None and use_real_unbind_dim in {-1, -2}
        if known and isinstance(freqs_cis, tuple) and len(freqs_cis) == 2 and _is_plain(x, *freqs_cis):
            interleaved = use_real_unbind_dim == -1
            table = _table(*freqs_cis, interleaved, twice=True)
            if table is not None and _fits(x, table, layout):
                return _turned(x, table, interleaved, str(layout))
        return original(x, freqs_cis, use_real, use_real_unbind_dim, sequence_dim)

    return rotate


@functools.cache
def _of_columns(original: Rotation) -> Rotation:
    """``f(x, cos, sin)`` of (B, S, H, D), which reads even columns of (1, S, 1, D) cosines and odd ones of sines."""

    def rotate(hidden_states: Tensor, freqs_cos: Tensor, freqs_sin: Tensor) -> Any:
        if _is_plain(hidden_states, freqs_cos, freqs_sin) and freqs_cos.ndim == 4:
            table = _table(freqs_cos, freqs_sin, True, twice=False)
            if table is not None and _fits(hidden_states, table, "BSHD"):
                return _turned(hidden_states, table, True, "BSHD")
        return original(hidden_states, freqs_cos, freqs_sin)

    return rotate


def _is_plain(x: Any, cos: Any, sin: Any) -> bool:
    """Whether it is ours to compute: compilers see the original, and gradients are its own."""
    if torch.compiler.is_compiling() or any(type(each) is not Tensor for each in (x, cos, sin)):
        return False
    if torch.is_grad_enabled() and (x.requires_grad or cos.requires_grad or sin.requires_grad):
        return False
    same = cos.shape == sin.shape and cos.dtype == sin.dtype == torch.float32 and cos.device == sin.device == x.device
    return same and x.is_floating_point() and x.dtype != torch.float64 and not torch._C._is_any_autocast_enabled()


def _fits(x: Tensor, table: Table, layout: str | None) -> bool:
    heads, seq = (2, 1) if layout == "BSHD" else (1, 2)
    rows, half = table.cos.shape
    return x.ndim == 4 and x.shape[heads] > 1 and x.shape[seq] == rows and x.shape[-1] == 2 * half and x.numel() > 0


def _turned(x: Tensor, table: Table, interleaved: bool, layout: str) -> Tensor:
    """A rotated copy, computed in float32; the heads' two halves are given as queries and keys."""
    wide = x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    axis = 2 if layout == "BSHD" else 1
    half = wide.shape[axis] // 2
    first, second = wide.narrow(axis, 0, half), wide.narrow(axis, half, wide.shape[axis] - half)
    lz.rope_(first, second, table.cos, table.sin, table.positions, interleaved=interleaved, layout=layout)
    return wide.to(x.dtype)


def _table(cos: Tensor, sin: Tensor, interleaved: bool, *, twice: bool) -> Table | None:
    """Cosines and sines (S, D/2) side by side in one tensor, with the row of each token, made once for all layers.

    Where each angle stands ``twice``, both must be the same: None where they are not, and while a graph is captured,
    when nothing may be read from the device, unless that was seen before. Each capture makes its own table: a replay
    then reads what the cosines hold by then, and no other call, nor another graph, reads memory that a replay fills.
    """
    if cos.is_inference() or sin.is_inference():  # they have no versions: whether they were written into is not known
        if not (twice and cos.is_cuda):
            return _side_by_side(cos, sin, interleaved, twice=twice)
        warn(_UNVERSIONED, LayerZeroWarning, stacklevel=2)  # shown once, as Python does
        return None
    versions = cos._version, sin._version
    kept = cos.__dict__.get(_MADE)
    capture = capture_of(cos)
    if kept is not None and (kept[1] is not sin or kept[2:4] != (versions, interleaved)):
        kept = None
    if kept is not None and (kept[4] is capture or kept[0] is None):
        made: Table | None = kept[0]
        return made
    if twice and capture is not None and kept is None:
        return None
    table = _side_by_side(cos, sin, interleaved, twice=twice, seen=kept is not None)
    setattr(cos, _MADE, (table, sin, versions, interleaved, capture))
    return table


def _side_by_side(cos: Tensor, sin: Tensor, interleaved: bool, *, twice: bool, seen: bool = False) -> Table | None:
    """The table; None where angles that should stand twice do not, which is not checked again once it was ``seen``."""
    size = cos.shape[-1]
    if size % 2 or (cos.ndim != 2 and cos.numel() != cos.shape[1] * size):
        return None
    half = size // 2
    cos, sin = cos.reshape(-1, size), sin.reshape(-1, size)
    first, second = (slice(0, size, 2), slice(1, size, 2)) if interleaved else (slice(0, half), slice(half, size))
    if twice and not seen and not all(torch.equal(each[:, first], each[:, second]) for each in (cos, sin)):
        return None
    rows = torch.cat((cos[:, first], sin[:, first if twice else second]), -1)
    return Table(rows[:, :half], rows[:, half:], torch.arange(rows.shape[0], device=rows.device))


# Which of them a function is


@dataclass(frozen=True)
class Proved:
    """A rotation of ours that gave what a processor's own gives.

    Attributes:
        rotation: ours.
        error: how far it was from the original, in units of the largest value.
        kernel: what ``lz.rope_`` ran.
    """

    rotation: Rotation
    error: float
    kernel: str


def proved(original: Rotation, heads: int, size: int, dtype: torch.dtype, device: torch.device) -> Proved | str:
    """Ours in its place, if it gives on random input what it gives; otherwise why not.

    Angles are random, not those of positions, so that another order of entries cannot pass.
    """
    generator = torch.Generator().manual_seed(heads + size)
    shapes = (2, 5, heads, size), (5, size // 2)
    x, angles = (
        torch.randn(each, generator=generator, dtype=torch.float32, device="cpu").to(device) for each in shapes
    )
    x = x.to(dtype)
    columns = [each.repeat_interleave(2, -1).view(1, 5, 1, size) for each in (angles.cos(), angles.sin())]
    reasons = []
    with torch.no_grad():
        for form, calls in ((_of_pair, _calls_of_pair(x, angles)), (_of_columns, [((x, *columns), {})])):
            ours, error = form(never), 0.0
            try:
                for given, named in calls:
                    wanted = original(*(each.clone() if each is x else each for each in given), **named)
                    got = ours(*given, **named)
                    same = isinstance(got, Tensor) and isinstance(wanted, Tensor) and got.dtype == wanted.dtype
                    error = max(error, distance(got, wanted) if same else float("inf"))
            except Exception as raised:  # noqa: BLE001  # a function of another form raises whatever it does on these arguments
                reasons.append(in_short(raised))
                continue
            if agrees(error, dtype):
                half = heads // 2
                cos, sin = (each.contiguous() for each in (angles.cos(), angles.sin()))
                halves = (x.float().narrow(2, 0, half), x.float().narrow(2, half, heads - half))
                kernel = lz.which("rope_", *halves, cos, sin, interleaved=True, layout="BSHD")["kernel_id"]
                return Proved(form(original), error, str(kernel))
            reasons.append(f"off by {error:.2g} of the largest value")
    return f"it is no rotation that lz.rope_ knows ({'; '.join(reasons)})"


def never(*_: Any, **__: Any) -> Any:
    """The original of a rotation that is compared with it: what would run it proves nothing."""
    raise NotImplementedError("lz.rope_ takes no such arguments")


def _calls_of_pair(x: Tensor, angles: Tensor) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments for each way in which that function may be called."""
    for unbind in (-1, -2):
        tables = [
            each.repeat_interleave(2, -1) if unbind == -1 else torch.cat((each, each), -1)
            for each in (angles.cos(), angles.sin())
        ]
        yield (x, tuple(tables)), {"use_real_unbind_dim": unbind, "sequence_dim": 1}
        yield (x.transpose(1, 2), tuple(tables)), {"use_real_unbind_dim": unbind}


def function_of(kind: type) -> tuple[str, Rotation] | None:
    """The rotation that a class of processors calls: its name, and itself; None where it calls none of its own.

    The name is empty for a function that ``__call__`` defines within itself.
    """
    call: Any = vars(kind).get("__call__")
    code = getattr(call, "__code__", None)
    if code is None:
        return None
    for inner in code.co_consts:
        if _is_rotation(inner):
            return "", _within(call, inner)
    for name in code.co_names:
        found = call.__globals__.get(name)
        if "rotary" in name and isinstance(found, types.FunctionType):
            return name, found
    return None


@functools.cache
def _within(call: Any, code: types.CodeType) -> Rotation:
    return types.FunctionType(code, call.__globals__)


def _is_rotation(constant: Any) -> bool:
    """Whether a constant of a call's code is a rotation of a tensor by cosines and sines, with nothing from outside."""
    if not isinstance(constant, types.CodeType) or "rotary" not in constant.co_name:
        return False
    only_given = not constant.co_freevars and not constant.co_kwonlyargcount and constant.co_argcount == 3
    return only_given and not constant.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)


@functools.cache
def _rotated_class(kind: type, call: Any, name: str, rotation: Rotation) -> type:
    """A subclass whose call is the same code, with ours in the place of the function of that name."""
    if name:
        return served_class(kind, {name: rotation})
    code = call.__code__
    return served_class(
        kind, {"_layerzero_rotation": rotation}, code.replace(co_consts=tuple(map(_calling_ours, code.co_consts)))
    )


def _calling_ours(constant: Any) -> Any:
    """The code of a rotation that a processor defines, as code that calls ours; any other constant as it is."""
    if not _is_rotation(constant):
        return constant
    names = constant.co_varnames[: constant.co_argcount]
    return _call_ours.__code__.replace(co_name=constant.co_name, co_varnames=names)


_layerzero_rotation: Rotation = never
"""What :func:`_call_ours` finds where its code runs: among the names of a rotated processor's call."""


def _call_ours(hidden_states: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return _layerzero_rotation(hidden_states, cos, sin)


class RotationSwap:
    """One attention's processor, whose rotations may be ours or its own."""

    def __init__(self, module: Module, name: str, rotation: Rotation) -> None:
        self.module = module
        self.before: Any = module.processor
        kind: Any = type(self.before)
        twin: Any = object.__new__(_rotated_class(kind, kind.__call__, name, rotation))
        self._twin: Any = twin
        self._twin.__dict__ = self.before.__dict__  # a backend is set on both

    @property
    def is_on(self) -> bool:
        return self.module.processor is self._twin

    def on(self) -> None:
        """Let LayerZero rotate, except where another processor was chosen meanwhile."""
        if self.module.processor is self.before:
            self.module.processor = self._twin

    def off(self) -> None:
        """Give back the processor that it had."""
        if self.is_on:
            self.module.processor = self.before


class RotationOf(Together):
    """The rotations of one model's processors, on or off together.

    Attributes:
        path, model: the model and where it lies.
        left: how many are left, by the reason.
        error, kernel: the largest difference from the originals, and what runs.
    """

    def __init__(self, path: str, model: Module) -> None:
        self.path, self.model = path, model
        self.left: dict[str, int] = {}
        self.error, self.kernel = 0.0, ""
        swaps: list[RotationSwap] = []
        known: dict[Any, Proved | str] = {}
        for module in model.modules():
            processor: Any = getattr(module, "processor", None)
            if processor is None or not _rotates(type(processor)):
                continue
            found = self._proved(module, processor, known)
            if isinstance(found, str):
                self.left[found] = self.left.get(found, 0) + 1
                continue
            name, made = found
            self.error, self.kernel = max(self.error, made.error), made.kernel
            swaps.append(RotationSwap(module, name, made.rotation))
        super().__init__(swaps)

    @staticmethod
    def _proved(module: Module, processor: Any, known: dict[Any, Proved | str]) -> tuple[str, Proved] | str:
        kind = type(processor)
        heads, product = getattr(module, "heads", None), getattr(module, "to_q", None)
        if isinstance(processor, Served):
            return "its processor is LayerZero's already"
        if not hasattr(processor, "_attention_backend"):
            return "its processor has no backend of diffusers that may be set"
        own = function_of(kind)
        if own is None:
            return "its processor imports or computes its rotation anew at each call"
        if not isinstance(heads, int) or heads < 2 or not isinstance(product, torch.nn.Linear):
            return "the number and size of its heads are not known, or there is but one"
        name, original = own
        weight = product.weight
        if weight.is_meta:
            return "its weights are on the meta device and have no values"
        key = (original.__code__, heads, product.out_features // heads, weight.dtype, weight.device)
        if key not in known:
            known[key] = proved(original, *key[1:])
        made = known[key]
        return made if isinstance(made, str) else (name, made)


def _rotates(kind: type) -> bool:
    """Whether a class of processors has to do with rotations."""
    code = getattr(vars(kind).get("__call__"), "__code__", None)
    return code is not None and any("rotary" in name for name in (*code.co_names, *code.co_varnames))
