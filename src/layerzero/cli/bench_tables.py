"""The table of one call in ``layerzero bench`` and in its page: every kernel, its times and rates, who is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import RenderableType
from rich.text import Text

from layerzero.cli.rows import new_row, new_table
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.tuning.measuring.bench import Benched, Line, Timed

_ABSENT = frozenset({ReasonCode.NOT_INSTALLED, ReasonCode.PLATFORM_MISMATCH})
"""A library that is not here, or made for other hardware: one line for all of them."""


def tables(found: Sequence[Benched]) -> Iterator[RenderableType]:
    """A table for each call, with what stands around it."""
    for each in found:
        yield Text(each.name, style="bold")
        yield Text(described(each), style="dim")
        headers = columns(each.timed)
        table = new_table("", *headers, right=[header for header in headers if header not in ("kernel", "device from")])
        for line in each.lines:
            mark = Text(">", style="bold green") if line.chosen else ""
            new_row(table, mark, Text(line.name, style="bold green" if line.chosen else ""), *cells(line, each.timed))
        yield table
        if each.rough:
            yield Text(f"{each.rough}: these times are rough", style="yellow")
        yield from (Text(text, style="dim") for text in above(each))
        for line in each.lines:
            for told in details(line):
                yield Text(told, style="yellow")
        yield from (Text(text, style="dim") for text in refusals(each.refused))
        yield ""


def described(each: Benched) -> str:
    """What the call must do, what the machine can, and who is chosen."""
    parts = [f"chosen: {each.chosen}"]
    if each.work is not None and each.ceiling is not None:
        parts.append(f"{each.work.bytes / 1e6:.3g} MB and {each.work.flops / 1e9:.3g} GFLOP")
        parts.append(f"ceiling {each.ceiling.gb_s:.3g} GB/s, {each.ceiling.tflop_s:.3g} TFLOP/s, measured")
        parts.append(f"at best {each.ceiling.least_us(each.work):.3g} us from memory")
    return "; ".join(parts)


def columns(timed: Timed) -> list[str]:
    """What stands above the cells of a line, its kernel first."""
    of_call = [] if timed is Timed.DEVICE else ["median us", "p95 us", "noise"]
    of_device = [] if timed is Timed.CALL else ["device us", "device from"]
    return ["kernel", *of_call, *of_device, "GB/s", "TFLOP/s", "of ceiling", "vs torch", "error"]


def cells(line: Line, timed: Timed) -> list[str]:
    """Numbers of a line as text; a kernel without a time has its status in their place."""
    if line.median_us is None or line.p95_us is None:
        return [line.status, *[""] * (len(columns(timed)) - 3), _error(line.error)]
    noise = "" if line.noise is None else f"{100 * line.noise:.1f} %"
    of_call = [] if timed is Timed.DEVICE else [f"{line.median_us:.1f}", f"{line.p95_us:.1f}", noise]
    device = "" if line.device_us is None else f"{line.device_us:.1f}"
    of_device = [] if timed is Timed.CALL else [device, line.device_from]
    share = "" if line.ceiling_share is None else f"{100 * line.ceiling_share:.0f} %"
    share = "above" if line.ceiling_share is not None and line.ceiling_share > 1 else share
    torch_ = "" if line.against_torch is None else f"{line.against_torch:.2f}x"
    rates = ["" if rate is None else f"{rate:.3g}" for rate in (line.gb_s, line.tflop_s)]
    return [*of_call, *of_device, *rates, share, torch_, _error(line.error)]


def above(each: Benched) -> Iterator[str]:
    """Why kernels are quicker than the ceiling allows, in one line for all; nothing where none is."""
    names = [line.name for line in each.lines if line.ceiling_share is not None and line.ceiling_share > 1]
    if names and each.work is not None and each.ceiling is not None:
        from_memory = each.work.bytes / each.ceiling.gb_s / 1e3 >= each.work.flops / each.ceiling.tflop_s / 1e6
        why = (
            "their tensors lie in a cache, and the ceiling is a copy beyond it"
            if from_memory
            else "the ceiling is one square product in this dtype, and this product has a kinder shape"
        )
        yield f"above the ceiling: {', '.join(names)}: {why}"


def details(line: Line) -> Iterator[str]:
    """Why a line has no time, or why its device time is no graph's."""
    if line.detail:
        yield f"{line.name}: {line.detail}"
    if line.device_detail:
        instead = "one launch between two events instead" if line.device_from else "no device time"
        yield f"{line.name}: not captured in a CUDA graph: {line.device_detail}; {instead}"


def _error(error: float | None) -> str:
    return "" if error is None else f"{error:.1e}"


def refusals(refused: Mapping[str, Sequence[Reason]]) -> Iterator[str]:
    """Why kernels may not run: a line each, and one for all whose library or hardware is not here."""
    absent = []
    for kernel, reasons in refused.items():
        if any(reason.code in _ABSENT for reason in reasons):
            absent.append(kernel)
        else:
            yield f"refused: {kernel}: {'; '.join(f'{reason.code}: {reason.message}' for reason in reasons)}"
    if absent:
        yield f"not for this machine: {', '.join(absent)}"
