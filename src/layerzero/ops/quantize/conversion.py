"""Weights made, laid out anew and read from files: functions of their own, so that none of it is done in silence."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from layerzero.core.arguments import told
from layerzero.core.errors import InvalidCallError, PolicyError, refuse
from layerzero.core.reasons import ReasonCode
from layerzero.ops.quantize.gguf import KINDS
from layerzero.ops.quantize.groups import GROUPED
from layerzero.ops.quantize.schemes import LOSSES, SCHEMES, conversion, format_problems, scheme_of
from layerzero.ops.quantize.weight import QuantizedWeight
from layerzero.ops.quantize.weight_format import Fields, WeightFormat

_WHOLE = re.compile(r"int([2-8])")

PATHS: Mapping[str, tuple[str, ...]] = {"nvfp4": ("int4", "mxfp4"), "int4": ("mxfp4",), "mxfp4": ("int4",)}
"""By format, those in place of it where no fast kernel takes it, the first one first.

Each holds other numbers: a weight that is quantised already is quantised anew, and loses again.
"""

PRIORITIES = ("balanced", "high", "performance")
"""What comes first: a path's own order; what loses least; what the device computes in."""


def profiled(profile: Mapping[str, Any]) -> None:
    """Check what a model loses in formats. Raises: PolicyError for an unknown format and for what is no share."""
    for name, loss in profile.items():
        if name not in LOSSES:
            raise PolicyError(f"wanted formats, {', '.join(LOSSES)}, got {name!r}")
        if type(loss) not in (int, float) or not loss >= 0:
            raise PolicyError(f"wanted a share from 0, as 0.05, for {name}, got {told(loss)}")


def ranked(names: Iterable[str], policy: Any, native: Collection[str] = ()) -> list[str]:
    """Formats in the order of the settings ``quant.*`` of a policy; ``native`` are those that the device computes in.

    Ranks are what normal numbers lose (:data:`LOSSES`), unless a model's profile says otherwise.
    """
    if policy["quant.priority"] == "high":
        losses = {**LOSSES, **dict(policy["quant.profile"])}
        return sorted(names, key=lambda name: losses[name.partition(":")[0]])
    performance = policy["quant.priority"] == "performance"
    return sorted(names, key=lambda name: performance and name not in native)


def usual(name: str) -> WeightFormat:
    """The format of a text; of a name alone its usual form, as groups of 128 of ``"int4"`` and ``"awq"``."""
    if isinstance(name, str) and (whole := _WHOLE.fullmatch(name)):
        return WeightFormat("compressed-tensors", bits=int(whole[1]), group=128)
    of = WeightFormat.of(name)
    return WeightFormat.of(scheme_of(of).example) if name in SCHEMES and format_problems(of) else of


def quantize_weight(
    weight: Tensor,
    format: WeightFormat | str = "int4",  # noqa: A002  # what it is everywhere
    *,
    group_size: int | None = None,
    zero_points: bool | None = None,
    accuracy: float | None = None,
) -> QuantizedWeight:
    """Quantise a weight, each number to the nearest that the format holds.

        weight = lz.quantize_weight(linear.weight, "int4", group_size=128)

    Args:
        weight: (N, K), floating and finite; or (E, N, K), each expert by itself.
        format: ``"int2"`` to ``"int8"``, as compressed-tensors lays them out; or a format or its text, such as
            ``"awq:bits=4,group=128,zeros=stored"``, ``"fp8:group=128,rows=128"``, ``"mxfp4"``, ``"nvfp4"`` or
            ``"nf4:group=64"``. ``"gptq"``, ``"awq"`` and ``"marlin"`` have 4 bits and groups of 128, ``"nf4"`` of 64.
        group_size: of ``"int2"`` to ``"int8"``, the columns that share a scale, 128 if None; 0 or -1 for a row.
        zero_points: of these, whether codes go from each group's least number to its largest; they do not if None.
        accuracy: how far the numbers may be from the weight's, as a share of their norm; None for however far.
    Scales of whole numbers have the weight's dtype; most kernels for four bits read bfloat16. Each group gets that of
    five scales which loses least: the largest code stands for its largest number, or for 0.95 to 0.8 of it.
    Nothing flows back.
    Raises: InvalidCallError for a weight or a format that does not fit, and for formats that are read and not made
        (GGUF, act-order); with QUANT_FORMAT_UNSUPPORTED for an unknown one, with QUANT_ACCURACY_THRESHOLD_EXCEEDED
        where more is lost than ``accuracy`` allows.
    """
    whole = _WHOLE.fullmatch(format) if isinstance(format, str) else None
    if whole is not None:
        zeros = "stored" if zero_points else "none"
        group = 128 if group_size is None else 0 if group_size == -1 else group_size
        of = WeightFormat("compressed-tensors", bits=int(whole[1]), group=group, zeros=zeros)
        problems = format_problems(of)
    else:
        of = format if isinstance(format, WeightFormat) else usual(format)
        if of.scheme not in SCHEMES:
            problem = f"format: wanted one of {', '.join((*LOSSES, *GROUPED))}, got {told(format)}"
            raise InvalidCallError("quantize_weight", [problem], ReasonCode.QUANT_FORMAT_UNSUPPORTED)
        given = {"group_size": group_size, "zero_points": zero_points}
        problems = format_problems(of) + [
            f"{name}: wanted None, since the format {of} says it, got {each!r}"
            for name, each in given.items()
            if each is not None
        ]
    fits = isinstance(weight, Tensor) and weight.is_floating_point() and weight.itemsize > 1
    if not fits or weight.ndim not in (2, 3):
        problems.append(f"weight: wanted a floating tensor (N, K) or (E, N, K) of 16 bits or more, got {told(weight)}")
    elif not problems:
        problems += scheme_of(of).size_problems(of, *weight.shape[-2:])
        if weight.is_meta or not bool(weight.isfinite().all()):
            problems.append(f"weight: wanted finite numbers, got {'none' if weight.is_meta else 'one that is not'}")
    if accuracy is not None and (type(accuracy) not in (int, float) or not accuracy >= 0):
        problems.append(f"accuracy: wanted a number from 0 or None, got {told(accuracy)}")
    if of.permuted:
        problems.append(f"permuted: wanted False, since no act-order is made here, got {of}")
    refuse("quantize_weight", problems)
    with torch.no_grad():
        numbers = weight.detach().float() if weight.dtype is torch.float64 else weight.detach()
        parts = [
            QuantizedWeight(of, tuple(each.shape), *scheme_of(of).quantized(of, each))
            for each in (numbers if numbers.ndim == 3 else numbers.unsqueeze(0))
        ]
        made = parts[0] if numbers.ndim == 2 else QuantizedWeight.stack(parts)
        if accuracy is not None:
            _near_enough(made, numbers.to(torch.float32), accuracy)
        return made


def _near_enough(made: QuantizedWeight, numbers: Tensor, accuracy: float) -> None:
    """Raises: InvalidCallError where a weight lost more than is allowed."""
    lost = float((made.dequantized(torch.float32) - numbers).norm() / numbers.norm().clamp(min=1e-30))
    if lost <= accuracy:
        return
    finer = [f"{name} loses {loss:.2g} of normal numbers" for name, loss in LOSSES.items() if loss <= accuracy]
    step = finer[-1] if finer else "no format here loses so little"
    wish = f"wanted a loss of at most {accuracy:g} of the numbers' norm, got {lost:.2g} with {made.format}"
    code = ReasonCode.QUANT_ACCURACY_THRESHOLD_EXCEEDED
    raise InvalidCallError("quantize_weight", [f"accuracy: {wish}; {step}"], code)


def repack(weight: QuantizedWeight, format: WeightFormat | str) -> QuantizedWeight:  # noqa: A002
    """Lay whole numbers by group out as another format has them: the same numbers, bit for bit.

        lz.repack(weight, "awq")

    Args:
        format: a format or its text; a scheme alone keeps bits, group and order of the weight.
    Raises: InvalidCallError (REQUANTIZATION_REQUIRED) where the format cannot hold these very numbers.
    """
    if not isinstance(weight, QuantizedWeight):
        raise InvalidCallError("repack", [f"weight: wanted a QuantizedWeight, got {told(weight)}"])
    if len(weight.shape) == 3:
        return QuantizedWeight.stack([repack(each, format) for each in weight])  # type: ignore[attr-defined]
    codes, of = weight.codes, format if isinstance(format, WeightFormat) else WeightFormat.of(format)
    scheme = GROUPED.get(of.scheme)
    if scheme is None:
        problem = f"format: wanted one of {', '.join(GROUPED)}, got {of}; {conversion(of, weight.shape)}"
        raise InvalidCallError("repack", [problem], ReasonCode.REQUANTIZATION_REQUIRED)
    if of == WeightFormat(of.scheme):
        zeros = "none" if scheme.zeros == ("none",) or (codes.zero is None and "none" in scheme.zeros) else "stored"
        group = 0 if codes.group == weight.shape[1] else codes.group
        of = WeightFormat(of.scheme, bits=codes.bits, group=group, zeros=zeros, permuted=codes.group_index is not None)
    problems = format_problems(of) or scheme.size_problems(of, *weight.shape)
    held = {"bits": (codes.bits, of.bits), "group": (codes.group, of.group or weight.shape[1])}
    held["permuted"] = codes.group_index is not None, of.permuted
    problems += [
        f"{name}: wanted {mine}, which the weight has, got {its}" for name, (mine, its) in held.items() if mine != its
    ]
    if of.zeros == "none" and codes.zero_points is not None:
        problems.append(f"zeros: wanted a format with zero points, which the weight has, got {of}")
    if problems:
        problems[-1] += f"; {conversion(of, weight.shape)}"
        raise InvalidCallError("repack", problems, ReasonCode.REQUANTIZATION_REQUIRED)
    return QuantizedWeight.unchecked(of, weight.shape, scheme.encoded(of, codes))


def read_gguf(path: str | Path, names: Iterable[str] | None = None) -> dict[str, QuantizedWeight | Tensor]:
    """Read the tensors of a GGUF file, by name: those of F32, F16 and BF16 as they are, others as QuantizedWeight.

        weights = lz.read_gguf("model-Q4_K_M.gguf", ["blk.0.attn_q.weight"])

    Quantised tensors of three axes (experts) are stacks (E, N, K). They are copied, on the CPU. It needs ``gguf``.

    Args:
        names: those that are wanted; all if None.
    Raises: InvalidCallError for a file that is none or is cut, for names that it has not, and for types that are
        unknown here; ImportError without ``gguf``.
    """
    try:
        import gguf
    except ImportError as error:
        raise ImportError("read_gguf: wanted the package gguf, got none here; pip install gguf") from error
    try:
        found = {each.name: each for each in gguf.GGUFReader(str(path)).tensors}
    except (ValueError, KeyError, IndexError) as error:  # what gguf 0.19 raises of damaged files
        problem = f"path: wanted a whole GGUF file, got {path}, which gguf does not read: {error}"
        raise InvalidCallError("read_gguf", [problem]) from error
    wanted = list(found) if names is None else list(names)
    problems = [
        f"names: wanted some of the {len(found)} tensors of {path}, got {name!r}"
        for name in wanted
        if name not in found
    ]
    types = {name: found[name].tensor_type.name for name in wanted if name in found}
    problems += [
        f"{name}: wanted F32, F16, BF16, {', '.join(KINDS)}, got {kind}; gguf.dequantize may know it"
        for name, kind in types.items()
        if kind not in (*_PLAIN, *KINDS)
    ]
    refuse("read_gguf", problems)
    return {name: _read(found[name], types[name]) for name in wanted}


_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _read(tensor: Any, kind: str) -> QuantizedWeight | Tensor:
    shape = tuple(int(each) for each in reversed(tensor.shape))
    data = torch.from_numpy(tensor.data.copy())
    if kind in _PLAIN:
        return data.contiguous().view(torch.uint8).flatten().view(_PLAIN[kind]).view(shape)
    of, columns = WeightFormat("gguf", kind), shape[-1]
    rows = data.view(*shape[:-1], columns // KINDS[kind].block * KINDS[kind].size)
    return QuantizedWeight(of, shape, *Fields(rows))
