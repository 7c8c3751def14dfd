"""Products with a stack of weights: mlp.batched, each with rows of its own, and mlp.grouped, rows sorted by weight.

Rows of a group lie one after the other; ``group_ends`` says behind which row each group ends, as ``torch.cumsum`` of
how many each has. A mixture of experts sorts its tokens by expert, multiplies, and sorts back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from layerzero.core.arguments import Axis, TensorSchema
from layerzero.core.operation import Case, Random, Work
from layerzero.core.values import Check
from layerzero.ops.calls import drawn
from layerzero.ops.declaration import function, operation, tensor, wide
from layerzero.ops.draw import Draw
from layerzero.ops.linear.declare import TOLERANCE, TOLERANCE_REASON, deviation, judged_by_products
from layerzero.ops.linear.route import FEATURES


def group_of(group_ends: Tensor, rows: int) -> Tensor:
    """The group of each row, and how many groups there are where a row lies behind the last."""
    places = torch.arange(rows, device=group_ends.device, dtype=group_ends.dtype)
    return torch.searchsorted(group_ends.cummax(0).values, places, right=True)


def batched_linear(input: Tensor, weight: Tensor, *, bias: Tensor | None = None) -> Tensor:
    """Multiply each input of a stack with its own weight: ``input[g] @ weight[g]^T + bias[g]``.

    Shapes: input (G, M, K), weight (G, N, K), bias (G, N) → (G, M, N)
    Dtype: floating, the same for all; sums are in float32; returns input.dtype.
    Raises: InvalidCallError for shapes, dtypes or devices that do not fit.
    """
    dtype = wide(input.dtype)
    output = input.to(dtype) @ weight.to(dtype).mT
    return (output if bias is None else output + bias.to(dtype).unsqueeze(1)).to(input.dtype)


def grouped_linear(input: Tensor, weight: Tensor, group_ends: Tensor, *, bias: Tensor | None = None) -> Tensor:
    """Multiply rows that are sorted by group with their group's weight: the experts of a mixture, each with its tokens.

    Shapes: input (T, K), weight (G, N, K), group_ends (G,), bias (G, N) → (T, N). Group g has the rows from the end of
        the group before it to group_ends[g]: ``torch.cumsum(counts, 0, dtype=torch.int32)``. A group may be empty.
    Dtype: floating, the same for all, group_ends int32; sums are in float32; returns input.dtype.
    Raises: InvalidCallError for shapes, dtypes or devices that do not fit, and, where values can be read (debug mode),
        for ends that fall or whose last is not T. Without, rows of no group hold anything.
    """
    dtype, group = wide(input.dtype), group_of(group_ends, input.shape[0])
    output = torch.zeros(input.shape[0], weight.shape[1], dtype=dtype, device=input.device)
    for number in range(weight.shape[0]):
        product = input.to(dtype) @ weight[number].to(dtype).mT
        product = product if bias is None else product + bias[number].to(dtype)
        output = torch.where((group == number).unsqueeze(-1), product, output)  # 0 in rows behind the last end
    return output.to(input.dtype)


def _check_values(input: Tensor, group_ends: Tensor, **_: object) -> list[Check]:
    """Values on the device, besides counts: groups follow one another, and the last ends with the rows."""
    rows = input.shape[0]

    def falls(_: tuple[int, ...], got: tuple[int, ...]) -> str:
        return f"group_ends: wanted numbers that do not fall, got {list(got)}"

    def ends(_: tuple[int, ...], got: tuple[int, ...]) -> str:
        return f"group_ends: wanted the last to be the {rows} rows of input, got {list(got)}"

    fall, last = (group_ends[1:] < group_ends[:-1]).any(), group_ends[-1:]
    return [Check(fall, group_ends[:8], falls), Check((last == rows).sum() != 1, last, ends, alone=True)]


def _work(rows_of: Callable[[Mapping[str, Any]], int], facts: Mapping[str, Any]) -> Work:
    """Every row times one weight; every tensor once."""
    rows, inputs, outputs = rows_of(facts), facts["in_features"], facts["out_features"]
    moved = rows * (inputs + outputs) + facts["experts"] * inputs * outputs
    return Work(2.0 * rows * inputs * outputs, float(moved * facts["dtype"].itemsize))


def _examples(case: Case, dtype: torch.dtype, device: torch.device, generator: Random) -> dict[str, Tensor]:
    """Weights whose products are of order 1, and groups of unlike lengths, one of them empty."""
    groups, outputs, inputs = (case.sizes[name] for name in ("experts", "out_features", "in_features"))
    weight = drawn(TensorSchema("weight"), (groups, outputs, inputs), dtype, device, {}, generator)
    made = {"weight": weight if device.type == "meta" else weight.mul_(deviation(inputs))}
    if "rows" not in case.sizes:
        return made
    if device.type == "meta":
        return {**made, "group_ends": torch.empty(groups, dtype=torch.int32, device=device)}
    where = device if generator is None else generator.device
    group_ends = torch.randint(case.sizes["rows"] + 1, (groups,), generator=generator, device=where).sort().values
    group_ends[-1:] = case.sizes["rows"]
    return {**made, "group_ends": group_ends.to(device, torch.int32)}


def _case(name: str, rows: int, groups: int, inputs: int, outputs: int, *, grouped: bool, biased: bool = False) -> Case:
    sizes = {
        "rows" if grouped else "rows_each": rows,
        "experts": groups,
        "in_features": inputs,
        "out_features": outputs,
    }
    return Case(name, sizes, {}, ("bias",) if biased else ())


_MODELS = {"cuda": ((8, 4096, 14336), (128, 2048, 768)), "cpu": ((8, 512, 1024),)}
"""(groups, in_features, out_features): Mixtral 8x7B and Qwen3-30B-A3B; a small one."""
_ROWS = {"cuda": (16, 128, 1024, 8192), "cpu": (16, 128, 512)}


def _sweep(device: str, narrow: Mapping[str, Sequence[int]], *, grouped: bool) -> Iterator[Case]:
    axis, kind = "rows" if grouped else "rows_each", device if device in _ROWS else "cpu"
    for groups, inputs, outputs in _MODELS[kind] if narrow.keys() <= {axis} else ():
        told = narrow.get(axis, _ROWS[kind])
        for own in told if grouped else dict.fromkeys(max(rows // groups, 1) for rows in told):
            yield _case(f"{groups}x{own}x{inputs}x{outputs}", own, groups, inputs, outputs, grouped=grouped)


def _cases(*, grouped: bool) -> tuple[Case, ...]:
    return (
        _case("small", 33, 4, 96, 64, grouped=grouped, biased=True),
        _case("small_plain", 17, 3, 64, 32, grouped=grouped),
        _case("mixtral_b16", 32, 8, 4096, 14336, grouped=grouped),
    )


def _torch_batched(input: Tensor, weight: Tensor, *, bias: Tensor | None = None) -> Tensor:
    if bias is None:
        return torch.bmm(input, weight.mT)
    return torch.baddbmm(bias.unsqueeze(1), input, weight.mT)


def _torch_grouped(input: Tensor, weight: Tensor, group_ends: Tensor, *, bias: Tensor | None = None) -> Tensor:
    """A loop over the groups that have rows, as models' code has it."""
    output, start = input.new_zeros(input.shape[0], weight.shape[1]), 0
    for number, end in enumerate(group_ends.tolist()):
        if end > start:
            own = None if bias is None else bias[number]
            output[start:end] = torch.nn.functional.linear(input[start:end], weight[number], own)
            start = end
    return output


_FEATURES = (Axis("in_features", scales=True), Axis("out_features", scales=True))
_BIAS = tensor("bias: experts out_features", required=False)
_WEIGHT = tensor("weight: experts out_features in_features", resident=True)
_JUDGED: dict[str, Any] = {"tolerance": TOLERANCE, "tolerance_reason": TOLERANCE_REASON, "examples": _examples}
BATCHED = operation(
    "mlp.batched",
    "Products with a weight each",
    batched_linear,
    inputs=("input: experts rows_each in_features", _WEIGHT, _BIAS),
    outputs=("output: experts rows_each out_features",),
    axes=(Axis("experts", scales=True), Axis("rows_each", scales=True, live=True), *_FEATURES),
    cases=_cases(grouped=False),
    judge=judged_by_products(batched_linear, TOLERANCE, TOLERANCE_REASON),
    work=functools.partial(_work, lambda facts: int(facts["experts"] * facts["rows_each"])),
    sweep=functools.partial(_sweep, grouped=False),
    expression=_torch_batched,
    **_JUDGED,
)
GROUPED = operation(
    "mlp.grouped",
    "Products of rows that are sorted by the weight they go to",
    grouped_linear,
    fake=lambda input, weight, *_, **__: input.new_empty((input.shape[0], weight.shape[1])),  # a loop over experts else
    inputs=(
        "input: rows in_features",
        _WEIGHT,
        tensor("group_ends: experts", frozenset({torch.int32}), same_dtype=False, counts=("rows",)),
        _BIAS,
    ),
    outputs=("output: rows out_features",),
    axes=(Axis("rows", scales=True, live=True), Axis("experts", scales=True), *_FEATURES),
    cases=_cases(grouped=True),
    judge=judged_by_products(grouped_linear, TOLERANCE, TOLERANCE_REASON),
    check_values=_check_values,
    work=functools.partial(_work, lambda facts: int(facts["rows"])),
    sweep=functools.partial(_sweep, grouped=True),
    expression=_torch_grouped,
    **_JUDGED,
)


def _stack(draw: Draw, dtype: torch.dtype, groups: int, inputs: int) -> dict[str, Tensor]:
    outputs = draw.of(FEATURES)
    made = draw.normal((groups, outputs, inputs), torch.float32).mul_(deviation(inputs)).to(dtype)
    arguments = {"weight": draw.laid_out(made, expand=False)}
    arguments |= draw.maybe(0.4, bias=lambda: draw.laid_out(draw.normal((groups, outputs), dtype)))
    return arguments


def _draw_batched(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    groups, rows, inputs = draw.of((1, 2, 3, 5)), draw.of((0, 1, 2, 5, 17), (1, 6, 3, 3, 3)), draw.of(FEATURES)
    arguments: dict[str, Any] = {"input": draw.laid_out(draw.normal((groups, rows, inputs), dtype))}
    arguments |= _stack(draw, dtype, groups, inputs)
    return draw.poison(arguments, ("input",))


def _draw_grouped(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw rows, weights, and where each group ends; some are empty."""
    groups, rows = draw.of((1, 2, 3, 5, 8)), draw.of((0, 1, 2, 5, 17, 40), (1, 3, 3, 3, 3, 3))
    inputs = draw.of(FEATURES)
    arguments: dict[str, Any] = {"input": draw.laid_out(draw.normal((rows, inputs), dtype))}
    arguments |= _stack(draw, dtype, groups, inputs)
    group_ends = draw.integers((groups,), rows, torch.int32).sort().values
    group_ends[-1] = rows
    arguments["group_ends"] = group_ends
    return draw.poison(arguments, ("input",))


OPERATIONS = (BATCHED, GROUPED)
FUNCTIONS = tuple(
    function(name, operation, varies=(axis,), draw=draw, weight=1, state=frozenset({"matmul"}))
    for name, operation, axis, draw in (
        ("batched_linear", BATCHED, "rows_each", _draw_batched),
        ("grouped_linear", GROUPED, "rows", _draw_grouped),
    )
)
