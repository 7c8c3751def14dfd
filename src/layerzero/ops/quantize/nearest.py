"""The format nearest to one that is not taken, and what a conversion to it costs."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from layerzero.core.facts import Facts
from layerzero.core.reasons import Reason
from layerzero.ops.quantize.groups import GROUPED
from layerzero.ops.quantize.schemes import SCHEMES, format_problems, scheme_of
from layerzero.ops.quantize.weight_format import WeightFormat

_WHOLE = {2: 0.454, 3: 0.203, 4: 0.102, 5: 0.052, 6: 0.026, 7: 0.013, 8: 0.0065}
_OTHERS = {"fp8": 0.026, "mxfp6_e2m3": 0.028, "mxfp8": 0.029, "mxfp6_e3m2": 0.054, "nf4": 0.092, "nvfp4": 0.095}
_OTHERS |= {"mxfp4": 0.115, "fp4": 0.122}
"""What ``lz.quantize_weight`` loses of normal numbers, as a share of their norm: of whole numbers by bits in groups of
128, of others by scheme (512 x 4096 numbers, 2026-11-26)."""


LOSSES = {f"int{bits}": each for bits, each in _WHOLE.items()} | _OTHERS
LOSSES = dict(sorted(LOSSES.items(), key=lambda each: each[1]))
"""The same by what ``lz.quantize_weight`` calls them, the least first."""


def loss_of(of: WeightFormat) -> float:
    """What a format loses of normal numbers, as a share of their norm. Raises: KeyError for one that is not made."""
    return _OTHERS[of.scheme] if of.scheme in _OTHERS else _WHOLE[of.bits]


def nearest(of: WeightFormat) -> WeightFormat:
    """A format that is made here and holds numbers like those of another: of as many bits, as far as its name tells."""
    name = f"{of.scheme} {of.kind}".lower()
    if scheme := next((each for each in _OTHERS if each in name), None):
        return WeightFormat(scheme, group=64 if scheme in {"nf4", "fp4"} else 0)
    if re.search("float8|e4m3|e5m2", name):
        return WeightFormat("fp8")
    digits = re.search(r"\d+", name)
    bits = of.bits or (int(digits[0]) if digits else 4)
    group = of.group if of.group > 0 else 128
    return WeightFormat("compressed-tensors", bits=min(max(bits, min(_WHOLE)), max(_WHOLE)), group=group)


def conversion(to: WeightFormat, shape: Sequence[int] | None = None, numbers: str = "weight.dequantized()") -> str:
    """The call that converts, the memory of its result, and what it loses."""
    if format_problems(to) or to.permuted or to.scheme == "gguf":  # which are read, not made
        to = nearest(to)
    if shape is not None and to.scheme in GROUPED and to.group:
        to = replace(to, group=math.gcd(to.group, shape[-1]))
    bits = scheme_of(to).bits(to)
    memory = f"{bits:.3g} bits a number"
    if shape is not None:
        memory = f"{round(bits * math.prod(shape) / 8)} bytes for {' x '.join(map(str, shape))} numbers"
    lost = f"normal numbers lose {loss_of(to):.2g} of their norm"
    return f"lz.quantize_weight({numbers}, {str(to)!r}) quantises anew: {memory}, {lost}"


def instead(of: WeightFormat, shape: object = None) -> str:
    """What to do with a format that nothing here reads: the nearest one, and what it costs."""
    known = isinstance(shape, (tuple, list)) and len(shape) in (2, 3) and all(type(each) is int for each in shape)
    step = conversion(nearest(of), shape if known else None, "numbers")  # type: ignore[arg-type]  # integers
    return f"the library that defines it gives the numbers, and {step}"


FORMAT_FACTS = frozenset(
    {"weight_scheme", "weight_kind", "weight_bits", "weight_group", "weight_zeros", "weight_permuted", "weight_format"}
)
"""What a call says of its weight's format."""


def taken_instead(facts: Facts, refused: Mapping[str, Sequence[Reason]]) -> str:
    """The nearest format that a refused kernel takes, and what it costs; empty where none is refused for the format."""
    found: list[tuple[float, str]] = []
    for kernel_id, reasons in refused.items():
        if reasons and {each.fact for each in reasons} <= FORMAT_FACTS:
            to = _wanted(WeightFormat.of(str(facts["weight_format"])), reasons)
            if to is not None:
                shape = facts.size("out_features"), facts.size("in_features")
                found.append((loss_of(to), f"{kernel_id} takes {to}; {conversion(to, shape)}"))
    return min(found)[1] if found else ""


def _wanted(of: WeightFormat, reasons: Collection[Reason]) -> WeightFormat | None:
    """A format that a kernel takes which was refused for these reasons; None where they do not say one that is made."""
    wanted = {each.fact: str(each.wanted).split(" or ") for each in reasons}
    if "weight_format" in wanted:
        return WeightFormat.of(wanted["weight_format"][0])
    scheme = wanted.get("weight_scheme", [of.scheme])[0]
    bits = [int(each) for each in wanted.get("weight_bits", ()) if each.isdigit()]
    width = max([each for each in bits if each <= of.bits] or bits or [of.bits])
    group = 128 if "weight_group" in wanted else of.group
    for zeros in dict.fromkeys((wanted.get("weight_zeros", [of.zeros])[0], "stored", "none")):
        made = WeightFormat(scheme, of.kind, width, group, of.rows, zeros)
        if scheme in SCHEMES and not format_problems(made):
            return made
    return None
