"""From a file, a folder, a name or an object to a tokenizer. Nothing is downloaded; libraries load when needed."""

from __future__ import annotations

import base64
import binascii
import gzip
import importlib
import importlib.util
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from layerzero.core.errors import InvalidCallError
from layerzero.core.system import forking
from layerzero.ops.tokenize import identity
from layerzero.ops.tokenize.tokenizer import DUMPED, Surround, Tokenizer, dumped

_RANKS = re.compile(rb"\A[A-Za-z0-9+/]+={0,2} \d+\r?\n")
_LOADING = forking.rlock()


def _wrong(wanted: str, got: object) -> InvalidCallError:
    return InvalidCallError("tokenize", [f"tokenizer_id: wanted {wanted}, got {got}"])


def _library(name: str, what: str) -> Any:
    """Import the library that defines a tokenizer; the error says what to install."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:  # a mere folder of that name
        raise _wrong(f"`pip install {name}` for {what}", f"no package {name}")
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # a half installed one may raise anything
        again = f"`pip install --force-reinstall {name}` for {what}"
        raise _wrong(again, f"one that does not load: {type(error).__name__}: {error}") from error


def named(text: str) -> Tokenizer:
    """The tokenizer of a path, or of an encoding that tiktoken or a plugin of it names."""
    path = Path(text).expanduser()
    try:
        if path.is_dir():
            return _of_folder(path, text)
        if path.is_file():
            return _of_file(path, text)
    except OSError as error:
        raise _wrong("a file that can be read", f"{text!r}: {error}") from error
    return of_encoding(_encoding(text), text, text)


def _of_folder(folder: Path, name: str) -> Tokenizer:
    path, config = identity.in_folder(folder)
    if path is None:
        raise _wrong(f"a folder with one of {', '.join(identity.FILES)}", f"{folder} without any")
    made = _of_file(path, name)
    return made if config is None else _configured(made, _json(config.read_bytes(), config))


def _of_file(path: Path, name: str) -> Tokenizer:
    content = path.read_bytes()
    if content.lstrip()[:1] == b"{":
        data = _json(content, path)
        if data.get("format") == DUMPED:
            return of_encoding(_of_dump(data, path), name, str(path))
        if "config" in data and isinstance(data.get("vocab"), list):
            return _of_tekken(data, name, path)
        return of_json(content.decode("utf-8"), data, name, str(path))
    if _RANKS.match(content):
        return of_encoding(_of_ranks(path, content), name, str(path))
    return of_model(content, name, str(path))


def _json(content: bytes, path: Path) -> dict[str, Any]:
    try:
        data = json.loads(content)
    except ValueError as error:
        raise _wrong("a JSON file", f"{path}: {error}") from error
    if not isinstance(data, dict):
        raise _wrong("a JSON file with one object", f"{path} with a {type(data).__name__}")
    return data


# tokenizer.json


_TEMPLATES = frozenset({"TemplateProcessing", "BertProcessing", "RobertaProcessing", "ByteLevel"})


def of_json(text: str, data: Mapping[str, Any], name: str, source: str) -> Tokenizer:
    """The tokenizer of a tokenizer.json; rows of its own length or filling are not taken from there."""
    found = identity.of_json(data)
    tokenizers = _library("tokenizers", "a tokenizer.json")
    try:
        native = tokenizers.Tokenizer.from_str(text)
    except Exception as error:
        raise _wrong("a tokenizer.json that the tokenizers library reads", f"{name!r}: {error}") from error
    padding, truncation = native.padding, native.truncation
    native.no_padding()
    native.no_truncation()
    added = native.get_added_tokens_decoder()
    named_pads = [place for name in ("[PAD]", "<pad>") if (place := native.token_to_id(name)) is not None]
    pad = padding["pad_id"] if padding else next(iter(named_pads), None)
    bound = max(native.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    return Tokenizer(
        name, native, found, source, _surround(native, data), adds=True, parses=True, bound=bound, pad_id=pad,
        pads_left=bool(padding and padding["direction"] == "left"),
        cuts_left=bool(truncation and truncation["direction"] == "left"),
        most=truncation["max_length"] if truncation else None,
        specials=tuple(each.content for each in added.values()),
        special_ids=frozenset(place for place, each in added.items() if each.special),
        write=lambda: (".json", native.to_str().encode("utf-8", "surrogatepass")),
    )  # fmt: skip


def _surround(native: Any, data: Mapping[str, Any]) -> Surround | None:
    """What a template puts around every text, None where the post-processor may do more than that."""
    processor = data.get("post_processor")
    if processor is None:
        return Surround()
    if not set(identity.types_of(processor, "processors").split("+")) <= _TEMPLATES:
        return None
    encoded = native.encode("a")
    mask = encoded.special_tokens_mask
    kept = [place for place, special in enumerate(mask) if not special]
    if not kept:
        return None
    return Surround(tuple(encoded.ids[: kept[0]]), tuple(encoded.ids[kept[-1] + 1 :]))


def _configured(tokenizer: Tokenizer, config: Mapping[str, Any]) -> Tokenizer:
    """What a tokenizer_config.json says about rows."""
    pad = config.get("pad_token")
    pad = pad.get("content") if isinstance(pad, dict) else pad
    if isinstance(pad, str) and hasattr(tokenizer.native, "token_to_id"):
        tokenizer.pad_id = tokenizer.native.token_to_id(pad)
    tokenizer.pads_left = config.get("padding_side", "right") == "left"
    tokenizer.cuts_left = config.get("truncation_side", "right") == "left"
    most = config.get("model_max_length")
    if isinstance(most, int) and 0 < most < 10**9:
        tokenizer.most = most
    return tokenizer


# tiktoken


def of_encoding(encoding: Any, name: str, source: str, before: tuple[int, ...] = ()) -> Tokenizer:
    """The tokenizer of a tiktoken.Encoding."""
    ranks, pattern, specials = encoding._mergeable_ranks, encoding._pat_str, encoding._special_tokens
    return Tokenizer(
        name, encoding, identity.of_ranks(ranks, pattern, specials), source, Surround(before), adds=False, parses=False,
        bound=encoding.max_token_value + 1,
        specials=tuple(specials),
        special_ids=frozenset(specials.values()),
        write=lambda: (".tiktoken.json", dumped(ranks, pattern, specials)),
    )  # fmt: skip


def _encoding(name: str) -> Any:
    """An encoding by name, of tiktoken or a plugin; its ranks must lie on this machine."""
    tiktoken = _library("tiktoken", f"the encoding {name!r}, or a file or folder that exists")
    known = tiktoken.list_encoding_names()
    if name not in known:
        raise _wrong(f"a file or folder that exists, or an encoding of {', '.join(sorted(known))}", repr(name))
    return _without_network(lambda: tiktoken.get_encoding(name), None)


def _without_network(load: Any, content: bytes | None) -> Any:
    """Let tiktoken load ranks from its cache, from a package that has them, or from the bytes that are given."""
    loader: Any = importlib.import_module("tiktoken.load")

    def read(place: str) -> bytes:
        found = content if content is not None else _packaged(place.rpartition("/")[2])
        if found is None:
            wanted = "ranks on this machine (a file, TIKTOKEN_CACHE_DIR, or `pip install bpe-openai`)"
            raise _wrong(wanted, f"none; LayerZero does not download {place}")
        return found

    with _LOADING:
        before, loader.read_file = loader.read_file, read
        try:
            return load()
        finally:
            loader.read_file = before


def _packaged(file: str) -> bytes | None:
    """Ranks that come with the package bpe-openai, without importing it."""
    spec = importlib.util.find_spec("bpe_openai")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder) / "data" / f"{file}.gz"
        if path.is_file():
            return gzip.decompress(path.read_bytes())
    return None


def _of_ranks(path: Path, content: bytes) -> Any:
    """The encoding that a file of ranks belongs to: it names neither its pattern nor its special tokens."""
    tiktoken = _library("tiktoken", "a file of ranks")
    public = importlib.import_module("tiktoken_ext.openai_public").ENCODING_CONSTRUCTORS
    try:
        ranks = {
            base64.b64decode(piece): int(rank)
            for piece, rank in (line.split() for line in content.splitlines() if line)
        }
    except (ValueError, binascii.Error) as error:
        raise _wrong("lines of a base64 piece and a rank", f"{path}: {error}") from error
    for name, made in public.items():
        if name == "gpt2":  # made of other files
            continue
        try:
            known = _without_network(made, None)
        except (InvalidCallError, ValueError):
            known = None
        if known is not None and known["mergeable_ranks"] == ranks:
            return tiktoken.Encoding(**known)
    wanted = f"ranks of {', '.join(public)}, or a tiktoken.Encoding with its pattern and special tokens"
    raise _wrong(wanted, f"{path}: {len(ranks)} ranks of another vocabulary")


def _of_dump(data: Mapping[str, Any], path: Path) -> Any:
    tiktoken = _library("tiktoken", "a tiktoken encoding")
    ranks = {base64.b64decode(piece): rank for piece, rank in data["ranks"].items()}
    return tiktoken.Encoding(
        path.name, pat_str=data["pattern"], mergeable_ranks=ranks, special_tokens=data["special_tokens"]
    )


def _of_tekken(data: Mapping[str, Any], name: str, path: Path) -> Tokenizer:
    """Mistral's files: ranks shifted behind the special tokens."""
    tiktoken = _library("tiktoken", "a tekken.json")
    try:
        config = data["config"]
        first = int(config["default_num_special_tokens"])
        count = int(config["default_vocab_size"]) - first
        ranks = {base64.b64decode(each["token_bytes"]): each["rank"] + first for each in data["vocab"][:count]}
        listed = data.get("special_tokens") or ()
        specials = {str(each["token_str"]): int(each["rank"]) for each in listed}
        pattern = config["pattern"]
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise _wrong("a tekken.json", f"{path}: {type(error).__name__}: {error}") from error
    specials = specials or {"<unk>": 0, "<s>": 1, "</s>": 2}
    encoding = tiktoken.Encoding(path.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=specials)
    begin = (specials["<s>"],) if "<s>" in specials else ()
    return of_encoding(encoding, name, str(path), begin)


# SentencePiece


def of_model(content: bytes, name: str, source: str) -> Tokenizer:
    """The tokenizer of a SentencePiece model."""
    library = _library("sentencepiece", "a SentencePiece model")
    try:
        native = library.SentencePieceProcessor(model_proto=content)
        if not content or native.get_piece_size() == 0:
            raise ValueError("a file without pieces")  # noqa: TRY301  # reported as the others
        found = identity.of_sentencepiece(content)
    except Exception as error:
        wanted = "a tokenizer.json, tiktoken ranks, a SentencePiece model or a tekken.json"
        raise _wrong(wanted, f"{name!r}: {error or type(error).__name__}") from error
    begin = native.bos_id()
    size = native.get_piece_size()
    return Tokenizer(
        name, native, found, source, Surround((begin,) if begin >= 0 else ()), adds=False, parses=False, bound=size,
        pad_id=native.pad_id() if native.pad_id() >= 0 else None,
        specials=tuple(native.id_to_piece(place) for place in range(size) if _is_marker(native, place)),
        special_ids=frozenset(place for place in range(size) if native.is_control(place)),
        write=lambda: (".model", content),
    )  # fmt: skip


def _is_marker(native: Any, place: int) -> bool:
    """Whether a piece is none of text: a control symbol, the unknown one, or one that its author defined."""
    return bool(native.is_control(place) or native.is_unknown(place) or native.is_unused(place))


# objects


def of_object(value: Any) -> Tokenizer:
    """The tokenizer of a loaded object: of tokenizers, tiktoken, sentencepiece or Transformers."""
    library = identity.library_of(value)
    if library == "tokenizers":
        made = _of_native(value, "tokenizers.Tokenizer")
        made.parses = not value.encode_special_tokens
        return made
    if library == "tiktoken":
        return of_encoding(value, value.name, "")
    if library == "sentencepiece":
        return _of_processor(value)
    if library == "transformers":
        return _of_transformers(value)
    wanted = "a path, an encoding's name, or a tokenizer of tokenizers, tiktoken, sentencepiece or transformers"
    raise _wrong(wanted, type(value).__name__)


def _of_processor(value: Any) -> Tokenizer:
    """A SentencePieceProcessor, which adds what its options say."""
    made = of_model(value.serialized_model_proto(), "SentencePieceProcessor", "")
    added = value.encode("", out_type=int)
    begins, ends = value.bos_id(), value.eos_id()
    known = {(): None, (begins,): ((begins,), ()), (ends,): ((), (ends,)), (begins, ends): ((begins,), (ends,))}
    odd = [name for name in ("reverse", "enable_sampling") if getattr(value, f"_{name}", False)]
    if odd or tuple(added) not in known:
        got = f"a SentencePieceProcessor with {', '.join(odd) or f'{added} around an empty text'}"
        raise _wrong("no options but add_bos and add_eos", got)
    around = known[tuple(added)]
    if around is not None:
        made.surround, made.adds = Surround(*around), True
    return made


def _of_native(value: Any, name: str) -> Tokenizer:
    try:
        text = value.to_str()
    except Exception as error:
        raise _wrong("a tokenizer that can be written, without steps in Python", f"{name!r}: {error}") from error
    made = of_json(text, json.loads(text), name, "")
    if made.native.get_added_tokens_decoder() != value.get_added_tokens_decoder():  # another model beneath them
        wanted = "added tokens with the ids that they have once it is written (save it, and load it)"
        raise _wrong(wanted, f"others in {name!r}")
    return made


def _of_transformers(value: Any) -> Tokenizer:
    name = str(value.name_or_path or type(value).__name__)
    backend = getattr(value, "backend_tokenizer", None)
    made = _of_python(value, name) if backend is None else _of_native(backend, name)
    made.parses = not value.split_special_tokens
    made.pad_id = value.pad_token_id
    made.pads_left, made.cuts_left = value.padding_side == "left", value.truncation_side == "left"
    made.most = value.model_max_length if value.model_max_length < 10**9 else None
    return made


def apart(made: Tokenizer, number: int) -> Tokenizer:
    """A tokenizer that no other object stands for: what Python code computes with need not be what it saves."""
    return replace(made, identity=replace(made.identity, model_id=f"{made.identity.model_id} {number}"))


def _of_python(value: Any, name: str) -> Tokenizer:
    """A tokenizer written in Python: its state is hashed as it saves itself."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        value.save_pretrained(folder)
        saved = {path.name: identity.digest(path.read_bytes()) for path in sorted(Path(folder).iterdir())}
    added = {place: str(each) for place, each in value.added_tokens_decoder.items()}
    vocabulary = value.get_vocab()
    found = identity.Identity(
        "transformers", f"{type(value).__module__}.{type(value).__qualname__}", identity.digest(vocabulary),
        identity.NONE, identity.digest(saved), added_tokens_hash=identity.digest(added),
    )  # fmt: skip
    bound = max([*vocabulary.values(), *added], default=-1) + 1
    return Tokenizer(
        name, value, found, "", None, adds=True, parses=True, bound=bound, specials=tuple(added.values()),
        special_ids=frozenset(value.all_special_ids),
    )  # fmt: skip
