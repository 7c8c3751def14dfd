"""What the calls of ``benchmarks/overhead.py`` give, for how many each is chosen anew, and what a hit of it calls.

Results are the reference's, rounded to three digits; hits are of the kernel that does nothing.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import layerzero as lz
from counting import events
from layerzero.engine.dispatch import Dispatcher
from layerzero.engine.functions import CALLS

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import overhead  # found by the line above

SEED = 34
REFERENCE = f"reference.{overhead.OPERATION}"


def lines() -> Iterator[str]:
    """One line for each way to call, with and without grad, and one for the values that most of them give."""
    lz.configure(jit="never")  # a build in the background has a scope of its own
    torch.manual_seed(SEED)
    query, key, value = overhead.tensors()
    for suffix, first in {"": query, ", grad on": query.clone().requires_grad_()}.items():
        with torch.set_grad_enabled(bool(suffix)):
            with overhead.registered():
                hits = {name: _hit(call) for name, call in _ways(first, key, value)}
            with lz.scope(locks={overhead.OPERATION: REFERENCE}):
                results = {name: _rounded(call()) for name, call in _ways(first, key, value)}
        for name, hit in hits.items():
            told = hashlib.sha256(repr(results[name]).encode()).hexdigest()[:8]
            yield f"{name}{suffix}: gives {told}, {hit}"
    yield f"values {results['lz.attention']}"


def _ways(*tensors: torch.Tensor) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What the benchmark times, but the kernel itself."""
    calls = overhead.ways(*tensors) | {"lz.attention, two sizes in turn": overhead.two_sizes_in_turn()}
    yield from [(name, call) for name, call in calls.items() if name != overhead.DIRECT]
    with lz.scope(debug=False):
        yield "lz.attention in a scope", calls["lz.attention"]


def _hit(call: Callable[[], Any], calls: int = 6) -> str:
    """How often so many calls choose, where nothing was chosen before, and what a hit calls."""
    CALLS["attention"].dispatcher.cache.current.clear()
    with mock.patch.object(Dispatcher, "choose", autospec=True, side_effect=Dispatcher.choose) as choose:
        for _ in range(calls):
            call()
    called = [name.rpartition(".")[2] for name in events(call)]
    return f"chosen {choose.call_count} times in {calls}, a hit calls {' '.join(called)}"


def _rounded(result: torch.Tensor) -> list[float]:
    return [round(number, 3) for number in result.flatten().tolist()]
