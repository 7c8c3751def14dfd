"""Rotations in processors of diffusers, by ``lz.rope_`` in one call a tensor in place of eight torch calls.

A processor rotates queries and keys one after the other, by a function that its module imports (Flux and most others:
``embeddings.apply_rotary_emb``) or that its ``__call__`` defines within itself (Wan). A rotated processor is an
instance of a subclass whose ``__call__`` is the same code with that function bound to ours, and shares its attributes
with the processor that it stands for. Neither a class nor a module of diffusers changes.

A function's name does not say which formula it is: both are tried on random input (diffusers 0.42).
"""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from layerzero.integrations.diffusers import Served, served_class
from layerzero.integrations.diffusers_formulas import Proved, Rotation, never, proved
from layerzero.integrations.exchange import Together


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
            return "", types.FunctionType(inner, call.__globals__)
    for name in code.co_names:
        found = call.__globals__.get(name)
        if "rotary" in name and isinstance(found, types.FunctionType):
            return name, found
    return None


def _is_rotation(constant: Any) -> bool:
    """Whether a constant of a call's code is a rotation of a tensor by cosines and sines, with nothing from outside."""
    if not isinstance(constant, types.CodeType) or "rotary" not in constant.co_name:
        return False
    only_given = not constant.co_freevars and not constant.co_kwonlyargcount and constant.co_argcount == 3
    return only_given and not constant.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)


@functools.cache
def _rotated_class(kind: type, name: str, rotation: Rotation) -> type:
    """A subclass whose call is the same code, with ours in the place of the function of that name."""
    if name:
        return served_class(kind, {name: rotation})
    code = vars(kind)["__call__"].__code__
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
        twin: Any = object.__new__(_rotated_class(kind, name, rotation))
        self._twin: Any = twin
        self._twin.__dict__ = self.before.__dict__  # a backend is set on both

    @property
    def is_on(self) -> bool:
        """Whether its rotations are ours now."""
        return self.module.processor is self._twin

    def on(self) -> None:
        """Let LayerZero rotate, except where somebody chose another processor meanwhile."""
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
        if isinstance(processor, Served) or not hasattr(processor, "_attention_backend"):
            return "its processor calls torch's attention itself"
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
