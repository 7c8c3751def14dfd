"""Limits that speak of tokenizers: a part of a tokenizer is one of those that a library knows."""

from __future__ import annotations

from dataclasses import dataclass

from layerzero.core.facts import Facts
from layerzero.core.limit import NOTHING, Findings, Limit, violated
from layerzero.core.reasons import ReasonCode


@dataclass(frozen=True, slots=True)
class TokenizerPart(Limit):
    """A part of the tokenizer is one of these values, else the kernel is refused with this code."""

    fact: str
    values: tuple[str, ...]
    code: str = "TOKENIZER_ID_MISMATCH"

    def check(self, facts: Facts) -> Findings:
        got = facts[self.fact]
        if got in self.values:
            return NOTHING
        return violated(ReasonCode(self.code), self.fact, " or ".join(map(_short, self.values)), _short(str(got)))

    def facts_named(self) -> tuple[str, ...]:
        return (self.fact,)

    def describe(self) -> str:
        return f"{self.fact}: {', '.join(map(_short, self.values))}"


def _short(value: str) -> str:
    """A hash by its beginning; it is compared as a whole."""
    return f"{value[:12]}…" if len(value) == 64 else value or "not a known one"
