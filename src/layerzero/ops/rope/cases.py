"""Named calls of rotations, the tables that they read, and the calls that are worth measuring."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from layerzero.core.operation import Case


def cos_sin(table: int, half: int, device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """A plain table of base 10,000 that lies as kernels want it: cosines, then sines, in each row of one tensor."""
    if device.type == "meta":
        joined = torch.empty(table, 2 * half, dtype=dtype, device=device)
    else:
        inverse = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / max(half, 1))
        angles = torch.outer(torch.arange(table, dtype=torch.float64), inverse)
        joined = torch.cat((angles.cos(), angles.sin()), -1).to(device, dtype)
    return joined[:, :half], joined[:, half:]


def examples(
    case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None
) -> dict[str, Tensor]:
    """Tokens in the middle of their sequences: positions are shuffled rows of a table of real angles."""
    size = case.sizes
    tokens = (size["batch"], size["seq"])
    cos, sin = cos_sin(size["table"], size["rotary_half"], device)

    def normal(heads: int) -> Tensor:
        shape = (*tokens, heads, size["head_dim"])
        if device.type == "meta":
            return torch.empty(shape, dtype=dtype, device=device)
        if generator is None:  # nobody asks for the same numbers everywhere: drawn where they are wanted
            return torch.randn(shape, device=device, dtype=dtype)
        return torch.randn(shape, generator=generator).to(device, dtype)

    positions = torch.randint(0, max(size["table"], 1), tokens, generator=generator).to(device)
    return {
        "query": normal(size["heads"]),
        "key": normal(size["kv_heads"]),
        "cos": cos,
        "sin": sin,
        "positions": positions,
    }


def case(
    name: str, batch: int, seq: int, heads: int, kv_heads: int, head_dim: int, half: int = 0, **params: object
) -> Case:
    """A case with a table of 4096 rows, or of 64 where it is small."""
    sizes = {"batch": batch, "seq": seq, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    table = 64 if name.startswith("small") else 4096
    return Case(name, sizes | {"rotary_half": half or head_dim // 2, "table": table}, params, ("positions",))


CASES = (
    case("small", 2, 7, 4, 2, 64),
    case("small_interleaved", 1, 9, 4, 4, 64, interleaved=True),
    case("small_partial", 2, 5, 4, 2, 80, 16),
    case("llama3_8b_decode_b1", 1, 1, 32, 8, 128),
    case("llama3_8b_decode_b64", 64, 1, 32, 8, 128),
    case("llama3_8b_s512", 1, 512, 32, 8, 128),
    case("llama3_8b_s4096", 1, 4096, 32, 8, 128),
)


def sweep(device: str, narrow: Mapping[str, Any]) -> list[Case]:
    """By tokens, for the head counts of models from 1 to 70 billion weights; none where other sizes are named."""
    if narrow:
        return []
    tokens = (1, 8, 64, 512, 4096, 16384) if device == "cuda" else (1, 8, 64, 512)
    shapes = ((32, 8, 128, 64), (16, 2, 128, 64), (64, 8, 128, 64), (16, 16, 64, 32), (32, 32, 80, 16))
    return [
        case(f"{each} tokens ({heads}/{kv_heads}/{head_dim})", each, 1, heads, kv_heads, head_dim, half)
        for heads, kv_heads, head_dim, half in shapes
        for each in tokens
    ]
