"""Stamps of tokenizers: what is compared at each call, so that no call is answered by what a tokenizer was before.

A file's stamp is what the system says of it: 2 us a file (AMD EPYC, Zen 5, 2026-11-25). An object's stamp holds its
sizes, its added tokens, the serialised form of each step around its model (changes in place are seen), the model's
settings and some of its pieces: 3 us, beside 11 us for a short text.

Three changes are not seen, or late; :func:`layerzero.forget_tokenizer` tells of them. A model with the same settings,
sizes and pieces at four places takes the place of another (other merges, other scores): never. A step of more than
4096 bytes, as a compiled table of characters, is replaced: at one call in 64. A token that was added before gets other
flags, and there are more than 32 of them: at one call in 64.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

Stamp = Callable[[], Any]
"""Gives what is equal as long as a tokenizer is the same; None where that cannot be told now."""

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
    """The stamp of a ``tokenizers.Tokenizer``."""
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
