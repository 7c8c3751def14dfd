"""Products of other libraries whose weight is quantised.

Modules of GPTQ, AWQ, Marlin, compressed-tensors, torchao and bitsandbytes, and Transformers' own of float8 and GGUF.
They are known by the names, shapes and dtypes of what they keep, so that their libraries need not be there, and each is
compared with the module's own output: GPTQ's two versions of zero points differ in nothing else. Some modules round
their rows to eight bits, or scales to bfloat16. LayerZero's product does not, and is only as near as such roundings.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from layerzero.backends.torch.quantized_linear import AS_NUMBERS
from layerzero.core.device import Device
from layerzero.core.errors import InvalidCallError, in_short
from layerzero.core.reasons import ReasonCode
from layerzero.engine.config import current_policy
from layerzero.inspection.answers import explain
from layerzero.integrations.optimize.attention.transformers import Search
from layerzero.integrations.optimize.modules.coded_experts import losses
from layerzero.integrations.optimize.modules.int8 import product_of, tried
from layerzero.integrations.optimize.swaps.candidate import TOLERANCE, Candidate, distance, quiet, random_rows
from layerzero.integrations.optimize.swaps.codes import Converted, Held, Weight, bias_of, call, for_columns, format_of
from layerzero.integrations.optimize.swaps.swap import stock_forward
from layerzero.integrations.optimize.times.report import NO_TIME, Left, Replaced
from layerzero.ops.linear.weight_formats import without_memory
from layerzero.ops.quantize.conversion import PATHS, ranked
from layerzero.ops.quantize.gguf import KINDS as BLOCKS
from layerzero.ops.quantize.gguf import NUMBERS
from layerzero.ops.quantize.schemes import conversion
from layerzero.ops.quantize.weight import QuantizedWeight
from layerzero.ops.quantize.weight_format import WeightFormat, packed

Read = Callable[[Module], tuple[Tensor | None, ...]]
Make = Callable[..., Weight]
"""Makes the weight of what was read."""

SCALED = 0.003
"""How far the size of a result may be from that of a module that rounds, where that alone shows a wrong scale."""


def _named(*names: str) -> Read:
    """Tensors of a module by name, None for those that it has not."""

    def read(module: Module) -> tuple[Tensor | None, ...]:
        return tuple([module._buffers.get(each, module._parameters.get(each)) for each in names])

    return read


def _gptq(
    version: int, module: Module, words: Tensor, zeros: Tensor, scales: Tensor, index: Tensor | None
) -> QuantizedWeight:
    columns = _columns(module, index)
    group = _group("in_features", columns, scales.shape[0])
    bits = words.shape[0] * 32 // columns
    return QuantizedWeight.from_gptq(words, zeros, scales, index, bits=bits, group_size=group, version=version)


def _awq(module: Module, words: Tensor, zeros: Tensor, scales: Tensor, index: Tensor | None) -> QuantizedWeight:
    return QuantizedWeight.from_awq(words, zeros, scales, group_size=words.shape[0] // scales.shape[0])


def _marlin(module: Module, words: Tensor, scales: Tensor) -> QuantizedWeight:
    return QuantizedWeight.from_marlin(words, scales, group_size=words.shape[0] * 16 // len(scales))


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


def _memory(weight: Any) -> Tensor | None:
    """A parameter of a class of its own as a plain tensor of the same memory, with its count of writes."""
    if type(weight) is Parameter:
        return weight
    if not isinstance(weight, Tensor) or getattr(weight, "__tensor_flatten__", None) is not None:
        return None
    with torch._C.DisableTorchFunctionSubclass():
        return weight.detach().as_subclass(Tensor)


def _four_bits(module: Module) -> tuple[Tensor | None, ...]:
    """The codes of bitsandbytes' Params4bit, and the scales of its blocks."""
    weight = module._parameters.get("weight")
    state = getattr(weight, "quant_state", None)
    absmax = getattr(state, "absmax", None)
    return (None, None) if absmax is None else (_memory(weight), absmax)


def _codebook(module: Module, codes: Tensor, absmax: Tensor) -> QuantizedWeight:
    return QuantizedWeight.from_bitsandbytes(codes, module._parameters["weight"].quant_state)  # type: ignore[union-attr]


def _eight_bits(module: Module) -> tuple[Tensor | None, ...]:
    """The codes of bitsandbytes' Int8Params, and 127 times the scale of each output; the first call moves these."""
    weight = module._parameters.get("weight")
    scale = getattr(weight, "SCB", None)
    scale = getattr(getattr(module, "state", None), "SCB", None) if scale is None else scale
    return (None, None) if scale is None else (_memory(weight), scale)


def _blocks(module: Module) -> tuple[Tensor | None, ...]:
    """GGUF's blocks, of a module that knows their type."""
    known = _kind_of(module) is not None and module._buffers.get("input_permutation") is None
    return (_memory(module._parameters.get("weight")) if known else None,)


def _kind_of(module: Module) -> str | None:
    number = vars(module).get("ggml_type")  # in each call: an attribute that is missing costs more than all the rest
    if number is None:
        number = getattr(module._parameters.get("weight"), "quant_type", None)
    return NUMBERS.get(int(number)) if isinstance(number, int) else None


def _gguf(module: Module, data: Tensor) -> QuantizedWeight:
    kind = BLOCKS[str(_kind_of(module))]
    columns = data.shape[1] // kind.size * kind.block
    return QuantizedWeight(WeightFormat("gguf", _kind_of(module) or ""), (data.shape[0], columns), data)


def _float8(module: Module, data: Tensor, scale: Tensor) -> QuantizedWeight:
    block = getattr(module, "block_size", None) or (128, 128)
    if scale.dtype.itemsize == 1:  # powers of two
        scale = scale.view(torch.float8_e8m0fnu).to(torch.float32)
    return QuantizedWeight.from_fp8(data, scale, (int(block[0]), int(block[1])))


def _group(name: str, columns: int, groups: int) -> int:
    if columns < groups:
        raise InvalidCallError("optimize", [f"{name}: wanted at least a column a group, got {columns}"])
    return columns // groups


def _columns(module: Module, index: Tensor | None) -> int:
    found = next((int(getattr(module, each)) for each in ("in_features", "infeatures") if hasattr(module, each)), 0)
    return found or (0 if index is None else index.numel())


@dataclass(frozen=True)
class Kind:
    """One way of keeping a quantised weight.

    Attributes:
        read: what is read of a module.
        count: how many of these tensors it must have.
        fits: whether their shapes and dtypes fit.
        make: what they are.
        rounds: whether such modules round more than the format does.
    """

    read: Read
    count: int
    fits: Callable[..., bool]
    make: Make
    rounds: bool = False


_GPTQ = _named("qweight", "qzeros", "scales", "g_idx")


def _of_float8(data: Tensor, scale: Tensor, static: Tensor | None = None) -> bool:
    return data.dtype in {torch.float8_e4m3fn, torch.float8_e5m2} and static is None


KINDS = (
    Kind(_GPTQ, 3, lambda words, _, scales, *__: words.shape[1:] == scales.shape[1:], functools.partial(_gptq, 2)),
    Kind(_GPTQ, 3, lambda words, _, scales, *__: words.shape[1:] == scales.shape[1:], functools.partial(_gptq, 1)),
    Kind(_GPTQ, 3, lambda words, _, scales, *__: (words.shape[1] * 8,) == scales.shape[1:], _awq),
    Kind(_named("B", "s"), 2, lambda words, scales: words.shape[1] == 2 * scales.shape[1], _marlin),
    Kind(
        _named("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"),
        3,
        lambda words, scale, shape, *_: words.shape[0] == scale.shape[0] and scale.ndim == shape.numel() == 2,
        _compressed,
    ),
    Kind(
        _named("weight_packed", "weight_scale", "weight_global_scale"),
        3,
        lambda data, scale, _: data.dtype is torch.uint8 and scale.dtype is torch.float8_e4m3fn,
        lambda _, data, scale, second: QuantizedWeight.from_nvfp4(data, scale, second.float(), divides=True),
        True,
    ),
    Kind(
        _named("weight_packed", "weight_scale"),
        2,
        lambda data, scale: data.dtype is torch.uint8 and scale.dtype in {torch.uint8, torch.float8_e8m0fnu},
        lambda _, data, scale: QuantizedWeight.from_mx(data, scale),
        True,
    ),
    Kind(_in_tensor, 3, lambda codes, scale, zero: codes.dtype is torch.int8 and scale.shape == zero.shape, _unpacked),
    Kind(_named("weight", "weight_scale_inv", "activation_scale"), 2, _of_float8, lambda *of: _float8(*of[:3]), True),
    Kind(_named("weight", "weight_scale", "input_scale"), 2, _of_float8, lambda *of: _float8(*of[:3]), True),
    Kind(_four_bits, 2, lambda codes, _: codes.dtype is torch.uint8, _codebook, True),
    Kind(
        _eight_bits,
        2,
        lambda codes, scale: codes.dtype is torch.int8 and scale.numel() == codes.shape[0],
        lambda _, codes, scale: (codes, scale.flatten() / 127.0),
        True,
    ),
    Kind(_blocks, 1, lambda data: data.dtype is torch.uint8, _gguf),
)
"""Those that are known."""


def find(search: Search) -> Iterator[Replaced | Left]:
    """Modules whose weight is quantised, and that give what our product gives."""
    exact: list[Replaced | Left] = []
    rounded: dict[int, Candidate] | None = None if search.rounding is None else {}
    for path, module in search.root.named_modules():
        if id(module) in search.taken or isinstance(module, torch.jit.ScriptModule) or module._modules:
            continue
        kinds = [each for each in KINDS if _fits(each.read(module), each)]
        if not kinds:
            continue
        same = functools.partial(_same, module, kinds, rounded)
        exact.append(tried(search, path, module, kinds[0].read(module)[0], same))
    exact = list(_elsewhere(search, exact))
    yield from exact if rounded is None else _with_rounded_rows(search, exact, rounded)


def _elsewhere(search: Search, found: list[Replaced | Left]) -> Iterator[Replaced | Left]:
    """All of them, but weights that no fast kernel takes in another format, where ``quant.fallback`` is ``held``.

    Else it says what that takes: weights are quantised anew, and lose again.
    """
    made: dict[int, Candidate] = {}
    why: dict[int, str] = {}
    for each in found:
        known = each.candidate if isinstance(each, Replaced) else None
        if known is None or (step := _step(known)) is None:
            continue
        (of, why[id(each)]), module = step, known.swap.module
        work = f"converting {type(module).__name__}"
        if current_policy()["quant.fallback"] != "held":
            code = ReasonCode.REQUANTIZATION_REQUIRED
            why[id(each)] = f"[{code}] {why[id(each)]}; set quant.fallback to held for that"
        elif not search.time.allows(work, work):
            why[id(each)] += f"; {NO_TIME}"
        else:
            with search.time.taking(work):
                state = Converted(module, known.swap.state, of)  # type: ignore[arg-type]  # of one that is held
                made[id(each)] = product_of(module, state, known.example)
    lost = losses(list(made.values()), _of_rows, search, "what another format loses on the inputs")
    bound = ANEW if search.accuracy is None else search.accuracy
    for each in found:
        other = made.get(id(each))
        if other is not None and (loss := lost[id(other.swap.module)]) <= bound:
            other.error = other.swap.state.loss = loss  # type: ignore[attr-defined]
            yield Left(each.path, each.module, f"{why[id(each)]}; it is in {other.kind} where that gains")
            yield Replaced.of(each.path, other)
            continue
        if other is not None:
            code, told = ReasonCode.QUANT_ACCURACY_THRESHOLD_EXCEEDED, why[id(each)]
            why[id(each)] = f"[{code}] {told}; it loses {loss:.2g} of its output, accuracy={bound:g} allows less"
        if id(each) in why:
            yield Left(each.path, each.module, why[id(each)])
        yield each


ANEW = 0.15
"""What a product may lose where its weight is quantised anew to four bits."""


def _step(found: Candidate) -> tuple[str, str] | None:
    """The format that a weight without a fast kernel can have one in, and what that costs; None where there is none."""
    state, rows = found.swap.state, found.example
    if not isinstance(state, Held) or isinstance(state.weight, Tensor) or state.kind not in PATHS:
        return None
    if not (found.kernel or "").startswith(AS_NUMBERS):
        return None
    device, (outputs, inputs) = Device.detect(rows.device), state.weight.shape
    for name in ranked(PATHS[state.kind], current_policy(), device.dtypes):
        if (of := for_columns(name, inputs)) is None:
            continue
        example = without_memory(format_of(of), (outputs, inputs), torch.bfloat16)
        other = explain(found.asked[0], rows.new_empty(rows.shape, device="meta"), example, device=device).kernel_id
        if other is not None and not other.startswith(AS_NUMBERS):
            cost = conversion(format_of(of), state.weight.shape)
            return of, f"no fast kernel takes {state.kind} here, {other} takes {name}; {cost}"
    return None


_ASKED = "activations='int8'"


def _with_rounded_rows(
    search: Search, exact: list[Replaced | Left], rounded: dict[int, Candidate]
) -> Iterator[Replaced | Left]:
    """Products whose rows kernels may round to eight bits; the exact ones, and why, where that loses too much."""
    if not exact:
        why = "no module that was looked at has a weight quantised by group or in GGUF's blocks"
        step = "pass weights='int8' or 'int4' with it to quantise other layers"
        yield Left("", type(search.root).__name__, f"{_ASKED}: {why}; {step}")
    lost = losses(list(rounded.values()), _of_rows, search, "what rounded rows lose on the inputs")
    for each in exact:
        found = rounded.get(id(each.swap.module)) if isinstance(each, Replaced) else None
        if found is None:
            yield each
            continue
        found.error = lost[id(found.swap.module)]
        if found.error <= search.rounding:  # type: ignore[operator]  # else nothing was rounded
            yield Replaced.of(each.path, found)
            continue
        told = f"rounded rows lose {found.error:.2g} of its output, accuracy={search.rounding:g} allows less"
        why = "no kernel rounds rows of this format" if math.isnan(found.error) else told
        yield Left(each.path, each.module, f"{_ASKED}: {why}; its rows stay as they are")
        yield each


def _of_rows(found: Candidate, rows: Tensor) -> Tensor:
    assert isinstance(found.swap.state, Held)
    try:
        return call(found.swap.state, rows, bias_of(found.swap.module))
    except InvalidCallError:  # no kernel rounds such rows
        return rows.new_full((), math.nan)


def _fits(read: tuple[Tensor | None, ...], of: Kind) -> bool:
    needed = read[: of.count]
    if any(each is None or each.ndim > 2 or not each.numel() for each in needed):
        return False
    return needed[0].ndim == 2 and of.fits(*read)  # type: ignore[union-attr]


def _same(module: Module, kinds: list[Kind], rounded: dict[int, Candidate] | None) -> Candidate | str:
    """A candidate that gives what the module gives, or why there is none; ``rounded`` gets one that rounds rows."""
    why = ""
    for kind in kinds:
        try:
            state = Held(module, kind.read, kind.make)
        except InvalidCallError as error:
            why = why or in_short(error)
            continue
        data, scale = state.pair
        known = torch.float32 if scale is None else scale.dtype
        for dtype in dict.fromkeys((known, torch.bfloat16, torch.float16, torch.float32)):
            rows = random_rows(module, state.columns, dtype=dtype, device=data.device)
            try:
                with quiet(module):
                    expected = stock_forward(module)(rows.clone())
            except Exception as error:  # noqa: BLE001  # it takes something else than rows of this dtype
                why = why or f"it does not compute on one tensor of rows: {in_short(error)}"
                continue
            found = product_of(module, state, rows)
            with quiet(module):
                got = call(state, rows, bias_of(module))
            found.error = distance(got, expected)
            if found.error <= TOLERANCE[dtype] or (kind.rounds and _rounded(found.error, got, expected)):
                if rounded is not None:
                    state.forget()  # what it packed: both would keep their forms until one is chosen
                    rounded[id(module)] = product_of(module, Held(module, kind.read, kind.make, "int8"), rows)
                return found
            why = f"{found.calls} by {found.kernel} was off by {found.error:.2g} of the largest value"
            break
    return why


def _rounded(error: float, got: Tensor, expected: Tensor) -> bool:
    """Whether two results differ by roundings, and not in size."""
    one, other = got.double(), expected.double()
    scaled = ((one - other) * other).sum() / other.square().sum()
    return error <= TOLERANCE[torch.bfloat16] and bool(scaled.abs() <= SCALED)
