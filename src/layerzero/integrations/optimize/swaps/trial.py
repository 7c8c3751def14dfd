"""What a trial of a module changes, and puts back: weights while a form is proved, and what a call leaves behind.

A new model has norms of ones and may have products of zeros, and is loaded or trained later. A form that takes one
weight for another computes the same until then. So weights that are one number are others, in the thread that proves
and in no other: other threads may run the model meanwhile, and see its own.

Some models keep something of a call. Of Transformers 5.24: a short one exchanges BigBird-Pegasus' attention for good,
a long one Phi's rotation, a first one sets how many tokens of a text NLLB-MoE's experts train on, and hooks that record
hidden states keep DPT from a pickle.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from layerzero.integrations.optimize.swaps.candidate import quiet, weight_problem
from layerzero.integrations.optimize.swaps.stamp import is_recorder

_NAME = "_parameters"


class _Parameters(dict[str, Any]):
    """A module's parameters, of which one thread sees others; what is copied of it is a dict."""

    def __init__(self, plain: dict[str, Any], drawn: Mapping[str, Any]) -> None:
        super().__init__(plain)
        # two threads may prove one module
        self.plain: dict[str, Any] = plain.plain if isinstance(plain, _Parameters) else plain
        self.drawn, self.thread = dict(drawn), threading.get_ident()

    def __getitem__(self, name: str) -> Any:
        found = self.drawn.get(name) if threading.get_ident() == self.thread else None
        return super().__getitem__(name) if found is None else found

    def __iter__(self) -> Iterator[str]:  # without it C code takes what lies here, past __getitem__
        return super().__iter__()

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401  # it is that

    def items(self) -> Any:
        return self._seen().items()

    def values(self) -> Any:
        return self._seen().values()

    def __reduce__(self) -> tuple[type, tuple[dict[str, Any]]]:
        return dict, (self._seen(),)

    def _seen(self) -> dict[str, Any]:
        return {name: self[name] for name in self}

    def leave(self, module: Module) -> None:
        """Give the module its own dict again, with what was written meanwhile; a later one that lies there stays."""
        self.drawn = {}
        if vars(module)[_NAME] is self:
            self.plain.clear()
            self.plain.update(self)
            vars(module)[_NAME] = self.plain


@contextmanager
def told_apart(module: Module) -> Iterator[None]:
    """Give weights that are one number others meanwhile, so that it shows where each stands."""
    generator, made = torch.Generator().manual_seed(0), dict[int, Parameter]()
    left: list[tuple[_Parameters, Module]] = []
    try:
        for each in module.modules():
            single = {name: one for name, one in each._parameters.items() if _is_one_number(one)}
            for one in single.values():
                made.setdefault(id(one), _drawn(one, generator))
            if single:
                drawn = {name: made[id(one)] for name, one in single.items()}
                left.append((_Parameters(each._parameters, drawn), each))
        for space, each in left:
            vars(each)[_NAME] = space
        yield
    finally:
        for space, each in left:
            space.leave(each)


def _is_one_number(one: Any) -> bool:
    if one is None or weight_problem(one) or not one.numel() or one.dtype.itemsize == 1:  # torch adds no float8
        return False
    first = (0,) * one.ndim
    return all(bool((each == one[first]).all()) for each in (one[first[1:]], one))


def _drawn(one: Any, generator: torch.Generator) -> Parameter:
    drawn = torch.rand(one.shape, generator=generator, device="cpu", dtype=torch.float32).to(one.device, one.dtype)
    number, size = one.detach()[(0,) * one.ndim], one.shape[-1] if one.ndim > 1 else 1
    return Parameter(number + (number.abs() or size**-0.5) * (drawn - 0.5), requires_grad=one.requires_grad)


_PLAIN = (str, int, float, NoneType, Tensor, tuple, torch.dtype, torch.device)
_NOTED = "_output_capturing_hooks_installed"


@contextmanager
def as_served(module: Module) -> Iterator[None]:
    """Run a model :func:`quiet`, and put back what calls change: numbers, texts, tensors, inner modules, recorders.

    What a call wrote into a tensor stays. Where one of its flags changed, all of a module stays: that may say what
    became of weights, as of RWKV's.
    """
    held = [
        (each, dict(vars(each)), dict(each._buffers), dict(each._modules), {*each._forward_hooks})
        for each in module.modules()
        if not isinstance(each, torch.jit.ScriptModule)
    ]
    try:
        with quiet(module):
            yield
    finally:
        for each, own, buffers, inner, hooks in held:
            for key in [key for key, one in each._forward_hooks.items() if key not in hooks and is_recorder(one)]:
                del each._forward_hooks[key]
            now = vars(each)
            if _NOTED not in own:
                now.pop(_NOTED, None)
            if _flags(now) == _flags(own):
                _replace(now, {name: one for name, one in own.items() if isinstance(one, _PLAIN)})
                _replace(each._buffers, buffers)
                _replace(each._modules, inner)


def _flags(held: Mapping[str, Any]) -> dict[str, bool]:
    return {name: one for name, one in held.items() if isinstance(one, bool)}


def _replace(now: MutableMapping[str, Any], before: Mapping[str, Any]) -> None:
    """Leave the plain entries and modules that were there before, and no others."""
    for name in [name for name, one in now.items() if isinstance(one, (*_PLAIN, Module)) and name not in before]:
        del now[name]
    now.update(before)
