"""Eager state that calls of some functions depend on, in one table: how each is read, and the fact that it becomes.

A function names what its calls depend on (``Function.state``). The hit paths, in C and in Python, query what it names
and hold the answers in the key; other functions do not pay for it. A new state is one new row. Besides, a block in
which torch runs no compiled code.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from layerzero.core.system import forking


@dataclass(frozen=True, slots=True)
class StateQuery:
    """One query of torch's state, made on every call that depends on it.

    Attributes:
        text: the query in words.
        ask: torch's own builtin, since the hit path waits for it.
        given: what it is called with.
        answers: what it may answer; the key in C holds the place of the answer here.
        cuda: whether it concerns tensors on CUDA and ROCm only, or elsewhere only; None: on any device.
    """

    text: str
    ask: Callable[..., object]
    given: tuple[object, ...] = ()
    answers: tuple[object, ...] = (False, True)
    cuda: bool | None = None


@dataclass(frozen=True, slots=True)
class EagerState:
    """One state outside the arguments.

    Attributes:
        name: what functions declare.
        fact: the name under which limits, rules, explanations and times know it.
        neutral: the value that changes nothing; what other functions' calls have.
        questions: in their order.
        value: the fact, from the answers.
        dtype: it matters where a tensor has this dtype, and is read there alone; None: always.
        works: whether it changes how long a call takes, so that times are kept apart by it; not at its neutral value.
    """

    name: str
    fact: str
    neutral: object
    questions: tuple[StateQuery, ...]
    value: Callable[[Sequence[object]], object]
    dtype: torch.dtype | None = None
    works: bool = False

    def read(self, *, cuda: bool) -> object:
        """The fact as it is now, for tensors that lie on CUDA or elsewhere."""
        return self.value([each.ask(*each.given) for each in self.questions if each.cuda in (None, cuda)])

    def restored(self, value: object) -> object:
        """The fact from what a document has in its place. Raises: TypeError for what it cannot be."""
        found = frozenset(value) if isinstance(self.neutral, frozenset) and isinstance(value, list) else value
        if type(found) is not type(self.neutral):
            raise TypeError(f"{self.fact}: wanted {type(self.neutral).__name__}, got {value!r}")
        return found


_ATTENTION_KERNELS = ("flash", "efficient", "math", "cudnn")


def _switched_off(enabled: Sequence[object]) -> frozenset[str]:
    return frozenset([name for name, on in zip(_ATTENTION_KERNELS, enabled, strict=True) if not on])


_PRECISIONS = {"none": "highest", "ieee": "highest", "tf32": "high", "bf16": "medium"}
"""What the kernels of a device compute products of float32 in, in the words of torch.get_float32_matmul_precision.

That one function raises RuntimeError where ``torch.backends.cuda.matmul.fp32_precision`` was set, which is torch's own
advice since 2.9; LayerZero reads what every way of setting it ends in, for the device of the call (torch 2.13).
"""


def _precision(answers: Sequence[object]) -> str:
    (answer,) = answers
    return _PRECISIONS.get(str(answer), str(answer))


_MULTIPLIED = "what float32 is multiplied in"

_SETTING = torch._C._get_fp32_precision_getter

EAGER_STATE: Mapping[str, EagerState] = MappingProxyType({
    each.name: each
    for each in (
        EagerState(
            "sdpa",
            "sdpa_disabled",
            frozenset(),
            (
                StateQuery("torch's flash attention is enabled", torch._C._get_flash_sdp_enabled),
                StateQuery("torch's efficient attention is enabled", torch._C._get_mem_efficient_sdp_enabled),
                StateQuery("torch's math attention is enabled", torch._C._get_math_sdp_enabled),
                StateQuery("torch's cudnn attention is enabled", torch._C._get_cudnn_sdp_enabled),
            ),
            _switched_off,
        ),
        EagerState(
            "matmul",
            "matmul_precision",
            "highest",
            (
                StateQuery(_MULTIPLIED, _SETTING, ("cuda", "matmul"), tuple(_PRECISIONS), cuda=True),
                StateQuery(_MULTIPLIED, _SETTING, ("mkldnn", "matmul"), tuple(_PRECISIONS), cuda=False),
            ),
            _precision,
            dtype=torch.float32,
            works=True,
        ),
    )
})  # fmt: skip
"""Every state, by the name that functions declare: what ``torch.nn.attention.sdpa_kernel`` and its switches have turned
off, and in what float32 is multiplied."""

STATE_FACTS: Mapping[str, EagerState] = MappingProxyType({each.fact: each for each in EAGER_STATE.values()})
"""The same by fact."""


@functools.cache
def declared(names: frozenset[str]) -> tuple[EagerState, ...]:
    """The rows that a function names, in the order of the table. Raises: KeyError for a name that is none of it."""
    strangers = sorted(names - EAGER_STATE.keys())
    if strangers:
        raise KeyError(f"wanted some of {', '.join(EAGER_STATE)}, got {', '.join(strangers)}")
    return tuple(each for name, each in EAGER_STATE.items() if name in names)


def state_values(read: Mapping[str, object], dtype: object) -> dict[str, object]:
    """The facts of all rows of a call: what was read, but neutral where the call's dtype makes it mean nothing."""
    return {
        fact: each.neutral if each.dtype not in (None, dtype) else read.get(fact, each.neutral)
        for fact, each in STATE_FACTS.items()
    }


_stances: list[Any] = []
"""The stance of torch that the first open block set, once for each open block."""

_STANCES_LOCK = forking.lock()


@contextmanager
def uncompiled(wanted: bool = True) -> Iterator[None]:
    """Run functions themselves where code of torch.compile would run, meanwhile, in every thread.

    A module that was compiled with ``fullgraph=True`` refuses hooks. A function that is first called in a mode of torch
    that sees each operator is not compiled any more, and with ``fullgraph=True`` it raises (torch 2.13). Torch has one
    such setting for all threads: the first block sets it, and the last one puts back what was there.
    """
    if not wanted or "torch._dynamo" not in sys.modules:  # nothing is compiled, and asking would import the compiler
        yield
        return
    with _STANCES_LOCK:
        _stances.append(_stances[0] if _stances else torch.compiler.set_stance("force_eager"))
    try:
        yield
    finally:
        with _STANCES_LOCK:
            held = _stances.pop()
            if not _stances:
                held.__exit__(None, None, None)
