"""Products of other libraries whose weight is quantised.

Modules of GPTQ, AWQ, Marlin, compressed-tensors, torchao and bitsandbytes, and Transformers' own of float8 and GGUF.
They are known by the names, shapes and dtypes of what they keep, so that their libraries need not be there, and each is
compared with the module's own output: GPTQ's two versions of zero points differ in nothing else. Some modules round
their rows to eight bits, or scales to bfloat16. LayerZero's product does not, and is only as near as such roundings.

What the weight of a layer loses in a format, kept in the database of times for later requests.

A row is of the kernel that computed the product, in its environment, as a time is. Its work has one fact more, the
weight itself, so that no call finds it; its one sample is too noisy for a prediction.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from layerzero.core.device import Device
from layerzero.core.dtypes import dtype_name
from layerzero.core.errors import InvalidCallError, in_short
from layerzero.core.evidence import Measurement
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.registry import REGISTRY
from layerzero.integrations.optimize.attention.transformers import Search
from layerzero.integrations.optimize.modules.coded_experts import losses
from layerzero.integrations.optimize.modules.int8 import product_of, tried
from layerzero.integrations.optimize.swaps.candidate import TOLERANCE, Candidate, distance, quiet, random_rows
from layerzero.integrations.optimize.swaps.codes import CodedProduct, Held, Weight, bias_of, call
from layerzero.integrations.optimize.swaps.swap import stock_forward
from layerzero.integrations.optimize.times import timing
from layerzero.integrations.optimize.times.report import Left, Replaced
from layerzero.ops.quantize.gguf import KINDS as BLOCKS
from layerzero.ops.quantize.gguf import NUMBERS
from layerzero.ops.quantize.weight import QuantizedWeight
from layerzero.ops.quantize.weight_format import WeightFormat, packed
from layerzero.tuning.storage.rows import Work
from layerzero.tuning.storage.store import StoreLedger

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
    """The columns of a group. Raises: InvalidCallError where there are fewer columns than groups."""
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
    yield from exact if rounded is None else _with_rounded_rows(search, exact, rounded)


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


SURELY = 1.25
"""A format is left out unseen where it lost so many times what is allowed: other rows lose a little less or more."""

_SAMPLE = 1 << 16
"""Numbers of a weight that are hashed, spread over all of its columns; sums stand for the others."""


def work_of(weight: Tensor, of: str, activations: str | None, *, on_inputs: bool) -> Work:
    """The work under which the loss of a weight (N, K) in a format is kept."""
    facts = {
        "operation": f"optimize.weights.{of}",
        "dtype": dtype_name(weight.dtype),
        "shape": " x ".join(map(str, weight.shape)),
        "activations": str(activations),
        "rows": "of inputs" if on_inputs else "random",
        "weight": _mark_of(weight.detach()),
        "device_name": Device.detect(weight.device).name,
    }
    return Work(tuple(sorted(facts.items())))


def _mark_of(weight: Tensor) -> str:
    """What tells the numbers of a weight from others: a sample of their bits, and sums of all and of their squares.

    Sums of whole numbers, modulo 2^64, are the same in any order and by any number of threads.
    """
    bits = weight.contiguous().view(_BITS[weight.element_size()]).flatten()
    step = max(len(bits) // _SAMPLE, 1)
    while math.gcd(step, len(bits)) > 1:  # else some columns are never looked at
        step += 1
    sums = torch.zeros(2, dtype=torch.int64, device=bits.device)
    for start in range(0, len(bits), _AT_ONCE):
        wide = bits[start : start + _AT_ONCE].long()
        sums += torch.stack([wide.sum(), wide.square().sum()])
    sample = bits[::step].contiguous().view(torch.uint8).tolist()
    return hashlib.blake2b(bytes(sample) + repr(sums.tolist()).encode(), digest_size=16).hexdigest()


_AT_ONCE = 1 << 18
"""Numbers that are summed together. 4096 x 4096 take 0.13 s so, and 0.5 s by 2^22 (AMD EPYC Zen 4, 2026-11-27)."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Whole numbers by their bytes."""


def known(work: Work, device: torch.device) -> float | None:
    """The loss that is kept for a work, by kernels as they are here; None where there is none."""
    ledger = ENGINE.ledger
    if not isinstance(ledger, StoreLedger):
        return None
    found = ledger.times.errors(work, Device.detect(device))
    return max(found.values()) if found else None


def keep(found: Candidate, work: Work, loss: float) -> None:
    """Keep what a layer lost, with the time of its product with the example's rows."""
    ledger, state, kernel = ENGINE.ledger, found.swap.state, found.kernel
    assert isinstance(state, CodedProduct)
    if not isinstance(ledger, StoreLedger) or kernel is None or not math.isfinite(loss):
        return
    module, rows = found.swap.module, found.example
    with quiet(module):
        took_us = max(1e6 * timing.taken(lambda: call(state, rows, bias_of(module)), rows.device), 0.1)
    told = Measurement(took_us, took_us, 0.0, 1, noise=1.0, origin="optimize", error=loss)
    ledger.times.record_work(REGISTRY.kernel(kernel), work, Device.detect(rows.device), told)
