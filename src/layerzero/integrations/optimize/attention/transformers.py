"""Attention of Transformers' models: by their own switch, set on the model's configurations and set back."""

from __future__ import annotations

import copy
import functools
import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from layerzero.core.errors import InvalidCallError, in_short
from layerzero.core.operation import Function
from layerzero.core.plan import Plan
from layerzero.engine.scopes import holding
from layerzero.inspection.trace import calls_told
from layerzero.integrations.optimize.swaps.candidate import agrees, distance
from layerzero.integrations.optimize.times.report import BY_CALL, NO_TIME, Left, Replaced
from layerzero.integrations.optimize.times.workload import RUN, TimeLeft, Workload, example_run
from layerzero.integrations.transformers import EXCHANGED
from layerzero.integrations.transformers_patches import version_problem
from layerzero.serving.warmup import Progress

NAME = "layerzero"

WEIGHTS = "it returns attention weights, which fast kernels never form"
COMPARED = "layerzero_compared"
"""The setting under which both compute: what Transformers computes goes on, and the difference is kept."""

FROM = "sdpa"
"""The setting that is exchanged: it is Transformers' default, and both compute the same."""

OWN = "eager"
"""The setting that is exchanged in models that torch's function does not serve: they have no other."""


class Restored:
    """A configuration's own setting, which lies on every module of that configuration while attention is LayerZero's.

    What ``torch.save`` writes of it is an assignment, so that a reader of the model, or of a part of it, has the stock
    setting, in places where our name is not registered; of the record itself ``None`` is left. A configuration
    that is written alone keeps our name. (A string of a class of its own, written down as another one, is what Dynamo
    of torch 2.10 and 2.11 cannot read where models compare it.)
    """

    __slots__ = ("before", "config")

    def __init__(self, config: Any, before: str) -> None:
        self.config, self.before = config, before

    def __reduce__(self) -> tuple[Callable[..., None], tuple[Any, str, str]]:
        now: str = self.config._attn_implementation  # another one may have been chosen meanwhile
        return setattr, (self.config, _SETTING, self.before if now == NAME else now)

    def __deepcopy__(self, memo: dict[int, Any]) -> Restored:
        """A copy of a model is optimized, too."""
        return Restored(copy.deepcopy(self.config, memo), self.before)


_SETTING = "_attn_implementation_internal"


class AttentionSwap:
    """One model's attention, which may be LayerZero's or what it was.

    Attributes:
        model: the outermost model of Transformers that has these configurations.
        of: the setting that is exchanged.
        chosen: whether the caller chose LayerZero's already, wherever it could be: then nothing is exchanged, and what
            goes on here is the comparison that layers and steps rest on.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.of = FROM if _has_torchs(model) else OWN
        left = {id(config) for config, _ in _left(model, self.of)}
        may = [each for each in configs_of(model) if each._attn_implementation in {self.of, NAME}]
        self._before = [(each, each._attn_implementation) for each in may if id(each) not in left]
        self.chosen = all(before == NAME for _, before in self._before)

    @property
    def is_on(self) -> bool:
        return any(config._attn_implementation == NAME for config, _ in self._before)

    def on(self) -> None:
        """Let LayerZero compute it, wherever the model's own choice was torch's function."""
        for config, _ in self._before:
            config._attn_implementation_internal = NAME
        self._keep()

    def off(self) -> None:
        """Give every configuration what it had, except where another one was chosen meanwhile."""
        for config, before in self._before:
            if config._attn_implementation == NAME:
                config._attn_implementation_internal = before
        self._keep()

    def _keep(self) -> None:
        """Let modules say what their settings were, where they are exchanged, in case they are saved.

        What the caller had set to our name himself, or another exchange, is not spoken of.
        """
        mine = {id(config): (config, before) for config, before in self._before if before != NAME}
        for module in self.model.modules():
            config, before = mine.get(id(vars(module).get("config")), (None, ""))
            if config is not None and config._attn_implementation == NAME:
                vars(module)[EXCHANGED] = Restored(config, before)
            elif config is not None:
                vars(module).pop(EXCHANGED, None)

    def flip(self, *, ours: bool) -> None:
        """Set the flag alone, for a timing that does so hundreds of times: what modules say when saved stays."""
        for config, before in self._before:
            config._attn_implementation_internal = NAME if ours else before

    @contextmanager
    def meanwhile(self, name: str) -> Iterator[None]:
        """Compute it so, whatever is set; what modules say when saved stays."""
        settings = [(config, config._attn_implementation) for config, _ in self._before]
        for config, _ in settings:
            config._attn_implementation_internal = name
        try:
            yield
        finally:
            for config, setting in settings:
                config._attn_implementation_internal = setting

    def stock(self) -> AbstractContextManager[None]:
        """Let Transformers compute it meanwhile, whatever is set."""
        return self.meanwhile(self.of)


@dataclass
class Search:
    """What finders of one model share: each yields what may be put on, or is left.

    Attributes:
        root: the model.
        time: what is left of it.
        workload: the caller's inputs; None without any.
        tell: hears what is done, how much of it, and of how much.
        graph, rounds, isolate: as of ``lz.optimize``; with ``graph`` layers and their attention stay, for steps are
            taken from them.
        models: what :func:`find` found, for layers and steps: of each of Transformers' models the path, the
            exchange, and whether attention is LayerZero's.
        taken: identities of modules that layers compute for.
        holders: those of what holds modules whose weights are quantised on request, a decoder's layers among them.
        rounding: what rows of weights that are quantised already may lose where they are rounded to eight bits, as a
            share of the product's norm; None where they stay as they are.
        accuracy: what they may lose in another format; None for the usual bound.
    """

    root: Module
    time: TimeLeft
    workload: Workload | None = None
    tell: Progress = lambda *_: None
    graph: bool = False
    rounds: int = 5
    isolate: bool = True
    models: list[tuple[str, AttentionSwap, bool]] = field(default_factory=list)
    taken: set[int] = field(default_factory=set)
    holders: set[int] = field(default_factory=set)
    rounding: float | None = None
    accuracy: float | None = None


def find(search: Search) -> Iterator[Replaced | Left]:
    """Attention of Transformers' models that gave what theirs gives, on the inputs or on Transformers' example."""
    for path, model in outermost(search.root, "transformers", "PreTrainedModel"):
        name, workload = type(model).__name__, search.workload
        if why := version_problem():
            yield Left(path, name, f"{why}; modules are taken by themselves")
            continue
        why, error, exchange = why_not(model), None, None
        step = f"comparing the attention of {name}"
        if not why and not search.time.allows(step, step if workload is None else RUN):
            yield Left(path, name, f"attention: {NO_TIME}")
            continue
        if not why:
            exchange = attention_swap(model)
            try:
                error, why = compared(exchange, example_run(model) if workload is None else workload.call)
            except Exception as raised:  # what a model raises on an example that was made for another
                if not (ours := isinstance(raised, InvalidCallError)) and workload is not None:  # no inputs help ours
                    raise
                why = f"it could not be compared{' without inputs=' * (not ours)} ({in_short(raised)})"
        if exchange is not None and exchange.chosen:
            said = "it is LayerZero's already, as attn_implementation says"
            yield Left(path, name, f"attention: {said}{why and f', but {why}'}")
            if why:
                continue
        elif why:
            yield Left(path, name, f"attention: {why}")
        if exchange is None:
            continue
        search.models.append((path, exchange, not why))
        for part in dict.fromkeys(each for _, each in _left(model, exchange.of)):
            yield Left(path, name, f"attention: {part}")
        if not why and not exchange.chosen:
            yield Replaced(path, name, "attention", "lz.attention", BY_CALL, error, exchange)


def why_not(model: Any) -> str:
    """Say why a model's attention is left to it; empty where it may be exchanged."""
    setting = model.config._attn_implementation
    wanted = FROM if _has_torchs(model) else OWN
    left = {id(config): why for config, why in _left(model, wanted)}
    may = [each for each in configs_of(model) if each._attn_implementation in {wanted, NAME}]
    if not may:
        return f"attn_implementation={setting!r} was chosen for it, or the model has no other"
    if all(id(each) in left for each in may):
        return left[id(may[0])]
    if getattr(model.config, "output_attentions", False):
        return WEIGHTS
    if _sharing(model):
        gc.collect()  # what waits for it is no other model
        if other := _sharing(model):
            return f"its config is also that of another {other}, which would change with it; give each a deep copy"
    return ""


def _left(module: Any, wanted: str, why: str = "") -> Iterator[tuple[Any, str]]:
    """Every configuration of a part whose attention cannot be exchanged, and why."""
    if hasattr(module, "_can_set_attn_implementation"):
        torchs = wanted == OWN or module._supports_sdpa
        why = "" if torchs else f"{type(module).__name__} has no attention by torch's function to compare with"
        if not module._can_set_attn_implementation():
            why = f"{type(module).__name__} computes attention by itself"
    if why and hasattr(config := getattr(module, "config", None), _SETTING):
        yield config, why
    for each in module.children():
        yield from _left(each, wanted, why)


def _sharing(model: Any) -> str:
    """The class of a live model that has a configuration of this one's that would be exchanged; empty for none.

    A model around this one counts as this one, and so does what lies in it.
    """
    mine = [each for each in configs_of(model) if each._attn_implementation != NAME]
    kind, own = sys.modules["transformers"].PreTrainedModel, {id(at) for of in model.modules() for at in (of, vars(of))}
    holders = gc.get_referrers(*mine)  # models themselves where Python has made no dict of their attributes
    states = [each for each in holders if type(each) is dict and "_modules" in each and id(each) not in own]
    owners = (*[each for each in holders if id(each) not in own], *(gc.get_referrers(*states) if states else ()))
    found = [each for each in owners if isinstance(each, kind) and any(vars(each).get("config") is one for one in mine)]
    around = {id(one) for each in found if any(one is model for one in each.modules()) for one in each.modules()}
    others = [each for each in found if id(each) not in around]
    return type(max(others, key=lambda each: sum(1 for _ in each.modules()))).__name__ if others else ""


def attention_swap(model: Any) -> AttentionSwap:
    """The exchange for a model; makes the name known to Transformers, in continuous batching, too."""
    from layerzero.integrations.transformers import batch, register_with_transformers

    register_with_transformers(NAME)
    batch(model)  # a model that was loaded before the name was known was not batched
    return AttentionSwap(model)


def _has_torchs(model: Any) -> bool:
    """Whether any of its models computes attention by torch's function."""
    return any(each._supports_sdpa for each in model.modules() if hasattr(each, "_supports_sdpa"))


def configs_of(module: Module, attribute: str = "_attn_implementation_internal") -> list[Any]:
    """Every configuration with an attribute that a module within this one reads, each once."""
    found = {id(each): each for one in module.modules() if hasattr(each := getattr(one, "config", None), attribute)}
    return list(found.values())


_ERRORS: ContextVar[list[tuple[float, torch.dtype, str]] | None] = ContextVar("layerzero_errors", default=None)

_LAST: ContextVar[str] = ContextVar("layerzero_last_kernel", default="")
"""The kernel that ran last while two are compared."""


@functools.cache
def _know_comparison() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    from layerzero.integrations.transformers import attention_mask

    AttentionInterface.register(COMPARED, comparing)
    AttentionMaskInterface.register(COMPARED, attention_mask)


@dataclass(frozen=True)
class Seen:
    """What one attention got.

    Attributes:
        sizes: heads, heads of keys and values, entries of a head.
        told: arguments by name that the attention's module gave by itself and that may matter.
    """

    sizes: tuple[int, int, int]
    told: Mapping[str, Any]


_SEEN: ContextVar[dict[int, Seen] | None] = ContextVar("layerzero_attention_seen", default=None)


@contextmanager
def seeing(swap: AttentionSwap) -> Iterator[dict[int, Seen]]:
    """Let every attention of a model be seen, by the identity of its module."""
    found: dict[int, Seen] = {}
    _know_comparison()
    with holding(_SEEN, found), swap.meanwhile(COMPARED):
        yield found


def comparing(
    module: Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **named: Any
) -> Any:
    """Attend by both, keep the difference, and return what Transformers' gives; called by Transformers' own names."""
    from layerzero.integrations.transformers import HARMLESS, attention_forward, selected, theirs_of

    mask = attention_mask
    seen = _SEEN.get()
    if seen is not None:
        told = {name: each for name, each in named.items() if each is not None and name not in {*HARMLESS, "dropout"}}
        seen[id(module)] = Seen((query.shape[1], key.shape[1], query.shape[3]), told)
    indices = named.pop("indices", None)
    if indices is not None:  # models that were loaded for sdpa put them into the mask themselves
        mask = selected(mask, indices, key.shape[2])
    theirs = theirs_of(module)(module, query, key, value, mask, **named)
    errors = _ERRORS.get()
    if errors is not None:
        ours, _ = attention_forward(module, query, key, value, mask, **named)
        errors.append((distance(*seen_rows(mask, ours, theirs[0])), query.dtype, _LAST.get()))
    return theirs


def seen_rows(mask: Tensor | None, *outputs: Tensor) -> tuple[Tensor, ...]:
    """Outputs (B, S, ...) with zeros where a token sees no key: there kernels give anything, and nothing reads it.

    LayerZero gives zeros; torch's efficient kernel on a GPU does not (H200, torch 2.11, 2026-11-22).
    """
    if mask is None or mask.ndim != 4:
        return outputs
    seen = mask if mask.dtype is torch.bool else mask > torch.finfo(mask.dtype).min / 2
    rows = seen.any(-1).any(1)  # heads share it in Transformers' masks
    return tuple(
        each.masked_fill(~rows.reshape(*rows.shape, *(1,) * (each.ndim - 2)), 0.0)
        if isinstance(each, Tensor) and rows.shape[1] == each.shape[1]
        else each
        for each in outputs
    )


def compared(swap: AttentionSwap, run: Callable[[], Any]) -> tuple[float | None, str]:
    """Run a model with both; the largest difference of one attention, None without a call, and what is wrong."""
    _know_comparison()
    kernels: dict[str, None] = {}
    errors: list[tuple[float, torch.dtype, str]] = []

    def saw(_: Function, plan: Plan) -> None:
        if _ERRORS.get() is errors:
            kernels[plan.kernel_id] = None
            _LAST.set(plan.kernel_id)

    from layerzero.integrations.transformers_patches import EXCHANGES

    exchanges = holding(EXCHANGES, not swap.chosen)
    with torch.no_grad(), holding(_ERRORS, errors), exchanges, calls_told(saw, tried=True), swap.meanwhile(COMPARED):
        given = run()
    if not errors:
        return None, "no attention was computed on these inputs"
    if swap.of == OWN and isinstance(given, Mapping) and "attentions" in given:  # BridgeTower gives them unasked
        return None, WEIGHTS
    worst, why = verdict(errors)
    if not why and swap.of == OWN and any("reference" in each for each in kernels):
        return None, "no kernel of this machine computes it but the slow reference"
    return worst, why


def verdict(errors: Sequence[tuple[float, torch.dtype, str]]) -> tuple[float | None, str]:
    """The largest of several differences of a dtype and a kernel, and what is wrong with it; empty where nothing."""
    wrong = [each for each in errors if not agrees(*each[:2])]
    if wrong:
        worst, _, kernel = max(wrong, key=lambda each: each[0])
        return worst, f"{kernel} was off by {worst:.2g} of the largest value"
    return max((each[0] for each in errors), default=None), ""


def outermost(root: Module, library: str, kind: str) -> Iterator[tuple[str, Any]]:
    """The outermost models of a library within a module, with their paths; none where that was not imported."""
    known = sys.modules.get(library)
    within: set[int] = set()
    for path, module in root.named_modules() if known is not None else ():
        if id(module) not in within and isinstance(module, getattr(known, kind)):
            within |= {id(each) for each in module.modules()}
            yield path, module
