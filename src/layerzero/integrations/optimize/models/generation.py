"""One step of generation for loops of one's own: the model, its cache, and the next tokens drawn."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import layerzero as lz
from layerzero.core.errors import in_short, refuse
from layerzero.engine.scopes import holding
from layerzero.integrations.optimize.attention.dynamic_cache import name_of
from layerzero.integrations.optimize.swaps.swap import stock_forward
from layerzero.ops.sampling.declare import LEAST, MOST_SEED
from layerzero.ops.sampling.formulas import TEMPERATURES


def generate_step(
    model: Any,
    cache: Any,
    tokens: Tensor,
    *,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int | None = None,
    **more: Any,
) -> Tensor:
    """Run a decoder on the last tokens, and draw the next one of each sequence; the likeliest by default.

        cache = transformers.DynamicCache(config=model.config)
        tokens = lz.generate_step(model, cache, prompt)              # (B, S): the whole prompt
        for _ in range(63):
            tokens = lz.generate_step(model, cache, tokens)          # (B, 1): one token each

    After ``lz.optimize(model, graph=True)`` a step of one token is a graph that ends with the draw: one launch, and
    no logits travel. Anything else is run as the model runs it, and drawn by the same functions. It neither stops at
    an end token nor keeps what was drawn: a loop of one's own does.

    Shapes: tokens (B, S) → (B, 1) int64
    Args:
        model: a causal language model of Transformers.
        cache: its cache, as ``DynamicCache(config=model.config)``; gets S tokens more.
        tokens: what the cache does not have yet.
        temperature: what logits are divided by; 0 takes the likeliest token, None is 1.
        top_k: how many of the likeliest tokens may come, from 1.
        top_p: the share that the tokens which may come have together, of those that ``top_k`` leaves.
        min_p: how likely a token must be, in parts of the likeliest one. It is applied first.
        seed: the same seed at the same length of the cache gives the same draw by the same kernel. None draws from
            torch's generator of the device. Sequences of one call draw apart.
        more: passed to the model, as ``attention_mask``, ``position_ids``.
    Raises: InvalidCallError for numbers out of range; whatever the model raises.
    """
    _check(cache, tokens, more, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    drawing = Drawing(temperature, top_k, top_p, min_p, seed)
    before = cache.get_seq_length()
    with holding(DRAWING, drawing), torch.no_grad():
        logits = model(input_ids=tokens, use_cache=True, **{name_of(model): cache}, **more).logits
    if drawing.ids is None:
        with torch.no_grad():
            drawing.draw(logits[:, -1], int(before) + tokens.shape[1] - 1)
    assert drawing.ids is not None
    return drawing.ids.view(-1, 1)


OWN = ("input_ids", "past_key_values", "cache", "use_cache", "return_dict")
"""Arguments of the model that a step gives itself."""


def why_not_by_place(model: Any, device: torch.device) -> str:
    """Say why a model that is given no positions counts other ones than places of its cache; empty where it does not.

    Qwen2-VL counts behind its pictures, PaliGemma from one (Transformers 5.24, 2026-11-30).
    """
    if any(hasattr(each, "rope_deltas") for each in model.modules()):
        return "it got no position_ids, and keeps how far its pictures moved them"
    name, ids = name_of(model), torch.arange(4, device=device)[None]
    forward = functools.partial(stock_forward(model), use_cache=True)
    try:
        with torch.no_grad():
            cache = getattr(forward(input_ids=ids[:, :3]), name)
            ways: tuple[dict[str, Any], ...] = ({}, {"position_ids": ids[:, 3:]})
            own, by_place = (
                forward(input_ids=ids[:, 3:], **{name: copy.deepcopy(cache)}, **each).logits for each in ways
            )
    except Exception as error:  # noqa: BLE001  # whatever a model's code raises of so few tokens
        return f"it got no position_ids, and does not show how it counts: {in_short(error)}"
    same = torch.allclose(own, by_place, rtol=0.0, atol=0.0, equal_nan=True)
    return "" if same else "it got no position_ids, and counts others than places of its cache"


def _check(cache: Any, tokens: Tensor, more: Mapping[str, Any], **given: float | None) -> None:
    """Raise for what does not fit, each with what was wanted and got."""
    problems = [f"{name}: wanted none, a step gives it itself; got one" for name in OWN if name in more]
    if not hasattr(cache, "get_seq_length"):
        wanted = "a cache of Transformers, as DynamicCache(config=model.config)"
        problems.append(f"cache: wanted {wanted}, got {type(cache).__name__}")
    if not isinstance(tokens, Tensor) or tokens.ndim != 2 or 0 in tokens.shape:
        got = tuple(tokens.shape) if isinstance(tokens, Tensor) else type(tokens).__name__
        problems.append(f"tokens: wanted a tensor (B, S) with at least one token each, got {got}")
    bounds: dict[str, tuple[float, float]] = {
        "top_k": (1, 2**31 - 1),
        "top_p": (LEAST, 1.0),
        "min_p": (LEAST, 1.0),
        "seed": (0, MOST_SEED),
    }
    for name, (first, last) in bounds.items():
        value = given[name]
        whole = name in {"top_k", "seed"}
        fits = isinstance(value, int) or (isinstance(value, float) and not whole)
        if value is not None and (isinstance(value, bool) or not fits or not first <= value <= last):
            kind = "a whole number" if whole else "a number"
            problems.append(f"{name}: wanted {kind} from {first:g} to {last:g} or None, got {value!r}")
    temperature, (coldest, hottest) = given["temperature"], TEMPERATURES
    number = isinstance(temperature, (int, float)) and not isinstance(temperature, bool)
    if temperature is not None and not (number and (temperature == 0 or coldest <= temperature <= hottest)):
        problems.append(f"temperature: wanted 0, {coldest:g} to {hottest:g} or None, got {temperature!r}")
    refuse("generate_step", problems)


_STEP = 0x9E3779B97F4A7C15
"""Odd, so that every position of a sequence gets a seed of its own."""

_SEEDS = 2**63


@dataclass
class Drawing:
    """How the next tokens are drawn, and those that were.

    Attributes:
        temperature, top_k, top_p, min_p, seed: as of ``lz.generate_step``.
        ids: (B,) int64, what was drawn; None before.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    ids: Tensor | None = None

    @property
    def is_random(self) -> bool:
        """Whether anything but the likeliest token may come."""
        given = (self.temperature, self.top_k, self.top_p, self.min_p)
        return self.temperature != 0 and any(each is not None for each in given)

    @property
    def kind(self) -> str:
        """What is computed; numbers aside, of which a graph reads the current ones."""
        if not self.is_random:
            return "greedy"
        return "drawn" + "".join(f" {name}" for name in ("top_k", "top_p", "min_p") if getattr(self, name) is not None)

    def draw(self, logits: Tensor, length: int) -> None:
        """Draw from (B, V) logits that follow ``length`` tokens."""
        told = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}
        self.ids = self._by(logits, {name: each for name, each in told.items() if each is not None}, self._at(length))

    def of_rows(self, logits: Tensor, numbers: Numbers) -> Tensor:
        """Draw by the numbers of each row, from torch's own generator of the device."""
        of_rows = {"top_k": numbers.k, "top_p": numbers.p, "min_p": numbers.min_p}
        told = {name: each for name, each in of_rows.items() if getattr(self, name) is not None}
        return self._by(logits, told | {"temperature": numbers.temperature}, None)

    def _by(self, logits: Tensor, told: dict[str, Any], seed: int | None) -> Tensor:
        if not self.is_random:
            return lz.greedy(logits)
        least = told.pop("min_p", None)
        if least is not None:
            logits = _likely(logits, least, told.get("temperature", 1.0))
        function: Any = lz.sample
        if self.top_k is not None:
            function = lz.sample_topk if self.top_p is None else lz.sample_topk_topp
        elif self.top_p is not None:
            function = lz.sample_topp
        drawn: Tensor = function(logits, **told, seed=seed)
        return drawn

    def _at(self, length: int) -> int | None:
        """The seed of the token after ``length`` others."""
        return None if self.seed is None else (self.seed + length * _STEP) % _SEEDS

    @contextmanager
    def seeded(self, device: torch.device, length: int) -> Iterator[None]:
        """Let torch's generator of a device begin at the seed of a token, and have it go on as it was afterwards.

        A graph draws from no other generator, and reads where that stands when it is replayed.
        """
        seed = self._at(length)
        if seed is None:
            yield
            return
        generator = torch.default_generator
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            generator = torch.cuda.default_generators[index]
        before = generator.get_state()
        generator.manual_seed(seed)
        try:
            yield
        finally:
            generator.set_state(before)


def _likely(logits: Tensor, least: Any, temperature: Any) -> Tensor:
    """Logits of the places at least so many times as likely as the likeliest, -inf elsewhere."""
    wide = logits.float()
    most = wide.amax(-1, keepdim=True)
    if isinstance(least, Tensor):
        bound = most + (least.log() * temperature).unsqueeze(-1)
    else:
        bound = most + math.log(least) * temperature
    return wide.masked_fill(wide < bound, float("-inf"))


class Numbers:
    """A draw's numbers for each row, where a graph reads them.

    Attributes:
        temperature, p, min_p: (B,) float32.
        k: (B,) int32.
    """

    def __init__(self, batch: int, device: torch.device) -> None:
        self.device = device
        self.temperature, self.p, self.min_p = (torch.ones(batch, device=device, dtype=torch.float32) for _ in range(3))
        self.k = torch.ones(batch, dtype=torch.int32, device=device)
        self._last: dict[str, float] = {}

    def set(self, drawing: Drawing) -> None:
        """Write those that changed."""
        wanted = {
            "temperature": drawing.temperature, "k": drawing.top_k, "p": drawing.top_p, "min_p": drawing.min_p,
        }  # fmt: skip
        for name, value in wanted.items():
            number = 1 if value is None else value
            if self._last.get(name) != number:
                getattr(self, name).fill_(number)
                self._last[name] = number


DRAWING: ContextVar[Drawing | None] = ContextVar("layerzero_drawing", default=None)
"""What a step draws by; None where its logits alone are wanted."""
