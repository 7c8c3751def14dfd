"""Tables of cosines and sines, with the ways in which models stretch them beyond the lengths that they were trained on.

Frequencies and angles are computed in float64: in float32 an angle of position 100,000 is off by 0.004.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from layerzero.core.arguments import told
from layerzero.core.dtypes import FLOATING
from layerzero.core.errors import InvalidCallError, refuse

_COMMON = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_KEYS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor", "original_max_position_embeddings"}),
    "yarn": frozenset({
        *("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim", "truncate"),
    }),
    "llama3": frozenset({"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"}),
    "longrope": frozenset({
        *("factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"),
    }),
}  # fmt: skip
_ALIASES = {"none": "default", "su": "longrope", "ntk": "dynamic"}
DEFAULT_BASE = 10000.0

Scaling = Mapping[str, Any]


def rope_table(
    length: int,
    rotary_dim: int,
    *,
    base: float | None = None,
    scaling: Scaling | None = None,
    max_positions: int | None = None,
    seq_len: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """Make cos and sin for ``lz.rope``, side by side in one tensor (length, rotary_dim).

    Shapes: → two views (length, rotary_dim / 2); row p holds the angles of position p.
    Dtype: ``dtype``, rounded once from float64. float32 is what most kernels take with 16-bit queries.
    Units: length, max_positions and seq_len in positions.
    Args: as of ``lz.rope_frequencies``; seq_len is length if None. Both are multiplied with the attention factor, as
        Transformers' rotary embeddings do.
    Raises: InvalidCallError for what the kind of scaling does not know, lacks, or cannot be, for a length that is none,
        and for dtypes that are not floating.
    """
    if type(length) is not int or not 0 <= length <= _MOST_LENGTH:
        raise InvalidCallError("rope_table", [f"length: wanted 0 to {_MOST_LENGTH} positions, got {told(length)}"])
    if not isinstance(dtype, torch.dtype) or dtype not in FLOATING:
        raise InvalidCallError("rope_table", [f"dtype: wanted a floating dtype, got {told(dtype)}"])
    frequencies, factor = rope_frequencies(
        rotary_dim,
        base=base,
        scaling=scaling,
        max_positions=max_positions,
        seq_len=length or None if seq_len is None else seq_len,
    )
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)
    joined = torch.cat((angles.cos(), angles.sin()), -1).mul_(factor).to(device=device, dtype=dtype)
    half = rotary_dim // 2
    return joined[:, :half], joined[:, half:]


_MOST_DIM, _MOST_LENGTH = 2**20, 2**31 - 1


def rope_frequencies(
    rotary_dim: int,
    *,
    base: float | None = None,
    scaling: Scaling | None = None,
    max_positions: int | None = None,
    seq_len: int | None = None,
) -> tuple[Tensor, float]:
    """The angle that each pair of entries turns by from one position to the next, and the attention factor.

    Shapes: → (rotary_dim / 2,), float64 on the CPU, in radians; and a number that cos and sin are multiplied with.
    Args:
        rotary_dim: rotated entries of a head, even; a partial_rotary_factor is in it already.
        base: theta; ``scaling["rope_theta"]`` or 10,000 if None.
        scaling: what a Transformers config has as ``rope_parameters`` or ``rope_scaling``: ``rope_type`` is default,
            linear, dynamic (NTK), yarn (NTK by parts), llama3 or longrope, with the numbers of its kind.
        max_positions: the config's ``max_position_embeddings``: what dynamic scaling starts from, and what stands for a
            factor of yarn and longrope that is not given.
        seq_len: the longest sequence: dynamic and longrope turn slower beyond the original length. max_positions, or
            the original length, if None.
    Raises: InvalidCallError for what the kind of scaling does not know, lacks, or cannot be.
    Source: arXiv:2104.09864; linear arXiv:2306.15595; yarn arXiv:2309.00071; Llama 3 arXiv:2407.21783; longrope
        arXiv:2402.13753.
    """
    if type(rotary_dim) is not int or not 2 <= rotary_dim <= _MOST_DIM or rotary_dim % 2:
        wanted = f"at most {_MOST_DIM}" if type(rotary_dim) is int and rotary_dim > 0 == rotary_dim % 2 else "above 0"
        problem = f"rotary_dim: wanted an even number {wanted}, got {told(rotary_dim)}"
        raise InvalidCallError("rope_frequencies", [problem])
    lengths = {"max_positions": max_positions, "seq_len": seq_len}
    problems = [
        f"{name}: wanted a number of positions above 0 or None, got {told(value)}"
        for name, value in lengths.items()
        if value is not None and (type(value) is not int or value < 1)
    ]
    config: Any = {} if scaling is None else scaling
    if not isinstance(config, Mapping):
        problems.append(f"scaling: wanted a mapping as a config has it, got {told(scaling)}")
    refuse("rope_frequencies", problems)
    given = dict(config)
    kind = given.get("rope_type") or given.get("type") or "default"
    kind = _ALIASES.get(kind, kind) if isinstance(kind, str) else kind
    problems = _problems(kind, given)
    refuse("rope_frequencies", problems)
    wanted_base = given.get("rope_theta") or DEFAULT_BASE if base is None else base
    try:
        theta = float(wanted_base)
        frequencies, factor = _KINDS[kind](rotary_dim, theta, _Numbers(kind, given, max_positions), seq_len)
    except (ArithmeticError, TypeError, ValueError) as error:
        if isinstance(error, InvalidCallError):
            raise
        frequencies, factor = torch.full((1,), torch.nan), math.nan
    if not (frequencies.isfinite().all() and math.isfinite(factor)):
        problem = (
            f"wanted numbers that give finite angles, got base {told(wanted_base)}, rotary_dim {rotary_dim}, "
            f"scaling {told(given)}"
        )
        raise InvalidCallError("rope_frequencies", [problem])
    return frequencies, factor


def _problems(kind: str, given: Scaling) -> list[str]:
    if not isinstance(kind, str) or kind not in _KEYS:
        return [f"scaling: wanted a rope_type of {', '.join(_KEYS)}, got {kind!r}"]
    unknown = sorted(name for name in set(given) - _COMMON - _KEYS[kind] if given[name] is not None)
    known = ", ".join(sorted(_KEYS[kind])) or "no further numbers"
    return [f"scaling: {kind} has {known}; got {', '.join(unknown)}"] if unknown else []


class _Numbers:
    """The numbers of a scaling; asking for one that is not there says so."""

    def __init__(self, kind: str, given: Scaling, max_positions: int | None) -> None:
        self.kind, self.given, self.max_positions = kind, given, max_positions

    def get(self, name: str, default: float | None = None) -> float:
        """A number, or what stands for it. Raises: InvalidCallError where nothing does."""
        value = self.given.get(name)
        value = default if value is None else value
        if value is None:
            raise InvalidCallError("rope_frequencies", [f"scaling: {self.kind} wants {name}, got none"])
        return float(value)

    def original(self) -> float:
        """The length that the model was trained on before it was stretched."""
        return self.get("original_max_position_embeddings", self.max_positions)

    def factor(self) -> float:
        """How many times longer it shall be."""
        longer = None if self.max_positions is None else self.max_positions / self.original()
        return self.get("factor", longer)


def _plain(dim: int, theta: float) -> Tensor:
    return theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def _default(dim: int, theta: float, numbers: _Numbers, seq_len: int | None) -> tuple[Tensor, float]:
    return _plain(dim, theta), 1.0


def _linear(dim: int, theta: float, numbers: _Numbers, seq_len: int | None) -> tuple[Tensor, float]:
    """Positions lie closer to each other."""
    return _plain(dim, theta) / numbers.get("factor"), 1.0


def _dynamic(dim: int, theta: float, numbers: _Numbers, seq_len: int | None) -> tuple[Tensor, float]:
    """A larger base, the longer the sequence: the first pair turns as ever, the last as linear scaling has it."""
    original = numbers.max_positions or numbers.original()
    factor, longest = numbers.get("factor"), max(seq_len or 0, original)
    stretched = factor * longest / original - (factor - 1.0)
    return _plain(dim, theta * stretched ** (dim / (dim - 2))), 1.0


def _yarn(dim: int, theta: float, numbers: _Numbers, seq_len: int | None) -> tuple[Tensor, float]:
    """Pairs that turn often within the original length stay, those that turn less than once are stretched."""
    factor, original = numbers.factor(), numbers.original()

    def pair_that_turns(times: float) -> float:
        """The place of the pair that makes so many turns within the original length, between places, too."""
        return dim * math.log(original / (times * 2.0 * math.pi)) / (2.0 * math.log(theta))

    first = pair_that_turns(float(numbers.given.get("beta_fast") or 32.0))
    last = pair_that_turns(float(numbers.given.get("beta_slow") or 1.0))
    if numbers.given.get("truncate", True):
        first, last = float(math.floor(first)), float(math.ceil(last))
    first, last = max(first, 0.0), min(last, dim - 1.0)
    width = (last - first) or 0.001
    stretched = ((torch.arange(dim // 2, dtype=torch.float64) - first) / width).clamp(0.0, 1.0)
    plain = _plain(dim, theta)
    return plain * (1.0 - stretched) + plain / factor * stretched, _yarn_attention(factor, numbers)


def _yarn_attention(factor: float, numbers: _Numbers) -> float:
    """What keeps the scores as sharp as they were."""

    def sharpness(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    given = numbers.given
    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    if given.get("mscale") and given.get("mscale_all_dim"):
        return sharpness(given["mscale"]) / sharpness(given["mscale_all_dim"])
    return sharpness(1.0)


def _llama3(dim: int, theta: float, numbers: _Numbers, seq_len: int | None) -> tuple[Tensor, float]:
    """Waves much shorter than the original length stay, longer ones are stretched, between them a blend."""
    original, factor = numbers.original(), numbers.get("factor")
    low, high = numbers.get("low_freq_factor"), numbers.get("high_freq_factor")
    plain = _plain(dim, theta)
    turns = original * plain / (2.0 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return plain * kept + plain / factor * (1.0 - kept), 1.0


def _longrope(dim: int, theta: float, numbers: _Numbers, seq_len: int | None) -> tuple[Tensor, float]:
    """A factor for each pair, found by search: one list up to the original length, another one beyond."""
    original, factor = numbers.original(), numbers.factor()
    name = "long_factor" if (seq_len or 0) > original else "short_factor"
    factors = numbers.given.get(name)
    if not isinstance(factors, (list, tuple)) or len(factors) != dim // 2:
        got = len(factors) if isinstance(factors, (list, tuple)) else factors
        raise InvalidCallError("rope_frequencies", [f"scaling: longrope wants {dim // 2} numbers in {name}, got {got}"])
    sharper = math.sqrt(1.0 + math.log(factor) / math.log(original)) if factor > 1.0 else 1.0
    return _plain(dim, theta) / torch.tensor(factors, dtype=torch.float64), numbers.get("attention_factor", sharper)


_KINDS: dict[str, Callable[[int, float, _Numbers, int | None], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
}
