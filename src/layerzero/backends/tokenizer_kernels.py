"""What tokenizer libraries have in common: how their kernels are declared, and how a tokenizer is found for one."""

from __future__ import annotations

import base64
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Backend, Kernel
from layerzero.core.limit_kinds import Limit
from layerzero.core.system.disk import make_private, write_whole
from layerzero.ops.tokenize.declare import TokenizerPart, folder
from layerzero.ops.tokenize.tokenizer import Tokenizer, by_hash

ENCODING = ("tokenizer", "items", "batched", "add_special_tokens", "parse_special", "return_offsets", "source")
DECODING = ("tokenizer", "items", "batched", "skip_special_tokens", "source")

Load = Callable[[Tokenizer, Mapping[str, Any]], Callable[..., Any]]
"""What encodes or decodes for a tokenizer, given the wanted results."""


def _loaded(load: Load, facts: Facts) -> Callable[..., Any]:
    return load(by_hash(facts["tokenizer_hash"]), facts)


def library(
    name: str, summary: str, versions: str, tested: tuple[str, ...], homepage: str, *, distribution: str = ""
) -> Backend:
    """A library that is installed and imported by its name; ``distribution`` is another name of its package."""
    package = distribution or name
    more = {"versions": versions, "tested": tested, "install": f"pip install {package}", "homepage": homepage}
    return Backend(name, summary, import_name=name, distribution=package, **more)  # type: ignore[arg-type]


def formats(*names: str) -> Limit:
    """Take tokenizers that these libraries define only."""
    return TokenizerPart("format", names)


def _kernel(
    name: str,
    operation: str,
    accepts: tuple[str, ...],
    backend: Backend,
    load: Load,
    native: str,
    declared: dict[str, Any],
) -> Kernel:
    """A kernel; one that does not define the format works on a form of its own, and has to prove it."""
    return backend.kernel(
        f"{backend.name}.{name}",
        operation,
        functools.partial(_loaded, load),
        accepts=accepts,
        deterministic=True,
        stock=(lambda facts: facts["format"] == native) if native else False,
        proved_first=not native,
        **declared,
    )


def ranks_file(tokenizer: Tokenizer) -> str:
    """A file of a tiktoken encoding's ranks, for libraries that read nothing else."""
    native = tokenizer.native
    path = folder() / f"{tokenizer.tokenizer_hash}.tiktoken"
    if not path.exists():
        make_private(path.parent)
        write_whole(path, ranks_bytes(native._mergeable_ranks))
    return os.fspath(path)


def ranks_bytes(ranks: Mapping[bytes, int]) -> bytes:
    """Ranks as tiktoken's files hold them."""
    return b"".join(base64.b64encode(piece) + b" %d\n" % rank for piece, rank in ranks.items())


def one_by_one(run: Callable[[Any], Any]) -> Callable[[list[Any]], list[Any]]:
    """Several, one after the other."""
    return lambda items: [run(each) for each in items]


def without_specials(
    tokenizer: Tokenizer, asked: Mapping[str, Any], decode: Callable[[list[int]], str]
) -> Callable[..., Any]:
    """What decodes, for a library that leaves no special token out by itself."""
    left_out, skip = tokenizer.special_ids, asked["skip_special_tokens"]

    def one(ids: list[int]) -> str:
        return decode([each for each in ids if each not in left_out] if skip else ids)

    return one_by_one(one) if asked["batched"] else one


def encoder(backend: Backend, load: Load, *, native: str = "", offsets: bool = False, **declared: Any) -> Kernel:
    """A kernel that encodes. ``native`` is the format that its library defines: no proof is needed for that.

    ``name`` tells several of one library apart.
    """
    limits = declared.pop("limits", ())
    if not offsets:
        limits = (*limits, limit.one_of("return_offsets", False))
    name = declared.pop("name", "encode")
    return _kernel(name, "tokenize.encode", ENCODING, backend, load, native, {"limits": limits, **declared})


def decoder(backend: Backend, load: Load, *, native: str = "", **declared: Any) -> Kernel:
    """A kernel that decodes."""
    return _kernel("decode", "tokenize.decode", DECODING, backend, load, native, declared)
