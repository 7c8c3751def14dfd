"""Named calls of rotations with an append, the tables that they read, and the calls that are worth measuring."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from layerzero.core.operation import Case
from layerzero.ops.rope.cases import cos_sin

_PAGE = 16


def _sizes(heads: int, kv_heads: int, head_dim: int, half: int, table: int) -> dict[str, int]:
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "value_dim": head_dim}
    return sizes | {"rotary_half": half or head_dim // 2, "table": table}


def _contiguous(
    name: str, batch: int, seq: int, heads: int, kv_heads: int, head_dim: int, half: int = 0, **params: object
) -> Case:
    length = 64 if name.startswith("small") else 4096
    sizes = {"batch": batch, "seq": seq, "length": length}
    return Case(name, sizes | _sizes(heads, kv_heads, head_dim, half, length), params)


def _paged(
    name: str, tokens: int, heads: int, kv_heads: int, head_dim: int, half: int = 0, pages: int = 0, **params: object
) -> Case:
    small = name.startswith("small")
    sizes = {"tokens": tokens, "pages": pages or (8 if small else 1024), "page_size": _PAGE}
    return Case(name, sizes | _sizes(heads, kv_heads, head_dim, half, 64 if small else 4096), params)


CONTIGUOUS = (
    _contiguous("small", 2, 7, 4, 2, 64),
    _contiguous("small_interleaved", 1, 9, 4, 4, 64, interleaved=True),
    _contiguous("small_partial", 2, 5, 4, 2, 80, 16),
    _contiguous("llama3_8b_decode_b1", 1, 1, 32, 8, 128),
    _contiguous("llama3_8b_decode_b8", 8, 1, 32, 8, 128),
    _contiguous("llama3_8b_s512", 1, 512, 32, 8, 128),
)
PAGED = (
    _paged("small", 7, 4, 2, 64),
    _paged("small_interleaved", 9, 4, 4, 64, interleaved=True),
    _paged("small_partial", 5, 4, 2, 80, 16),
    _paged("llama3_8b_decode_b1", 1, 32, 8, 128),
    _paged("llama3_8b_decode_b64", 64, 32, 8, 128),
    _paged("llama3_8b_s512", 512, 32, 8, 128),
)


def _table(case: Case, device: torch.device) -> dict[str, Tensor]:
    return dict(zip(("cos", "sin"), cos_sin(case.sizes["table"], case.sizes["rotary_half"], device), strict=True))


def contiguous_examples(
    case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None
) -> dict[str, Tensor]:
    """Real angles; the tokens of a sequence one after the other, from anywhere."""
    batch, seq, length = (case.sizes[name] for name in ("batch", "seq", "length"))
    first = torch.randint(0, max(length - seq, 0) + 1, (batch, 1), generator=generator)
    places = first + torch.arange(seq)
    return {**_table(case, device), "positions": places.clamp(max=max(length - 1, 0)).to(device)}


def paged_examples(
    case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None
) -> dict[str, Tensor]:
    """Real angles, at positions in any order."""
    positions = torch.randint(0, max(case.sizes["table"], 1), (case.sizes["tokens"],), generator=generator)
    return {**_table(case, device), "positions": positions.to(device)}


_SHAPES = ((32, 8, 128), (16, 2, 128), (16, 16, 64))


def contiguous_sweep(device: str, narrow: Mapping[str, Sequence[int]]) -> Iterator[Case]:
    """A decode step of one sequence and of several, a prefill; none where sizes are named."""
    batches = ((1, 1), (8, 1), (64, 1), (1, 512), (1, 4096)) if device == "cuda" else ((1, 1), (4, 1), (1, 512))
    for heads, kv_heads, head_dim in _SHAPES if not narrow else ():
        for batch, seq in batches:
            yield _contiguous(f"B{batch} S{seq} ({heads}/{kv_heads}/{head_dim})", batch, seq, heads, kv_heads, head_dim)


def paged_sweep(device: str, narrow: Mapping[str, Sequence[int]]) -> Iterator[Case]:
    """The same in tokens."""
    tokens, pages = ((1, 8, 64, 512, 4096), 8192) if device == "cuda" else ((1, 8, 64, 512), 256)
    for heads, kv_heads, head_dim in _SHAPES if not narrow else ():
        for each in tokens:
            name = f"{each} tokens ({heads}/{kv_heads}/{head_dim})"
            yield _paged(name, each, heads, kv_heads, head_dim, pages=pages)
