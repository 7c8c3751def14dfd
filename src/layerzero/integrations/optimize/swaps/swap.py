"""Another ``forward`` on one instance: put there, taken away, copied and saved with its module.

Nothing of a class or of the process changes. What the new forward keeps lies on the module as well, under one name that
is no parameter, buffer or submodule, so names and values of a state dict stay what they are. A deep copy takes both
along, with its own weights. A pickle does not: what ``torch.save`` wrote loads as the stock module, without LayerZero,
and with the attention that the model had before.
"""

from __future__ import annotations

import copy
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from types import FunctionType, MappingProxyType, MethodType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from layerzero.core.arguments import signature_of
from layerzero.core.errors import LayerZeroWarning
from layerzero.core.system import warn
from layerzero.engine.transforms import in_function_mode, in_transform
from layerzero.integrations.optimize.swaps.stamp import OURS, SWAPPED, Stamp

MARK = "_layerzero"
"""Where a module keeps what its new forward needs; None after a pickle."""

Forward = Callable[..., Any]


def as_forward(function: Forward) -> Forward:
    """Name a function as a pickle of a method needs it: loaded again, it is the forward of the module's class."""
    function.__name__ = "forward"
    setattr(function, OURS, True)
    _OURS.add(function)
    return function


_OURS: weakref.WeakSet[Forward] = weakref.WeakSet()
"""Every forward that is put on a module."""

ABSENT: Any = object()
"""Stands for the first argument of a call that has none by place: modules' classes give it names of their own."""


def by_name(forward: Forward, module: Module, named: dict[str, Any]) -> Any:
    """Call a forward of ours whose first argument came by name, or the module's own, which knows what to say."""
    state: State | None = module.__dict__.get(MARK)
    if state is None or state.first not in named:
        return type(module).forward(module, **named)
    return forward(module, named.pop(state.first), **named)


_TWINS: weakref.WeakKeyDictionary[type, weakref.WeakKeyDictionary[Forward, Forward]] = weakref.WeakKeyDictionary()


def _as_of(forward: Any, cls: type[Module]) -> Forward:
    """A forward of ours with the signature that it has in a class: trainers, exporters and pipelines ask for that.

    One for all modules of the class, or code that is compiled for one of them would serve no other.
    """
    if "__signature__" in vars(forward):
        return forward  # type: ignore[no-any-return]
    if forward not in (twins := _TWINS.setdefault(cls, weakref.WeakKeyDictionary())):
        parts = (getattr(forward, f"__{each}__") for each in ("code", "globals", "name", "defaults", "closure"))
        twins[forward] = twin = FunctionType(*parts)
        signature = inspect.signature(forward)
        with suppress(TypeError, ValueError):  # it is compiled
            signature = signature_of(cls.forward)
        vars(twin).update(vars(forward), __signature__=signature)
        _OURS.add(twin)
    return twins[forward]


SIZES = (1, 4, 64)
"""Tokens of the calls that are timed: a step of generation, what speculation verifies, and a prompt."""

FROM_MANY = 16
"""Tokens from which a call counts as a prompt where no time says: half-way between the second size and the third."""


class Way(StrEnum):
    """What a call of one size runs."""

    STOCK = "stock"
    """The model as it was: what all others are compared with."""
    OWN = "own code"
    """The module's own code, with LayerZero's attention in it."""
    PLAIN = "weights as they lie"
    PACKED = "packed weights"


def size_of(rows: Tensor, many: int = FROM_MANY) -> int:
    """Which of :data:`SIZES` stands for rows (..., width); ``many`` of them are a prompt."""
    count = rows.numel() // (rows.shape[-1] or 1)
    return 0 if count <= 1 else 1 if count < many else 2


class State:
    """What a new forward needs besides its module's parameters.

    Attributes:
        covers: submodules that the new forward computes for, by name: it computes without calling them.
        stamp: what the proof of the new forward rests on; None before that is put on first.
        own_at: of each size of :data:`SIZES`, whether the module's own code is faster; empty where it nowhere is.
        many: from how many rows a call is computed as the last of these sizes is.
        called: a submodule that the new forward calls as the module's own does, so that nothing in it was proved.
        sets: what the module has on itself while the new forward is on it, and had not before.
        asks: whether calls ask for the stamp.
        first: the name of the first argument of the module's own forward.
        over: :class:`~layerzero.integrations.optimize.models.compiled.Over` that lies over it, and the forward beneath.
        keeps: what its bytes are, for the report; empty for packed forms.
    """

    stamp: Stamp | None = None
    sets: Mapping[str, object] = MappingProxyType({})
    own_at: tuple[bool, ...] = ()
    many = FROM_MANY
    called: Module | None = None
    asks = True
    first = keeps = ""
    over: tuple[State, Forward] | None = None

    def __init__(self, covers: Iterable[tuple[str, Module]] = ()) -> None:
        self.covers = tuple(covers)

    def __deepcopy__(self, memo: dict[int, Any]) -> State:
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    @property
    def bytes(self) -> int:
        """Memory that it keeps besides the module's own."""
        return 0

    @property
    def parts(self) -> tuple[State, ...]:
        """It, or the states that it is made of."""
        return (self,)

    def forget(self) -> None:
        """Give back what can be made anew where it is used."""

    def take(self, ways: Sequence[Way], many: int = FROM_MANY) -> None:
        """Compute calls of each size that way; by the new forward, with packed weights if any, where none is said."""
        self.many = many
        self.own_at = tuple(way is Way.OWN for way in ways) if Way.OWN in ways else ()


def weight_of(module: Module) -> Parameter:
    """The weight of a module that has one."""
    weight = module._parameters["weight"]
    assert weight is not None
    return weight


def serves(state: State | None, input: Tensor, *weights: Tensor | None) -> bool:
    """Whether a call is one that the new forward was proved for; any other belongs to the module's own.

    What trains, traces, compiles or hears torch's functions gets what is stock; so do nested tensors, later changes,
    and a size at which the module's own code is faster. There is no state once another thread has undone it.
    """
    if torch.compiler.is_compiling() or state is None or torch._C._is_any_autocast_enabled():
        return False
    if type(input) not in _PLAIN or input.is_nested or in_transform() or in_function_mode():
        return False
    if state.own_at and state.own_at[size_of(input, state.many)]:
        return False
    wanted = torch.is_grad_enabled()
    if wanted and input.requires_grad:
        return False
    for each in weights:  # a loop: each call comes here
        if each is None:
            continue
        if type(each) not in _PLAIN:  # quantised or divided among devices since: its own operators know what to do
            return False
        if wanted and each.requires_grad:
            return False
    stamp = state.stamp  # once: undo takes it away
    return stamp is not None and stamp.holds()


_PLAIN = frozenset({Tensor, Parameter})


def is_dense(weight: object) -> bool:
    """Whether a weight is a plain tensor: neither of a library's own class (quantised, divided), nor sparse."""
    return type(weight) in _PLAIN and isinstance(weight, Tensor) and weight.layout is torch.strided


def stock_forward(module: Module) -> Forward:
    """The forward of the module's class, for this module."""
    return MethodType(type(module).forward, module)


def is_swapped(module: Module) -> bool:
    """Whether its forward is one of ours."""
    return module.__dict__.get(MARK) is not None


def has_own_forward(module: Module) -> bool:
    """Whether other code put another forward on this instance; one of ours that outlived its undoing counts for none.

    Code that had put another one around it may have put ours back later.
    """
    forward = getattr(module.__dict__.get("forward"), "__func__", None) or module.__dict__.get("forward")
    if forward is None or forward is type(module).forward:
        return False
    return MARK in module.__dict__ or forward not in _OURS


@dataclass
class Swap:
    """The new forward of one module, which may be on or off.

    Attributes:
        module: the module, as it was found.
        forward: a function of the module and its arguments.
        state: what it needs.
    """

    module: Module
    forward: Forward
    state: State

    def __post_init__(self) -> None:
        self.forward = _as_of(self.forward, type(self.module))
        self.state.first = "".join([*self.forward.__signature__.parameters][1:2])  # type: ignore[attr-defined]

    @property
    def is_on(self) -> bool:
        return self.module.__dict__.get(MARK) is self.state

    def on(self) -> None:
        """Put it on the module.

        Shallow copies (``copy.copy``, replicas of DataParallel) and pickles are made without it: a method that is bound
        to this module would compute with this module's weights in theirs. A deep copy gets one of its own.
        """
        self.module.__dict__ |= self.state.sets  # first: the proof rests on them, too
        if self.state.stamp is None:
            self.state.stamp = Stamp(self.module, called=self.state.called)
        self.module.__dict__[MARK] = self.state
        self.module.__dict__ |= {name: MethodType(each, self.module) for name, each in _methods(self.forward)}

    def off(self) -> None:
        """Take it off the module, which has its class's forward again. Off already, or another's: leave it.

        A forward that was put around it since (accelerate's, of a hook) stays, and finds the class's beneath.
        """
        if self.is_on:
            _strip(self.module.__dict__, self.forward)

    def compute(self, way: Way) -> None:
        """Compute calls of every size that way."""
        if way is Way.STOCK:
            self.off()
            return
        if not self.is_on:  # what its proof rests on is looked at anew then
            self.on()
        self.state.take((way,) * len(SIZES))


def _methods(forward: Forward) -> Iterator[tuple[str, Forward]]:
    return zip(SWAPPED, (forward, _stock_state, _deep_copy, _stock_replica, _to_be_scripted), strict=True)


def _strip(attributes: dict[str, Any], forward: Forward) -> None:
    """Take what a swap put there out of a module's attributes."""
    for name in attributes.pop(MARK).sets:
        attributes.pop(name, None)
    for name, made in _methods(forward):
        if getattr(attributes.get(name), "__func__", None) is made:
            del attributes[name]


def _without(module: Module, attributes: dict[str, Any]) -> dict[str, Any]:
    """Attributes of a module, or of a copy of it, as they are without its swap."""
    found = dict(attributes)
    if found.get(MARK) is not None:
        _strip(found, _mine(module))
    return found


def _mine(module: Module) -> Forward:
    """The forward of ours that is on a module; its class's where another one lies around it."""
    forward: Any = getattr(module.__dict__.get("forward"), "__func__", None)
    return forward if forward in _OURS else type(module).forward


def _of_class(module: Module, name: str) -> Any:
    return MethodType(getattr(type(module), name), module)


def _stock_state(self: Module) -> Any:
    lost = getattr(self.__dict__.get(MARK), "lost", "")
    if lost and sys._getframe(1).f_code is not _deep_copy.__code__:
        warn(lost, LayerZeroWarning, stacklevel=2)
    state = _of_class(self, "__getstate__")()
    return _without(self, state) if isinstance(state, dict) else state


def _stock_replica(self: Module) -> Module:
    replica: Module = _of_class(self, "_replicate_for_data_parallel")()
    replica.__dict__ = _without(self, replica.__dict__)
    return replica


def _to_be_scripted(self: Module) -> Module:
    """Take the swap off: ``torch.jit.script`` reads source code, and of no other module than this one."""
    text = (
        "lz.optimize: torch.jit.script reads modules' own code, so modules that it was given run theirs from now on; "
        "give it a copy.deepcopy of the model, or undo() the report and optimize again"
    )
    warn(text, LayerZeroWarning, stacklevel=2)
    _strip(self.__dict__, _mine(self))
    own = getattr(type(self), "__prepare_scriptable__", None)
    return self if own is None else own(self)


def _deep_copy(self: Module, memo: dict[int, Any]) -> Module:
    """A deep copy with a swap of its own: first the module, then what its new forward needs."""
    asking = sys._getframe(1)
    if asking.f_code is copy.deepcopy.__code__ and (asked := asking.f_locals["x"]) is not self:
        # a wrapper that hands names which it lacks on to this module, as torch.compile's and PEFT's do: this one, too
        return copy._reconstruct(asked, memo, *asked.__reduce_ex__(4))  # type: ignore[attr-defined, no-any-return]
    forward, state = self.__dict__.get("forward"), self.__dict__.get(MARK)
    twin: Module
    if hasattr(type(self), "__deepcopy__"):  # parametrized modules copy all that lies on them, before they are whole
        memo[id(state)] = None
        twin = _of_class(self, "__deepcopy__")(memo)
        del memo[id(state)]
    else:
        made: Any = self.__reduce_ex__(4)  # by __getstate__, so without the swap
        twin = memo[id(self)] = made[0](*copy.deepcopy(made[1], memo))
        _of_class(twin, "__setstate__")(copy.deepcopy(made[2], memo))
    if state is not None and isinstance(forward, MethodType) and forward.__func__ in _OURS:
        twin.__dict__ |= state.sets  # before its proof is copied, which rests on them
        Swap(twin, forward.__func__, copy.deepcopy(state, memo)).on()
    return twin


class Exchange(Protocol):
    """What may be on or off."""

    @property
    def is_on(self) -> bool:
        """Whether it is on."""

    def on(self) -> None:
        """Put it in place."""

    def off(self) -> None:
        """Take it away."""


@contextmanager
def trying(*exchanges: Exchange) -> Iterator[None]:
    """Put them on meanwhile; they are off afterwards, whatever the block did and raised."""
    try:
        for each in exchanges:
            each.on()
        yield
    finally:
        for each in exchanges:
            each.off()


class Together:
    """Several that are timed as one: those of one kind in one model."""

    def __init__(self, exchanges: Sequence[Exchange]) -> None:
        self._exchanges = exchanges

    def __len__(self) -> int:
        return len(self._exchanges)

    @property
    def is_on(self) -> bool:
        return any(each.is_on for each in self._exchanges)

    def on(self) -> None:
        for each in self._exchanges:
            each.on()

    def off(self) -> None:
        for each in self._exchanges:
            each.off()
