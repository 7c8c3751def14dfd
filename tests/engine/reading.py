"""Drawn functions of facts, and kernels that are made of them: what they read differs from call to call."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from layerzero.core import limits
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.engine.function_kernels import USER_BACKEND
from layerzero.engine.registry import REGISTRY

WHOLE = (
    lambda facts: sorted(facts.sizes().items()),
    lambda facts: sorted((name, str(value)) for name, value in facts.items()),
    lambda facts: list(facts),
    lambda facts: facts.size_classes(),
    lambda facts: facts.layout,
    lambda facts: list(facts.tensors),
)
PARTS = (
    *("shape", "strides", "dtype", "ndim", "alignment_bytes", "row_alignment_bytes", "expanded", "negated"),
    *("last_stride", "contiguous"),
)

NUMBERS = st.integers(0, 12)
SIMPLE = st.one_of(
    st.tuples(st.sampled_from(["fact", "get", "in", "bits", "even"]), NUMBERS),
    st.tuples(st.just("tensor"), NUMBERS, st.sampled_from(PARTS)),
    st.tuples(st.just("last of"), NUMBERS, st.sampled_from(["shape", "strides"])),
)
READINGS = st.recursive(
    st.lists(SIMPLE, max_size=3),
    lambda inner: st.one_of(
        st.tuples(SIMPLE, inner, inner).map(lambda each: [("if", *each)]),
        inner.map(lambda each: [("seen in", each)]),
        st.sampled_from(range(len(WHOLE))).map(lambda each: [("whole", each)]),
    ),
    max_leaves=4,
)
"""A drawn function: steps that read one after the other, and some that read only after what was read before."""


def evaluate(steps: list[Any], facts: Facts) -> tuple[Any, ...]:
    """What a drawn function reads of facts."""
    return tuple(_step(step, facts) for step in steps)


def _step(step: tuple[Any, ...], facts: Facts) -> Any:
    kind, argument, *rest = step
    if kind == "if":
        value = _step(argument, facts)
        return value, evaluate(rest[0] if len(repr(value)) % 2 else rest[1], facts)
    if kind == "seen in":
        layouts = facts.operation.layouts
        return evaluate(argument, facts.seen_in(layouts[-1]) if layouts else facts)
    if kind == "whole":
        return WHOLE[argument](facts)
    if kind in ("tensor", "last of"):
        name = sorted(facts.tensors)[argument % len(facts.tensors)]
        value = getattr(facts.tensors[name], rest[0])
        return value[-1:] if kind == "last of" else value
    behind = facts.operation.behind
    names = sorted(behind, key=lambda name: (not behind[name], name))  # those that follow from sizes first
    name = names[argument % len(names)]
    if kind == "in":
        return name in facts
    value = facts.get(name)
    if kind == "even":
        return value % 2 if isinstance(value, int) else None
    if kind == "bits":
        return facts.size_bits(name) if type(value) is int else None
    return value


def reading_kernel(operation: str, load: list[Any], limit: list[Any], build_key: list[Any]) -> Kernel:
    """A right kernel of an operation that reads as it was drawn; its limit refuses half of what it reads."""

    def refuses(facts: Facts) -> Reason | None:
        if not limit or zlib.crc32(repr(evaluate(limit, facts)).encode()) % 2:
            return None
        return Reason(ReasonCode.CONSTRAINT_FAILED, "what was read", "something else", "this")

    compiled: dict[str, Any] = {}
    if build_key:
        compiled = {"jit": True, "build_key": lambda facts: repr(evaluate(build_key, facts))}
    reference = REGISTRY.kernel(f"reference.{operation}")
    return dataclasses.replace(
        reference,
        id="user.reading",
        backend=USER_BACKEND,
        load=loading(reference.load, lambda facts: evaluate(load, facts)),
        limits=(limits.Custom("what was drawn", refuses),),
        priority=100,
        **compiled,
    )


def loading(load: Callable[[Facts], Any], read: Callable[[Facts], Any]) -> Callable[[Facts], Any]:
    """A ``load`` that reads something first."""

    def both(facts: Facts) -> Any:
        read(facts)
        return load(facts)

    return both
