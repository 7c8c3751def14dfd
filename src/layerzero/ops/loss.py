"""Cross-entropy of classes: of logits, and of hidden states and the weight that makes logits of them.

loss.cross_entropy              the mean or the sum over rows      loss.cross_entropy.rows          the loss of each row
loss.linear_cross_entropy       the same of ``hidden @ weight^T``  loss.linear_cross_entropy.rows   and of each row

Logits of a language model are its largest tensor in training: 4096 tokens of 128,256 classes take 2.1 GB in float32,
and torch keeps three of that size. Kernels of the linear operations hold a few rows of them at a time.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from layerzero.core.arguments import Axis, Param, told
from layerzero.core.dtypes import INDEX
from layerzero.core.errors import refuse
from layerzero.core.operation import Case, Function, Operation, Random, Tolerance, Work
from layerzero.core.values import Check
from layerzero.ops.declaration import NDIM, ROUNDED_TWICE, cases, function, operation, tensor, wide
from layerzero.ops.draw import Draw
from layerzero.ops.linear.declare import OUT_DTYPE, deviation
from layerzero.ops.linear.route import as_default, out_dtype_problems

REDUCTIONS = ("mean", "sum", "none")
IGNORED = -100

TOLERANCE = ROUNDED_TWICE | {torch.float16: Tolerance(2e-3, 4e-3), torch.bfloat16: Tolerance(1e-2, 2e-2)}
TOLERANCE_REASON = (
    "twice the rounding of a loss, and of logits of a few units: a row whose class is certain loses their difference"
)


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Logits within ``softcap`` of 0: ``softcap * tanh(logits / softcap)``."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def by_torch(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """``torch.nn.functional.cross_entropy``; in float32 with a softcap or a z-loss, and where it sums in float16."""
    dtype = logits.dtype
    overflows = dtype is torch.float16 and (label_smoothing or logits.device.type == "cpu")  # over classes, over rows
    if softcap is not None or z_loss or overflows:
        logits = capped(logits.to(wide(dtype)), softcap)
    factors = None if weight is None else weight.detach().to(logits.dtype)  # torch refuses those that want a gradient
    rows, classes = logits, target.long()
    if logits.ndim == 1 and reduction == "mean":  # CUDA gives 0 for one ignored row (torch 2.11, 2026-12-01)
        rows, classes = logits.unsqueeze(0), classes.unsqueeze(0)
    found = functional.cross_entropy(
        rows, classes, factors, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction
    )
    if z_loss:
        counted = target != ignore_index
        extra = z_loss * torch.where(counted, logits.logsumexp(-1).square(), 0.0)
        found = found + (extra if reduction == "none" else extra.sum() / (counted.sum() if reduction == "mean" else 1))
    return found.to(dtype)


def linear_by_torch(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **more: Any,
) -> Tensor:
    """``torch.nn.functional.linear``, then the cross-entropy of all its logits, in the dtype of the result."""
    dtype = out_dtype or hidden.dtype
    logits = functional.linear(hidden, weight, bias).to(dtype)
    of_classes = None if class_weight is None else class_weight.to(dtype)
    found = by_torch(logits.reshape(-1, logits.shape[-1]), target.reshape(-1), weight=of_classes, **more)
    return found.view(target.shape) if found.ndim else found


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """Compare logits with classes, as ``torch.nn.functional.cross_entropy``.

    Shapes: logits (T, V) or (V,), target (T,) or () → (), or target's shape for ``"none"``; weight (V,)
    Dtype: logits and weight floating, the same; target int32 or int64; computes in float32; returns logits.dtype.
    Args:
        weight: factor on the loss of each class; it gets no gradient.
        ignore_index: rows of this class count nowhere; a mean of no row is NaN.
        label_smoothing: share of the loss that is the mean over all classes, 0 to 1.
        softcap: logits become ``softcap * tanh(logits / softcap)`` first, as in Gemma 2.
        z_loss: factor on ``logsumexp(logits)^2``, added to the loss of each row, whatever its class weighs.
        reduction: ``"mean"``, weighted by class, ``"sum"`` or ``"none"``.
    Raises: InvalidCallError for shapes, dtypes or devices that do not fit, for more than two axes (torch has the
        classes second there), and for probabilities as target, which torch's function takes.
        Classes that no logit has are the caller's mistake: an error on a CPU, and in debug mode elsewhere.
    Source: label smoothing arXiv:1512.00567; z-loss arXiv:2204.02311.
    """
    logits, dtype = capped(logits.to(wide(logits.dtype)), softcap), logits.dtype
    counted = target != ignore_index
    places = target.masked_fill(~counted, 0).long()
    of_classes = logits.new_ones(logits.shape[-1]) if weight is None else weight.detach().to(logits.dtype)
    of_rows = of_classes.take(places)  # an index without axes would be read, and shapes alone have no values
    total = logits.logsumexp(-1)
    total = total.masked_fill(total == torch.inf, torch.nan)  # as torch.log_softmax has it
    losses = (1.0 - label_smoothing) * of_rows * (total - logits.gather(-1, places.unsqueeze(-1))[..., 0])
    if label_smoothing:
        losses = losses + label_smoothing * ((total.unsqueeze(-1) - logits) * of_classes).mean(-1)
    extra = z_loss * total.square() if z_loss else torch.zeros_like(losses)
    losses, extra = (torch.where(counted, each, 0.0) for each in (losses, extra))
    if reduction == "none":
        return (losses + extra).to(dtype)
    if reduction == "sum":
        return (losses.sum() + extra.sum()).to(dtype)
    return (losses.sum() / (of_rows * counted).sum() + extra.sum() / counted.sum()).to(dtype)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    reduction: str = "mean",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compare ``hidden @ weight^T + bias`` with classes, without holding all of these logits.

    The mean and the sum compute gradients with the loss, as far as the inputs want them. A second backward pass through
    one result (``retain_graph=True``) computes them once more; gradients of gradients raise.

    Shapes: hidden (*, D), weight (V, D), target (*), bias and class_weight (V,) → (), or (*) for ``"none"``
    Dtype: all but target floating, the same; target int32 or int64; computes in float32; returns out_dtype.
    Args:
        class_weight, ignore_index, label_smoothing, softcap, z_loss, reduction: as of :func:`layerzero.cross_entropy`.
        out_dtype: of the loss: hidden's, or float32 for float16 and bfloat16, as Transformers has it.
    Raises: InvalidCallError for shapes, dtypes or devices that do not fit, and for probabilities as target.
        Classes that no row of weight has are the caller's mistake: an error on a CPU, and in debug mode elsewhere.
    Source: arXiv:2410.10989 (Liger), arXiv:2411.09009 (Cut Cross-Entropy).
    """
    dtype = wide(hidden.dtype)
    logits = functional.linear(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    loss = cross_entropy(
        logits,
        target,
        weight=class_weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        softcap=softcap,
        z_loss=z_loss,
        reduction=reduction,
    )
    return loss.to(out_dtype or hidden.dtype)


def _of_rows(reference: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *tensors, **arguments: reference(*tensors, **arguments, reduction="none")


_ROWS = {"cuda": (64, 512, 2048, 8192), "cpu": (64, 512)}
_TABLES = {"cuda": ((32000, 2048), (128256, 2048), (128256, 4096)), "cpu": ((32000, 512), (32000, 2048))}
"""(classes, features)"""

_SHARED = (
    Param("ignore_index", int, IGNORED, example=1, works=False),
    Param("label_smoothing", float, 0.0, example=0.1),
    Param("softcap", float, None, example=5.0),
    Param("z_loss", float, 0.0, example=0.01),
)


def _target(case: Case, dtype: torch.dtype, device: torch.device, generator: Random) -> dict[str, Tensor]:
    """A class for each row; the schema cannot say that one more number than the classes is allowed."""
    rows, classes = case.sizes["rows"], max(case.sizes["vocab"], 1)
    if device.type == "meta":
        return {"target": torch.empty(rows, dtype=torch.int64, device=device)}
    where = device if generator is None else generator.device
    return {"target": torch.randint(classes, (rows,), generator=generator, device=where).to(device)}


def _linear_examples(case: Case, dtype: torch.dtype, device: torch.device, generator: Random) -> dict[str, Tensor]:
    shape = case.sizes["vocab"], case.sizes["features"]
    where = device if generator is None else generator.device
    weight = torch.randn(shape, generator=generator, device=where, dtype=torch.float32).mul_(deviation(shape[1]))
    return _target(case, dtype, device, generator) | {"weight": weight.to(device, dtype)}


def _check_values(target: Tensor, ignore_index: int = IGNORED, **of: Any) -> list[Check]:
    """Each class is one of the logits', or the ignored one."""
    classes = of["weight"].shape[0] if "hidden" in of else of["logits"].shape[-1]
    wrong = ((target < 0) | (target >= classes)) & (target != ignore_index)
    said = f"target: wanted 0 to {classes - 1}, or {ignore_index} for a row that is ignored, got"
    return [Check(wrong, target.unsqueeze(-1), lambda _, got: f"{said} {got[0]}")]


def _operation(summary: str, reference: Callable[..., Tensor], *, linear: bool, rows: bool) -> Operation:
    columns = "rows vocab features" if linear else "rows vocab"
    sizes = {"small": (33, 96, 64), "llama2_t2048": (2048, 32000, 2048), "llama3_t1024": (1024, 128256, 2048)}
    named = cases(columns, {label: each[: 3 if linear else 2] for label, each in sizes.items()})
    smoothed = {"small_smoothed": sizes["small"][: 3 if linear else 2]}
    more = cases(
        columns, smoothed, {"label_smoothing": 0.1, "softcap": 30.0}, ("class_weight" if linear else "weight",)
    )
    expression = linear_by_torch if linear else by_torch

    def work(facts: Mapping[str, Any]) -> Work:
        """Logits once; or their product, and what makes them."""
        logits = facts["rows"] * facts["vocab"]
        if not linear:
            return Work(6.0 * logits, float(logits * facts["dtype"].itemsize))
        read = (facts["rows"] + facts["vocab"]) * facts["features"]
        return Work(2.0 * logits * facts["features"], float(read * facts["dtype"].itemsize))

    def fake(scores: Tensor, *tensors: Tensor, out_dtype: torch.dtype | None = None, **_: object) -> Tensor:
        return scores.new_empty(tensors[-1].shape if rows else (), dtype=out_dtype or scores.dtype)

    def sweep(device: str, narrow: Mapping[str, Sequence[int]]) -> Iterator[Case]:
        kind = device if device in _ROWS else "cpu"
        tables = dict.fromkeys(table if linear else table[:1] for table in _TABLES[kind])  # logits know no features
        for table in tables if narrow.keys() <= {"rows"} else ():
            for count in narrow.get("rows", _ROWS[kind]):
                yield cases(columns, {f"{count} of {'x'.join(map(str, table))}": (count, *table)})[0]

    brought: tuple[Any, ...] = ("logits: ... vocab", tensor("target: ...", INDEX, same_dtype=False))
    if linear:
        weight = tensor("weight: vocab features", resident=True)
        brought = "hidden: ... features", weight, brought[1], tensor("bias: vocab", required=False)
    of_classes = tensor(f"{'class_weight' if linear else 'weight'}: vocab", required=False)
    axes = (
        Axis("rows", scales=True, live=True, apart=rows, leading=True),
        Axis("vocab", scales=True),
        *((Axis("features", scales=True),) if linear else ()),
        NDIM,
    )
    reduction = () if rows else (Param("reduction", str, "mean", example="sum", works=False),)
    params = (*_SHARED, *reduction, *((OUT_DTYPE,) if linear else ()))
    return operation(
        f"loss.{reference.__name__}{'.rows' if rows else ''}",
        summary,
        _of_rows(reference) if rows else reference,
        inputs=(*brought, of_classes),
        outputs=(tensor("loss: ..." if rows else "loss:", dtype_from="out_dtype" if linear else ""),),
        params=params,
        axes=axes,
        cases=(*named[:1], *more, *named[1:]),
        tolerance=TOLERANCE,
        tolerance_reason=TOLERANCE_REASON,
        fake=fake,
        fixed={"reduction": "none"} if rows else {},
        check_values=_check_values,
        examples=_linear_examples if linear else _target,
        work=work,
        scratch=lambda sizes: 3 * sizes["rows"] * sizes["vocab"],
        sweep=sweep,
        expression=_of_rows(expression) if rows else expression,
    )


CROSS_ENTROPY, CROSS_ENTROPY_ROWS, LINEAR_CROSS_ENTROPY, LINEAR_CROSS_ENTROPY_ROWS = OPERATIONS = tuple(
    _operation(f"Cross-entropy of {of}, {what}", reference, linear=reference is not cross_entropy, rows=rows)
    for reference, of in ((cross_entropy, "logits"), (linear_cross_entropy, "a linear layer"))
    for what, rows in (("over all rows", False), ("of each row", True))
)


_NO_CLASSES = "target: wanted classes (int32 or int64), got probabilities; torch.nn.functional.cross_entropy has them"


def _choose(name: str, reduced: Operation, by_row: Operation, arguments: dict[str, Any]) -> Operation:
    target, reduction = arguments["target"], arguments["reduction"]
    problems = [_NO_CLASSES] * (isinstance(target, Tensor) and target.is_floating_point())
    if reduction not in REDUCTIONS:
        problems.append(f"reduction: wanted {', '.join(REDUCTIONS)}, got {told(reduction)}")
    refuse(name, problems)
    if reduction != "none":
        return reduced
    arguments["reduction"] = None  # the operation of rows has no such argument
    return by_row


def _problems(arguments: dict[str, Any]) -> list[str]:
    linear = "hidden" in arguments
    scores, target, softcap = arguments["hidden" if linear else "logits"], arguments["target"], arguments["softcap"]
    problems = out_dtype_problems({**arguments, "input": scores}) if linear else []
    if not linear and scores.ndim > 2:
        wanted = "(rows, classes): logits.flatten(0, -2) where classes are last"
        problems.append(f"logits: wanted {wanted}, got {tuple(scores.shape)}")
    elif target.shape != scores.shape[:-1]:
        problems.append(f"target: wanted shape {tuple(scores.shape[:-1])}, a class a row, got {tuple(target.shape)}")
    if (arguments["weight"] if linear else scores).shape[0 if linear else -1] == 0 or scores.shape[-1] == 0:
        problems.append(f"{'weight' if linear else 'logits'}: wanted a class at least, got shape {tuple(scores.shape)}")
    if softcap is not None and not (math.isfinite(softcap) and softcap > 0):
        problems.append(f"softcap: wanted a finite number above 0 or None, got {told(softcap)}")
    for name, most in (("label_smoothing", 1.0), ("z_loss", sys.float_info.max)):
        if not 0.0 <= arguments[name] <= most:
            problems.append(f"{name}: wanted 0 to {most:g}, got {told(arguments[name])}")
    return problems


def _draw(draw: Draw, dtype: torch.dtype, *, linear: bool) -> dict[str, Any]:
    """Draw a call: a row, some, or none; of few and of many classes; now and then all rows ignored."""
    vocab, features = draw.of((2, 3, 8, 33, 257, 1000)), draw.of((1, 7, 16, 64, 100))
    shape = draw.leading((0, 1, 2) if linear else (0, 1), (1, 6, 2)[: 3 if linear else 2], (1, 2, 5, 17))
    shape = shape if linear else shape[:1]
    if linear:
        weight = draw.normal((vocab, features), torch.float32).mul_(deviation(features)).to(dtype)
        arguments: dict[str, Any] = {
            "hidden": draw.laid_out(draw.normal((*shape, features), dtype)),
            "weight": draw.laid_out(weight, expand=False),
        }
        arguments |= draw.maybe(0.3, bias=lambda: draw.laid_out(draw.normal((vocab,), dtype)))
        arguments |= draw.maybe(0.2, out_dtype=lambda: wide(dtype))
    else:
        arguments = {"logits": draw.laid_out(draw.normal((*shape, vocab), dtype) * draw.of((1, 4)))}
    target = draw.integers(shape, vocab - 1, draw.of((torch.int64, torch.int32), (3, 1)))
    ignored = draw.of((IGNORED, 0, vocab - 1))  # the call without the argument must mean something too
    if draw.chance(0.5):
        places = draw.uniform(shape, torch.float32) < draw.of((0.3, 0.3, 1.1))
        target = target.masked_fill(places, ignored)
        arguments["ignore_index"] = ignored
    arguments["target"] = draw.laid_out(target, expand=False)
    if draw.chance(0.3):
        name = "class_weight" if linear else "weight"
        arguments[name] = draw.laid_out(draw.uniform((vocab,), torch.float32).add_(0.25).to(dtype))
    draw.poison(arguments, ("hidden",) if linear else ("logits",))
    for name, values in (("label_smoothing", (0.1, 0.5)), ("softcap", (5.0, 30.0)), ("z_loss", (0.01,))):
        if draw.chance(0.25):
            arguments[name] = draw.of(values)
    arguments |= draw.maybe(0.6, reduction=lambda: draw.of(REDUCTIONS))
    return arguments


def _function(name: str, reduced: Operation, by_row: Operation, *, linear: bool) -> Function:
    return function(
        *(name, reduced, by_row),
        choose=functools.partial(_choose, name, reduced, by_row),
        fits=_problems,
        canonical=functools.partial(as_default, name="hidden") if linear else None,
        draw=functools.partial(_draw, linear=linear),
        weight=1,
    )


FUNCTIONS = (
    _function("cross_entropy", CROSS_ENTROPY, CROSS_ENTROPY_ROWS, linear=False),
    _function("linear_cross_entropy", LINEAR_CROSS_ENTROPY, LINEAR_CROSS_ENTROPY_ROWS, linear=True),
)
