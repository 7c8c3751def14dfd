"""What a tokenizer is: hashes over everything that decides about its ids, never its name; and whether it changed.

Two tokenizers with one hash are the same tokenizer. Hashes are whole SHA-256 sums, 64 hexadecimal digits.

A stamp is compared at each call, so that no call is answered by what a tokenizer was before. A file's stamp is what the
system says of it: 2 us a file (AMD EPYC, Zen 5, 2026-11-25). An object's stamp holds its sizes, its added tokens, the
serialised form of each step around its model (changes in place are seen), the model's settings and some of its pieces:
3 us, where a short text takes 11.

Three changes are not seen, or late; :func:`layerzero.forget_tokenizer` tells of them. A model with the same settings,
sizes and pieces at four places takes the place of another (other merges, other scores): never. A step of more than 4096
bytes, as a compiled table of characters, is replaced: at one call in 64. A token that was added before gets other
flags, and there are more than 32 of them: at one call in 64.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from layerzero.core.errors import InvalidCallError

NONE = "none"


@dataclass(frozen=True, slots=True)
class Identity:
    """The parts of a tokenizer.

    Attributes:
        format: its definition: ``tokenizer.json``, ``tiktoken``, ``sentencepiece``, ``transformers``.
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
and nothing looks back, or ahead over such a place: :mod:`layerzero.ops.tokenize.prefixes` cuts there."""

_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""

SEQUENCES: dict[tuple[str, ...], str] = {
    (
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        (
            rf"{_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*"
            r"|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
    ): "deepseek"
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


Stamp = Callable[[], Any]
"""Gives what is equal as long as a tokenizer is the same; None where that is not known now."""

FILES = ("tokenizer.json", "tekken.json", "tokenizer.model", "spiece.model", "tiktoken.model")
"""What a folder is looked through for, in order."""

FEW_ADDED = 32
"""Added tokens that are compared at each call: 0.3 us for two of them, 41 us for 250."""

LARGE_BYTES = 4096
SELDOM = 64

_STEPS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_SETTINGS = (
    *("dropout", "unk_token", "fuse_unk", "byte_fallback", "ignore_merges", "continuing_subword_prefix"),
    *("end_of_word_suffix", "max_input_chars_per_word", "alpha", "nbest_size"),
)
"""What models of the tokenizers library let their users set."""


def of_name(text: str) -> Stamp | None:
    """The stamp of a path: times, sizes and places on the disk of what is read. None for an encoding's name.

    What is gone stays as it was read.
    """
    paths = [os.fspath(each) for each in read_from(text)]

    def stamp() -> Any:
        try:
            found = [os.stat(path) for path in paths]  # noqa: PTH116  # half the time of Path.stat
        except OSError:
            return None
        return [(each.st_mtime_ns, each.st_ctime_ns, each.st_size, each.st_ino) for each in found]

    return stamp if paths else None


def read_from(text: str) -> list[Path]:
    """Files that a path is read from, behind a folder that says which ones; none for an encoding's name."""
    path = Path(text).expanduser()
    if not path.is_dir():
        return [path] if path.is_file() else []
    return [path, *(each for each in in_folder(path) if each is not None)]


def in_folder(folder: Path) -> tuple[Path | None, Path | None]:
    """The file that defines a folder's tokenizer, and the one that says what rows are like."""
    versioned = sorted(folder.glob("*.model.v*")) + sorted(folder.glob("*.tiktoken")) + sorted(folder.glob("tekken_*"))
    found = (path for path in (*(folder / each for each in FILES), *versioned) if path.is_file())
    config = folder / "tokenizer_config.json"
    return next(found, None), config if config.is_file() else None


def library_of(value: Any) -> str:
    """The library that a loaded tokenizer is an object of; empty for what is none."""
    home = type(value).__module__.partition(".")[0]
    if home in ("tokenizers", "tiktoken", "sentencepiece"):
        return home
    base = getattr(sys.modules.get("transformers"), "PreTrainedTokenizerBase", None)
    return "transformers" if base is not None and isinstance(value, base) else ""


def of_object(value: Any) -> Stamp | None:
    """The stamp of a loaded tokenizer; None for one that cannot change, as those of tiktoken."""
    library = library_of(value)
    if library == "tokenizers":
        inner = _of_native(value)
        return lambda: (inner(), value.encode_special_tokens, value.padding, value.truncation)
    if library == "sentencepiece":
        return _of_sentencepiece(value)
    return _of_transformers(value) if library == "transformers" else None


def _spread(size: int, count: int) -> list[int]:
    """Some places of a vocabulary; the last ones differ most between vocabularies of one size."""
    return sorted({size * (each + 1) // count - 1 for each in range(count)} - {-1})


def _of_native(native: Any) -> Stamp:
    sizes, turn = native.get_vocab_size, itertools.count()
    places = _spread(sizes(with_added_tokens=False), 4)
    settings = attrgetter("__class__", *(name for name in _SETTINGS if hasattr(native.model, name)))

    def states(names: Sequence[str]) -> list[Any]:
        return [None if (step := getattr(native, name)) is None else step.__getstate__() for name in names]

    large = [name for name, state in zip(_STEPS, states(_STEPS), strict=True) if len(state or b"") > LARGE_BYTES]
    small = [name for name in _STEPS if name not in large]
    few = len(native.get_added_tokens_decoder()) <= FEW_ADDED

    def seldom() -> Any:
        return states(large), None if few else native.get_added_tokens_decoder()

    kept = seldom()
    piece, added = native.id_to_token, native.get_added_tokens_decoder

    def stamp() -> Any:
        nonlocal kept
        if (large or not few) and not (next(turn) + 1) % SELDOM:
            kept = seldom()
        return (
            sizes(),
            added() if few else sizes(with_added_tokens=False),
            settings(native.model),
            [piece(place) for place in places],
            states(small),
            kept,
        )

    return stamp


def _of_sentencepiece(value: Any) -> Stamp:
    places = _spread(value.get_piece_size(), 2)

    def stamp() -> Any:
        size = value.get_piece_size()
        return size, [value.id_to_piece(place) for place in places if place < size], value.encode("", out_type=int)

    return stamp


def _of_transformers(value: Any) -> Stamp:
    """The stamp of a tokenizer of Transformers: that of the library beneath it, and what it says of rows."""
    sides = attrgetter(
        "pad_token_id", "padding_side", "truncation_side", "model_max_length", "split_special_tokens", "name_or_path"
    )
    backend = getattr(value, "backend_tokenizer", None)
    if backend is None:
        return lambda: (sides(value), value.vocab_size, dict(value.added_tokens_decoder), value.all_special_ids)
    inner = _of_native(backend)
    return lambda: (sides(value), value.backend_tokenizer is backend, inner())
