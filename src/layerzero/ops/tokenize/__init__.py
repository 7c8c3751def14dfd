"""Text to tokens and back, exactly as the library does that defines the tokenizer."""

from layerzero.ops.tokenize.declare import PLAIN_OPERATIONS, TokenizerPart
from layerzero.ops.tokenize.prefixes import TEXTS, TokenizerCacheConfig
from layerzero.ops.tokenize.route import PLAIN_FUNCTIONS
from layerzero.ops.tokenize.rows import StreamingDetokenizer
from layerzero.ops.tokenize.tokenizer import forget

OPERATIONS = ()
FUNCTIONS = ()
EXPORTS = ("StreamingDetokenizer", "TokenizerCacheConfig", "forget_tokenizer", "tokenizer_cache")
LIMITS = {"tokenizer_part": TokenizerPart}

forget_tokenizer, tokenizer_cache = forget, TEXTS

__all__ = [
    "EXPORTS",
    "FUNCTIONS",
    "LIMITS",
    "OPERATIONS",
    "PLAIN_FUNCTIONS",
    "PLAIN_OPERATIONS",
    "StreamingDetokenizer",
    "TokenizerCacheConfig",
    "forget_tokenizer",
    "tokenizer_cache",
]
