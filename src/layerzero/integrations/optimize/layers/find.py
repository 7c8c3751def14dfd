"""Whole layers of Transformers' models, found by what they are made of and believed by their values.

A decoder layer is a candidate if it has one attention that keeps a cache, one feed-forward block, and norms. Which
product is that of queries, where norms stand, and what is added to what is tried out, on the arguments that the model
itself hands to the layer: a prompt and a token after it, with a row's first tokens hidden and without. An encoder's
layers are in :mod:`layerzero.integrations.optimize.layers.encoders`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Dropout, Identity, Module

from layerzero.core.errors import InvalidCallError, in_short
from layerzero.core.operation import Function
from layerzero.core.plan import Plan
from layerzero.inspection.trace import calls_told
from layerzero.integrations.optimize.attention.dynamic_cache import cache_in, name_in, name_of
from layerzero.integrations.optimize.attention.transformers import NAME, AttentionSwap, Search, Seen, seeing, seen_rows
from layerzero.integrations.optimize.layers import encoders
from layerzero.integrations.optimize.layers.inner import Inner, alike, extreme, inner
from layerzero.integrations.optimize.layers.layer import Heads, Layer, forward
from layerzero.integrations.optimize.modules.norms import Normed, fit, normed, places
from layerzero.integrations.optimize.modules.products import Block, block
from layerzero.integrations.optimize.swaps.candidate import (
    ELSEWHERE,
    MORE,
    WRITES,
    agrees,
    distance,
    quiet,
    refusal,
    unfollowed,
    watching,
)
from layerzero.integrations.optimize.swaps.reads import Listening
from layerzero.integrations.optimize.swaps.stamp import Stamp
from layerzero.integrations.optimize.swaps.swap import Swap, stock_forward, trying, weight_of
from layerzero.integrations.optimize.swaps.trial import as_served, told_apart
from layerzero.integrations.optimize.swaps.weights import is_plain, wants_packed
from layerzero.integrations.optimize.times.report import NO_TIME, Left, Replaced
from layerzero.integrations.optimize.times.workload import TimeLeft

CALLS = "lz.add_residual_rms_norm_, lz.rope_, lz.attention, lz.linear, lz.mlp"
"""What a layer calls, in short."""

PROMPT = 5
"""Tokens of the prompt that candidates are tried on."""

Call = tuple[Tensor, Mapping[str, Any]]
"""What a layer is called with: the hidden states, and arguments by name."""

Form = tuple[tuple[Any, ...], Callable[[], Layer]]
"""A way in which a layer could compute, named by its order of parts, and what makes it."""


@dataclass
class Parts:
    """What a decoder layer is made of, by name."""

    module: Module
    heads: Module
    block: Block | Inner
    norms: dict[str, Normed]

    calls = CALLS
    forward = staticmethod(forward)

    def cache(self) -> Any:
        """An empty one, as a model makes it."""
        from transformers import DynamicCache

        return DynamicCache(config=self.heads.config)

    def still(self) -> AbstractContextManager[None]:
        """Put something smooth in the place of what computes by its own code, while the layer is compared."""
        return self.block.still() if isinstance(self.block, Inner) else nullcontext()

    def forms(self, calls: list[Call], seen: Mapping[int, Seen], of: str) -> list[Form] | str:
        """Every way in which a layer could compute with these parts; or why there is none."""
        got = seen.get(id(self.heads))
        if got is None or len(calls) != 6 or not isinstance(calls[0][1].get("position_embeddings"), tuple):
            return "it has no rotary positions or no cache, or its attention is called otherwise"
        cos = calls[0][1]["position_embeddings"][0]
        once = not torch.equal(*cos.chunk(2, -1)) if cos.shape[-1] % 2 == 0 else True
        found = list(_forms(self, got, of, turned_once=once))  # latent projections have none
        return found or encoders.why_formless(self.module)


def find(search: Search) -> Iterator[Replaced | Left]:
    """The layers of models whose attention was found; what they compute for is taken."""
    for path, exchange, ours in search.models:
        with told_apart(exchange.model):
            found = list(_layers(path, exchange, search, ours=ours))
        for each in found:
            if isinstance(each, Replaced):
                state = each.swap.state
                open_ = state.called.modules() if state.called is not None else ()
                search.taken |= set(map(id, each.swap.module.modules())) - set(map(id, open_))
            yield each


def _layers(prefix: str, exchange: AttentionSwap, search: Search, *, ours: bool) -> Iterator[Replaced | Left]:
    """Try each layer of a model, with LayerZero's attention or with its own; a model without such layers gives none."""
    finders: Any = ((_parts_of, _calls_of), (encoders.parts_of, encoders.calls_of))
    if search.holders:
        finders = ((functools.partial(_parts_of, by_module=True), _calls_of),)
    known = search.taken - search.holders
    for parts_of, calls_of in finders:
        parts: dict[str, Parts | encoders.Parts] = {}
        for path, module in exchange.model.named_modules():
            made = None if id(module) in known else parts_of(module)
            if made is not None:  # what holds one layer alone looks like that
                parts = {each: of for each, of in parts.items() if each and not path.startswith(f"{each}.")}
                parts[path] = made
        known |= {id(each.module) for each in parts.values()}
        if parts:
            yield from _checked(prefix, parts, calls_of, exchange, search.time, ours=ours)


def _checked(
    prefix: str,
    parts: Mapping[str, Parts | encoders.Parts],
    calls_of: Callable[..., tuple[dict[int, list[Call]], Mapping[int, Seen]]],
    exchange: AttentionSwap,
    time: TimeLeft,
    *,
    ours: bool,
) -> Iterator[Replaced | Left]:
    """Try what may be layers, on what the model hands to them."""
    model = exchange.model
    step = f"checking layers of {type(model).__name__}"
    if not time.allows(f"{step}, with an example", step):
        yield Left(prefix, type(model).__name__, f"its layers: {NO_TIME}")
        return
    try:
        calls, seen = calls_of(model, exchange, list(parts.values()))
    except Exception as error:  # noqa: BLE001  # what a model raises on an example that was made for another
        why = f"its layers could not be run on an example: {in_short(error)}"
        yield Left(prefix, type(model).__name__, why)
        return
    found: list[Replaced | Left] = []
    liked: tuple[Any, ...] = ()
    unknown: dict[type[Module], str] = {}
    for name, made in parts.items():
        path, cls = f"{prefix}.{name}".strip("."), type(made.module).__name__
        why = refusal(made.module) or unknown.get(type(made.module), "")
        if why:
            yield Left(path, cls, why)
            continue
        if not time.allows(step, step):
            found.append(Left(path, cls, f"as a whole: {NO_TIME}"))
            continue
        with time.taking(step), made.still():
            each, liked = _tried(path, made, calls.get(id(made.module), []), seen, exchange, liked, ours=ours)
        if isinstance(each, Left) and isinstance(made, encoders.Parts):  # which have dozens of forms
            unknown[type(made.module)] = each.why
        found.append(each)
    for first, second in itertools.pairwise(found):
        if isinstance(first, Replaced) and isinstance(second, Replaced) and _follows(first.path, second.path):
            before, after = first.swap.state, second.swap.state
            assert isinstance(before, Layer)
            assert isinstance(after, Layer)
            before.following = after.norms[0]
    yield from found


def _follows(first: str, second: str) -> bool:
    (before, _, one), (after, _, two) = first.rpartition("."), second.rpartition(".")
    return before == after and one.isdigit() and two.isdigit() and int(two) == int(one) + 1


def _parts_of(module: Module, *, by_module: bool = False) -> Parts | None:
    """The attention, the block and the norms of what may be a layer, whose products may be called as modules."""
    children = {name: each for name, each in module._modules.items() if each is not None}
    attending = [name for name, each in children.items() if isinstance(getattr(each, "layer_idx", None), int)]
    if len(attending) != 1 or not hasattr(children[attending[0]], "config"):
        return None
    if any(True for _ in module.parameters(recurse=False)) or any(each.is_meta for each in module.parameters()):
        return None
    heads = children.pop(attending[0])
    norms: dict[str, Normed] = {}
    blocks: list[Block | Inner] = []
    rest: list[Module] = []
    for name, each in children.items():
        if isinstance(each, (Dropout, Identity)):
            continue
        state = getattr(getattr(block(each), "swap", None), "state", None)
        if isinstance(state, Block) and state.called is None:
            blocks.append(state)
        elif (made := normed(each)) is not None:
            norms[name] = made
        else:
            rest.append(each)
    if len(blocks) + len(rest) != 1 or len(norms) not in {2, 4}:
        return None
    if rest:
        width = next(iter(norms.values())).weight.shape[0]
        if by_module or (by_itself := inner(rest[0], width)) is None:
            return None
        blocks.append(by_itself)
    made_block = blocks[0]
    if by_module:
        if not (isinstance(made_block, Block) and made_block.multiplies):
            return None
        made_block.call_modules()
    return Parts(module, heads, made_block, norms)


def _calls_of(
    model: Any, exchange: AttentionSwap, parts: list[Parts]
) -> tuple[dict[int, list[Call]], Mapping[int, Seen]]:
    """What the model hands to each layer: prompt and token, with hidden tokens, of more rows; what attention got."""
    ids = torch.randint(1, 64, (2, PROMPT + 1), generator=torch.Generator().manual_seed(0), device="cpu")
    ids = (ids % model.get_input_embeddings().weight.shape[0]).to(model.get_input_embeddings().weight.device)
    hidden, more = torch.ones_like(ids), ids.repeat(MORE, MORE)  # a branch on sizes would take another way
    hidden[0, :2] = 0
    calls: dict[int, list[Call]] = {}
    name = name_of(model)

    def keep(module: Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        if len(given) == 1:
            calls.setdefault(id(module), []).append((given[0], dict(named)))

    with watching([each.module for each in parts], keep), as_served(model), seeing(exchange) as seen:
        for rows, mask in ((ids, torch.ones_like(ids)), (ids, hidden), (more, torch.ones_like(more))):
            given = model(input_ids=rows[:, :-1], attention_mask=mask[:, :-1], use_cache=True)
            handed = next((cache_in(made[-1][1]) for made in calls.values()), None)  # a head may return no cache
            if (cache := getattr(given, name, handed)) is not None:
                model(input_ids=rows[:, -1:], attention_mask=mask, **{name: cache})
    return calls, seen


def _tried(
    path: str,
    made: Parts | encoders.Parts,
    calls: list[Call],
    seen: Mapping[int, Seen],
    exchange: AttentionSwap,
    liked: tuple[Any, ...],
    *,
    ours: bool,
) -> tuple[Replaced | Left, tuple[Any, ...]]:
    """The form of a layer that gives the original's values; that of the layer before is tried first."""
    module = made.module
    cls = type(module).__name__
    forms = made.forms(calls, seen, exchange.of)
    if isinstance(forms, str):
        return Left(path, cls, f"as a whole: {forms}"), liked
    forms.sort(key=lambda form: form[0] != liked)
    calls = [*calls, max(calls, key=lambda call: call[0].numel())]  # with extreme numbers
    try:
        hidden, expected, why = _expected(made, calls, exchange)
    except Exception as raised:  # noqa: BLE001  # what a layer raises that names its cache otherwise (GPT-NeoX)
        hidden, expected, why = [], [], f"it could not be run by itself: {in_short(raised)}"
    if why:
        return Left(path, cls, f"as a whole: {why}"), liked
    least = float("inf")
    ran, failed, tried = dict[str, None](), dict[str, None](), dict[str, None]()

    def saw(_: Function, plan: Plan) -> None:
        ran[plan.kernel_id] = None

    with calls_told(saw):
        for name, make in forms:
            ran.clear()
            swap = Swap(module, made.forward, make())
            error = _error(swap, hidden, expected, calls, exchange if ours else None, made.cache)
            tried |= ran
            if isinstance(error, str):
                failed[error] = None
                continue
            least = min(least, error)
            if agrees(error, hidden[0].dtype):
                return Replaced(path, cls, "layer", made.calls, ", ".join(ran), error, swap), name
    by = f" by {', '.join(tried)}" if tried else ""
    nearest = f"the nearest is off by {least:.2g}"
    if least == float("inf"):
        nearest = next(iter(failed), "they cannot be compared")
    if ELSEWHERE in failed:
        return Left(path, cls, f"as a whole: {ELSEWHERE}"), liked
    return Left(path, cls, f"as a whole: its output is none of the layers' formulas{by}: {nearest}"), liked


def _forms(made: Parts, got: Seen, of: str, *, turned_once: bool) -> Iterator[Form]:
    """Every way in which a layer could compute with these parts, named by its order of parts."""
    children = {name: each for name, each in made.heads._modules.items() if each is not None}
    products = {name: each for name, each in children.items() if is_plain(each)}
    rest = {name: each for name, each in children.items() if name not in products}
    norms = {name: normed(each) for name, each in rest.items() if any(True for _ in each.parameters())}
    if len(products) not in {2, 4} or len(norms) not in {0, 2} or None in norms.values():
        return
    heads, kv_heads, width = got.sizes
    apart = (heads * width, kv_heads * width, kv_heads * width)
    wanted: tuple[int, ...] = apart if len(products) == 4 else (sum(apart),)
    for names in itertools.permutations(products):
        chosen = [products[name] for name in names]
        *first, last = chosen
        if tuple(weight_of(each).shape[0] for each in first) != wanted or weight_of(last).shape[1] != heads * width:
            continue
        for both in itertools.permutations(norms.items()):
            pair: Any = tuple(each for _, each in both) or None
            if pair is not None and not fit(pair, got.sizes):
                continue
            for order, placed in places(made.norms):
                how: dict[str, Any] = {"of": of, "pack": wants_packed(weight_of(last)), "turned_once": turned_once}
                state = functools.partial(Heads, made.heads, tuple(chosen), got.sizes, pair, got.told, **how)
                name = names, tuple(name for name, _ in both), order
                yield name, functools.partial(_layer, state, made.block, placed)


def _layer(heads: Callable[[], Heads], block: Block | Inner, norms: tuple[Normed | None, ...]) -> Layer:
    made = heads()
    if block.by_module:
        made.call_modules()
    return Layer(made, block, norms)


def _expected(
    made: Parts | encoders.Parts, calls: list[Call], exchange: AttentionSwap
) -> tuple[list[Tensor], list[Tensor], str]:
    """Random input, as large as what the layer adds to it, so that all shows; the layer's own output; why it stays."""
    module = made.module
    generator = torch.Generator().manual_seed(len(list(module.parameters())))
    hidden = [
        torch.randn(each.shape, generator=generator, device="cpu", dtype=torch.float32).to(each.device, each.dtype)
        for each, _ in calls
    ]
    stock, stamp = stock_forward(module), Stamp(module, whole=False)
    with exchange.stock():
        first = list(_run(stock, module, hidden[:2], calls[:2], made.cache))
    for each in first:
        if not isinstance(each, Tensor):  # Bamba's layers
            raise TypeError(f"wanted one tensor, the layer returns {type(each).__name__}")
    added = max((got - rows).abs().max().item() for got, rows in zip(first, hidden[:2], strict=True))
    hidden = [rows * min(1.0, added / 4) for rows in hidden]
    hidden[-1] = extreme(hidden[-1])
    writes = "" if stamp.last.same else WRITES
    with exchange.stock(), Listening(module) as reads:
        expected = list(_run(stock, module, hidden, calls, made.cache))
    return hidden, expected, reads.why() or unfollowed(module) or writes


def _error(
    swap: Swap,
    hidden: list[Tensor],
    expected: list[Tensor],
    calls: list[Call],
    exchange: AttentionSwap | None,
    cached: Callable[[], Any] = lambda: None,
) -> float | str:
    """How far a form is from the layer's own output, in units of the largest value that the layer adds.

    Most forms are wrong, and at the first call: no other is made. Text where that is no number: what was raised,
    another shape, or what is not finite.
    """
    worst, attending = 0.0, nullcontext() if exchange is None else exchange.meanwhile(NAME)
    try:
        with attending, trying(swap), closing(_run(swap.module.forward, swap.module, hidden, calls, cached)) as outputs:
            state: Any = swap.state
            with quiet(swap.module):
                if not state.is_proved(hidden[0]):
                    return "its own code would run: something that it reads is no longer what it was"
            for one, two, rows, (_, named) in zip(outputs, expected, hidden, calls, strict=True):
                for got, wanted in ((tuple(one.shape), tuple(two.shape)), (one.dtype, two.dtype)):
                    if got != wanted:
                        return f"a form gave {got}, the layer {wanted}"
                if rows.isnan().any():
                    ours, own = seen_rows(named.get("attention_mask"), one, two)
                    return worst if alike(ours, own, large=state.norms[0] is not None) else ELSEWHERE
                ours, own = seen_rows(named.get("attention_mask"), one - rows, two - rows)
                for whose, each in (("the layer's own", own), ("a form's", ours)):
                    if not torch.isfinite(each).all():
                        return f"{whose} output has NaN or infinities on random input"
                worst = max(worst, distance(ours, own))
                if not agrees(worst, rows.dtype):
                    break
    except (InvalidCallError, RuntimeError, IndexError) as raised:  # this form does not fit its sizes
        return f"a form raised {in_short(raised)}"
    return worst


def _run(
    function: Any, module: Module, hidden: list[Tensor], calls: list[Call], cached: Callable[[], Any]
) -> Generator[Tensor]:
    """The outputs of a layer for its calls, each pair of which shares a cache, where it has one."""
    cache: Any = None
    with quiet(module):
        for number, (rows, (_, named)) in enumerate(zip(hidden, calls, strict=True)):
            cache = cached() if number % 2 == 0 else cache
            yield function(rows.clone(), **(named if cache is None else {**named, name_in(named): cache}))
