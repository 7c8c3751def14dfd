"""Products of other libraries with weights of int8, found by value.

A module that holds int8 codes and scales is known by what it gives for rows in which one number is 40 times as large as
the others: their rounding to int8 is coarse there, so that it shows whether rows are rounded, and by how many scales.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import linear

from layerzero.core.errors import InvalidCallError, in_short
from layerzero.integrations.optimize.attention.transformers import Search
from layerzero.integrations.optimize.swaps.candidate import (
    Candidate,
    agrees,
    candidate,
    distance,
    quiet,
    random_rows,
    refusal,
)
from layerzero.integrations.optimize.swaps.codes import CodedProduct, Held, Place, at, bias_of, call, product
from layerzero.integrations.optimize.swaps.swap import stock_forward
from layerzero.integrations.optimize.times.report import NO_TIME, Left, Replaced
from layerzero.integrations.optimize.times.timing import TIMED

KIND = "int8"
"""Of what is replaced."""

LARGE, APART = 40.0, 32.0
"""One number of a row, in units of the others' deviation, and one row in units of another."""

EXACT, ROUNDED = 0.25, (0.5, 1.6)
"""In units of the expected error of rows in int8: what weights alone may be off by, and what rounded rows are."""

PLAIN = 2
"""Rows without a large number, whose error shows whether a result is scaled, which rounding does not do."""

SCALED = 0.003
"""By how much: torchao's scales, of 127.5 steps, cut the largest number of a row by 0.4 %."""


def find(search: Search) -> Iterator[Replaced | Left]:
    """Modules of other libraries whose weight is int8 codes and scales, known by value."""
    dynamic = getattr(sys.modules.get("torch.ao.nn.quantized.dynamic"), "Linear", None)
    for path, module in search.root.named_modules():
        name = type(module).__name__
        if dynamic is not None and isinstance(module, dynamic):
            why = "torch's dynamic int8 rounds all rows of a call by one scale and a zero point; no kernel does that"
            yield Left(path, name, why)
            search.taken.add(id(module))
            continue
        pairs = [] if module._modules else _pairs(module)
        if not pairs:
            continue
        yield tried(search, path, module, at(module, pairs[0][0]), functools.partial(_by_value, module, pairs))


def tried(
    search: Search, path: str, module: Module, weight: Tensor | None, candidate: Callable[[], Candidate | str]
) -> Replaced | Left:
    """What a candidate makes of a module with a quantised weight, as far as there is time to check it."""
    found: Candidate | str = NO_TIME
    step = f"checking modules of {type(module).__name__}"
    if search.time.allows(step, step):
        with search.time.taking(step):
            found = why_not(module) or untimed(search, weight) or candidate()
    search.taken.add(id(module))
    return Left(path, type(module).__name__, found) if isinstance(found, str) else Replaced.of(path, found)


def _pairs(module: Module) -> list[tuple[Place, Place]]:
    """Where codes and scales may lie: int8 of two axes, and as many floating numbers as it has outputs, or one."""
    places = list(_places(module))
    codes = [(each.numel(), place) for place, each in places if each.dtype is torch.int8 and each.ndim == 2]
    count, largest = max(codes, default=(0, ("", "", "")))  # zero points may be int8, too
    if not count:
        return []
    outputs = at(module, largest).shape[0]  # type: ignore[union-attr]
    shapes = {(), (1,), (1, 1), (outputs,), (outputs, 1)}
    return [
        (largest, place)
        for place, each in places
        if each.is_floating_point() and tuple(each.shape) in shapes and place[1] != "bias"
    ]


def _places(module: Module) -> Iterator[tuple[Place, Tensor]]:
    for held in ("_parameters", "_buffers"):
        for name, each in getattr(module, held).items():
            inner = getattr(each, "__tensor_flatten__", None)
            if inner is None:
                yield from [((held, name, ""), each)] if isinstance(each, Tensor) else []
                continue
            for attribute in inner()[0]:
                if isinstance(part := getattr(each, attribute), Tensor):
                    yield (held, name, attribute), part


def why_not(module: Module) -> str:
    """What speaks against another forward, besides the weight."""
    why = refusal(module)
    return "" if "quantised" in why else why


def untimed(search: Search, weight: Tensor | None) -> str:
    """Why nothing is known of a product's time; empty where it will be taken."""
    if weight is None or search.workload is not None or weight.device.type in TIMED:
        return ""
    return f"nothing is timed on {weight.device.type} without inputs; pass inputs= to measure"


def _by_value(module: Module, pairs: list[tuple[Place, Place]]) -> Candidate | str:
    """A candidate that gives what the module gives, within the rounding of its rows; or why there is none."""
    why, raised = "", ""
    for places in pairs:
        codes, scale = (at(module, place) for place in places)
        assert codes is not None
        assert scale is not None
        exact_weight = codes.double() * scale.double().reshape(-1, 1)
        for dtype in _dtypes(module, places):
            rows = _telling_rows(module, exact_weight, dtype)
            try:
                with quiet(module):
                    got = stock_forward(module)(rows.clone())
            except Exception as error:  # noqa: BLE001  # it takes something else than rows of this dtype
                raised = f"it does not compute on one tensor of rows: {in_short(error)}"
                continue
            why = "its output is no product of its int8 weight, by itself or with rows rounded by a scale for each"
            if not isinstance(got, Tensor) or got.dtype != dtype or got.shape != (*rows.shape[:-1], codes.shape[0]):
                continue
            activations = _rounding(rows, exact_weight, got, bias_of(module))
            if activations == "":
                continue
            try:
                with quiet(module):
                    state = Held(module, functools.partial(_read, places), _weight, activations)
                    ours = call(state, rows, bias_of(module))
            except InvalidCallError as error:  # rows of another dtype than the bias, which torchao's product takes
                why = in_short(error)
                continue
            found = product_of(module, state, rows)
            found.error = distance(ours, got)
            same = agrees(found.error, rows.dtype)
            if activations is not None:
                same = _rounding(rows, exact_weight, ours, bias_of(module)) == activations
            off = f"{found.calls} by {found.kernel} was off by {found.error:.2g} of the largest value"
            return found if same else off
    return why or raised


def _read(places: tuple[Place, Place], module: Module) -> tuple[Tensor | None, ...]:
    """Codes and scales as they lie now; neither where one is gone, or gradients of what holds them are recorded."""
    codes, scale = (at(module, place) for place in places)
    if codes is None or scale is None:
        return None, None
    held = [getattr(module, kind)[name] for kind, name, inner in places if inner]
    recorded = torch.is_grad_enabled() and any(each.requires_grad for each in held)
    return (None, None) if recorded else (codes, scale)


def _weight(_: Module, codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Both. Raises: InvalidCallError for what is no codes and scales any more."""
    if codes.dtype is not torch.int8 or codes.ndim != 2 or scale.numel() not in {1, codes.shape[0]}:
        wanted = f"weight: wanted int8 codes (N, K) and 1 or N scales, got {codes.dtype} {tuple(codes.shape)}"
        raise InvalidCallError("optimize", [wanted])
    return codes, scale


def _dtypes(module: Module, places: tuple[Place, Place]) -> Iterable[torch.dtype]:
    held, name, _ = places[0]
    others = [getattr(module, held)[name], bias_of(module), at(module, places[1])]
    known = [each.dtype for each in others if each is not None and each.is_floating_point()]
    return dict.fromkeys([*known, torch.float32, torch.bfloat16])


def _telling_rows(module: Module, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Two sizes of rows, one number of each far larger, so large that the bias does not hide what is rounded."""
    features = weight.shape[1]
    rows = random_rows(module, features, dtype=torch.float64, device=weight.device).reshape(6, features)
    for number in range(6 - PLAIN):
        rows[number, number % features] = LARGE
    bias = bias_of(module)
    if bias is not None:
        rows *= max(1.0, (8 * bias.abs().max() / linear(rows, weight).square().mean().sqrt()).item())
    rows[1::2] *= APART
    return rows.to(dtype).reshape(2, 3, features)


def _rounding(rows: Tensor, weight: Tensor, got: Tensor, bias: Tensor | None) -> str | None:
    """How rows are rounded: None for not at all, ``"int8"`` by a scale for each, empty for neither."""
    wide = rows.double().flatten(0, -2)
    exact = linear(wide, weight)
    errors = got.double().flatten(0, -2) - exact - (0.0 if bias is None else bias.double())
    off, expected = errors.norm(dim=-1), wide.abs().amax(-1) / 127 / math.sqrt(12) * weight.norm()
    if bool((off <= EXACT * expected)[:-PLAIN].all()):
        return None
    scaled = (errors * exact)[-PLAIN:].sum(-1) / exact[-PLAIN:].square().sum(-1)
    chance = 5 * expected[-PLAIN:] / exact[-PLAIN:].norm(dim=-1) / math.sqrt(exact.shape[-1])
    least, most = ROUNDED
    rounded = bool(((off >= least * expected) & (off <= most * expected))[:-PLAIN].all())
    return "int8" if rounded and bool((scaled.abs() <= chance.clamp(min=SCALED)).all()) else ""


def product_of(module: Module, state: CodedProduct, rows: Tensor) -> Candidate:
    """What computes a module's product from codes, and how it is called."""
    how = "rows as they are" if state.activations is None else f"rows {state.activations}"
    calls = f"lz.quantized_linear with {state.kind} weights and {how}"
    asked = "quantized_linear", (rows, *state.pair, bias_of(module)), {**state.named, "packed": state.packed[0]}
    return candidate(module, product, state, kind=state.kind, calls=calls, example=rows, asked=asked)
