"""What every kernel for weights as files hold them does around its library's operator.

Of whole numbers by group the library's own form is made of :class:`Codes`, so that a kernel takes every file format
within its limits. Columns that an act-order index scatters are put in order in that form once, those of the rows in
each call. Of other formats it is made of the weight itself.

Kernels of a product, which make a form of a weight once, serve the experts that have tokens with a form of each; the
weights of others are not read. Sorting, the gate and the sum are those of torch's loop over experts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.torch.moe import load_each
from layerzero.backends.torch.quantized_linear import on_boundary, propagate_nan
from layerzero.core import limits as limit
from layerzero.core.errors import NotPreparedError
from layerzero.core.facts import Facts
from layerzero.core.kernel import Backend, Kernel
from layerzero.core.limit_kinds import Limit
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.ops.linear.packed import BELONGS, MAY_BE_DENSE, Pack, PackedWeight, belongs
from layerzero.ops.linear.weight_formats import FORMATTED
from layerzero.ops.moe.experts import PACKED_OF
from layerzero.ops.moe.quantized import QUANTIZED, ROUNDED
from layerzero.ops.quantize.weight import QuantizedWeight
from layerzero.ops.quantize.weight_format import Codes, Fields, WeightFormat, rotated

ROUNDING, ROUNDING_GGUF = (FORMATTED["group.int8"].name,), (FORMATTED["gguf.int8"].name,)
"""What kernels that round rows to int8 also take, of weights by group and of GGUF weights."""

Product = Callable[[Tensor, Any], Tensor]
"""Multiplies dense rows (M, K) with the form."""

Parts = Callable[[Facts], tuple[Pack, Product]]
"""What makes the library's form, of codes whose columns lie in order or of a QuantizedWeight, and its product."""


_MADE: set[tuple[object, ...]] = set()
"""Which kernels made forms of weights of which format and size."""


OF_PRODUCT = ("dtype", "weight_format", "out_features", "in_features")
"""Facts that tell one kernel's forms of weights apart."""


def of_call(owner: str, facts: Facts, names: tuple[str, ...] = OF_PRODUCT) -> tuple[object, ...]:
    """What a kernel's calls with weights of one kind have in common: what they share lies on one device."""
    return owner, facts.device.index, *(facts.get(name) for name in names)


def made_for(call: tuple[object, ...]) -> None:
    """Note that a form, or what else no capture can make, exists for calls of this kind."""
    _MADE.add(call)


def before_capture(owner: str, names: tuple[str, ...] = OF_PRODUCT) -> Limit:
    """No form can be made in a capture, so that one takes what calls before it made for weights like this.

    A weight of the same sizes that has no form of its own yet is refused by its handle, and the next kernel runs.
    """

    def check(facts: Facts) -> Reason | None:
        if not facts["capturing"] or of_call(owner, facts, names) in _MADE:
            return None
        hint = "Call it once with this weight outside of the capture"
        return Reason(ReasonCode.CUDA_GRAPH_UNSAFE, "packed", "a form made before", "none", hint)

    return limit.Custom("under capture: a form made by an earlier call", check)


def formed(pack: Pack, weight: QuantizedWeight, *, of_codes: bool) -> tuple[tuple[Any, Tensor | None], int]:
    """The library's form of one weight, the order that columns of rows are to be in, and the bytes of both.

    That of a rotated weight is of the rotated numbers: its rows are rotated, too, before the product. In place of an
    order it has the matrix for that, which no capture can keep.
    """
    fields = Fields(*[None if each is None else on_boundary(each) for each in weight.fields])  # type: ignore[arg-type]
    rotation = weight.format.rotation
    weight = QuantizedWeight.unchecked(replace(weight.format, rotation=0), weight.shape, fields)
    if not of_codes:
        form, size = pack(weight)
        like: dict[str, Any] = {"dtype": torch.float32, "device": fields.data.device}
        matrix = rotated(torch.eye(rotation, **like), rotation) if rotation else None
        return (form, matrix), size + bytes_of(matrix)
    codes, order = weight.codes, None
    if codes.group_index is not None:
        order = codes.group_index.argsort(stable=True)
        codes = replace(codes, numbers=codes.numbers[:, order], group_index=None)
    if codes.bits < 4:  # in four bits, with their middle as a zero point
        zero = torch.full_like(codes.scale, codes.middle, dtype=torch.uint8) if codes.zero is None else codes.zero
        codes = replace(codes, bits=4, zero=zero)
    form, size = pack(codes)
    return (form, order), size + (0 if order is None else order.nbytes)


def _load(
    facts: Facts, owner: str, parts: Parts, *, of_codes: bool, rounds: bool = False, batch_invariant: bool = False
) -> Callable[..., Any]:
    pack, product = parts(facts)
    call = of_call(owner, facts)
    ndim, features = facts["input_ndim"], facts.size("in_features")
    key = owner, facts["dtype"]  # scales are in that of the rows
    rotation = WeightFormat.of(str(facts["weight_format"])).rotation

    def made(weight: QuantizedWeight) -> tuple[tuple[Any, Tensor | None], int]:
        made_for(call)
        return formed(pack, weight, of_codes=of_codes)

    def run(
        input: Tensor,
        weight: Tensor,
        weight_scale: Tensor | None = None,
        *,
        weight_format: str,
        bias: Tensor | None = None,
        weight_zero: Tensor | None = None,
        group_index: Tensor | None = None,
        second_scale: Tensor | None = None,
        packed: PackedWeight,
    ) -> Tensor:
        form, order = packed.form(key, made)
        rows = input if ndim == 2 else input.reshape(-1, features)
        if rotation:
            rows, order = rotated(rows, rotation, None if batch_invariant else order), None
        rows = rows.contiguous() if order is None else rows.index_select(1, order)
        output = product(rows, form)
        if rounds:
            output = propagate_nan(output, rows)
        if bias is not None:
            output = output.add_(bias)
        return output if ndim == 2 else output.view(*input.shape[:-1], -1)

    return run


def _rotated_halves(facts: Facts) -> Reason | None:
    if facts["dtype"] is not torch.float16 or not WeightFormat.of(str(facts["weight_format"])).rotation:
        return None
    return Reason(ReasonCode.DTYPE_UNSUPPORTED, "dtype", "bfloat16 or float32 with a rotated weight", "float16")


_ROTATED_IN_RANGE = limit.Custom("rotated rows: no float16, whose numbers they may exceed", _rotated_halves)


def _rotated_experts(facts: Facts) -> Reason | None:
    found = [text for name in ("gate_up_format", "down_format") if "rotation=" in (text := str(facts[name]))]
    code, wanted = ReasonCode.QUANT_FORMAT_UNSUPPORTED, "without rotation"
    return Reason(code, "the format of experts", wanted, found[0]) if found else None


UNROTATED = limit.Custom("experts whose weights are not rotated", _rotated_experts)
"""Of kernels that rotate no rows between the two products."""

IN_FOUR_BITS = limit.one_of("weight_bits", 2, 3, 4)
"""What fits kernels of codes of four bits."""


def grouped(
    kernel_id: str,
    backend: Backend,
    parts: Parts,
    priority: int,
    *limits: Limit,
    platform: str = "cpu",
    operation: str = "group",
    of_codes: bool = True,
    owner: str = "",
    **changes: Any,
) -> Kernel:
    """A kernel for weights by group, or of another operation of :data:`FORMATTED`.

    Args:
        kernel_id, backend, priority, changes: see :class:`layerzero.core.kernel.Kernel`.
        parts: of the facts of a call, what makes the library's form and what multiplies with it.
        limits: what the library demands, besides the form.
        platform: what it runs on.
        operation: the last word of its name.
        of_codes: whether the form of a weight by group is made of its codes.
        owner: the kernel whose forms it takes; its own if empty.
    """
    optional = {"group": ("weight_zero", "group_index"), "mx": ("second_scale",)}
    fields: dict[str, Any] = {
        "operations": (FORMATTED[operation].name, *{"group": ROUNDING, "gguf": ROUNDING_GGUF}.get(operation, ())),
        "load": functools.partial(
            _load,
            owner=owner or kernel_id,
            parts=parts,
            of_codes=of_codes and operation == "group",
            rounds=changes.get("operations") in (ROUNDING, ROUNDING_GGUF),
            batch_invariant=bool(changes.get("batch_invariant")),
        ),
        "accepts": ("weight_format", "bias", *optional.get(operation, ()), "packed"),
        "limits": (
            limit.platform(platform),
            *limits,
            *([] if MAY_BE_DENSE in limits else [BELONGS]),
            *([before_capture(kernel_id)] if platform == "cuda" else []),
            *([_ROTATED_IN_RANGE] if operation == "mx" else []),
        ),
    }
    return Kernel(id=kernel_id, backend=backend, priority=priority, **fields | changes)


def regrouped(codes: Codes, sizes: tuple[int, ...]) -> Codes:
    """The same numbers in groups of one of these sizes: the first that divides their own, with its scale repeated."""
    size = next(each for each in sizes if codes.group % each == 0)
    if size == codes.group:
        return codes
    times = codes.group // size
    zero = None if codes.zero is None else codes.zero.repeat_interleave(times, 1)
    return replace(codes, scale=codes.scale.repeat_interleave(times, 1), zero=zero, group=size)


def group_sums(rows: Tensor, group: int) -> Tensor:
    """Of each group of a row; 0 where one is not finite, which the product itself shows."""
    return rows.view(rows.shape[0], -1, group).sum(-1).nan_to_num_(0.0, 0.0, 0.0)


def by_rows(weight: QuantizedWeight) -> Tensor:
    """The scales of blocks for each row. Shapes: → (N, G), float32."""
    of, scale = weight.format, weight.fields.scale
    assert scale is not None
    scale = scale.to(torch.float32)
    if not of.rows:
        return scale.expand(weight.shape[0], 1)
    return scale.repeat_interleave(of.rows, 0)[: weight.shape[0]]


def as_powers(scale: Tensor) -> Tensor:
    """Powers of two in their own dtype, where a file has their bytes."""
    return scale.view(torch.float8_e8m0fnu) if scale.dtype is torch.uint8 else scale


def refuse_nan(weight: Tensor | QuantizedWeight, library: str) -> None:
    """Refuse NaN in float8 for a kernel that shifts bits into place: it makes 480 of e4m3's, infinity of e8m0's.

    Read: dequant.h of vllm 0.20.0, datatype/dequant_single.cuh of humming 0.1.19. Raises: NotPreparedError.
    """
    if isinstance(weight, Tensor):
        held: list[tuple[str, Tensor | None, int]] = [("weight", weight, 127)]
    else:
        scheme, fields = weight.format.scheme, weight.fields
        held = [("weight", fields.data, 127)] if scheme in ("fp8", "mxfp8") else []
        held += [("weight_scale", fields.scale, 127 if scheme == "nvfp4" else 255)] if scheme != "fp8" else []
    for name, numbers, nan in held:
        if numbers is not None and bool((numbers.view(torch.uint8) & nan == nan).any()):
            raise NotPreparedError("quantized_linear", [f"{name}: wanted no NaN for {library}, got some"])


def second_factor(weight: QuantizedWeight) -> Tensor:
    """What nvfp4's scales are multiples of. Shapes: → (1,), float32."""
    second = weight.fields.second_scale
    assert second is not None
    second = second.to(torch.float32).reshape(1)
    return second.reciprocal() if weight.format.kind == "over" else second


class Locks:
    """Counters of 0 through which blocks of a launch wait for each other, and which they leave at 0.

    Launches on two streams would mix them up, so that each stream has its own. Captured graphs share one, whatever
    stream captured them: what a capture allocates is 0 only after a replay. So they are replayed one after the other.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._captured, self._device = torch.zeros(count, dtype=torch.int32, device=device), device
        self._of: dict[int, Tensor] = {}

    def now(self) -> Tensor:
        """Those of the current stream, or of captures where one is open."""
        if torch.cuda.is_current_stream_capturing():
            return self._captured
        stream = torch._C._cuda_getCurrentRawStream(self._device.index)
        found = self._of.get(stream)
        if found is None:
            found = self._of[stream] = torch.zeros_like(self._captured)
        return found


def bytes_of(*tensors: Tensor | None) -> int:
    """Memory that a form takes."""
    return sum(each.nbytes for each in tensors if each is not None)


BY_NAME = ("gate_up_bias", "down_bias", "activation", "alpha", "limit")
"""What the loop takes by name."""

ACCEPTS = (*BY_NAME, "gate_up_format", "down_format")
"""What every kernel for quantised experts takes; the loop around them does the rest."""

TENSORS = tuple(each.name for each in QUANTIZED.schema.optional if not each.name.endswith("_bias"))
"""The tensors that formats have besides the data."""


class Products:
    """The products with the weights of all experts: what a loop over experts takes in place of a stack of tensors."""

    def __init__(self, experts: int, product: Callable[[Tensor, int], Tensor]) -> None:
        self.shape, self._product = (experts,), product

    def __getitem__(self, number: int) -> Callable[[Tensor], Tensor]:
        return lambda rows: self._product(rows, number)


def multiplied(rows: Tensor, expert: Callable[[Tensor], Tensor], bias: Tensor | None = None) -> Tensor:
    """What stands for ``F.linear`` in a loop over :class:`Products`."""
    output = expert(rows)
    return output if bias is None else output + bias


def of_product(facts: Facts, inputs: str, outputs: str) -> Facts:
    """The facts of one of the two products, as kernels of a product read them."""
    sizes = {"in_features": facts.size(inputs), "out_features": facts.size(outputs), "input_ndim": 2}
    return Facts(facts.operation, facts.device, facts.layout, facts.tensors, {**facts, **sizes})


def looped(facts: Facts, of: Callable[[Mapping[str, Any]], Iterable[Products]]) -> Callable[..., Tensor]:
    """A call for quantised experts: torch's loop over the products that are made of its stacks, gate and up first."""
    loop = load_each(facts, multiplied)

    def experts(input: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, shares: Tensor, **given: Any) -> Tensor:
        named = {name: given[name] for name in BY_NAME if name in given}
        stacks = of({**given, "input": input, "gate_up_weight": gate_up, "down_weight": down})
        return loop(input, *stacks, ids, shares, **named)

    return experts


def _load_experts(facts: Facts, owner: str, parts: Parts) -> Callable[..., Any]:
    made_of = [
        parts(of_product(facts, *each)) for each in (("hidden", "joined_features"), ("inner_features", "hidden"))
    ]
    count, key = facts.size("experts"), (owner, facts["dtype"])

    def forms(packed: PackedWeight, pack: Pack, product: Product) -> Products:
        def made(weight: QuantizedWeight) -> tuple[list[Any], int]:
            found = [formed(pack, weight[number], of_codes=True) for number in range(weight.shape[0])]
            return [each for each, _ in found], sum(size for _, size in found)

        all_forms = packed.form(key, made)

        def run(rows: Tensor, number: int) -> Tensor:
            form, order = all_forms[number]
            return product(rows.contiguous() if order is None else rows.index_select(1, order), form)

        return Products(count, run)

    return looped(facts, lambda given: [forms(given[name], *own) for name, own in zip(PACKED_OF, made_of, strict=True)])


EITHER = QUANTIZED.name, ROUNDED.name
"""Of kernels for quantised experts: whether rows may be rounded or not, they stay as they are."""

ALIKE = limit.one_of("formats_alike", True)
"""What kernels demand that look at one of both formats alone."""


def experts_of(kernel_id: str, backend: Backend, parts: Parts, priority: int, *limits: Limit) -> Kernel:
    """A kernel for quantised experts on a CPU, made of a product's; see :func:`grouped`."""
    return backend.kernel(
        kernel_id,
        EITHER,
        lambda facts: _load_experts(facts, kernel_id, parts),
        accepts=(*ACCEPTS, *TENSORS, *PACKED_OF),
        limits=(limit.platform("cpu"), ALIKE, *limits, *(belongs(packed, of) for packed, of in PACKED_OF.items())),
        graph_safe=False,
        priority=priority,
    )
