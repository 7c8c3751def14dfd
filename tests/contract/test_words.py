"""Kernels and processes are things, and a sentence says what they do: words that hide it stay out of the package."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2] / "src" / "layerzero"
WORDS = re.compile(
    r"\b(who|whoever|whom|nobody|somebody|someone|anybody|anyone|he|his|him|told|asked|beside|nearly|spent)\b",
    re.IGNORECASE,
)
NAME = re.compile(r"``[^`]*``|:\w+:`[^`]*`|`[^`]*`|\{[^{}]*\}|^ *[\w*, ]+: |\w*_\w*|\w+\.\w+", re.MULTILINE)
"""Names of code, which the rule is not about: in backquotes, in braces, before a colon, with ``_`` or a dot."""


def texts(source: str) -> dict[int, str]:
    """Docstrings, comments and texts of a module, by line."""
    found = {
        each.lineno: each.value
        for each in ast.walk(ast.parse(source))
        if isinstance(each, ast.Constant) and isinstance(each.value, str) and " " in each.value.strip()
    }
    comments = (line[line.index("#") :] for line in source.splitlines() if "#" in line)
    if any(map(WORDS.search, comments)):  # most files need no tokens
        for each in tokenize.generate_tokens(io.StringIO(source).readline):
            if each.type == tokenize.COMMENT:
                found[each.start[0]] = each.string
    return found


def bad(source: str) -> list[tuple[int, str]]:
    """Lines and words; a file that has none of them anywhere is not read as code."""
    return [
        (line + text[: word.start()].count("\n"), word[0])
        for line, text in (texts(source) if WORDS.search(source) else {}).items()
        if WORDS.search(text)
        for word in WORDS.finditer(NAME.sub(lambda name: " " * len(name[0]), text))
    ]


def test_a_planted_word_is_found_in_texts_and_not_in_names():
    source = 'asked = 1  # who asked\n"""Nobody\n\ntold ``told`` told_by."""\n'
    assert bad(source) == [(2, "Nobody"), (4, "told"), (1, "who"), (1, "asked")]


def test_texts_say_what_things_do():
    found = [f"{path}:{line}: {word!r}" for path in sorted(ROOT.rglob("*.py")) for line, word in bad(path.read_text())]
    assert not found, "name the thing and what it does: " + ", ".join(found)
