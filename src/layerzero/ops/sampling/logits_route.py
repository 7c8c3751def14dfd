"""The functions that change logits before a draw, or ask of them after it: signatures, checks of a call, routes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from layerzero.core.errors import InvalidCallError
from layerzero.core.operation import Function, Operation, Routed
from layerzero.ops.checks import check_dense
from layerzero.ops.sampling import logits as declare
from layerzero.ops.sampling import logits_draw as draw


def apply_penalties(
    logits: Tensor,
    output_ids: Tensor | None = None,
    prompt_ids: Tensor | None = None,
    *,
    output_counts: Tensor | None = None,
    prompt_mask: Tensor | None = None,
    repetition: float | Tensor | None = None,
    presence: float | Tensor | None = None,
    frequency: float | Tensor | None = None,
) -> Tensor:
    """Make what was said already less likely: by repetition first, then by frequency, then by presence.

    Repetition divides logits above 0 and multiplies those below, of places in the output or the prompt. Frequency is
    taken off for each time that a place is in the output, presence once if it is there.

    Shapes: logits (*, V), output_ids (*, L), prompt_ids (*, P) → (*, V)
    Dtype: logits floating, ids and counts int32 or int64, masks bool; computes in float32 or wider; returns
        logits.dtype.
    Args:
        output_ids: the tokens that were said, from 0 to V - 1; -1 is none.
        prompt_ids: those of the prompt, which count for repetition alone.
        output_counts: in place of output_ids, how often each place was said, (*, V).
        prompt_mask: in place of prompt_ids, whether each place is in the prompt, (*, V).
        repetition: 1e-4 to 1e4; None does nothing, as 1.
        presence, frequency: -1e4 to 1e4; None does nothing, as 0.
        Each is a number for all rows, or a float32 tensor (*) with one for each row.
    Raises: InvalidCallError for what does not fit, ids and counts together, and on a CPU for ids beyond the vocabulary.
    Source: arXiv:1909.05858 for repetition, the OpenAI interface for presence and frequency.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def add_logit_bias(logits: Tensor, bias_ids: Tensor, bias: Tensor) -> Tensor:
    """Add numbers to a few places of each row; ``-inf`` forbids one.

    Shapes: logits (*, V), bias_ids (*, N), bias (*, N) → (*, V)
    Dtype: logits floating, bias_ids int32 or int64, bias float32; computes in float32 or wider; returns logits.dtype.
    Args:
        bias_ids: the places, from 0 to V - 1; -1 is none; numbers of a place that is named twice are added up.
    Raises: InvalidCallError for what does not fit, and on a CPU for places beyond the vocabulary.
    Source: the OpenAI interface.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def chosen_logprobs(
    logits: Tensor,
    ids: Tensor,
    *,
    temperature: float | Tensor | None = None,
) -> Tensor:
    """Tell the logarithm of the probability that one place of each row has.

    Shapes: logits (*, V), ids (*) → (*)
    Dtype: logits floating, ids int32 or int64; computes in float32 or wider; returns float32.
    Args:
        ids: from 0 to V - 1.
        temperature: what logits are divided by, from 1e-6; 1 if None. Or a float32 tensor (*) with one for each row,
            where 0 and less is 1e-6.
    Raises: InvalidCallError for what does not fit, and on a CPU for ids beyond the vocabulary.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def _route_penalties(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    check_dense("apply_penalties", arguments)
    problems = []
    for ids, counted in (("output_ids", "output_counts"), ("prompt_ids", "prompt_mask")):
        if arguments[ids] is not None and arguments[counted] is not None:
            problems.append(f"{ids}: wanted {ids} or {counted}, got both")
    by_ids = arguments["output_ids"] is not None
    if not problems and not by_ids and arguments["output_counts"] is None:
        problems.append("output_ids: wanted output_ids or output_counts, got neither; ids (*, 0) are an empty output")
    strange = "prompt_mask" if by_ids else "prompt_ids"
    if not problems and arguments[strange] is not None:
        with_it, wanted = ("output_ids", "prompt_ids") if by_ids else ("output_counts", "prompt_mask")
        problems.append(f"{strange}: wanted {wanted} beside {with_it}, got {strange}")
    problems += [
        f"{each.name}: wanted a number or a tensor with one for each row, got both"
        for each in declare.PENALTIES_BY
        if arguments[each.name] is not None and arguments[f"{each.name}_by_row"] is not None
    ]
    if problems:
        raise InvalidCallError("apply_penalties", problems)
    operation = declare.PENALTIES if by_ids else declare.COUNTED
    return _routed("apply_penalties", operation, {each: arguments[each] for each in operation.schema.arguments})


def _routed(name: str, operation: Operation, arguments: dict[str, Any]) -> Routed:
    problems = operation.schema.validate(**arguments) or _row_problems(operation, arguments)
    if problems:
        raise InvalidCallError(name, problems)
    lengths = tuple(axis.name for axis in operation.schema.axes if axis.live and not axis.leading)
    return Routed(operation, arguments, varies=("...", "vocab", *lengths))


def _row_problems(operation: Operation, arguments: dict[str, Any]) -> list[str]:
    """What the schema does not ask: that every tensor has the rows of the logits, and that there are places."""
    shape = tuple(arguments["logits"].shape)
    rows, problems = shape[:-1], []
    if shape[-1] == 0:
        problems.append(f"logits: wanted at least one place in the last axis, got {shape}")
    for tensor in operation.schema.inputs[1:]:
        value = arguments.get(tensor.name)
        own = len(tensor.shape_vars) - 1
        if value is not None and tuple(value.shape[: value.ndim - own]) != rows:
            problems.append(f"{tensor.label}: wanted the rows {rows} of logits, got shape {tuple(value.shape)}")
    return problems


def _route_bias(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    check_dense("add_logit_bias", arguments)
    return _routed("add_logit_bias", declare.BIAS, arguments)


def _route_logprobs(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    check_dense("chosen_logprobs", arguments)
    if arguments["temperature"] is not None and arguments["temperature_by_row"] is not None:
        told = "temperature: wanted a number or a tensor with one for each row, got both"
        raise InvalidCallError("chosen_logprobs", [told])
    return _routed("chosen_logprobs", declare.LOGPROBS, arguments)


FUNCTIONS = (
    Function(
        "apply_penalties",
        apply_penalties,
        _route_penalties,
        (declare.PENALTIES, declare.COUNTED),
        draw=draw.apply_penalties,
        weight=1,
        renamed={f"row_{each.name}": each.name for each in declare.PENALTIES_BY},
    ),
    Function("add_logit_bias", add_logit_bias, _route_bias, (declare.BIAS,), draw=draw.add_logit_bias, weight=1),
    Function(
        "chosen_logprobs",
        chosen_logprobs,
        _route_logprobs,
        (declare.LOGPROBS,),
        draw=draw.chosen_logprobs,
        weight=1,
        renamed={"row_temperature": "temperature"},
    ),
)
