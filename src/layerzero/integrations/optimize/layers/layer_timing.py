"""The time of layers each way: some of a model's own in a row, on what the model hands to them."""

from __future__ import annotations

import functools
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from layerzero.core.arguments import signature_of
from layerzero.engine.config import current_policy
from layerzero.integrations.optimize.attention.dynamic_cache import name_in, name_of
from layerzero.integrations.optimize.attention.transformers import AttentionSwap
from layerzero.integrations.optimize.layers.encoders import Encoder
from layerzero.integrations.optimize.layers.inner import forget_table
from layerzero.integrations.optimize.layers.layer import Layer
from layerzero.integrations.optimize.swaps.candidate import TOLERANCE
from layerzero.integrations.optimize.swaps.swap import SIZES, Way, is_dense, weight_of
from layerzero.integrations.optimize.swaps.trial import as_served
from layerzero.integrations.optimize.times.report import Replaced
from layerzero.integrations.optimize.times.timing import LEAST, Paced, Prepare, Sizes, Untimed, timed

PAST = 64
"""Tokens in the cache of a step."""

ENOUGH_BYTES, MOST_LAYERS = 64 * 2**20, 8
"""Weights of the layers that are run in a row: more than caches of most hosts hold, as in the model itself."""

SWEPT_BYTES = 4 * 2**20
"""More than the caches hold that are a core's own."""

_ROWS = 16

_Handed = tuple[tuple[Any, ...], Mapping[str, Any]]


def shapes_of(whole: Sequence[Replaced], exchange: AttentionSwap, *, ours: bool) -> dict[Hashable, list[Replaced]]:
    """Layers of one model by all that their time hangs on.

    Args:
        whole: layers whose new forwards are on.
        exchange: of the model's attention; ``ours`` where that is on.
    """
    alike: dict[Hashable, list[Replaced]] = defaultdict(list)
    for each in whole:
        alike[_shape_of(each)].append(each)
    found: dict[Hashable, list[Replaced]] = {}
    for shape, group in alike.items():
        about: Any = (shape, ours and not exchange.chosen)
        if len(_row(group)) == len(whole) and not isinstance(_state(group[0]), Encoder):  # the model itself is timed
            weights = sum(each.numel() for each in exchange.model.parameters())
            about = *about, type(exchange.model), len(whole), weights
        found[about] = group
    return found


def cut(whole: Sequence[Replaced]) -> None:
    """Compute nothing for the next layer where that does not read it: what is computed must be read there."""
    for first in whole:
        state = _state(first)
        if state.following is not None and any(
            not each.swap.is_on or _state(each).own_at != state.own_at
            for each in whole
            if _state(each).norms[0] is state.following
        ):
            state.following = None


def attention_costs(found: Sequence[Paced | Untimed]) -> str:
    """Say where layers that are not kept are slower with LayerZero's attention in them, or were not timed."""
    for each in found:
        if isinstance(each, Untimed):
            if not each.stays:
                return f"in {each.module}: {each.why}"
        elif not each.kept:
            for count, ratios, noise in zip(SIZES, each.sizes.ratios, each.sizes.noise, strict=True):
                if Way.OWN not in ratios:
                    return f"no kernel for it in {each.module} on {count} tokens"
                if ratios[Way.OWN] > 1 + max(LEAST, noise[Way.OWN]):
                    return f"it took {ratios[Way.OWN]:.2f} times as long in {each.module} on {count} tokens"
    return ""


def _state(found: Replaced) -> Layer:
    assert isinstance(found.swap.state, Layer)
    return found.swap.state


def _shape_of(found: Replaced) -> Hashable:
    state = _state(found)
    learned = tuple(None if each is None else (tuple(each.shape), each.dtype, each.device) for each in state.learned)
    told = tuple(sorted((name, repr(each)) for name, each in state.heads.told.items()))
    forms = tuple(None if each is None else each.form for each in state.norms)
    about = type(found.swap.module), learned, state.heads.sizes, told, state.block.activation, forms, state.may_pack
    return (*about, state.heads.setting, torch.get_num_threads(), current_policy())


def _row(group: Sequence[Replaced]) -> list[Replaced]:
    """The first layers of a shape, as many as a host's caches do not hold."""
    found: list[Replaced] = []
    taken = 0
    for each in group[:MOST_LAYERS]:
        found.append(each)
        taken += sum(part.nbytes for part in _state(each).learned if part is not None)
        if taken >= ENOUGH_BYTES:
            break
    return found


def measured(
    group: Sequence[Replaced],
    whole: Sequence[Replaced],
    exchange: AttentionSwap,
    passed: Callable[[], bool],
    *,
    ours: bool,
) -> Sizes | None:
    """Time steps of the model itself where a row of the group is all of its layers, else the row."""
    row, exchanged = _row(group), ours and not exchange.chosen
    encodes = isinstance(_state(row[0]), Encoder)
    entire = len(row) == len(whole) and not encodes
    ways = [Way.STOCK, Way.OWN, Way.PLAIN, *([Way.PACKED] if _state(row[0]).may_pack else [])]
    switch = _Switch(row, exchange if exchanged else None)
    states = [_state(each) for each in row]
    followings = [state.following for state in states]
    for state, after in zip(states, [*states[1:], None], strict=True):
        if not entire and (after is None or after.norms[0] is not state.following):
            state.following = None  # the layer that would read it is not run next
    try:
        with as_served(exchange.model):
            sizes: list[dict[Way, Prepare]] = []
            for count in SIZES:
                past = PAST if count != SIZES[-1] and not encodes else 0
                if entire:
                    sizes.append({way: _stepping(way, whole, exchange.model, count, past, switch) for way in ways})
                    continue
                handed = theirs = _handed(exchange.model, whole, count, past)
                if exchanged:
                    with exchange.stock():
                        theirs = _handed(exchange.model, whole, count, past)
                hidden = _hidden(row[0], count)
                sizes.append({
                    way: _prepared(way, row, theirs if way is Way.STOCK else handed, hidden, past, switch)
                    for way in ways
                })  # fmt: skip
            return timed(sizes, passed=passed)
    finally:
        for each, state, following in zip(row, states, followings, strict=True):
            state.following = following
            state.take(())
            each.swap.on()
        if exchanged:
            exchange.on()


@dataclass(frozen=True)
class Around:
    """What runs before a module, as a layer of the model does on one token: it leaves the host's caches as that does.

    Attributes:
        model: what is timed in.
        run: it, where the model is quiet.
        about: what of it changes the time of other modules.
    """

    model: Module
    run: Callable[[], object]
    about: Hashable


def around(whole: Sequence[Replaced], exchange: AttentionSwap) -> Around:
    """The first layer of a model, after it was decided how its layers compute."""
    first = whole[0]
    with as_served(exchange.model):
        others, named = _handed(exchange.model, whole, 1, 0)[id(first.swap.module)]
    hidden, state = _hidden(first, 1), _state(first)

    def run() -> None:
        forget_table(named)
        cached = {} if isinstance(state, Encoder) else {name_in(named): filled([first], 0)}
        first.swap.module(hidden, *others, **{**named, **cached})

    return Around(exchange.model, run, (_shape_of(first), first.swap.is_on, state.own_at))


def among_weights(root: Module) -> Around:
    """Some weights of a model without such layers, multiplied with rows: in place of what runs between two calls.

    A packed block of 128 and 256 features took 107 us of 64 rows over and over, and 132 behind torch's own products.
    """
    runs: list[Callable[[], object]] = []
    room = SWEPT_BYTES
    for each in root.parameters():
        if room > 0 and each.ndim and each.device.type == "cpu" and each.dtype in TOLERANCE and is_dense(each):
            part = each.detach()[: max(1, room * each.shape[0] // max(each.nbytes, 1))]  # an embedding is large
            rows = part.new_ones(_ROWS, part.shape[-1])
            runs.append(functools.partial(torch.mm, rows, part.t()) if part.ndim == 2 else part.sum)
            room -= part.nbytes
    return Around(root, lambda: [run() for run in runs], SWEPT_BYTES - room)


def _hidden(found: Replaced, count: int) -> Tensor:
    weight = weight_of(_state(found).heads.products[0])
    generator = torch.Generator().manual_seed(count)
    rows = torch.randn(1, count, weight.shape[1], generator=generator, device="cpu", dtype=torch.float32)
    return rows.to(weight.device, weight.dtype)


def filled(whole: Sequence[Replaced], past: int) -> Any:
    """A cache with so many tokens in each of these layers."""
    from transformers import DynamicCache

    cache = DynamicCache(config=_state(whole[0]).heads.module.config)
    for each in whole if past else ():
        heads: Any = _state(each).heads
        weight, (_, kv_heads, width) = weight_of(heads.products[0]), heads.sizes
        tokens = [torch.full((1, kv_heads, past, width), 0.1, dtype=weight.dtype, device=weight.device) for _ in "kv"]
        cache.update(*tokens, heads.module.layer_idx)
    return cache


def called_with(model: Any, count: int) -> dict[str, Any]:
    """What a model is called with for so many tokens, of which the last one's logits are wanted."""
    ids = torch.ones(1, count, dtype=torch.int64, device=model.get_input_embeddings().weight.device)
    asked = {"logits_to_keep": 1} if "logits_to_keep" in signature_of(model.forward).parameters else {}
    return {"input_ids": ids, "use_cache": True, **asked}


def _handed(model: Any, whole: Sequence[Replaced], count: int, past: int) -> dict[int, _Handed]:
    """What a model hands to its layers for so many tokens, all of which pass their input on meanwhile.

    An encoder's layers get what they got on the example, without a mask. Only in this thread: another one
    that runs the model gets what its layers compute.
    """
    given: dict[int, _Handed] = {}
    for each in whole:
        if isinstance(state := _state(each), Encoder):
            given[id(each.swap.module)] = (), state.given
    whole = [each for each in whole if id(each.swap.module) not in given]
    if not whole:
        return given
    here = threading.get_ident()

    def passing(module: Module, before: Callable[..., Any]) -> Callable[..., Any]:
        def forward(hidden_states: Tensor, *others: Any, **named: Any) -> Any:
            if threading.get_ident() != here:
                return before(hidden_states, *others, **named)
            given[id(module)] = others, named
            return hidden_states

        return forward

    before = [(each.swap.module, each.swap.module.__dict__.get("forward")) for each in whole]
    try:
        for module, _ in before:
            module.__dict__["forward"] = passing(module, module.forward)
        model(**called_with(model, count), **{name_of(model): filled(whole, past)})
    finally:
        for module, forward in before:
            if forward is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = forward
    return given


class _Switch:
    """Puts a way on some layers, and nothing where it is on: what a layer's proof rests on is looked at anew then."""

    def __init__(self, row: Sequence[Replaced], exchange: AttentionSwap | None) -> None:
        self._row, self._exchange = row, exchange
        self._now: Way | None = None

    def __call__(self, way: Way) -> None:
        if way is self._now:
            return
        self._now = way
        for each in self._row:
            each.swap.compute(way)
        if self._exchange is not None:
            self._exchange.flip(ours=way is not Way.STOCK)


def _stepping(
    way: Way, whole: Sequence[Replaced], model: Any, count: int, past: int, switch: Callable[[Way], None]
) -> Prepare:
    """What puts a way on, and then calls the model as a generation does: a prompt, or a step after the one before."""
    given, cache = called_with(model, count), filled(whole, past) if past else None

    def prepare() -> Callable[[], Any]:
        switch(way)
        return functools.partial(model, **given, **{name_of(model): filled(whole, 0) if cache is None else cache})

    return prepare


def _prepared(
    way: Way,
    row: Sequence[Replaced],
    handed: Mapping[int, _Handed],
    hidden: Tensor,
    past: int,
    switch: Callable[[Way], None],
) -> Prepare:
    """What puts a way on, and then runs the layers one after the other as the model does, on what it handed to them.

    With a cache of its own each time: masks are of its length, and one of a sliding window keeps no more than that.
    """
    calls = [(each.swap.module, *handed[id(each.swap.module)]) for each in row]

    def prepare() -> Callable[[], Any]:
        switch(way)
        cache = None if isinstance(_state(row[0]), Encoder) else filled(row, past)
        ready = []
        for module, others, named in calls:
            forget_table(named)
            ready.append((module, others, {**named, name_in(named): cache} if cache is not None else named))

        def run() -> None:
            rows = hidden
            for module, others, named in ready:
                rows = module(rows, *others, **named)

        return run

    return prepare
