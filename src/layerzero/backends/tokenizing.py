"""What tokenizer libraries have in common: how their kernels are declared, and how a tokenizer is found for one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Backend, Kernel
from layerzero.core.limit import Limit
from layerzero.ops.tokenize.limits import TokenizerPart
from layerzero.ops.tokenize.tokenizer import Tokenizer, by_hash

ENCODING = ("tokenizer", "items", "batched", "add_special_tokens", "parse_special", "return_offsets")
DECODING = ("tokenizer", "items", "batched", "skip_special_tokens")

Load = Callable[[Tokenizer, Mapping[str, Any]], Callable[..., Any]]
"""What encodes or decodes for a tokenizer, given what is asked of it."""


def _loaded(load: Load, facts: Facts) -> Callable[..., Any]:
    return load(by_hash(facts["tokenizer_hash"]), facts)


def formats(*names: str) -> Limit:
    """Take tokenizers that these libraries define only."""
    return TokenizerPart("format", names)


def _kernel(
    name: str, operation: str, accepts: tuple[str, ...], backend: Backend, load: Load, native: str, declared: dict[str, Any]
) -> Kernel:
    """A kernel; what it takes of another library's format it converts, and has to prove."""
    proved = (lambda facts: facts["format"] != native) if native else True
    return Kernel(
        id=f"{backend.name}.{name}",
        operations=(operation,),
        backend=backend,
        load=functools.partial(_loaded, load),
        accepts=accepts,
        deterministic=True,
        stock=(lambda facts: facts["format"] == native) if native else False,
        proved_first=proved,
        **declared,
    )


def encoder(backend: Backend, load: Load, *, native: str = "", offsets: bool = False, **declared: Any) -> Kernel:
    """A kernel that encodes. ``native`` is the format that its library defines: no proof is needed for that."""
    limits = declared.pop("limits", ())
    if not offsets:
        limits = (*limits, limit.one_of("return_offsets", False))
    return _kernel("encode", "tokenize.encode", ENCODING, backend, load, native, {"limits": limits, **declared})


def decoder(backend: Backend, load: Load, *, native: str = "", **declared: Any) -> Kernel:
    """A kernel that decodes."""
    return _kernel("decode", "tokenize.decode", DECODING, backend, load, native, declared)
