"""What a tokenizer is: hashes over everything that decides about its ids, never its name.

Two tokenizers with one hash are the same tokenizer. Hashes are whole SHA-256 sums, 64 hexadecimal digits.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from layerzero.core.errors import InvalidCallError

NONE = "none"


@dataclass(frozen=True, slots=True)
class Identity:
    """The parts of a tokenizer.

    Attributes:
        format: who defines it: ``tokenizer.json``, ``tiktoken``, ``sentencepiece``, ``transformers``.
        model: ``BPE``, ``WordPiece``, ``Unigram``, ``WordLevel``; of a Python tokenizer its class.
        vocab_hash, merges_hash: of the pieces with their ids and scores, and of the merges in order.
        model_id: hash of the rest of the model: unknown token, byte fallback, prefixes, dropout.
        normalizer: types of its steps, ``NFC``; ``normalizer_id`` is the hash with all parameters.
        pretokenizer: types of its steps, ``Split+ByteLevel``; ``pretokenizer_id`` is the hash with all parameters.
        scheme: the name of its split pattern, where that is one that LayerZero knows; else empty.
        postprocessor_id, decoder_id: hashes of these steps.
        added_tokens: ``none``, ``plain`` (found as they are), or ``flagged`` (they strip or want whole words).
        added_tokens_hash, special_tokens_hash: of those tokens with ids and flags.
    """

    format: str
    model: str
    vocab_hash: str
    merges_hash: str
    model_id: str = NONE
    normalizer: str = NONE
    normalizer_id: str = NONE
    pretokenizer: str = NONE
    pretokenizer_id: str = NONE
    scheme: str = ""
    postprocessor_id: str = NONE
    decoder_id: str = NONE
    added_tokens: str = NONE
    added_tokens_hash: str = NONE
    special_tokens_hash: str = NONE

    @property
    def tokenizer_hash(self) -> str:
        """The hash of all parts."""
        return digest([getattr(self, name) for name in self.__slots__])


def digest(value: Any) -> str:
    """SHA-256 of a plain value, however its mappings are ordered."""
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def digest_of_ranks(ranks: Mapping[bytes, int]) -> str:
    """SHA-256 of byte sequences and their ids."""
    summed = hashlib.sha256()
    for piece, rank in sorted(ranks.items(), key=lambda each: each[1]):
        summed.update(len(piece).to_bytes(4, "little") + piece + rank.to_bytes(4, "little"))
    return summed.hexdigest()


def of_json(data: Mapping[str, Any]) -> Identity:
    """The identity of what a tokenizer.json holds. Raises: InvalidCallError where it is none."""
    model = data.get("model")
    if not isinstance(model, dict) or "vocab" not in model:
        wanted = "wanted a tokenizer.json with a model and its vocab"
        raise InvalidCallError("tokenize", [f"tokenizer_id: {wanted}, got keys {sorted(map(str, data))[:8]}"])
    merges = [each if isinstance(each, list) else each.split(" ", 1) for each in model.get("merges") or ()]
    rest = {name: value for name, value in model.items() if name not in ("vocab", "merges")}
    added = data.get("added_tokens") or []
    return Identity(
        "tokenizer.json",
        str(model.get("type") or ("BPE" if merges else "WordPiece")),
        digest(model["vocab"]),
        digest(merges),
        digest(rest),
        types_of(data.get("normalizer"), "normalizers"),
        _hash(data.get("normalizer")),
        types_of(data.get("pre_tokenizer"), "pretokenizers"),
        _hash(data.get("pre_tokenizer")),
        scheme_of(data.get("pre_tokenizer")),
        _hash(data.get("post_processor")),
        _hash(data.get("decoder")),
        _flags(added),
        digest(added),
        digest([each for each in added if each.get("special")]),
    )


def of_ranks(ranks: Mapping[bytes, int], pattern: str, specials: Mapping[str, int]) -> Identity:
    """The identity of a tiktoken encoding."""
    vocabulary = digest_of_ranks(ranks)
    return Identity(
        "tiktoken",
        "BPE",
        vocabulary,
        vocabulary,  # ranks are the merges
        pretokenizer="Split",
        pretokenizer_id=digest(pattern),
        scheme=SCHEMES.get(pattern, ""),
        special_tokens_hash=digest(dict(specials)),
    )


def of_sentencepiece(model: bytes) -> Identity:
    """The identity of a SentencePiece model file: pieces, and each other part of the file as it is."""
    parts: dict[int, list[bytes]] = {}
    for field, value in fields_of(model):
        parts.setdefault(field, []).append(value)
    pieces, trainer = parts.get(1, []), b"".join(parts.get(2, []))
    kind = {1: "Unigram", 2: "BPE", 3: "WordLevel", 4: "Char"}.get(number_of(trainer, 3, 1), "Unigram")
    rest = [value.hex() for field in sorted(parts) if field not in (1, 2, 3) for value in parts[field]]
    vocabulary = digest(b"".join(len(each).to_bytes(4, "little") + each for each in pieces))
    special = [place for place, each in enumerate(pieces) if number_of(each, 3, 1) != 1]
    normalizer = b"".join(parts.get(3, []))
    return Identity(
        "sentencepiece",
        kind,
        vocabulary,
        vocabulary,  # scores are the merges
        digest([trainer.hex(), *rest]),
        "sentencepiece",
        digest(normalizer),
        special_tokens_hash=digest([[place, pieces[place].hex()] for place in special]),
    )


def _hash(part: object) -> str:
    return NONE if part is None else digest(part)


def types_of(part: Mapping[str, Any] | None, nested: str) -> str:
    """Names of a step, or of the steps of a sequence, joined by a plus."""
    if part is None:
        return NONE
    if part.get("type") == "Sequence":
        return "+".join(types_of(each, nested) for each in part.get(nested) or ()) or NONE
    return str(part.get("type"))


def _flags(added: Iterable[Mapping[str, Any]]) -> str:
    found = list(added)
    if not found:
        return NONE
    flagged = any(each.get("lstrip") or each.get("rstrip") or each.get("single_word") for each in found)
    return "flagged" if flagged else "plain"


def fields_of(message: bytes) -> Iterable[tuple[int, bytes]]:
    """Number and content of each field of a protobuf message; numbers as the bytes that they were written in."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        start = at
        if key & 7 == 0:
            _, at = _varint(message, at)
        elif key & 7 == 2:
            length, start = _varint(message, at)
            at = start + length
        else:
            at += 8 if key & 7 == 1 else 4
        yield key >> 3, message[start:at]


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
        if byte < 128:
            return value, at


def number_of(message: bytes, field: int, default: int) -> int:
    """A number of a protobuf message, what it stands for where it is not there."""
    found = [value for number, value in fields_of(message) if number == field]
    return _varint(found[-1], 0)[0] if found else default


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_END = r"|\s*[\r\n]+|\s+(?!\S)|\s+"

SCHEMES: dict[str, str] = {
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s": "gpt2",
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": "gpt2",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": "gpt2",
    (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]"
        r"|\s+(?!\S)|\s"
    ): "cl100k",
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _END: "cl100k",
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _END: "qwen2",
    (
        rf"{_CASED[0]}{_CONTRACTIONS}?|{_CASED[1]}{_CONTRACTIONS}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_END}"
    ): "o200k",
    rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_END}": "tekken",
}
"""Split patterns that are known to the letter. In all of them no piece has a character that is no space before a space,
and nothing looks back, or ahead over such a place: :mod:`layerzero.ops.tokenize.cutting` cuts there."""

_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""

SEQUENCES: dict[tuple[str, ...], str] = {
    (
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        (
            rf"{_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*"
            r"|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
    ): "deepseek",
}
"""Patterns that split one after the other, each what the one before left; the same holds for all of them."""


def scheme_of(pretokenizer: Mapping[str, Any] | None) -> str:
    """The name of a tokenizer.json's split, where it is one of the known patterns and a byte-level alphabet."""
    if pretokenizer is None:
        return ""
    steps = pretokenizer.get("pretokenizers") if pretokenizer.get("type") == "Sequence" else [pretokenizer]
    steps = list(steps or ())
    last = steps[-1] if steps else {}
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return ""
    if len(steps) == 1:
        return "gpt2" if last.get("use_regex", True) else ""
    *splits, _ = steps
    alone = all(each.get("type") == "Split" and each.get("behavior") == "Isolated" for each in splits)
    if not alone or any(each.get("invert") for each in splits) or last.get("use_regex", True):
        return ""
    patterns = tuple((each.get("pattern") or {}).get("Regex", "") for each in splits)
    # some files write the ends of lines as escapes, others as they are
    patterns = tuple(each.replace("\r", r"\r").replace("\n", r"\n") for each in patterns)
    return SCHEMES.get(patterns[0], "") if len(patterns) == 1 else SEQUENCES.get(patterns, "")
