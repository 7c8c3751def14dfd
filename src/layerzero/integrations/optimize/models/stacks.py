"""Stacks of layers that compute a padded batch without its padding: found, compared with themselves, and timed.

A stack has a list of layers, and its forward takes a mask. What it gives real positions must be what its own code
gives, on the arguments that its model hands to it for a padded example; and the model's own output, too: a head that
reads padded positions is found so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, ModuleList

from layerzero.core.arguments import signature_of
from layerzero.core.errors import in_short
from layerzero.engine.config import current_policy
from layerzero.integrations.optimize.attention.transformers import Search, outermost
from layerzero.integrations.optimize.models.padding import (
    GROUPS,
    MASK,
    ONE_ROW,
    TOKENS,
    Costs,
    Plan,
    Rows,
    Unpadded,
    bound,
    cut,
    forward,
    noted,
    tokens_of,
    without_padding,
)
from layerzero.integrations.optimize.swaps.candidate import WRITES, agrees, distance, watching
from layerzero.integrations.optimize.swaps.swap import MARK, Swap, has_own_forward, is_swapped, stock_forward, trying
from layerzero.integrations.optimize.swaps.trial import as_served
from layerzero.integrations.optimize.times import timing
from layerzero.integrations.optimize.times.report import BY_CALL, NO_TIME, Left, Replaced
from layerzero.integrations.optimize.times.workload import TimeLeft, tensors_in
from layerzero.tuning.measurement.timing import TimeOverError

LENGTHS = (16, 9, 3, 12, 1, 7, 14, 5)
"""Real tokens of the example's rows; unlike ones, so that what reads over a row's end shows."""

ALONE = frozenset({"MPNetEncoder"})
"""Stacks that compute attention by themselves, and alike at every length (transformers 5.24). Others of that kind may
change their formula with the length, as block-sparse attention does, which a short example does not show."""

CALLS = {ONE_ROW: "real tokens in one row, lz.ragged_attention", GROUPS: "groups of rows of like lengths"}

RUNS = 12
"""Of the example: four are compared, and eight timed."""

ROUNDS, SECONDS = 7, 0.4
"""Runs of each that is timed, and the time after which there are no more than two."""


def find(search: Search) -> Iterator[Replaced | Left]:
    """The stacks of Transformers' models that give the same without padding."""
    exchanged = {id(exchange.model) for _, exchange, _ in search.models}
    for path, model in outermost(search.root, "transformers", "PreTrainedModel"):
        stacks = dict(_stacks(path, model, id(model) in exchanged))
        if not stacks:
            continue
        device = next(model.parameters()).device.type
        if device != "cpu":
            why = f"padding: its masks lie on {device}, and reading one would wait for all that was launched before"
            yield Left(path, type(model).__name__, why)
            continue
        search.tell("checking padding", 0, 1)
        with as_served(model):
            yield from _of_model(model, stacks, search.time)


def _stacks(prefix: str, model: Module, exchanged: bool) -> Iterator[tuple[str, Module]]:
    """Modules with a list of layers whose forward takes tokens and a mask; none that only looks back."""
    within: set[int] = set()
    for path, module in model.named_modules():
        if id(module) in within or not any(isinstance(each, ModuleList) and len(each) for each in module.children()):
            continue
        if not exchanged and type(module).__name__ not in ALONE:
            continue
        names = list(signature_of(type(module).forward).parameters)
        if MASK not in names or not any(name in names for name in TOKENS):
            continue
        within |= {id(each) for each in module.modules()}
        parts = list(module.modules())
        looks_back = any(getattr(each, "is_causal", False) or getattr(each, "is_decoder", False) for each in parts)
        if not looks_back and not any(each.is_meta for each in module.parameters()):
            yield f"{prefix}.{path}".strip("."), module


def _of_model(model: Any, stacks: Mapping[str, Module], time: TimeLeft) -> Iterator[Replaced | Left]:
    found: list[Replaced | Left] = []
    name = type(model).__name__
    step, what = f"an example of {name}", f"computing {name} without padding"
    try:
        if not time.allows(what, step):
            raise TimeOverError  # noqa: TRY301
        with time.taking(step):
            example = _example(model)
            calls, expected = _calls_of(model, stacks, example)
        if not time.allows(what, step, RUNS):
            raise TimeOverError  # noqa: TRY301
    except TimeOverError:
        yield from (Left(path, type(each).__name__, f"padding: {NO_TIME}") for path, each in stacks.items())
        return
    except Exception as raised:  # noqa: BLE001  # what a model raises on an example that was made for another
        why = f"padding: no example runs ({in_short(raised)})"
        yield from (Left(path, type(each).__name__, why) for path, each in stacks.items())
        return
    for path, stack in stacks.items():
        made = _proved(stack, calls.get(path))
        if isinstance(made, str):
            found.append(Left(path, type(stack).__name__, f"padding: {made}"))
            continue
        state, error = made
        ways = CALLS[ONE_ROW if state.is_packing else GROUPS]
        swap = Swap(stack, forward, state)
        found.append(Replaced(path, type(stack).__name__, "padding", ways, BY_CALL, error, swap))
    swaps = [each.swap for each in found if isinstance(each, Replaced)]
    why = _reads_padding(model, swaps, example, expected) if swaps else ""
    for each in found:
        if why and isinstance(each, Replaced):
            yield Left(each.path, each.module, f"padding: {why}")
            continue
        if isinstance(each, Replaced):
            state = _state_of(each.swap)
            state.costs = _costs(each.swap.module, state, calls[each.path])
        yield each


def _state_of(swap: Swap) -> Unpadded:
    assert isinstance(swap.state, Unpadded)
    return swap.state


def _example(model: Any) -> dict[str, Any]:
    """Rows of random words, each with padding behind it but the longest."""
    if model.main_input_name != "input_ids":
        raise TypeError(f"wanted a model of words, its main input is {model.main_input_name}")
    words = model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(words // 2, words, (len(LENGTHS), max(LENGTHS)), generator=generator, device="cpu")
    mask = torch.arange(max(LENGTHS), device="cpu") < torch.tensor(LENGTHS, device="cpu").unsqueeze(1)
    mask = mask.long()
    padding = getattr(getattr(model.config, "text_config", model.config), "pad_token_id", None)  # Idefics 3 warns else
    ids = ids if padding is None else ids.masked_fill(mask == 0, padding)
    example = {"input_ids": ids, MASK: mask}
    if "decoder_input_ids" in signature_of(model.forward).parameters:
        example["decoder_input_ids"] = ids[:, :1]
    return example


def _calls_of(
    model: Any, stacks: Mapping[str, Module], example: Mapping[str, Any]
) -> tuple[dict[str, dict[str, Any]], Any]:
    """What the model hands to each stack, by names; and what it gives."""
    calls: dict[str, dict[str, Any]] = {}
    paths = {each: path for path, each in stacks.items()}

    def keep(module: Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        calls[paths[module]] = bound(_names_of(module), given, named)

    with watching(paths, keep):
        return calls, model(**example)


def _names_of(stack: Module) -> list[str]:
    return list(signature_of(type(stack).forward).parameters)[1:]


def _proved(stack: Module, call: dict[str, Any] | None) -> tuple[Unpadded, float] | str:
    """A state whose ways give the stack's own values, with the largest difference; or what is wrong."""
    if is_swapped(stack) or has_own_forward(stack):
        return "its forward was exchanged on the instance"
    tokens = None if call is None else tokens_of(call)
    if call is None or tokens is None or type(call.get(MASK)) is not Tensor:
        return "it gets no tokens and mask of its own"
    state = Unpadded(stack, _names_of(stack))
    if state.stamp is None or not state.stamp.holds():
        return "something is on its modules that waits for their calls"
    if Rows.of(call[MASK], tokens) is None:
        return "its mask hides more than padding"
    with torch.no_grad():
        expected = list(tensors_in(stock_forward(stack)(**call)))
    errors: dict[str, float] = {}
    why = ""
    for form in (ONE_ROW, GROUPS):
        state.forms = frozenset({form})
        if form == ONE_ROW and (tokens.ndim != 3 or not state.is_packing):
            continue
        error, why = _error(stack, state, call, expected)
        if not why:
            errors[form] = error
    state.forms = frozenset(errors)
    if ONE_ROW in errors and "position_ids" in call:
        backwards = torch.arange(tokens.shape[1], device="cpu").flip(0).unsqueeze(0)
        with torch.no_grad():
            other = tensors_in(stock_forward(stack)(**{**call, "position_ids": backwards}))
        state.ignores_positions = all(map(torch.equal, other, expected))
    if not state.stamp.last.same:  # as BigBird-Pegasus does where a group of rows is short
        return WRITES
    return (state, max(errors.values())) if errors else why


def _error(stack: Module, state: Unpadded, call: dict[str, Any], expected: list[Tensor]) -> tuple[float, str]:
    """How far a way is from the stack's own values, in units of the largest; and what is wrong, empty where nothing."""
    swap = Swap(stack, forward, state)
    try:
        with noted() as padded, _whatever_it_takes(state), trying(swap):
            got = list(tensors_in(stack.forward(**call)))
    except Exception as raised:  # noqa: BLE001  # a stack that takes no packed row
        return 0.0, in_short(raised)
    if not padded:
        return 0.0, "such a call is one for its own code"
    errors = [distance(*without_padding(padded, *pair)) for pair in zip(got, expected, strict=True)]
    wrong = [each for each, of in zip(errors, expected, strict=True) if not agrees(each, of.dtype)]
    why = f"it gives other values without padding, off by {max(wrong):.2g} of the largest" if wrong else ""
    return max(errors), why


@contextmanager
def _whatever_it_takes(state: Unpadded) -> Iterator[None]:
    """Compute each padded call without its padding; with groups of one row and of several."""
    costs = state.costs
    state.costs = Costs(call_s=4.0, token_s=1.0, sequence_s=0.0, check_s=0.0, threads=torch.get_num_threads())
    try:
        yield
    finally:
        state.costs = costs


def _reads_padding(model: Any, swaps: list[Swap], example: Mapping[str, Any], expected: Any) -> str:
    """Say whether the model's own output shows what stands at padded positions; empty where not."""
    if any(name.startswith("start_") for name in getattr(expected, "keys", tuple)()):
        return "answers are looked for in its start_logits over all positions, padded ones too"
    with noted() as padded, ExitStack() as meanwhile:
        for each in swaps:
            meanwhile.enter_context(_whatever_it_takes(_state_of(each)))
            meanwhile.enter_context(trying(each))
        got = model(**example)
    for one, two in zip(tensors_in(got), tensors_in(expected), strict=True):
        if not agrees(distance(*without_padding(padded, one, two)), two.dtype):
            return "its model's output depends on padded positions"
    return ""


def _costs(stack: Module, state: Unpadded, call: dict[str, Any]) -> Costs:
    """Time a stack on one row, on several and on several in one row, and the check by itself."""
    ours = tuple(type(each.__dict__.get(MARK)) for each in stack.modules())
    shapes = tuple((name, tuple(each.shape), each.dtype) for name, each in stack.named_parameters())
    about = type(stack), ours, shapes, state.is_packing, torch.get_num_threads(), current_policy()
    return timing.measured_once(about, functools.partial(_measured, stack, state, call))


def _measured(stack: Module, state: Unpadded, call: dict[str, Any]) -> Costs:
    every, longest = torch.arange(len(LENGTHS), device="cpu"), max(LENGTHS)
    whole = {**cut(call, every, longest), MASK: None}
    row = {**cut(call, every[:1], longest), MASK: None}
    tokens = tokens_of(call)
    assert tokens is not None
    real = torch.ones(tokens.shape[:2], dtype=torch.bool, device="cpu")
    full = Rows(real, [longest] * len(LENGTHS), is_prefix=True)
    stock = stock_forward(stack)
    runs: dict[str, Callable[[], Any]] = {
        "row": lambda: stock(**row),
        "rows": lambda: stock(**whole),
        "check": lambda: state.planned(stack, (), call),
    }
    if state.is_packing:
        runs["packed"] = lambda: Plan(call, full, []).run(stock)
    with torch.no_grad(), _whatever_it_takes(state):
        took = _fastest(runs)
    token_s = max(took["rows"] - took["row"], 0.0) / (longest * (len(LENGTHS) - 1))
    call_s = max(took["row"] - token_s * longest, 0.0)
    sequence_s = max(took.get("packed", 0.0) - took["rows"], 0.0) / len(LENGTHS)
    return Costs(call_s, token_s, sequence_s, took["check"], torch.get_num_threads())


def _fastest(runs: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """The least time of each, in turn."""
    for run in runs.values():
        run()
    began = timing.CLOCK()

    def undecided(times: Mapping[str, Sequence[float]], turn: int) -> Sequence[str]:
        still = turn and not any(each[-1] for each in times.values())
        over = turn == ROUNDS or still or (turn > 1 and timing.CLOCK() - began > SECONDS)
        return () if over else list(runs)

    times = timing.race(list(runs), lambda name: timing.taken(runs[name]), undecided)
    return {name: min(each) for name, each in times.items()}
