"""What is right: the ids, offsets and texts that the library gives which defines a tokenizer."""

from __future__ import annotations

from typing import Any

from layerzero.ops.tokenize.tokenizer import Tokenizer


def encode(
    items: str | list[str],
    *,
    tokenizer: Tokenizer,
    batched: bool = False,
    add_special_tokens: bool = False,
    parse_special: bool = False,
    return_offsets: bool = False,
) -> Any:
    """Ids, or ids and offsets, one text after the other."""
    if batched:
        return [
            encode(
                each, tokenizer=tokenizer, add_special_tokens=add_special_tokens, parse_special=parse_special,
                return_offsets=return_offsets,
            )
            for each in items
        ]  # fmt: skip
    text: Any = items
    native, kind = tokenizer.native, tokenizer.identity.format
    if kind == "tokenizer.json":
        if not parse_special:
            native = ordinary_copy(tokenizer)
        encoded = native.encode(text, add_special_tokens=add_special_tokens)
        return (encoded.ids, encoded.offsets) if return_offsets else encoded.ids
    if kind == "tiktoken":
        ids = native.encode(text, allowed_special="all") if parse_special else native.encode_ordinary(text)
        return (ids, offsets_of_bytes(text, native.decode_tokens_bytes(ids))) if return_offsets else ids
    if kind == "sentencepiece":
        return with_offsets_of_pieces(native, text) if return_offsets else native.encode(text)
    return native.encode(text, add_special_tokens=add_special_tokens, split_special_tokens=not parse_special)


def ordinary_copy(tokenizer: Tokenizer) -> Any:
    """A tokenizers.Tokenizer that takes texts of special tokens as text: that switch is the object's own state."""

    def make() -> Any:
        copied = type(tokenizer.native).from_str(tokenizer.native.to_str())
        copied.encode_special_tokens = True
        return copied

    return tokenizer.engine("ordinary", make)


def offsets_of_bytes(text: str, pieces: list[bytes]) -> list[tuple[int, int]]:
    """Where the bytes of each token lie in characters; one that begins amid a character begins with it."""
    offsets, at = [], 0
    for piece in pieces:
        begins = sum(1 for byte in piece if byte & 0xC0 != 0x80)
        amid = bool(piece) and piece[0] & 0xC0 == 0x80
        offsets.append((at - amid, at + begins))
        at += begins
    return offsets


def with_offsets_of_pieces(native: Any, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Ids of SentencePiece, and where their pieces lie in characters.

    The library has two ways: ``immutable_proto`` up to 0.2.1, ``offset_mapping`` from 0.2.2 on.
    """
    if hasattr(native, "EncodeAsOffsetMapping"):
        found = native.encode(text, return_type="offset_mapping")
        return found["ids"], found["offsets"]
    pieces = native.encode(text, out_type="immutable_proto").pieces
    return [each.id for each in pieces], [(each.begin, each.end) for each in pieces]


def decode(items: Any, *, tokenizer: Tokenizer, batched: bool = False, skip_special_tokens: bool = False) -> Any:
    """Text of ids, one list after the other."""
    if batched:
        return [decode(each, tokenizer=tokenizer, skip_special_tokens=skip_special_tokens) for each in items]
    native, kind = tokenizer.native, tokenizer.identity.format
    if kind in ("tokenizer.json", "transformers"):
        return native.decode(items, skip_special_tokens=skip_special_tokens)
    left = [each for each in items if each not in tokenizer.special_ids] if skip_special_tokens else list(items)
    return native.decode(left)
