"""Whether a module and all its submodules are still what they were when a forward was proved to compute the same.

The proof ran the modules' own code, so it rests on all that this code reads: the submodules, their classes, modes,
hooks and attributes, and the functions that the code names. A stamp notes them once, and each call compares identities:
of a decoder layer of Llama in 1.0 us, of a norm or a linear layer in 0.15 (C, Xeon, 2 cores in use by others,
2026-11-25; about 100 and 7 where no extension was built). Only where something differs is it compared by value; a
change that means nothing is noted then, and costs that call alone.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import is_
from types import MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules import module as _module

from layerzero.engine import accelerator
from layerzero.integrations.optimize.swaps.reads import code_of, is_object, is_own

HOOKS, TRAINS = "it has hooks, which wait for calls", "a module is in training mode"
"""Why the modules' own code runs though everything else is as it was."""

_RECORDER = "transformers.utils.output_capturing"
"""Its hooks stay on modules once hidden states were wanted, and mostly record nothing."""

SILENT = frozenset({_RECORDER, "layerzero.inspection.trace", "layerzero.integrations.optimize.times.module_times"})
"""Modules whose hooks change nothing: the last two note which module calls, and read the clock."""

_TORCHS = frozenset(vars(Module())) | {"_compiled_call_impl"}
"""Attributes of every module: hooks, modes and submodules are looked at by themselves, others change no output."""

_SKIPPED = _TORCHS - {"training", "_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"}

_BESIDE = "_layerzero", "_hf_hook", "_old_forward", "_output_capturing_hooks_installed"
"""Beginnings of names that LayerZero, accelerate and Transformers' recorder put on modules."""

SWAPPED = "forward", "__getstate__", "__deepcopy__", "_replicate_for_data_parallel", "__prepare_scriptable__"
"""Attributes of a module that has a new forward."""

_PLAIN = frozenset({int, float, complex, str, bytes, bool, type(None), MethodType, torch.device, torch.Size})
"""Types whose values are compared where identities differ."""

_CONTAINERS = frozenset({list, tuple, dict, set})

_DEEPEST = 4
"""Containers within containers that are looked into."""


class Last(NamedTuple):
    """What the last look found.

    Attributes:
        seen: what is compared at each call, as :func:`unchanged` takes it.
        same: whether everything is as it was.
        why: :data:`HOOKS`, :data:`TRAINS` or nothing.
        records: whether hooks of Transformers' recorder are there.
        tensors: buffers and attributes that are tensors, each with how it stood.
    """

    seen: tuple[tuple[Any, ...], ...]
    same: bool
    why: str
    records: bool
    tensors: tuple[tuple[Tensor, tuple[int, ...]], ...]


class Stamp:
    """What the proof of a module's new forward rests on.

    Args:
        root: the module.
        whole: whether the new forward passes its submodules over, and asks for their parameters at each call. Then a
            forward of their own on the instance counts as a change, and hooks of the root, which run around whatever
            forward it has, do not. Otherwise their calls are recorded, with parameters and hooks of all.
        called: a submodule that is called as before: what is in it is its own affair.
    """

    def __init__(self, root: Module, *, whole: bool = True, called: Module | None = None) -> None:
        self._whole = whole
        left = set() if called is None else set(called.modules())
        self._note([each for each in root.modules() if each not in left])

    def _note(self, modules: list[Module]) -> None:
        self._modules = modules
        self._facts = self._facts_now()
        names, classes = _names_of(modules)
        self._classes = {cls: of_class(cls) for cls in dict.fromkeys((*map(type, modules), *classes))}
        self._names = [(space, name, _frozen(space[name])) for space, name in names if name in space]
        self._absent: dict[int, tuple[Any, set[str]]] = {}  # what code reads of objects that lack it until later
        for space, name in names:
            if name not in space:
                self._absent.setdefault(id(space), (space, set()))[1].add(name)
        self._dtypes = {str(each.dtype)[6:] for module in modules for each in module.parameters()}
        self._last: Last | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Stamp:
        """That of a copy, whose modules are there already; where the original has changed, its copy never holds."""
        twin = object.__new__(Stamp)
        memo[id(self)] = twin
        twin._whole = self._whole
        twin._note(copy.deepcopy(self._modules, memo))
        if not self._is_same():
            twin._facts = ()
        return twin

    def holds(self) -> bool:
        """Whether everything is as it was, and nothing trains or waits for the calls that are passed over."""
        last = self._last
        if last is None or not unchanged(*last.seen) or (last.tensors and not _stand_still(last.tensors)):
            last = self.look()
        return last.same and not last.why and not (last.records and _is_recording_within())

    @property
    def last(self) -> Last:
        last = self._last
        if last is None or not unchanged(*last.seen) or not _stand_still(last.tensors):
            return self.look()
        return last

    def look(self) -> Last:
        """Compare by value. What is seen is noted first, so that a change meanwhile is one for the next call."""
        seen = self._seen()
        hooked = self._modules[1:] if self._whole else self._modules
        hooks = [hook for each in hooked for made in _hooks_of(each) for hook in made.values()]
        makers = {getattr(each, "__module__", "") for each in hooks}
        why = HOOKS if makers - (SILENT if self._whole else {_RECORDER}) or any(_GLOBAL_HOOKS) else ""
        if any(each.training for each in self._modules):
            why = TRAINS
        tensors = tuple((each, _stand(each)) for module in self._modules for each in _tensors_of(module))
        self._last = last = Last(seen, self._is_same(), why, _RECORDER in makers, tensors)
        return last

    def _is_same(self) -> bool:
        if any(not all(map(is_, of_class(cls), facts)) for cls, facts in self._classes.items()):
            return False
        found = ((space, name, None) for space, names in self._absent.values() for name in names & {*space})
        if not all(self._has(*each) for each in (*self._names, *found)):
            return False
        if self._whole and not all(map(_has_its_forward, self._modules[1:])):
            return False
        return _same(self._facts_now(), self._facts)

    def _has(self, space: Any, name: str, before: Any) -> bool:
        now = space.get(name)  # Transformers writes a model's dtype where there was none, as it saves one
        saved = name == "dtype" and before is None and str(now).removeprefix("torch.") in self._dtypes
        return saved or _same(_frozen(now), before)

    def _facts_now(self) -> tuple[Any, ...]:
        if self._whole:
            return tuple(_facts_of(each, SWAPPED) for each in self._modules)
        return tuple((*_facts_of(each, SWAPPED[1:]), *each._parameters.values()) for each in self._modules)

    def _seen(self) -> tuple[tuple[Any, ...], ...]:
        """What is compared at each call, as it is now."""
        versions = tuple(part for each in self._classes for part in (each, version(each)))
        hooked = self._modules[1:] if self._whole else self._modules
        dicts: list[dict[Any, Any]] = [*_GLOBAL_HOOKS, *(made for each in hooked for made in _hooks_of(each))]
        lists: list[list[Any]] = []
        named = [(space, name) for space, name, _ in self._names]
        for each in self._modules:
            dicts += [each.__dict__, each._modules]
            dicts += [each._buffers] if each._buffers else []
            dicts += [] if self._whole else [each._parameters]
            for name, value in [*each.__dict__.items()]:
                if name not in _TORCHS:
                    _gather(value, dicts, lists)
        for space, name in named:
            _gather(space.get(name), dicts, lists)
        sizes = [(space, places(space, ()), ()) for space, _ in self._absent.values()]
        return (
            tuple(part for each in self._modules for part in (each, type(each))),
            versions,
            tuple(part for each in (*map(_items, dicts), *sizes) for part in each),
            tuple(part for each in self._modules for part in (each._parameters, tuple(each._parameters))),
            tuple(part for each in lists for part in (each, tuple(each))),
            tuple(part for made, name in named for part in (made, name, made.get(name))),
        )


OURS = "_layerzero_forward"
"""On functions that are put on modules as their forward, and were proved to compute the same."""


def _has_its_forward(module: Module) -> bool:
    forward: Any = module.__dict__.get("forward")
    return forward is None or hasattr(getattr(forward, "__func__", forward), OURS)


def _items(made: dict[Any, Any]) -> tuple[Any, ...]:
    """A dict with those of its items that are looked at, and where they stand."""
    items = tuple(part for name, value in made.items() if name not in _SKIPPED for part in (name, value))
    return made, places(made, items), items


_GLOBAL_HOOKS: tuple[dict[int, Any], ...] = (_module._global_forward_hooks, _module._global_forward_pre_hooks)


def _hooks_of(module: Module) -> tuple[dict[int, Any], ...]:
    return module._forward_hooks, module._forward_pre_hooks


def may_write(hooks: Mapping[int, object]) -> bool:
    """Whether hooks may write into what they get, past torch's count of writes (by .data)."""
    return any(getattr(each, "__module__", "") not in SILENT for each in hooks.values())


def is_recorder(hook: object) -> bool:
    """Whether a hook is Transformers' own."""
    return getattr(hook, "__module__", "") == _RECORDER


def _is_recording_within() -> bool:
    """Whether Transformers records more now than hidden states, which lie between layers."""
    return any(not str(each).lstrip("_").startswith("hidden_states") for each in recorded())


def recorded() -> Iterable[Any]:
    """What Transformers records now of the calls of modules, by name."""
    recorder = sys.modules.get(_RECORDER)
    if recorder is None:
        return ()
    collector = getattr(recorder, "_active_collector", None)
    return {"unknown"} if collector is None else collector.get() or ()


def _facts_of(module: Module, beside: tuple[str, ...]) -> tuple[Any, ...]:
    """A module's class, submodules, buffers and names of parameters, and attributes of its own."""
    attributes = module.__dict__
    own = tuple(
        (name, _frozen(value))
        for name, value in sorted([*attributes.items()])
        if name not in _TORCHS and name not in beside and not name.startswith(_BESIDE)
    )
    buffers = tuple((name, each, *_stand(each)) for name, each in [*module._buffers.items()])
    return type(module), (*module._modules.items(),), buffers, (*module._parameters,), own


def _tensors_of(module: Module) -> list[Tensor]:
    return [each for of in (module._buffers, module.__dict__) for each in [*of.values()] if isinstance(each, Tensor)]


def _stand_still(tensors: tuple[tuple[Tensor, tuple[int, ...]], ...]) -> bool:
    return all(_stand(each) == stood for each, stood in tensors)


def _stand(tensor: Tensor | None) -> tuple[int, ...]:
    """Where a tensor lies, and how often it was written into."""
    if tensor is None or tensor.is_inference() or tensor.layout is not torch.strided:
        return ()
    return tensor._version, tensor.device.type != "meta" and tensor.data_ptr()


def _frozen(value: Any, depth: int = 0) -> Any:
    """A value as it is now: the contents of containers in tuples, a tensor with how it stands."""
    if depth < _DEEPEST and type(value) in {list, tuple}:
        return type(value), *(_frozen(each, depth + 1) for each in value)
    if depth < _DEEPEST and isinstance(value, dict):
        return type(value), *((_frozen(key), _frozen(each, depth + 1)) for key, each in value.items())
    if isinstance(value, (set, frozenset)):
        return frozenset(value)
    return (value, *_stand(value)) if isinstance(value, Tensor) else value


def _same(now: Any, before: Any) -> bool:
    """Whether two are one, or plain and equal, or tuples of such."""
    if now is before:
        return True
    if type(now) is not type(before):
        return False
    if type(now) is tuple:
        return len(now) == len(before) and all(map(_same, now, before))
    return (type(now) in _PLAIN or type(now) is frozenset) and bool(now == before)


def _gather(value: Any, dicts: list[Any], lists: list[list[Any]], depth: int = 0) -> None:
    """Note the containers in which contents may change while an attribute stays the same object."""
    if depth == _DEEPEST:
        return
    if isinstance(value, dict):
        dicts.append(value)
        for each in value.values():
            _gather(each, dicts, lists, depth + 1)
    elif type(value) in {list, tuple}:
        if type(value) is list:
            lists.append(value)
        for each in value:
            _gather(each, dicts, lists, depth + 1)


def _names_of(modules: list[Module]) -> tuple[list[tuple[Any, str]], list[type]]:
    """What the modules' code names outside of them: functions and numbers of files and of torch, settings; classes."""
    found: dict[tuple[int, str], tuple[Any, str]] = {}
    classes: dict[type, None] = {}
    for module in modules:
        names, spaces = code_of(module)
        mine = {name: each for name, each in vars(module).items() if name not in _TORCHS}
        held = {name: each for name, each in mine.items() if is_object(each) and not name.startswith(_BESIDE)}
        found |= {(id(each[0]), each[1]): each for each in _named_in(names, spaces, classes) if each[1] in each[0]}
        for space, name in _named_in(names | held.keys(), [held], classes):
            if space is not held and not name.startswith("_attn_implementation"):  # another part reads it
                found[id(space), name] = space, name
    own = [base for cls in (*classes, *map(type, modules)) for base in cls.__mro__ if is_own(base.__module__)]
    held_by = {base: {name: each for name, each in vars(base).items() if type(each) in _CONTAINERS} for base in own}
    return [*found.values(), *((space, name) for space in held_by.values() for name in space)], list(classes)


_SPACES = frozenset({"argparse", "types"})

_MOST = 64
"""Attributes of an object of which all are followed: its methods may read others than code names."""


def _named_in(
    names: set[str], spaces: Iterable[dict[str, Any]], classes: dict[type, None]
) -> Iterator[tuple[dict[str, Any], str]]:
    """Where these names stand, or would stand in objects; in spaces and what they name there. Own classes are added."""
    waiting, done = [(each, False) for each in spaces], set[int]()
    while waiting:
        space, whole = waiting.pop()
        if id(space) in done:
            continue
        done.add(id(space))
        for name in list(space) if whole else names & space.keys():
            value = space[name]
            if isinstance(value, Tensor) and name not in names:  # weights of a library's own class
                continue
            follows = isinstance(value, ModuleType) and (is_own(value.__name__) or value.__name__.startswith("torch"))
            if follows or is_object(value):
                inner = vars(value)
                yield from () if follows else ((inner, each) for each in names - inner.keys())
                own = is_own(kind := type(value).__module__) or kind in _SPACES
                waiting.append((inner, not follows and own and len(inner) <= _MOST))
            if isinstance(value, type) and is_own(value.__module__):
                classes[value] = None
            if follows or not isinstance(value, (type, ModuleType, torch.dtype)):
                yield space, name


def of_class(cls: Any) -> tuple[Any, ...]:
    """What calls of a module of this class read from it and its bases, torch's own class aside."""
    own = [each for each in cls.__mro__ if each is not Module and each is not object]
    call = cls.__call__ if issubclass(cls, Module) else None
    return getattr(cls, "forward", None), call, *[value for each in own for value in vars(each).values()]


def python_version(cls: Any) -> Any:
    """Identities; what they belong to is kept where they are compared with a class as it was."""
    return tuple(map(id, of_class(cls)))


def python_unchanged(
    objects: tuple[Any, ...],
    classes: tuple[Any, ...],
    dicts: tuple[Any, ...],
    keys: tuple[Any, ...],
    lists: tuple[Any, ...],
    names: tuple[Any, ...],
) -> bool:
    """What ``_native/stamp.c`` does."""
    if not all(map(is_, map(type, objects[::2]), objects[1::2])):
        return False
    for made, size, items in zip(dicts[::3], dicts[1::3], dicts[2::3], strict=True):
        if len(made) != size or not all(map(is_, map(made.get, items[::2]), items[1::2])):
            return False
    for made, items in zip(keys[::2], keys[1::2], strict=True):
        if (*made,) != items:
            return False
    for made, items in zip(lists[::2], lists[1::2], strict=True):
        if len(made) != len(items) or not all(map(is_, made, items)):
            return False
    for made, name, value in zip(names[::3], names[1::3], names[2::3], strict=True):
        if made.get(name) is not value:
            return False
    return all(python_version(cls) == wanted for cls, wanted in zip(classes[::2], classes[1::2], strict=True))


_IN_C = accelerator.HOT if hasattr(accelerator.HOT, "unchanged") else None


version: Callable[[type], Any] = python_version if _IN_C is None else _IN_C.version
"""What changes with anything of a class or of its bases; 0 where nothing tells."""


places: Callable[[Any, Any], Any] = (lambda made, _: len(made)) if _IN_C is None else _IN_C.places
"""How large a dict is, and where some of its items stand: keys and values one after the other, in its own order."""


unchanged: Callable[..., bool] = python_unchanged if _IN_C is None else _IN_C.unchanged
"""Whether all are what they were.

Pairs of an object and its class, and of a class and its version; triples of a dict, places and items; pairs of a dict
and its keys, and of a list and its items; triples of a dict, a name and its value.
"""
