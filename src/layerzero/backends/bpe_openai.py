"""bpe-openai: OpenAI's two newer encodings, whose vocabularies it brings; linear in the length of a word.

Source: bpe-openai 0.1.4. Its own Python function counts and times each call; what is called is the Rust object.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from layerzero.backends.tokenizer_kernels import encoder, formats, one_by_one
from layerzero.core import limits as limit
from layerzero.core.kernel import Backend
from layerzero.ops.tokenize.declare import TokenizerPart, own_specials
from layerzero.ops.tokenize.tokenizer import Tokenizer

BPE_OPENAI = Backend(
    "bpe_openai",
    "bpe-openai: cl100k and o200k in Rust, never quadratic",
    import_name="bpe_openai",
    distribution="bpe-openai",
    versions=">=0.1.4,<0.2",
    tested=("0.1.4",),
    install="pip install bpe-openai",
    homepage="https://pypi.org/project/bpe-openai/",
)

_BROUGHT = {
    "1ed95da8c64f95d46c2309468b36b36ff085db93cab0ed69726eba15379fec4c": "cl100k_base",
    "f406a602251cf270bb965e4396fde1106a8abe16a05f54106837001eca781a2d": "o200k_base",
}
"""Hashes of the ranks that it brings."""


def _load_encode(tokenizer: Tokenizer, asked: Mapping[str, Any]) -> Callable[..., Any]:
    def make() -> Any:
        from bpe_openai import _bindings

        return _bindings.tokenizer_for_encoding(_BROUGHT[tokenizer.identity.vocab_hash])

    one: Callable[..., Any] = tokenizer.engine("bpe_openai", make).encode
    return one_by_one(one) if asked["batched"] else one


KERNELS = (
    encoder(
        BPE_OPENAI,
        _load_encode,
        limits=(
            formats("tiktoken"),
            TokenizerPart("vocab_hash", tuple(_BROUGHT), "VOCAB_HASH_MISMATCH"),
            TokenizerPart("merges_hash", tuple(_BROUGHT), "MERGES_HASH_MISMATCH"),
            own_specials(),
            limit.one_of("add_special_tokens", False),
        ),
        priority=26,
    ),
)
