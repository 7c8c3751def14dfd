"""Limits that speak of tokenizers: a part of a tokenizer is one of those that a library knows."""

from __future__ import annotations

from dataclasses import dataclass

from layerzero.core.facts import Facts
from layerzero.core.limit import NOTHING, Findings, Limit, violated
from layerzero.core.limit_kinds import Custom
from layerzero.core.reasons import Reason, ReasonCode


@dataclass(frozen=True, slots=True)
class TokenizerPart(Limit):
    """A part of the tokenizer is one of these values, else the kernel is refused with this code.

    Where ``format`` is given, tokenizers of other formats need none of them.
    """

    fact: str
    values: tuple[str, ...]
    code: str = "TOKENIZER_ID_MISMATCH"
    format: str = ""

    def check(self, facts: Facts) -> Findings:
        got = facts[self.fact]
        if got in self.values or (self.format and facts["format"] != self.format):
            return NOTHING
        return violated(ReasonCode(self.code), self.fact, " or ".join(map(_short, self.values)), _short(str(got)))

    def facts_named(self) -> tuple[str, ...]:
        return (self.fact,)

    def describe(self) -> str:
        where = f" of {self.format}" if self.format else ""
        return f"{self.fact}{where}: {', '.join(map(_short, self.values))}"


def own_specials(text: str = "special tokens of ranks are text") -> Limit:
    """Refuse to parse special tokens of a tiktoken encoding: the library brings its own."""
    return Custom(text, _own_specials)


def _own_specials(facts: Facts) -> Reason | None:
    if facts["format"] != "tiktoken" or not facts["parse_special"]:
        return None
    return Reason(ReasonCode.SPECIAL_TOKENS_MISMATCH, "parse_special", False, True)


def always_added(text: str = "added tokens of a tokenizer.json are parsed") -> Limit:
    """Refuse to take added tokens of a tokenizer.json as text: the library always parses them."""
    return Custom(text, _always_added)


def _always_added(facts: Facts) -> Reason | None:
    if facts["format"] != "tokenizer.json" or facts["parse_special"] or facts["added_tokens"] == "none":
        return None
    return Reason(ReasonCode.ADDED_TOKENS_MISMATCH, "added_tokens", "none where they are text", facts["added_tokens"])


def _short(value: str) -> str:
    """A hash by its beginning; it is compared as a whole."""
    return f"{value[:12]}…" if len(value) == 64 else value or "not a known one"
