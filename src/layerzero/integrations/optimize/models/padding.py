"""A padded batch without its padding: the forward of a stack of layers, called with the real tokens only.

A stack is what hands hidden states from layer to layer (``BertEncoder``), or a model that embeds them, too
(``T5Stack``). Its own code runs, on less: all real tokens in one row, whose attention LayerZero computes by sequences
(``lz.ragged_attention``), or else groups of rows of like lengths, each as long as its longest row. Both ways a real
position gets what it got before but for rounding: a masked key has no weight. Positions behind a row's last real token
are zero. Which way, and whether at all, is decided by the tokens and by times that were measured on this machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from layerzero.engine.config import current_policy
from layerzero.engine.scopes import holding
from layerzero.engine.transforms import in_transform
from layerzero.integrations.optimize.attention.transformers import NAME, configs_of
from layerzero.integrations.optimize.swaps.stamp import Stamp, recorded
from layerzero.integrations.optimize.swaps.swap import MARK, State, as_forward, stock_forward
from layerzero.integrations.transformers_patches import ROW_ARGUMENTS

MASK = "attention_mask"

TOKENS = ("hidden_states", "input_ids", "inputs_embeds")
"""Names of what has the tokens."""

BY_TOKEN = frozenset({*TOKENS, "position_ids", "token_type_ids"})
"""Arguments (B or 1, S, ...) that are cut like the tokens."""

FLAGS = frozenset({"return_dict", "output_hidden_states"})
"""Arguments that may be set and change only the form of what is returned."""

ONE_ROW, GROUPS = "one row", "groups"

MOST_SHARE = 0.9
"""The share of the model's own time that another way is expected to take at most: what was measured is no promise."""

LEVELS = 16
"""Lengths at most among which groups are cut: of 64 rows the plan takes 0.3 ms, and more levels save below 3 %."""


@dataclass(frozen=True)
class Costs:
    """What a stack takes, in seconds, measured on this machine with so many threads.

    Attributes:
        call_s: a call without tokens: the code around kernels, and weights that are read once.
        token_s: a token more.
        sequence_s: a sequence more in a packed row, whose attention is a call of its own.
        check_s: reading a mask and deciding.
    """

    call_s: float
    token_s: float
    sequence_s: float
    check_s: float
    threads: int

    def by_tokens(self) -> float:
        """Seconds of a token with the threads of now: more threads save less, fewer are taken to save no more."""
        return self.token_s * min(1.0, self.threads / torch.get_num_threads())


class Unpadded(State):
    """What the stack's new forward needs.

    Attributes:
        forms: the ways that gave the stack's own values.
        costs: what decides among them.
        ignores_positions: whether ``position_ids`` say nothing to the stack, so that packed tokens may go without.
        names: the names of the forward's arguments by place.
    """

    def __init__(self, stack: Module, names: Sequence[str]) -> None:
        super().__init__()
        self.names = tuple(names)
        self.stamp = Stamp(stack)
        self.forms: frozenset[str] = frozenset()
        self.costs = Costs(0.0, 0.0, 0.0, 0.0, 1)
        self.ignores_positions = False
        self._configs = configs_of(stack, "_attn_implementation")

    @property
    def is_packing(self) -> bool:
        """Whether sequences in one row are told apart: by LayerZero's attention alone."""
        ours = all(each._attn_implementation == NAME for each in self._configs)
        return ONE_ROW in self.forms and ours

    def planned(self, stack: Module, given: Sequence[Any], named: Mapping[str, Any]) -> Plan | None:
        """How to compute a call; None for one that the stack's own code computes."""
        mask = _mask_of(self.names, given, named)
        if type(mask) is not Tensor or not mask.is_cpu or not mask.numel() or in_transform():
            return None
        call = bound(self.names, given, named)
        tokens = tokens_of(call)
        if tokens is None or torch._C._is_any_autocast_enabled():
            return None
        costs, by_token, count = self.costs, self.costs.by_tokens(), tokens.shape[0] * tokens.shape[1]
        if by_token * count * (1 - MOST_SHARE) < costs.check_s or not _is_cut(call, tokens):
            return None
        rows = Rows.of(mask, tokens)
        if rows is None:
            return None
        limit = MOST_SHARE * (costs.call_s + by_token * count)
        packs = rows.is_prefix and self.is_packing and (self.ignores_positions or call.get("position_ids") is None)
        plan = self._least(rows, by_token, limit, packs=packs)
        if plan is None or not self._serves(stack):
            return None
        return Plan(call, rows, plan)

    def _least(self, rows: Rows, by_token: float, limit: float, *, packs: bool) -> list[list[int]] | None:
        """The groups of rows that take the least; no group for one packed row, None for the stack's own code."""
        costs = self.costs
        if packs:
            packed_s = costs.call_s + by_token * sum(rows.lengths) + costs.sequence_s * len(rows.lengths)
            return [] if packed_s <= limit else None
        if GROUPS not in self.forms:
            return None
        groups, seconds = cheapest(rows.lengths, costs.call_s, by_token)
        return groups if seconds <= limit else None

    def _serves(self, stack: Module) -> bool:
        """Whether all is as it was when this was proved, nothing waits for inner calls, and no gradient is recorded."""
        stamp = self.stamp  # once: undo takes it away
        if stamp is None or not stamp.holds() or recorded() or not current_policy().enabled:
            return False
        if any(getattr(each, "output_attentions", False) for each in self._configs):
            return False
        return not (torch.is_grad_enabled() and any(each.requires_grad for each in stack.parameters()))


@as_forward
def forward(self: Module, *given: Any, **named: Any) -> Any:
    """What is put on a stack."""
    state = self.__dict__.get(MARK)
    if not torch.compiler.is_compiling() and state is not None:
        plan = state.planned(self, given, named)
        if plan is not None:
            found = plan.run(stock_forward(self))
            if plan.groups or state.is_packing:  # else undo took attention away meanwhile: another knows no packed row
                return found
    return type(self).forward(self, *given, **named)


def _mask_of(names: Sequence[str], given: Sequence[Any], named: Mapping[str, Any]) -> Any:
    if MASK in named:
        return named[MASK]
    place = names.index(MASK)
    return given[place] if place < len(given) else None


def bound(names: Sequence[str], given: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a call by name."""
    return {**dict(zip(names, given, strict=False)), **named}


def tokens_of(call: Mapping[str, Any]) -> Tensor | None:
    """What has the tokens of a call (B, S) or (B, S, H), on a CPU; None without such."""
    found = [call[name] for name in TOKENS if call.get(name) is not None]
    if len(found) != 1 or type(found[0]) is not Tensor or found[0].ndim not in {2, 3} or not found[0].is_cpu:
        return None
    return None if found[0].requires_grad and torch.is_grad_enabled() else found[0]


def _is_cut(call: Mapping[str, Any], tokens: Tensor) -> bool:
    """Whether every argument that says anything may be cut by rows and lengths."""
    for name, value in call.items():
        if name == MASK or value is None or value is False or name in FLAGS:
            continue
        if name not in BY_TOKEN or type(value) is not Tensor or value.ndim < 2:
            return False
        if value.shape[1] != tokens.shape[1] or value.shape[0] not in {1, tokens.shape[0]}:
            return False
    return True


@dataclass(frozen=True)
class Rows:
    """Where the real tokens of a batch lie.

    Attributes:
        keep: (B, S), True for a real token.
        lengths: of each row, the place behind its last real token.
        is_prefix: whether each row begins with its real tokens, without a hole.
    """

    keep: Tensor
    lengths: list[int]
    is_prefix: bool

    @classmethod
    def of(cls, mask: Tensor, tokens: Tensor) -> Rows | None:
        """Read a mask (B, S), or (B, 1, S or 1, S) that hides the same keys from every query.

        None for another mask, for one that hides nothing, and for a row of which nothing is real.
        """
        batch, longest = tokens.shape[:2]
        if mask.ndim == 4:
            if mask.shape[:2] != (batch, 1) or mask.shape[2] not in {1, longest} or mask.shape[3] != longest:
                return None
            if mask.dtype is not torch.bool:
                if not mask.is_floating_point():
                    return None
                seen = mask == 0
                if not (seen | (mask <= torch.finfo(mask.dtype).min / 2)).all():
                    return None
                mask = seen
            keep, queries = mask[:, 0, 0], mask[:, 0].view(torch.uint8)
            if (queries[:, 1:] ^ queries[:, :-1]).any():  # an eighth of what torch.equal takes of bools
                return None
        elif mask.shape == (batch, longest):
            keep = mask.to(torch.bool)
        else:
            return None
        if keep.all():
            return None
        lengths: list[int] = (keep * torch.arange(1, longest + 1, device="cpu")).amax(1).tolist()
        if min(lengths) == 0:
            return None
        return cls(keep, lengths, int(keep.sum()) == sum(lengths))

    def behind(self) -> Tensor:
        """(B, S), True behind a row's last real token."""
        places = torch.arange(self.keep.shape[1], device="cpu")
        return places >= torch.tensor(self.lengths, device="cpu").unsqueeze(1)


def cheapest(lengths: Sequence[int], call_s: float, token_s: float) -> tuple[list[list[int]], float]:
    """Rows in groups of like lengths, and the seconds that all take: a call for each, as long as its longest row."""
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    step = -(-len(order) // LEVELS)
    ends = [end for end in range(1, len(order)) if lengths[order[end]] != lengths[order[end - 1]]]
    ends = [*(ends if len(ends) < LEVELS else (end for end in ends if end % step == 0)), len(order)]
    best: dict[int, tuple[float, int]] = {0: (0.0, 0)}
    for place, end in enumerate(ends):
        best[end] = min(
            (best[first][0] + call_s + token_s * (end - first) * lengths[order[first]], first)
            for first in (0, *ends[:place])
        )
    groups, end = [], len(order)
    while end:
        first = best[end][1]
        groups.append(order[first:end])
        end = first
    return groups, best[len(order)][0]


class _UnknownShapeError(Exception):
    """A stack returned more than hidden states (B, S, H): attention weights, a cache."""


@dataclass(frozen=True)
class Plan:
    """How to compute a call: its arguments, and the groups of its rows; none where all lie in one row."""

    call: Mapping[str, Any]
    rows: Rows
    groups: Sequence[Sequence[int]]

    def run(self, stock: Callable[..., Any]) -> Any:
        try:
            found = self._by_groups(stock) if self.groups else self._packed(stock)
        except _UnknownShapeError:
            return stock(**self.call)
        noted = _NOTED.get()
        if noted is not None:
            noted.append(self.rows)
        return found

    def _packed(self, stock: Callable[..., Any]) -> Any:
        batch, longest = self.rows.keep.shape
        places = self.rows.keep.reshape(-1).nonzero().squeeze(1)
        call: dict[str, Any] = {name: None if name in {MASK, *BY_TOKEN} else each for name, each in self.call.items()}
        for name in TOKENS:
            each = self.call.get(name)
            if each is not None:
                call[name] = each.flatten(0, 1).index_select(0, places).unsqueeze(0)
        starts = torch.tensor([0, *itertools.accumulate(self.rows.lengths)], dtype=torch.int32, device="cpu")
        length = max(self.rows.lengths)
        call |= dict(zip(ROW_ARGUMENTS, (starts, starts, length, length), strict=True))

        def spread(each: Tensor) -> Tensor:
            if each.ndim != 3 or each.shape[:2] != (1, len(places)):
                raise _UnknownShapeError
            whole = each.new_zeros((batch * longest, *each.shape[2:]))
            return whole.index_copy_(0, places, each[0]).view(batch, longest, -1)

        return _mapped(lambda each: spread(each[0]), [stock(**call)])

    def _by_groups(self, stock: Callable[..., Any]) -> Any:
        batch, longest = self.rows.keep.shape
        cuts, found = [], []
        for group in self.groups:
            lengths = [self.rows.lengths[row] for row in group]
            cuts.append((torch.tensor(group, device="cpu"), max(lengths)))
            call = cut(self.call, *cuts[-1])
            if self.rows.is_prefix and min(lengths) == max(lengths):
                call[MASK] = None  # it hides nothing, and attention is faster without
            found.append(stock(**call))
        behind = self.rows.behind()

        def whole(parts: Sequence[Tensor]) -> Tensor:
            first = parts[0]
            if first.ndim != 3 or first.shape[:2] != (len(cuts[0][0]), cuts[0][1]):
                raise _UnknownShapeError
            made = first.new_zeros((batch, longest, *first.shape[2:]))
            for (rows, length), part in zip(cuts, parts, strict=True):
                made[rows, :length] = part
            return made.masked_fill_(behind.reshape(batch, longest, *(1,) * (made.ndim - 2)), 0)

        return _mapped(whole, found)


def cut(call: Mapping[str, Any], rows: Tensor, length: int) -> dict[str, Any]:
    """The arguments for some rows, up to a length."""
    found = dict(call)
    for name, each in call.items():
        if not isinstance(each, Tensor):
            continue
        if name == MASK:
            mask = each[rows, ..., :length]
            found[name] = mask[:, :, :length] if mask.ndim == 4 else mask
        else:
            found[name] = each[rows, :length] if each.shape[0] > 1 else each[:, :length]
    return found


def _mapped(change: Callable[[list[Tensor]], Tensor], found: Sequence[Any]) -> Any:
    """What several calls returned, as one: tensors of one place become one, and what holds them is made anew."""
    first = found[0]
    if isinstance(first, Tensor):
        return change(list(found))
    if isinstance(first, Mapping):
        parts = {name: _mapped(change, [each[name] for each in found]) for name in first}
        return type(first)(**parts)
    if isinstance(first, (tuple, list)):
        return type(first)(_mapped(change, each) for each in zip(*found, strict=True))
    if not isinstance(first, (bool, int, float, str, type(None))):  # a cache, which is of one group's rows
        raise _UnknownShapeError
    return first


_NOTED: ContextVar[list[Rows] | None] = ContextVar("layerzero_padding", default=None)


@contextmanager
def noted() -> Iterator[list[Rows]]:
    """Where the real tokens of the calls lie that are computed without padding meanwhile."""
    found: list[Rows] = []
    with holding(_NOTED, found):
        yield found


def without_padding(padded: Iterable[Rows], *tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors (B, S, ...) of such batches with zeros behind the last real tokens, where nothing is promised."""
    for rows in padded:
        behind = rows.behind()
        tensors = tuple(
            each.masked_fill(behind.reshape(*behind.shape, *(1,) * (each.ndim - 2)), 0)
            if each.shape[:2] == behind.shape and each.is_cpu
            else each
            for each in tensors
        )
    return tensors
