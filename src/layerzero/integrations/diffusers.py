"""diffusers: attention by ``lz.attention``, through the backend of its dispatcher and through processors.

Transformers of diffusers (Flux, Wan, ...) hand queries, keys and values to a dispatcher with named backends; the name
``"layerzero"`` is made one of them. Processors of UNets, of SD3 and of autoencoders call torch's function themselves
and ignore every backend. They are served as they stand: the same code runs with ``F.scaled_dot_product_attention``
bound to ``lz.scaled_dot_product_attention``, in a subclass of the processor's class on that one instance. Nothing that
others use is changed, and no code of diffusers is repeated here.

The registry and the enumeration of names are private to diffusers (0.36 to 0.42, ``models/attention_dispatch.py``).
"""

from __future__ import annotations

import copy
import copyreg
import functools
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from packaging.specifiers import SpecifierSet
from torch import Tensor
from torch.nn import Module, functional

import layerzero as lz
from layerzero.core.errors import InvalidCallError
from layerzero.engine.fusion import written
from layerzero.engine.transforms import in_function_mode

NAME = "layerzero"
TESTED = SpecifierSet(">=0.36,<0.43")
"""Versions of diffusers whose registry and processors were seen to work."""

_FUNCTION, _DISPATCHER = "scaled_dot_product_attention", "dispatch_attention_fn"

COMPARED: ContextVar[Callable[[Tensor, Tensor], None] | None] = ContextVar("layerzero_diffusers", default=None)
"""Called with the outputs of both, ours first, while two are compared; diffusers then goes on with torch's."""


@dataclass
class ServedAttention:
    """The attentions of a model or pipeline that LayerZero computes now; print it.

    Attributes:
        served: the class of each processor, by the path of its module.
        left: why an attention is as it was, by the path of its module.
    """

    served: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    _exchanges: list[ProcessorSwap] = field(default_factory=list, repr=False)

    def undo(self) -> None:
        """Give every module the processor, and every processor the backend, that it had."""
        for exchange in reversed(self._exchanges):
            exchange.off()

    def __str__(self) -> str:
        lines = [f"{count} by lz.attention: {kind}" for kind, count in Counter(self.served.values()).items()]
        lines += [f"left {count}: {why}" for why, count in Counter(self.left.values()).items()]
        return "\n".join(lines) or "no attention was found"


def register_with_diffusers(model: Any = None) -> ServedAttention:
    """Make ``"layerzero"`` a backend of diffusers' attention, and let a model or a pipeline use it.

        lz.register_with_diffusers(pipe)  # every attention of its models; UNets and autoencoders, too
        lz.register_with_diffusers()  # the name alone, for model.set_attention_backend("layerzero")

    Args:
        model: a model, or a pipeline, whose attentions are LayerZero's from now on; None for the name alone.
    Returns: what is served and what is left and why; ``undo()`` takes it back. The name stays known: it changes nothing
    where it is not used.
    Raises: ImportError without diffusers or with a version that was not tested; TypeError for what has no modules.
    """
    backend = backend_of_diffusers()
    served = ServedAttention()
    if model is None:
        return served
    for path, module, why in attentions_of(module_of(model)):
        if why:
            served.left[path] = why
            continue
        exchange = ProcessorSwap(module, backend)
        served.served[path] = type(exchange.before).__name__
        served._exchanges.append(exchange)
    for exchange in served._exchanges:  # only now: one processor may be that of several modules
        exchange.on()
    return served


def module_of(model: Any) -> Module:
    """A model itself, or a module with all the models of a pipeline, by their names there.

    Raises: TypeError naming what was wanted.
    """
    if isinstance(model, Module):
        return model
    parts = getattr(model, "components", None)
    modules = {name: each for name, each in parts.items() if isinstance(each, Module)} if parts else {}
    if not modules:
        raise TypeError(f"diffusers: wanted a model or a pipeline with models, got {type(model).__name__}")
    whole = torch.nn.ModuleDict(modules)
    whole.training = any(each.training for each in modules.values())
    return whole


def attentions_of(root: Module) -> Iterator[tuple[str, Module, str]]:
    """Every attention of diffusers in a module: its path, itself, and why it is left, empty where it is served."""
    for path, module in root.named_modules():
        if not type(module).__module__.startswith("diffusers."):
            continue
        processor = getattr(module, "processor", None)
        if processor is None:
            if _calls_torch(type(module).forward):
                yield path, module, f"{type(module).__name__} calls torch's function itself and has no processor"
            continue
        kind = type(processor)
        if isinstance(processor, Served) or getattr(processor, "_attention_backend", None) == NAME:
            yield path, module, "it is LayerZero's already"
        elif getattr(processor, "_parallel_config", None) is not None:
            yield (
                path,
                module,
                "its sequence is split over several devices; LayerZero's kernels give no logarithms of sums",
            )
        elif getattr(processor, "_attention_backend", None) not in {None, "native"}:
            chosen = str.__str__(processor._attention_backend)  # a member, or its bare name as a class has it
            yield path, module, f"the backend {chosen!r} was chosen for it"
        elif hasattr(processor, "_attention_backend") or _calls_torch(kind.__call__) or _dispatches(kind.__call__):
            yield path, module, ""
        elif _DISPATCHER in getattr(getattr(kind.__call__, "__code__", None), "co_names", ()):
            yield path, module, f"{kind.__name__} names the backend of its attention itself"
        else:
            yield path, module, f"{kind.__name__} computes its scores itself"


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Tensor:
    """Attend for diffusers' dispatcher; the names are those that it hands to its backends.

    Shapes: query (B, S_q, H, D), key and value (B, S_k, K, D) → (B, S_q, H, D); views, no copy is made.
    Args:
        attn_mask: broadcastable to (B, H, S_q, S_k), or (B, S_k); bool, True attends; or float, added to scores.
    Raises: InvalidCallError for what cannot be honoured, with wanted and got.
    """
    for name, wanted, got in (
        ("return_lse", "no logarithms of sums, only the output", return_lse),
        ("_parallel_config", "no context parallelism", _parallel_config),
    ):
        if got:
            problem = f"{name}: wanted {wanted}; got {got!r:.80}; use set_attention_backend('native')"
            raise InvalidCallError("attention backend 'layerzero'", [problem])
    if attn_mask is not None and attn_mask.shape == (query.shape[0], key.shape[1]) and attn_mask.ndim == 2:
        attn_mask = attn_mask[:, None, None]
    plain = attn_mask is None and not is_causal and not dropout_p and query.ndim == 4
    compiling = torch.compiler.is_compiling()
    plain = plain and query.shape[2] == key.shape[2] and not torch.is_autocast_enabled(query.device.type)
    if plain and not written() and (compiling or (COMPARED.get() is None and not in_function_mode())):
        return lz.attention(query, key, value, False, scale, layout="BSHD")
    views = (each.permute(0, 2, 1, 3) for each in (query, key, value))
    output = _as_torch(*views, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    return output.permute(0, 2, 1, 3)


def _as_torch(query: Tensor, key: Tensor, value: Tensor, *others: Any, **named: Any) -> Tensor:
    """Torch's function for processors: LayerZero's, or both where they are compared."""
    ours: Tensor = lz.scaled_dot_product_attention(query, key, value, *others, **named)
    compare = None if torch.compiler.is_compiling() else COMPARED.get()
    if compare is None:
        return ours
    theirs = functional.scaled_dot_product_attention(query, key, value, *others, **named)
    compare(ours, theirs)
    return theirs


class ProcessorSwap:
    """One attention's processor, which may be LayerZero's or what it was.

    Attributes:
        module: the attention.
        before: its own processor.
    """

    def __init__(self, module: Module, backend: Any) -> None:
        self.module = module
        self.before: Any = module.processor
        self._backend = backend if hasattr(self.before, "_attention_backend") else None
        self._chosen = getattr(self.before, "_attention_backend", None)
        self._twin: Any = None if self._backend is not None else _twin_of(self.before)

    @property
    def is_on(self) -> bool:
        if self._backend is not None:
            backend = getattr(self.module.processor, "_attention_backend", None)
            attributes = getattr(self.module.processor, "__dict__", None)  # one that rotates otherwise shares them
            return attributes is self.before.__dict__ and backend == NAME
        return self.module.processor is self._twin

    def on(self) -> None:
        if self._backend is not None:
            self.before._attention_backend = self._backend
        else:
            _CLASS.__set__(self._twin, _served_class(type(self.before)))
            self.module.processor = self._twin

    def off(self) -> None:
        """Give back what it had, except where another one was chosen meanwhile.

        A model with fused projections keeps the processors from before, and puts those back: they are stock, too.
        """
        if self._backend is not None:
            if getattr(self.before, "_attention_backend", None) == NAME:
                self.before._attention_backend = self._chosen
            return
        if self.is_on:
            self.module.processor = self.before
        _CLASS.__set__(self._twin, type(self.before))


_CLASS: Any = object.__dict__["__class__"]
"""Sets the class of a processor that says to be of another."""


class Served:
    """What marks a processor whose call of torch's function is LayerZero's; it says that it is of its own class.

    diffusers asks ``processor.__class__`` to see whether all are of known kinds. A pickle is of that class, too, so
    what ``torch.save`` wrote loads as stock processors.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        object.__setattr__(twin, "__dict__", copy.deepcopy(self.__dict__, memo))
        return twin

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return copyreg._reconstructor, (self.__class__, object, None), self.__dict__  # type: ignore[attr-defined]


@functools.cache
def _functional() -> types.ModuleType:
    """torch.nn.functional with LayerZero's attention in it: a module of its own that no other code sees."""
    ours = types.ModuleType(functional.__name__)
    ours.__dict__.update(functional.__dict__)
    setattr(ours, _FUNCTION, _as_torch)
    return ours


def _calls_torch(function: Any) -> bool:
    """Whether a function of Python calls ``F.scaled_dot_product_attention``."""
    code = getattr(function, "__code__", None)
    return code is not None and _FUNCTION in code.co_names and function.__globals__.get("F") is functional


def _dispatches(function: Any) -> bool:
    """Whether a function of Python calls diffusers' dispatcher and names no backend, as Cosmos' processors do."""
    code = getattr(function, "__code__", None)
    if code is None or _DISPATCHER not in code.co_names or _DISPATCHER not in function.__globals__:
        return False
    return not any(isinstance(each, tuple) and "backend" in each for each in code.co_consts)  # names of arguments


def _served_class(kind: Any) -> type:
    """A subclass whose call is the same code with ``F`` bound to :func:`_functional`, and the dispatcher to ours."""
    return _served_class_of(kind, kind.__call__)


@functools.cache
def _served_class_of(kind: type, call: Any) -> type:
    """One for each call that a class has had: other code may exchange it."""
    bound: dict[str, Any] = {"F": _functional()}
    if _dispatches(call):
        dispatch: Any = call.__globals__[_DISPATCHER]
        bound[_DISPATCHER] = functools.partial(dispatch, backend=backend_of_diffusers())
    return served_class(kind, bound)


def served_class(kind: type, bound: Mapping[str, Any], code: types.CodeType | None = None) -> type:
    """A subclass of a class of processors whose call is the same code, or another one, with some names bound anew."""
    call: Any = kind.__call__
    known = dict(call.__globals__) | dict(bound)
    # torch.compile looks up by a module's name what its functions read: without one it looks into these globals
    del known["__name__"]
    ours = types.FunctionType(code or call.__code__, known, call.__name__, call.__defaults__, call.__closure__)
    ours.__kwdefaults__, ours.__annotations__ = call.__kwdefaults__, call.__annotations__
    ours.__module__ = call.__module__
    members = {"__call__": ours, "__class__": property(lambda _: kind), "__module__": kind.__module__}
    return type(kind.__name__, (Served, kind), members)


def _twin_of(processor: Any) -> Any:
    """The same processor in the class that calls LayerZero; what is set on one of them is set on both."""
    kind: Any = type(processor)
    twin: Any = object.__new__(_served_class(kind))
    object.__setattr__(twin, "__dict__", processor.__dict__)
    return twin


def backend_of_diffusers() -> Any:
    """The member of diffusers' enumeration of backends for LayerZero, made and registered at the first call."""
    try:
        found = version("diffusers")
    except PackageNotFoundError as error:
        wanted = f"register_with_diffusers: wanted diffusers {TESTED}, got none"
        raise ImportError(f"{wanted}; pip install 'diffusers{TESTED}'") from error
    if not TESTED.contains(found, prereleases=True):
        wanted = f"register_with_diffusers: wanted diffusers {TESTED}, whose private registry is known, got {found}"
        raise ImportError(f"{wanted}; pip install 'diffusers{TESTED}'")
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    names: Any = AttentionBackendName
    if NAME not in names._value2member_map_:
        member = str.__new__(names, NAME)
        member._name_, member._value_ = NAME.upper(), NAME
        # a pickled processor loads where there is no LayerZero, with no backend of its own
        member.__reduce_ex__ = lambda _: (getattr, (names, NAME.upper(), None))
        type.__setattr__(names, NAME.upper(), member)
        names._member_names_.append(NAME.upper())
        names._member_map_[NAME.upper()] = names._value2member_map_[NAME] = member
    backend = names(NAME)
    if backend not in _AttentionBackendRegistry._backends:
        _AttentionBackendRegistry.register(backend)(attend)
    return backend
