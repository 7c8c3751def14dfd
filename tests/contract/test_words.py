"""Kernels and processes are things, and a sentence says what they do: words that hide it stay out of the package."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "src" / "layerzero"
WORDS = re.compile(r"\b(who|whoever|whom|nobody|he|his|him|told|asked|beside|nearly|spent)\b", re.IGNORECASE)
NAME = re.compile(r"``[^`]*``|:\w+:`[^`]*`|`[^`]*`|\{[^{}]*\}|^ *[\w*, ]+: |\w*_\w*|\w+\.\w+", re.MULTILINE)
"""Names of code, which the rule is not about: in backquotes, in braces, before a colon, with ``_`` or a dot."""


def texts(source: str) -> dict[int, str]:
    """Docstrings, comments and texts of a module, by line."""
    found = {
        each.lineno: each.value
        for each in ast.walk(ast.parse(source))
        if isinstance(each, ast.Constant) and isinstance(each.value, str) and " " in each.value.strip()
    }
    for each in tokenize.generate_tokens(io.StringIO(source).readline):
        if each.type == tokenize.COMMENT:
            found[each.start[0]] = each.string
    return found


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda each: each.relative_to(ROOT).as_posix())
def test_texts_say_what_things_do(path):
    bad = [
        f"{path.name}:{line + text[: word.start()].count(chr(10))}: {word[0]!r}"
        for line, text in texts(path.read_text()).items()
        for word in WORDS.finditer(NAME.sub(lambda name: " " * len(name[0]), text))
    ]
    assert not bad, "name the thing and what it does: " + ", ".join(bad)
