"""Multi-head latent attention over pages: one latent vector a token for keys and values, with a rotated part."""

from __future__ import annotations

from layerzero.ops.latent.declare import FUNCTIONS, MLA_DECODE_PAGED, OPERATIONS

__all__ = ["ALIASES", "FUNCTIONS", "OPERATIONS"]

ALIASES: dict[str, tuple[tuple[str, ...], dict[str, object]]] = {
    "attention.mla.decode": ((MLA_DECODE_PAGED.name,), {}),
    "attention.mla.prefill": ((MLA_DECODE_PAGED.name,), {}),
}
"""The specification's names: absorbed matrices are one operation, for one or more of the newest tokens."""
