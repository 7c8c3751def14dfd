"""Tokenizers that tests make or find on this machine: nothing is downloaded."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest


def _text() -> list[str]:
    return [path.read_text() for path in sorted(Path(json.__file__).parent.parent.glob("[a-d]*.py"))[:40]]


@functools.cache
def byte_level() -> str:
    """A tokenizer.json of a byte-level BPE with two special tokens."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    specials = ["<|end|>", "<|pad|>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=1200, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(_text(), trainer)
    return made.to_str()


@functools.cache
def word_piece() -> str:
    """A tokenizer.json like BERT's: lower case, pieces of words, a template around each text."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    made.normalizer = tokenizers.normalizers.BertNormalizer()
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    made.decoder = tokenizers.decoders.WordPiece()
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=800, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]"], show_progress=False
    )
    made.train_from_iterator(_text(), trainer)
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B [SEP]",
        special_tokens=[("[CLS]", made.token_to_id("[CLS]")), ("[SEP]", made.token_to_id("[SEP]"))],
    )
    return made.to_str()


@functools.cache
def pieces(kind: str, **options) -> bytes:
    """A SentencePiece model, ``bpe`` or ``unigram``, with byte fallback."""
    import io

    library = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    lines = [line for text in _text() for line in text.splitlines() if line.strip()][:4000]
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=700, model_type=kind, byte_fallback=True,
        minloglevel=2, **options,
    )  # fmt: skip
    return model.getvalue()


def as_it_is(**options) -> bytes:
    """A SentencePiece BPE that changes nothing of a text, as Mistral's and Llama's."""
    kept = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    return pieces("bpe", **kept, **options)


@functools.cache
def split_in_turn() -> str:
    """A tokenizer.json of a byte-level BPE whose patterns split one after the other, as DeepSeek's."""
    tokenizers = pytest.importorskip("tokenizers")
    from layerzero.ops.tokenize.identity import SEQUENCES

    made = tokenizers.Tokenizer.from_str(byte_level())
    parts = tokenizers.pre_tokenizers
    (patterns,) = SEQUENCES
    splits = [parts.Split(tokenizers.Regex(each), "isolated") for each in patterns]
    made.pre_tokenizer = parts.Sequence([*splits, parts.ByteLevel(add_prefix_space=False, use_regex=False)])
    return made.to_str()


def encoding():
    """A tiktoken encoding with few ranks, in the pattern of cl100k."""
    tiktoken = pytest.importorskip("tiktoken")
    from layerzero.ops.tokenize.identity import SCHEMES

    ranks = {bytes([byte]): byte for byte in range(256)}
    for text in (
        "th",
        "he",
        "in",
        "er",
        "the",
        " t",
        " the",
        "ing",
        "  ",
        "    ",
        "\n\n",
        "se",
        "lf",
        "self",
        "de",
        "def",
    ):
        ranks[text.encode()] = len(ranks)
    pattern = next(text for text, name in SCHEMES.items() if name == "cl100k")
    specials = {"<|end|>": len(ranks) + 3, "<|start|>": len(ranks) + 4}
    return tiktoken.Encoding("few", pat_str=pattern, mergeable_ranks=ranks, special_tokens=specials)


def files(folder: Path) -> dict[str, str]:
    """Each kind of file, written into a folder."""
    made = {"byte_level": ("a.json", byte_level().encode()), "word_piece": ("b.json", word_piece().encode())}
    made |= {kind: (f"{kind}.model", pieces(kind)) for kind in ("bpe", "unigram")}
    for name, content in made.values():
        (folder / name).write_bytes(content)
    return {kind: str(folder / name) for kind, (name, _) in made.items()}
