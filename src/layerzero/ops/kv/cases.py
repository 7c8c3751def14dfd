"""Named calls of what moves tokens between caches, what cannot be drawn from a schema, and what is worth measuring."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from layerzero.core.operation import Case

_SHAPES = ((8, 128), (2, 64))


def _row(name: str, batch: int, seq: int, length: int, kv_heads: int, head_dim: int) -> Case:
    sizes = {"batch": batch, "seq": seq, "length": length, "kv_heads": kv_heads}
    return Case(name, sizes | {"head_dim": head_dim, "value_dim": head_dim})


def _paged(name: str, count: tuple[str, int], pages: int, kv_heads: int, head_dim: int, page_size: int = 16) -> Case:
    sizes = {count[0]: count[1], "pages": pages, "page_size": page_size, "kv_heads": kv_heads}
    return Case(name, sizes | {"head_dim": head_dim, "value_dim": head_dim})


ROWS = (
    _row("small", 2, 3, 16, 2, 64),
    _row("llama3_8b_decode_b8", 8, 1, 4096, 8, 128),
    _row("llama3_8b_s512", 1, 512, 4096, 8, 128),
)
SLOTS = (
    _paged("small", ("tokens", 5), 4, 2, 64),
    _paged("llama3_8b_b64", ("tokens", 64), 1024, 8, 128),
    _paged("llama3_8b_s2048", ("tokens", 2048), 1024, 8, 128),
)
ONE_HEAD = _paged("one_head", ("tokens", 7), 5, 1, 128)
COPIES = (
    _paged("small", ("copied_pages", 3), 8, 2, 64),
    _paged("llama3_8b_16", ("copied_pages", 16), 1024, 8, 128),
)


def positions(
    case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None
) -> dict[str, Tensor]:
    """The tokens of a sequence one after the other, from anywhere."""
    batch, seq, length = (case.sizes[name] for name in ("batch", "seq", "length"))
    first = torch.randint(0, max(length - seq, 0) + 1, (batch, 1), generator=generator)
    return {"positions": (first + torch.arange(seq)).clamp(max=max(length - 1, 0)).to(device)}


def pages(case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None) -> dict[str, Tensor]:
    """Pages that are read, and others that are written."""
    count, copies = case.sizes["pages"], case.sizes["copied_pages"]
    order = torch.randperm(count, generator=generator)
    return {"from_pages": order[:copies].to(device), "to_pages": order[-copies:].flip(0).to(device)}


def rows_sweep(device: str, narrow: Mapping[str, Sequence[int]]) -> Iterator[Case]:
    """A decode step of one row and of several, a prefill; none where sizes are named."""
    for kv_heads, head_dim in _SHAPES if not narrow else ():
        for batch, seq in ((1, 1), (16, 1), (1, 512)):
            yield _row(f"B{batch} S{seq} ({kv_heads}/{head_dim})", batch, seq, 1024, kv_heads, head_dim)


def slots_sweep(device: str, narrow: Mapping[str, Sequence[int]]) -> Iterator[Case]:
    """A decode step's tokens, a batch's, a prefill's."""
    for kv_heads, head_dim in _SHAPES if not narrow else ():
        for tokens in (1, 64, 2048):
            name = f"{tokens} tokens ({kv_heads}/{head_dim})"
            yield _paged(name, ("tokens", tokens), 8192 if device == "cuda" else 256, kv_heads, head_dim)


def copies_sweep(device: str, narrow: Mapping[str, Sequence[int]]) -> Iterator[Case]:
    """One page, and as many as a batch that was forked needs."""
    for kv_heads, head_dim in _SHAPES if not narrow else ():
        for copies in (1, 64):
            name = f"{copies} pages ({kv_heads}/{head_dim})"
            yield _paged(name, ("copied_pages", copies), 8192 if device == "cuda" else 256, kv_heads, head_dim)
