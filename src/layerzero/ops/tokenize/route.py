"""``lz.tokenize`` and ``lz.detokenize``: from what users pass to one call of an operation, and back.

A call that was chosen for before costs a dictionary read more than its kernel: the key is the tokenizer's name, the
wanted results, and the powers of two of its sizes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from layerzero.core.arguments import has_hash
from layerzero.core.errors import InvalidCallError, refuse
from layerzero.core.operation import Routed
from layerzero.core.plain import PlainBinding, PlainFunction, Ways
from layerzero.ops.tokenize.declare import DECODE, ENCODE
from layerzero.ops.tokenize.prefixes import LEAST, TEXTS
from layerzero.ops.tokenize.rows import Asked, check_ids, finish
from layerzero.ops.tokenize.tokenizer import Tokenizer, follow, resolve, when_chosen_anew

_PLAIN = Asked()


def tokenize(
    texts: str | list[str],
    tokenizer_id: Any,
    return_offsets: bool = False,
    *,
    add_special_tokens: bool | None = None,
    parse_special: bool | None = None,
    truncation: bool | str = False,
    max_length: int | None = None,
    padding: bool | str = False,
    pad_to_multiple_of: int | None = None,
    return_attention_mask: bool | None = None,
) -> dict[str, list[Any]]:
    """Encode a text, or several: ``{"input_ids": [...]}``, a list of ids, or one for each text.

    The ids are those of the library that defines the tokenizer, whichever library computes them.

    Args:
        texts: a string, or a list or tuple of strings.
        tokenizer_id: a folder or file (tokenizer.json, tiktoken ranks, SentencePiece .model, tekken.json), the name of
            a tiktoken encoding, or an object of tokenizers, tiktoken, sentencepiece or transformers. It is read once,
            and anew where the file or object changed; :mod:`layerzero.ops.tokenize.identity` says what is compared at
            each call, and what needs ``lz.forget_tokenizer``. Nothing is downloaded.
        return_offsets: also ``offset_mapping``: for each id, where its characters begin and end in the text; (0, 0) of
            what was added.
        add_special_tokens: whether what the tokenizer puts around a text is added. None does what its library does: a
            tokenizer.json adds it, ranks and SentencePiece models do not.
        parse_special: whether texts of special tokens become these tokens. None does what its library does: a
            tokenizer.json parses them, tiktoken's encodings take them as text. SentencePiece always does that.
        truncation: whether texts are cut to ``max_length`` ids, special tokens included.
        max_length: in ids; what the tokenizer says that its model takes if None.
        padding: ``True`` or ``"longest"`` fills rows up to the longest, ``"max_length"`` up to that.
        pad_to_multiple_of: round the length of rows up.
        return_attention_mask: also ``attention_mask``, 1 for ids and 0 for what was filled up; as ``padding`` if None.
    Raises: InvalidCallError for what is no text (a lone surrogate is none), an unknown or broken tokenizer, and
        arguments that mean nothing; NoKernelFoundError where no installed library is exact for it.
    """
    raise NotImplementedError


def detokenize(
    tokens: list[int] | list[list[int]], tokenizer_id: Any, *, skip_special_tokens: bool = False
) -> str | list[str]:
    """Decode ids, or several lists of them: a string, or one for each list. Bytes that are no UTF-8 become U+FFFD.

    Args:
        tokens: ids; lists, tuples, arrays or tensors.
        tokenizer_id: as :func:`tokenize` takes it.
        skip_special_tokens: leave ids of special tokens out.
    Raises: InvalidCallError for ids outside of the vocabulary, and as :func:`tokenize`.
    """
    raise NotImplementedError


def _texts(texts: Any) -> tuple[Any, bool]:
    """What is to be encoded, and whether it is several. Raises: InvalidCallError."""
    if isinstance(texts, str):
        return texts, False
    if isinstance(texts, (list, tuple)):
        for place, each in enumerate(texts):
            if not isinstance(each, str):
                got = f"a {type(each).__name__} at place {place}"
                raise InvalidCallError("tokenize", [f"texts: wanted strings, got {got}"])
        return list(texts), True
    raise InvalidCallError("tokenize", [f"texts: wanted a string or a list of strings, got {type(texts).__name__}"])


def _encode_arguments(items: Any, batched: bool, tokenizer: Tokenizer, asked: Asked) -> tuple[dict[str, Any], bool]:
    """Canonical arguments of a call, and whether what stands around texts is added to what the kernel gives."""
    adds = tokenizer.adds if asked.add_special_tokens is None else asked.add_special_tokens
    parses = tokenizer.parses if asked.parse_special is None else asked.parse_special
    if parses and tokenizer.identity.format == "sentencepiece":
        raise InvalidCallError(
            "tokenize", ["parse_special: SentencePiece takes all text as text; wanted None, got True"]
        )
    own = tokenizer.surround is not None
    arguments = {
        "tokenizer": tokenizer,
        "items": items,
        "batched": batched,
        "add_special_tokens": adds and not own,
        "parse_special": parses,
        "return_offsets": asked.return_offsets,
    }
    if adds and not own and asked.cuts:
        wanted = "a tokenizer with a plain template around its texts"
        raise InvalidCallError("tokenize", [f"truncation: wanted {wanted}, got {tokenizer!r}; its wrapper does it"])
    return arguments, adds and own


def _encode_route(arguments: Mapping[str, Any]) -> Routed:
    given = dict(arguments)
    items, batched = _texts(given.pop("texts"))
    tokenizer = resolve(given.pop("tokenizer_id"))
    asked = Asked(**given)
    refuse("tokenize", asked.problems())
    return Routed(ENCODE, _encode_arguments(items, batched, tokenizer, asked)[0])


def make_tokenize(ways: Ways) -> Callable[..., dict[str, list[Any]]]:
    """The public function over the engine's ways."""
    when_chosen_anew(ways.forget)
    signature = inspect.signature(tokenize)

    def call(
        texts: Any,
        tokenizer_id: Any,
        return_offsets: bool = False,
        *,
        add_special_tokens: bool | None = None,
        parse_special: bool | None = None,
        **options: Any,
    ) -> dict[str, list[Any]]:
        if type(texts) is str and not options and return_offsets is False:
            size = len(texts)
            key: Any = (tokenizer_id, size.bit_length(), add_special_tokens, parse_special)
            try:
                way = ways.table.get(key)
            except TypeError:  # an object without a hash
                way = None
            if way is not None and ((changed := way[3]) is None or not changed()):
                run, around, reader, _ = way
                try:
                    ids = run(texts) if size < LEAST or reader is None else reader(texts, run)
                except BaseException as error:  # noqa: BLE001  # some libraries panic in classes of their own
                    ids = failed(key, error, texts, tokenizer_id)
                if around is not None:
                    ids = [*around[0], *ids, *around[1]]
                return {"input_ids": ids}
        elif type(texts) is list and texts and not options and return_offsets is False:
            try:
                size = len("".join(texts))  # which is also the quickest way to see that all are strings
                key = (tokenizer_id, size.bit_length(), add_special_tokens, parse_special, len(texts).bit_length())
                way = ways.table.get(key)
            except TypeError:
                way = None
            if way is not None and ((changed := way[3]) is None or not changed()):
                run, around, _, _ = way
                try:
                    rows = run(texts)
                except BaseException as error:  # noqa: BLE001  # some libraries panic in classes of their own
                    rows = failed(key, error, texts, tokenizer_id)
                if around is not None:
                    rows = [[*around[0], *row, *around[1]] for row in rows]
                return {"input_ids": rows}
        given = {"add_special_tokens": add_special_tokens, "parse_special": parse_special}
        return slow(texts, tokenizer_id, return_offsets, {**options, **given})

    def failed(key: Any, error: BaseException, texts: Any, tokenizer_id: Any) -> Any:
        asked = Asked(add_special_tokens=key[2], parse_special=key[3])
        arguments, _ = _encode_arguments(texts, type(texts) is list, resolve(tokenizer_id), asked)
        return ways.failed(key, error, arguments)

    def slow(texts: Any, tokenizer_id: Any, return_offsets: Any, options: Mapping[str, Any]) -> dict[str, list[Any]]:
        signature.bind(texts, tokenizer_id, return_offsets, **options)  # an unknown argument is a TypeError
        items, batched = _texts(texts)
        followed = follow(tokenizer_id)
        tokenizer = followed.tokenizer
        asked = Asked(bool(return_offsets), **options)
        refuse("tokenize", asked.problems())
        arguments, surrounds = _encode_arguments(items, batched, tokenizer, asked)
        if batched and not items:
            return finish([], tokenizer, asked, surrounds)
        size = (sum(map(len, items)) if batched else len(items)).bit_length()
        simple = asked[3:] == _PLAIN[3:] and not asked.return_offsets and has_hash(tokenizer_id)
        key: Any = (tokenizer_id, size, *asked[1:3]) if simple else (tokenizer, batched, asked[:3], size)
        key = (*key, len(items).bit_length()) if batched else key
        table = ways.scoped()
        way = table.get(key)
        if way is None or way[3] is not followed.changed:
            run, rows = ways.find(key, arguments)
            table[key] = (run, *_beside(arguments, surrounds), followed.changed)
        else:
            run, _, reader, _ = way
            try:
                rows = run(items) if batched or reader is None or len(items) < LEAST else reader(items, run)
            except BaseException as error:  # noqa: BLE001  # some libraries panic in classes of their own
                rows = ways.failed(key, error, arguments)
        found = finish(rows if batched else [rows], tokenizer, asked, surrounds)
        return found if batched else {name: row[0] for name, row in found.items()}

    return _dressed(call, tokenize)


def _beside(arguments: Mapping[str, Any], surrounds: bool) -> tuple[Any, Any]:
    """What is added to the ids of a text, and what looks for texts that were encoded before; None for neither."""
    tokenizer: Tokenizer = arguments["tokenizer"]
    around = tokenizer.surround if surrounds and any(tokenizer.surround or ()) else None
    if arguments["batched"] or arguments["return_offsets"]:
        return around, None
    return around, TEXTS.reader(tokenizer, (arguments["add_special_tokens"], arguments["parse_special"]))


def _dressed(call: Callable[..., Any], signature: Callable[..., Any]) -> Callable[..., Any]:
    call.__name__ = call.__qualname__ = signature.__name__
    call.__doc__, call.__module__, call.__annotations__ = signature.__doc__, "layerzero", signature.__annotations__
    call.__wrapped__ = signature  # type: ignore[attr-defined]  # inspect.signature and help() follow it
    return call


def _ids(tokens: Any) -> tuple[Any, bool]:
    """Ids as lists of integers, and whether there are several lists. Raises: InvalidCallError."""
    if hasattr(tokens, "tolist"):
        tokens = tokens.tolist()
    if isinstance(tokens, int) and not isinstance(tokens, bool):
        tokens = [tokens]
    if not isinstance(tokens, (list, tuple)):
        raise InvalidCallError("detokenize", [f"tokens: wanted ids or lists of ids, got {type(tokens).__name__}"])
    several = bool(tokens) and not isinstance(tokens[0], int)
    if not several:
        return list(tokens), False
    rows = [each.tolist() if hasattr(each, "tolist") else each for each in tokens]
    wrong = next((each for each in rows if not isinstance(each, (list, tuple))), None)
    if wrong is not None:
        raise InvalidCallError("detokenize", [f"tokens: wanted lists of ids, got a {type(wrong).__name__} among them"])
    return [list(each) for each in rows], True


def _decode_route(arguments: Mapping[str, Any]) -> Routed:
    items, batched = _ids(arguments["tokens"])
    tokenizer = resolve(arguments["tokenizer_id"])
    check_ids(items if batched else [items], tokenizer)
    skip = bool(arguments["skip_special_tokens"])
    return Routed(DECODE, {"tokenizer": tokenizer, "items": items, "batched": batched, "skip_special_tokens": skip})


def make_detokenize(ways: Ways) -> Callable[..., str | list[str]]:
    """The public function over the engine's ways."""
    when_chosen_anew(ways.forget)

    def call(tokens: Any, tokenizer_id: Any, *, skip_special_tokens: bool = False) -> str | list[str]:
        routed = _decode_route(
            {"tokens": tokens, "tokenizer_id": tokenizer_id, "skip_special_tokens": skip_special_tokens}
        )
        arguments = routed.arguments
        items, batched = arguments["items"], arguments["batched"]
        tokenizer: Any = arguments["tokenizer"]
        count = len(items).bit_length() if batched else 0  # type: ignore[arg-type]
        sized: Any = items
        size = (sum(map(len, sized)) if batched else len(sized)).bit_length()
        key = (tokenizer, batched, skip_special_tokens, size, count)
        table = ways.scoped()
        run = table.get(key)
        found: Any
        if run is None:
            table[key], found = ways.find(key, arguments)
            return found  # type: ignore[no-any-return]
        try:
            found = run(items)
        except BaseException as error:  # noqa: BLE001  # some libraries panic in classes of their own
            found = ways.failed(key, error, arguments)
        return found  # type: ignore[no-any-return]

    return _dressed(call, detokenize)


def _bits(items: Any, several: bool) -> tuple[Any, ...]:
    size = (sum(map(len, items)) if several else len(items)).bit_length()
    return ("several", size, len(items).bit_length()) if several else ("one", size, 0)


def _bind_tokenize(arguments: Mapping[str, Any]) -> PlainBinding:
    given = dict(arguments)
    texts, followed = given.pop("texts"), follow(given.pop("tokenizer_id"))
    tokenizer, asked = followed.tokenizer, Asked(**given)
    items, several = _texts(texts)
    canonical, surrounds = _encode_arguments(items, several, tokenizer, asked)

    def finished(raw: Any) -> dict[str, list[Any]]:
        found = finish(raw if several else [raw], tokenizer, asked, surrounds)
        return found if several else {name: row[0] for name, row in found.items()}

    plain = asked[3:] == _PLAIN[3:] and not asked.return_offsets
    quick = functools.partial(_quick, items, *_beside(canonical, surrounds)) if plain and items != [] else None
    return PlainBinding("texts", lambda items: _bits(*_texts(items)), finished, followed.changed, quick)


def _quick(example: Any, around: Any, reader: Any, run: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """What :func:`tokenize` does behind its table, for texts like an example; None for others."""
    before, behind = (list(each) for each in around or ((), ()))
    kind, several = type(example), len(example).bit_length()
    bits = several if kind is str else len("".join(example)).bit_length()
    looks_up = reader is not None and len(example) >= LEAST  # a power of two: all of a class or none

    def one(text: Any) -> Any:
        if type(text) is not kind or len(text).bit_length() != bits:
            return None
        ids = reader(text, run) if looks_up else run(text)
        return {"input_ids": ids if around is None else [*before, *ids, *behind]}

    def many(texts: Any) -> Any:
        if type(texts) is not kind or len(texts).bit_length() != several or len("".join(texts)).bit_length() != bits:
            return None
        rows = run(texts)
        return {"input_ids": rows if around is None else [[*before, *row, *behind] for row in rows]}

    return one if kind is str else many


def _bind_detokenize(arguments: Mapping[str, Any]) -> PlainBinding:
    followed = follow(arguments["tokenizer_id"])

    def kind(tokens: Any) -> tuple[Any, ...]:
        items, several = _ids(tokens)
        check_ids(items if several else [items], followed.tokenizer)
        return _bits(items, several)

    return PlainBinding("tokens", kind, lambda raw: raw, followed.changed)


PLAIN_FUNCTIONS = (
    PlainFunction("tokenize", tokenize, _encode_route, (ENCODE,), make_tokenize, _bind_tokenize),
    PlainFunction("detokenize", detokenize, _decode_route, (DECODE,), make_detokenize, _bind_detokenize),
)
