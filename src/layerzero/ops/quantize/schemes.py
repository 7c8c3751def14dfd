"""Every scheme by name: whole numbers by group, blocks of float8, MX and NVFP4, codebooks, GGUF.

Each gives the numbers that the library which defines it gives, bit for bit in the dtype that this library computes in:
gptqmodel 7.7, autoawq 0.2.9, compressed-tensors 0.20, bitsandbytes 0.50, gguf 0.19; OCP Microscaling Formats 1.0.
"""

from __future__ import annotations

from layerzero.ops.quantize.groups import GROUPED
from layerzero.ops.quantize.scheme import Scheme
from layerzero.ops.quantize.weight_format import WeightFormat

SCHEMES: dict[str, Scheme] = {**GROUPED}
"""By name."""


def scheme_of(of: WeightFormat) -> Scheme:
    """The scheme of a format. Raises: KeyError for one that is unknown."""
    return SCHEMES[of.scheme]


def format_problems(of: WeightFormat) -> list[str]:
    """What is wrong with a format: an unknown scheme, or options that it has not."""
    if of.scheme not in SCHEMES:
        return [f"format: wanted one of {', '.join(SCHEMES)}, got {of.scheme!r}"]
    return scheme_of(of).problems(of)
