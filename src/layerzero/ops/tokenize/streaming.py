"""Text of tokens as they come: what is handed out is never taken back, and half of a character waits for the rest."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Any

from layerzero.ops.tokenize import oracle
from layerzero.ops.tokenize.checks import check_ids
from layerzero.ops.tokenize.tokenizer import Tokenizer, resolve

MARK = "\ufffd"

REACH = 6
"""Ids behind which nothing that comes later changes a text: the longest character has four bytes."""


class StreamingDetokenizer:
    """Turns ids into text one by one.

        stream = lz.StreamingDetokenizer("cl100k_base")
        for token in model: print(stream.add(token), end="")
        print(stream.end())

    All that was handed out, joined, is what :func:`layerzero.detokenize` gives for all ids at once.
    """

    def __init__(self, tokenizer_id: Any, *, skip_special_tokens: bool = False) -> None:
        self._tokenizer: Tokenizer = resolve(tokenizer_id)
        self._skip = skip_special_tokens
        self._bytes = self._tokenizer.identity.format == "tiktoken"
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._ids: list[int] = []
        self._context = self._told = 0

    def add(self, token: int | Iterable[int]) -> str:
        """The text that is certain now; empty while a character is not whole. Raises: InvalidCallError."""
        ids = [token] if isinstance(token, int) else list(token)
        check_ids([ids], self._tokenizer)
        if self._bytes:
            kept = [each for each in ids if not (self._skip and each in self._tokenizer.special_ids)]
            return self._decoder.decode(b"".join(map(self._tokenizer.native.decode_single_token_bytes, kept)))
        self._ids += ids
        return self._grown(last=False)

    def end(self) -> str:
        """What is left: half of a character becomes U+FFFD. The stream begins anew."""
        left = self._decoder.decode(b"", final=True) if self._bytes else self._grown(last=True)
        self._decoder.reset()
        self._ids, self._context, self._told = [], 0, 0
        return left

    def _grown(self, *, last: bool) -> str:
        """What the ids behind those that were told add to the text; decoded with some before them, which may matter."""
        before = self._text(self._context, self._told)
        whole = self._text(self._context, len(self._ids))
        if not whole.startswith(before):  # a cleaned-up ending: all that is certain is what both begin with
            self._context = 0
            before, whole = self._text(0, self._told), self._text(0, len(self._ids))
        if not last and whole.endswith(MARK):
            return ""
        new = whole[len(before) :]
        self._context, self._told = max(self._told - REACH, 0) if new else self._context, len(self._ids)
        return new

    def _text(self, start: int, end: int) -> str:
        text = oracle.decode(self._ids[start:end], tokenizer=self._tokenizer, skip_special_tokens=self._skip)
        return str(text)
