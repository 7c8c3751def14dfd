"""Products of other libraries whose weight is codes by group: GPTQ's, AWQ's, compressed-tensors' and torchao's modules.

They are told by the names, shapes and dtypes of what they keep, so that their libraries need not be there, and each is
compared with the module's own output: GPTQ's two versions of zero points differ in nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from layerzero.core.errors import InvalidCallError, in_short
from layerzero.integrations.optimize.attention.transformers import Search
from layerzero.integrations.optimize.modules.int8 import product_of, untimed, why_not
from layerzero.integrations.optimize.swaps.candidate import TOLERANCE, Candidate, distance, quiet, random_rows
from layerzero.integrations.optimize.swaps.codes import Held, bias_of, call
from layerzero.integrations.optimize.swaps.swap import stock_forward
from layerzero.integrations.optimize.times.report import NO_TIME, Left, Replaced
from layerzero.ops.quantize.weight import QuantizedWeight
from layerzero.ops.quantize.weight_format import WeightFormat, packed

Read = Callable[[Module], tuple[Tensor | None, ...]]
Make = Callable[..., QuantizedWeight]
"""Makes the weight of what was read."""


def _named(*names: str) -> Read:
    """Tensors of a module by name, None for those that it has not."""

    def read(module: Module) -> tuple[Tensor | None, ...]:
        return tuple([module._buffers.get(each, module._parameters.get(each)) for each in names])

    return read


def _gptq(version: int) -> Make:
    def make(module: Module, words: Tensor, zeros: Tensor, scales: Tensor, index: Tensor | None) -> QuantizedWeight:
        columns = _columns(module, index)
        group = _group("in_features", columns, scales.shape[0])
        bits = words.shape[0] * 32 // columns
        return QuantizedWeight.from_gptq(words, zeros, scales, index, bits=bits, group_size=group, version=version)

    return make


def _awq(module: Module, words: Tensor, zeros: Tensor, scales: Tensor, index: Tensor | None) -> QuantizedWeight:
    return QuantizedWeight.from_awq(words, zeros, scales, group_size=words.shape[0] // scales.shape[0])


def _compressed(
    module: Module, words: Tensor, scale: Tensor, shape: Tensor, zero: Tensor | None, index: Tensor | None
) -> QuantizedWeight:
    columns = int(shape.flatten()[1])
    group = _group("weight_shape", columns, scale.shape[1])
    bits = words.shape[1] * 32 // columns
    return QuantizedWeight.from_compressed_tensors(words, scale, shape, zero, index, bits=bits, group_size=group)


def _in_tensor(module: Module) -> tuple[Tensor | None, ...]:
    """The parts of torchao's IntxUnpackedToInt8Tensor."""
    weight = module._parameters.get("weight")
    found = weight if hasattr(weight, "target_dtype") else None
    return tuple([getattr(found, each, None) for each in ("qdata", "scale", "zero_point")])


def _unpacked(module: Module, codes: Tensor, scale: Tensor, zero: Tensor) -> QuantizedWeight:
    weight: Any = module._parameters["weight"]
    if getattr(weight, "activation_quantization", None) is not None:
        raise InvalidCallError("optimize", ["activation_quantization: wanted None: rows are multiplied as they are"])
    bits = int(str(weight.target_dtype).removeprefix("torch.int"))  # torch.iinfo knows no int4
    (rows, columns), half = codes.shape, 1 << (bits - 1)
    of = WeightFormat("compressed-tensors", bits=bits, group=columns // scale.shape[1], zeros="signed")
    data = packed((codes.to(torch.int16) + half).to(torch.uint8), bits)
    return QuantizedWeight(of, (rows, columns), data, scale, zero.to(torch.int8))


def _group(name: str, columns: int, groups: int) -> int:
    """The columns of a group. Raises: InvalidCallError where there are fewer columns than groups."""
    if columns < groups:
        raise InvalidCallError("optimize", [f"{name}: wanted at least a column a group, got {columns}"])
    return columns // groups


def _columns(module: Module, index: Tensor | None) -> int:
    found = next((int(getattr(module, each)) for each in ("in_features", "infeatures") if hasattr(module, each)), 0)
    return found or (0 if index is None else index.numel())


_GPTQ = _named("qweight", "qzeros", "scales", "g_idx")
KINDS: tuple[tuple[Read, int, Callable[..., bool], Make], ...] = (
    (_GPTQ, 3, lambda words, _, scales, *__: words.shape[1:] == scales.shape[1:], _gptq(2)),
    (_GPTQ, 3, lambda words, _, scales, *__: words.shape[1:] == scales.shape[1:], _gptq(1)),
    (_GPTQ, 3, lambda words, _, scales, *__: (words.shape[1] * 8,) == scales.shape[1:], _awq),
    (
        _named("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"),
        3,
        lambda words, scale, shape, *_: words.shape[0] == scale.shape[0] and shape.numel() == 2,
        _compressed,
    ),
    (_in_tensor, 3, lambda codes, scale, zero: codes.dtype is torch.int8 and scale.shape == zero.shape, _unpacked),
)
"""What is read of a module, how many of these tensors it must have, whether their shapes fit, and what they are."""


def find(search: Search) -> Iterator[Replaced | Left]:
    """Modules whose weight is codes by group, and that give what our product gives."""
    for path, module in search.root.named_modules():
        if id(module) in search.taken or isinstance(module, torch.jit.ScriptModule) or module._modules:
            continue
        kinds = [(read, make) for read, count, fits, make in KINDS if _fits(read(module), count, fits)]
        if not kinds:
            continue
        name = type(module).__name__
        step = f"checking modules of {name}"
        found: Candidate | str = NO_TIME
        if search.time.allows(step, step):
            with search.time.taking(step):
                found = why_not(module) or untimed(search, kinds[0][0](module)[0]) or _same(module, kinds)
        search.taken.add(id(module))
        if isinstance(found, str):
            yield Left(path, name, found)
        else:
            yield Replaced(path, name, found.kind, found.calls, found.kernel, found.error, found.swap, found)


def _fits(read: tuple[Tensor | None, ...], count: int, fits: Callable[..., bool]) -> bool:
    needed = read[:count]
    if any(each is None or each.ndim not in (1, 2) or not each.numel() for each in needed):
        return False
    if any(each.ndim != 2 for each in needed[:2]):  # type: ignore[union-attr]
        return False
    return fits(*read)


def _same(module: Module, kinds: list[tuple[Read, Make]]) -> Candidate | str:
    """A candidate that gives what the module gives, or why there is none."""
    why = ""
    for read, make in kinds:
        try:
            state = Held(module, read, make)
        except InvalidCallError as error:
            why = why or in_short(error)
            continue
        scale = state.pair[1]
        for dtype in dict.fromkeys((scale.dtype, torch.bfloat16, torch.float16, torch.float32)):
            rows = random_rows(module, state.columns, dtype=dtype, device=scale.device)
            try:
                with quiet(module):
                    expected = stock_forward(module)(rows.clone())
            except Exception as error:  # noqa: BLE001  # it takes something else than rows of this dtype
                why = why or f"it does not compute on one tensor of rows: {in_short(error)}"
                continue
            found = product_of(module, state, rows)
            with quiet(module):
                found.error = distance(call(state, rows, bias_of(module)), expected)
            if found.error <= TOLERANCE[dtype]:
                return found
            why = f"{found.calls} by {found.kernel} was off by {found.error:.2g} of the largest value"
            break
    return why
