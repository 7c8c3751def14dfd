"""What happens to logits before a draw, what they give after it, and the functions that lead there.

sampling.penalties          less of what was said already, by lists of token ids
sampling.penalties.counted  the same by how often each place was said
sampling.bias               numbers added to a few places of each row
sampling.logprobs           the logarithm of the probability of one place of each row
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from layerzero.core.arguments import Axis, Param, Role, TensorSchema
from layerzero.core.dtypes import FLOATING
from layerzero.core.errors import refuse
from layerzero.core.operation import Case, Function, Operation, Random, Routed, Tolerance, Work
from layerzero.core.values import Check, Say
from layerzero.ops.declaration import ROUNDED_TWICE, check_dense, function, given_twice, operation, tensor
from layerzero.ops.sampling import draw, stock
from layerzero.ops.sampling.declare import AXES, COUNTS, TEMPERATURE, TEMPERATURE_BY_ROW, of_rows
from layerzero.ops.sampling.formulas import biased, counts_of, of_row, penalised, tempered

TOLERANCE = ROUNDED_TWICE | {torch.float16: Tolerance(2e-3, 2e-3)}
TOLERANCE_REASON = "twice the rounding of the logits' dtype; numbers of rows are float32"

MOST = 1e4
REPETITION = Param("repetition", float, None, Role.PASSED, 1 / MOST, MOST, example=1.3)
PRESENCE = Param("presence", float, None, Role.PASSED, -MOST, MOST, example=0.5)
FREQUENCY = Param("frequency", float, None, Role.PASSED, -MOST, MOST, example=0.25)
PENALTIES_BY = (REPETITION, PRESENCE, FREQUENCY)

_LOGITS = TensorSchema("logits", ("...", "vocab"), FLOATING)
_SAID = tuple(
    TensorSchema(name, ("...", axis), COUNTS, required, same_dtype=False, indexes=("vocab",), holes=True)
    for name, axis, required in (("output_ids", "output_len", True), ("prompt_ids", "prompt_len", False))
)
_COUNTED = (
    TensorSchema("output_counts", ("...", "vocab"), COUNTS, same_dtype=False),
    TensorSchema("prompt_mask", ("...", "vocab"), frozenset({torch.bool}), required=False, same_dtype=False),
)
_ROWS = tuple(of_rows(each) for each in PENALTIES_BY)
_SIZES = {"small": (33, 32), "odd": (5, 1003), "llama2_batch": (8, 32000), "llama3_decode": (1, 128256)}


def _cases(params: Mapping[str, object] | None = None, given: tuple[str, ...] = (), **more: int) -> tuple[Case, ...]:
    return tuple(
        Case(label, {"rows": rows, "vocab": vocab, **more}, params or {}, given)
        for label, (rows, vocab) in _SIZES.items()
    )


def _work(flops: float, read: float, facts: Mapping[str, Any]) -> Work:
    """So many operations for each number, and so many times its bytes read and written."""
    elements = facts["rows"] * facts["vocab"]
    return Work(flops * elements, read * elements * facts["dtype"].itemsize)


def _penalties_reference(
    logits: Tensor, output_ids: Tensor, *, prompt_ids: Tensor | None = None, **numbers: Any
) -> Tensor:
    """Penalties by ids. Shapes: (*, V), (*, L), (*, P) → (*, V). Dtype: computes in float32 or wider."""
    said = counts_of(output_ids, logits.shape[-1])
    asked = None if prompt_ids is None else counts_of(prompt_ids, logits.shape[-1]) > 0
    return _counted_reference(logits, said, prompt_mask=asked, **numbers)


def _counted_reference(
    logits: Tensor, output_counts: Tensor, *, prompt_mask: Tensor | None = None, **numbers: Any
) -> Tensor:
    """Penalties by counts. Shapes: (*, V), (*, V), (*, V) → (*, V). Dtype: computes in float32 or wider."""
    seen = output_counts > 0 if prompt_mask is None else (output_counts > 0) | prompt_mask
    by = [of_row(numbers.get(each.name), numbers.get(f"{each.name}_by_row")) for each in PENALTIES_BY]
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return penalised(wide, seen, output_counts, *by).to(logits.dtype)


def _penalties(name: str, summary: str, reference: Callable[..., Tensor], of: tuple[TensorSchema, ...]) -> Operation:
    lists = {"output_len": 64, "prompt_len": 128} if of is _SAID else {}
    small = {each.name: each.example for each in PENALTIES_BY}
    lengths = (Axis("output_len", scales=True, live=True), Axis("prompt_len", scales=True, live=True))
    return operation(
        name,
        summary,
        reference,
        inputs=(_LOGITS, *of, *_ROWS),
        outputs=("output: ... vocab",),
        params=PENALTIES_BY,
        axes=(*AXES, *(lengths if of is _SAID else ())),
        cases=_cases(small, tuple(each.name for each in of), **lists),
        tolerance=TOLERANCE,
        tolerance_reason=TOLERANCE_REASON,
        examples=_examples,
        check_values=_check_rows,
        work=functools.partial(_work, 4.0, 2.0),
        stock=stock.penalties,
    )


def _check_rows(**given: Any) -> list[Check]:
    """What numbers of rows must be, as one for all of them must."""
    rows = [(each, given.get(f"{each.name}_by_row")) for each in PENALTIES_BY]
    return [
        Check(~((values >= each.least) & (values <= each.most)), None, _outside(each), most=1)
        for each, values in rows
        if values is not None
    ]


def _outside(param: Param) -> Say:
    wanted = f"{param.name}: wanted {param.least:g} to {param.most:g} for each row"
    return lambda row, _: f"{wanted}, got another" + (f" in row {row[0] if len(row) == 1 else row}" if row else "")


def _examples(case: Case, dtype: torch.dtype, device: torch.device, generator: Random) -> dict[str, Any]:
    """Numbers of rows in place of those for all, and counts of places that were mostly never said."""
    if device.type == "meta":
        return {}
    made: dict[str, Any] = {}
    where, rows = device if generator is None else generator.device, case.sizes["rows"]
    for name in (each.removesuffix("_by_row") for each in case.given if each.endswith("_by_row")):
        made[name] = None
        made[f"{name}_by_row"] = (torch.rand(rows, generator=generator, device=where) + 0.75).to(device)
    if "output_counts" in case.given:
        often = torch.rand(rows, case.sizes["vocab"], generator=generator, device=where) * 8 - 6
        made["output_counts"] = often.clamp(0).ceil().to(device, torch.int32)
    return made


PENALTIES = _penalties("sampling.penalties", "Less of the token ids that were said", _penalties_reference, _SAID)
COUNTED = _penalties("sampling.penalties.counted", "Less of what was said, by how often", _counted_reference, _COUNTED)


def add_logit_bias(logits: Tensor, bias_ids: Tensor, bias: Tensor) -> Tensor:
    """Add numbers to a few places of each row; ``-inf`` forbids one.

    Shapes: logits (*, V), bias_ids (*, N), bias (*, N) → (*, V)
    Dtype: logits floating, bias_ids int32 or int64, bias float32; computes in float32 or wider; returns logits.dtype.
    Args:
        bias_ids: the places, from 0 to V - 1; -1 is none; numbers of a place that is named twice are added up.
    Raises: InvalidCallError for what does not fit, and on a CPU for places beyond the vocabulary.
    Source: the OpenAI interface.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    return biased(wide, bias_ids, bias).to(logits.dtype)


BIAS = operation(
    "sampling.bias",
    "Numbers added to a few places of each row",
    add_logit_bias,
    inputs=(
        _LOGITS,
        tensor("bias_ids: ... bias_len", COUNTS, same_dtype=False, indexes=("vocab",), holes=True),
        tensor("bias: ... bias_len", frozenset({torch.float32}), same_dtype=False),
    ),
    outputs=("output: ... vocab",),
    axes=(*AXES, Axis("bias_len", scales=True, live=True)),
    cases=_cases(bias_len=16),
    tolerance=TOLERANCE,
    tolerance_reason=TOLERANCE_REASON,
    work=functools.partial(_work, 0.0, 2.0),
    stock=stock.bias,
)


def _logprobs_reference(
    logits: Tensor, ids: Tensor, *, temperature: float | None = None, temperature_by_row: Tensor | None = None
) -> Tensor:
    """The log-probability of a place of each row. Shapes: (*, V), (*) → (*). Dtype: computes in float32 or wider."""
    wide = tempered(logits.to(torch.promote_types(logits.dtype, torch.float32)), temperature, temperature_by_row)
    return wide.log_softmax(-1).gather(-1, ids.long().unsqueeze(-1)).squeeze(-1).float()


LOGPROBS = operation(
    "sampling.logprobs",
    "The log-probability of one place of each row",
    _logprobs_reference,
    inputs=(_LOGITS, tensor("ids: ...", COUNTS, same_dtype=False, indexes=("vocab",)), TEMPERATURE_BY_ROW),
    outputs=(tensor("logprobs: ...", frozenset({torch.float32}), same_dtype=False),),
    params=(TEMPERATURE,),
    axes=AXES,
    cases=_cases(),
    tolerance=dict.fromkeys(TOLERANCE, Tolerance(1e-5, 3e-5)),
    tolerance_reason="logits are read as they are and summed in float32, whose steps at 50 are 4e-6",
    examples=_examples,
    work=functools.partial(_work, 4.0, 1.0),
    stock=stock.logprobs,
)

OPERATIONS = (PENALTIES, COUNTED, BIAS, LOGPROBS)


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
        Each is a number for all rows, or a float32 tensor (*) with one for each row. A tensor's numbers are read in
            debug mode alone, since that waits for a GPU. A repetition of 0 gives inf, NaN gives NaN, a negative one
            turns signs around. Check them where a request comes.
    Raises: InvalidCallError for what does not fit, ids and counts together, on a CPU for ids beyond the vocabulary, and
        in debug mode for numbers of rows that are none.
    Source: arXiv:1909.05858 for repetition, the OpenAI interface for presence and frequency.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def chosen_logprobs(logits: Tensor, ids: Tensor, *, temperature: float | Tensor | None = None) -> Tensor:
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
        problems.append(f"{strange}: wanted {wanted} with {with_it}, got {strange}")
    problems += given_twice(arguments, *(each.name for each in PENALTIES_BY))
    refuse("apply_penalties", problems)
    operation = PENALTIES if by_ids else COUNTED
    given = {each: arguments[each] for each in operation.schema.arguments}
    problems = operation.schema.validate(**given) or row_problems(operation, given)
    refuse("apply_penalties", problems)
    return Routed(operation, given, varies=_varying(operation))


def _varying(operation: Operation) -> tuple[str, ...]:
    return ("...", "vocab", *(axis.name for axis in operation.schema.axes if axis.live and not axis.leading))


def row_problems(operation: Operation, arguments: dict[str, Any]) -> list[str]:
    """What the schema does not ask: that every tensor has the rows of the logits, and that there are places."""
    shape = tuple(arguments["logits"].shape)
    rows, found = shape[:-1], []
    if shape[-1] == 0:
        found.append(f"logits: wanted at least one place in the last axis, got {shape}")
    for each in operation.schema.inputs[1:]:
        value = arguments.get(each.name)
        own = len(each.shape_vars) - 1
        if value is not None and tuple(value.shape[: value.ndim - own]) != rows:
            found.append(f"{each.label}: wanted the rows {rows} of logits, got shape {tuple(value.shape)}")
    return found


FUNCTIONS = (
    Function(
        "apply_penalties",
        apply_penalties,
        _route_penalties,
        (PENALTIES, COUNTED),
        draw=draw.apply_penalties,
        weight=1,
        renamed={f"row_{each.name}": each.name for each in PENALTIES_BY},
    ),
    function(
        "add_logit_bias",
        BIAS,
        varies=_varying(BIAS),
        fits=functools.partial(row_problems, BIAS),
        draw=draw.add_logit_bias,
        weight=1,
    ),
    function(
        "chosen_logprobs",
        LOGPROBS,
        varies=_varying(LOGPROBS),
        values=lambda arguments: given_twice(arguments, "temperature"),
        fits=functools.partial(row_problems, LOGPROBS),
        signature=chosen_logprobs,
        draw=draw.chosen_logprobs,
        weight=1,
        renamed={"row_temperature": "temperature"},
    ),
)
