"""Calls on a device with little memory left: none fails that another legal kernel would have answered.

On a GPU a tensor holds all but 2 GB. Elsewhere memory is what the part says it is, and no kernel runs out of it.
"""

from __future__ import annotations

import logging
import random
import time
import traceback
import warnings
from collections import Counter
from typing import Any, NamedTuple

import torch
from keeping import Found, cache

import layerzero as lz
from layerzero import _assembly
from layerzero.core.plan import Candidate
from layerzero.core.system.memory import FREE, UNKNOWN, Reading, mib
from layerzero.engine import headroom
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.failures import out_of_memory

LEFT_BYTES = 2 * 10**9
CALLS = 1000
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Call(NamedTuple):
    """A call of a public function."""

    function: str
    arguments: dict[str, Any]

    def run(self) -> None:
        """Run it, and drop its results."""
        getattr(lz, self.function)(**self.arguments)
        if torch.cuda.is_available():
            torch.cuda.synchronize()


class Calls:
    """Random calls whose tensors take up to a third of what is left."""

    def __init__(self, draw: random.Random, device: str) -> None:
        self.draw, self.device, self.small = draw, device, device == "cpu"
        size = 256 if self.small else 4096
        weights = [torch.randn(size * n, size, device=device, dtype=torch.bfloat16) for n in (1, 3)]
        self.weights = [lz.quantize_weight(each, kind) for each in weights for kind in ("int4", "int8")]

    def made(self) -> Call:
        """One call; MemoryError or torch's own where its tensors do not fit."""
        name = self.draw.choices(("attention", "linear", "rows", "experts", "quantised"), (5, 2, 3, 1, 1))[0]
        function, arguments = getattr(self, name)(self.draw.choice(DTYPES))
        return Call(function, arguments)

    def tensor(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Random numbers."""
        if torch.Size(shape).numel() * dtype.itemsize > LEFT_BYTES / 3:
            raise MemoryError
        return torch.randn(*shape, device=self.device, dtype=dtype)

    def size(self, low: int, high: int) -> int:
        """A size between two powers of two, often one of them."""
        if self.small:
            low, high = max(low - 4, 1), max(high - 5, 2)
        found = 1 << self.draw.randint(low, high)
        return found if self.draw.random() < 0.7 else self.draw.randint(max(found // 2, 1), found)

    def attention(self, dtype: torch.dtype) -> tuple[str, dict[str, Any]]:
        """Up to 16,384 tokens; masks, biases and caps that few kernels take."""
        batch, heads = self.draw.choice((1, 1, 2, 4, 8)), self.draw.choice((4, 8, 16, 32))
        kv_heads, dim = self.draw.choice((heads, heads // 4)), self.draw.choice((64, 80, 128, 128, 256))
        queries, keys = self.size(7, 14), self.size(7, 14)
        queries = keys if self.draw.random() < 0.6 else queries
        more: dict[str, Any] = {}
        kind = self.draw.choice(("causal", "full", "mask", "heads", "softcap", "lse"))
        if kind in ("mask", "heads"):
            more["attn_mask"] = self.tensor(batch, heads if kind == "heads" else 1, queries, keys, dtype=dtype)
        if kind == "softcap":
            more["softcap"] = 30.0
        if kind == "lse":
            more["return_lse"] = True
        shapes = [(batch, queries, heads), (batch, keys, kv_heads), (batch, keys, kv_heads)]
        named = zip(("query", "key", "value"), shapes, strict=True)
        tensors = {name: self.tensor(*shape, dim, dtype=dtype) for name, shape in named}
        return "attention", {**tensors, "layout": "BSHD", "causal": kind == "causal" and queries == keys, **more}

    def linear(self, dtype: torch.dtype) -> tuple[str, dict[str, Any]]:
        """Up to 65,536 rows."""
        rows, inner, outer = self.size(6, 16), self.size(8, 13), self.size(8, 14)
        weight = self.tensor(outer, inner, dtype=dtype)
        return "linear", {"input": self.tensor(rows, inner, dtype=dtype), "weight": weight}

    def rows(self, dtype: torch.dtype) -> tuple[str, dict[str, Any]]:
        """Norms, products and softmax of large rows."""
        name = self.draw.choice(("rms_norm", "layer_norm", "softmax", "silu_mul"))
        data = self.tensor(self.size(8, 16), 2 * self.size(7, 14), dtype=dtype)
        weight = {"weight": torch.ones(data.shape[-1], device=self.device, dtype=dtype)} if "norm" in name else {}
        return name, {"input": data, **weight, **({"normalized_shape": data.shape[-1]} if name == "layer_norm" else {})}

    def experts(self, dtype: torch.dtype) -> tuple[str, dict[str, Any]]:
        """Eight experts, up to 16,384 tokens."""
        tokens, hidden, inner = self.size(4, 14), self.size(9, 11), self.size(9, 11)
        ids = torch.randint(8, (tokens, 2), device=self.device, dtype=torch.int32)
        return "moe_experts", {
            "input": self.tensor(tokens, hidden, dtype=dtype),
            "gate_up_weight": self.tensor(8, 2 * inner, hidden, dtype=dtype),
            "down_weight": self.tensor(8, hidden, inner, dtype=dtype),
            "expert_ids": ids,
            "expert_weights": torch.rand(tokens, 2, device=self.device, dtype=torch.float32),
        }

    def quantised(self, _: torch.dtype) -> tuple[str, dict[str, Any]]:
        """A product with whole numbers of four or eight bits."""
        weight = self.draw.choice(self.weights)
        data = self.tensor(self.size(4, 16), 256 if self.small else 4096, dtype=torch.bfloat16)
        return "quantized_linear", {"input": data, "weight": weight}


def answering(call: Call, ran: str) -> str:
    """The first legal kernel, in order of its need, that answers a call which ran out of memory; empty if none does.

    The one that ran out of memory comes first: if it answers now, none had to take its place.
    """
    report = lz.explain(call.function, **call.arguments)

    def need(each: Candidate) -> int:
        return headroom.need_of(each.kernel, report.facts).bytes

    able = [each for each in report.candidates if each.legal or headroom.lacks_memory_alone(each)]
    for each in sorted(able, key=lambda each: (each.kernel.id != ran, need(each))):
        with lz.scope(locks={report.operation: each.kernel.id}, memory_headroom_mb=10**6):
            try:
                call.run()
            except Exception:  # noqa: BLE001  # it does not answer
                continue
            return each.kernel.id
    return ""


def held() -> torch.Tensor | None:
    """A tensor that holds all of a GPU but :data:`LEFT_BYTES`."""
    if not torch.cuda.is_available():
        return None
    free, _ = torch.cuda.mem_get_info()
    return torch.empty(max(free - LEFT_BYTES, 1), dtype=torch.uint8, device="cuda")


def capped(draw: random.Random, until: float, times: int | None, *, reads: bool = True) -> Found:
    """Random calls with 2 GB left; ``reads`` is whether free memory is read, for a comparison without."""
    zero = Counter({"OOMs that another kernel would have avoided": 0, "calls raised": 0})
    other: Counter[str] = Counter({"calls": 0})
    logging.disable()  # of what does not fit, which is much
    device, before = ("cuda" if torch.cuda.is_available() else "cpu"), FREE.read
    with cache(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ENGINE.ledger = _assembly.ledger()
        calls, rest = Calls(draw, device), held()
        if not reads or device == "cpu":
            few = Reading(*[LEFT_BYTES / 500.0] * 3)
            FREE.read = lambda _: few if reads else UNKNOWN
        headroom.forget()
        try:
            for _ in range(CALLS if times is None else times):
                if time.monotonic() >= until:
                    break
                one(calls, zero, other)
        finally:
            FREE.read = before
            headroom.forget()
        del rest
    return zero, other


def one(calls: Calls, zero: Counter[str], other: Counter[str]) -> None:
    """Draw a call and make it; what raises is looked into."""
    try:
        call = calls.made()
    except Exception as error:
        if out_of_memory(error):
            other["draws too large"] += 1
            return
        raise
    other["calls"] += 1
    other[call.function] += 1
    before = sum(each.fallbacks for each in ENGINE.health.counts().values())
    ran = str(lz.which(call.function, **call.arguments)["kernel_id"])
    try:
        call.run()
    except Exception as error:  # noqa: BLE001  # this is what is counted
        if not out_of_memory(error):
            zero["calls raised"] += 1
            print(f"{told(call)}: {type(error).__name__}: {str(error).splitlines()[0][:200]}", flush=True)
            return
        traceback.clear_frames(error.__traceback__)
        answers = answering(call, ran)
        zero["OOMs that another kernel would have avoided"] += answers not in ("", ran)
        other["OOMs that none avoids"] += not answers
        other["OOMs of a kernel that answers when asked again"] += answers == ran
        if answers:
            print(f"{told(call)}: {ran} ran out of memory, {answers} does not", flush=True)
        return
    report = lz.explain(call.function, **call.arguments)
    other["with a kernel refused for memory"] += any(map(headroom.lacks_memory_alone, report.candidates))
    other["beyond what is allowed"] += report.chosen is not None and headroom.BEYOND in report.chosen.adaptations
    other["ran out, and another kernel answered"] += (
        sum(each.fallbacks for each in ENGINE.health.counts().values()) > before
    )


def told(call: Call) -> str:
    """A call in a line."""
    parts = [
        f"{name} {tuple(each.shape)} {str(each.dtype).removeprefix('torch.')}" if isinstance(each, torch.Tensor) else ""
        for name, each in call.arguments.items()
    ]
    free = mib(torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else "?"
    return f"{call.function}({', '.join(filter(None, parts))}), {free} free"


def unread(draw: random.Random, until: float, times: int | None) -> Found:
    """The same without any reading: what runs out of memory is answered by another kernel afterwards, or fails."""
    return capped(draw, until, times, reads=False)


PARTS = (capped, unread)
"""The second is for comparing how many kernels run out of memory first."""
