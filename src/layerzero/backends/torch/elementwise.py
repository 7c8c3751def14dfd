"""torch's own operators on every element; each computes in float32 where its tensors are narrower, and rounds once.

But for a scaled addition on a CPU: torch 2.13 rounds the factor to the tensors' dtype there, so that it is written out.

torch's embedding and its selection by index differ in how they read rows and in their backward. A shard looks up row 0
for ids of others and blanks it, so that nothing waits for the device.

torch's activations, called below ``torch.nn.functional``, and what it has no operator for as expressions.

An expression rounds the activation before it multiplies. Where no gradient is recorded the product is written over the
activation: 0.9 of the time for 512 x 2816, as long for a few rows (AMD EPYC, CPU time of one thread, torch 2.13.0,
2026-11-22). gpt-oss's gate has four roundings in a row: half precision computes it in float32.

Narrow numbers and their scales as torch expressions: a pass each for the largest value, the quotient, the rounding.

torch has no operator of its own for these formats. float8's rule that NaN makes no scale costs a pass more on GPUs;
on a CPU the largest value is looked at first. The largest of 64 x 4096 absolute values took 37 us
as ``abs().amax(-1)``, 747 as ``vector_norm``, 839 with ``nan_to_num`` between (one thread, torch 2.13.0, AMD EPYC,
2026-11-23).
Library: torch >= 2.10, BSD-3-Clause.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.torch.attention import BY_ITSELF, FLOATS, TORCH, always, kernel
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.ops.activation.declare import ALONE, GATED, halves, turns
from layerzero.ops.activation.formulas import relu2, swiglu_oai
from layerzero.ops.elementwise import OPERATIONS
from layerzero.ops.quantize import formats
from layerzero.ops.quantize.declare import DEQUANTIZE
from layerzero.ops.quantize.formats import E2M1_LARGEST, FORMATS, MX, NV, SCALED, Format, in_blocks, packed, rounded
from layerzero.ops.tensor import COPY_SLICE, SPLIT_QKV, TRANSPOSE_HEAD_TOKEN, TRANSPOSE_TOKEN_HEAD


def _format(facts: Facts) -> Format:
    return FORMATS[str(facts["operation"]).rpartition(".")[2]]


def scales(numbers: Tensor, of: Format, per: str, block_size: int | None) -> Tensor:
    """Computed scales of numbers in float32 or wider, as the operation says."""
    size = numbers.abs()
    if per == "tensor":
        most = size.amax()
    elif per == "row":
        most = size.amax(-1, True)
    else:
        most = in_blocks(size, block_size or 1).amax(-1)
    if of.is_whole:
        scale = (most / of.largest).to(torch.float32)
        return scale.masked_fill_(scale == 0.0, 1.0)
    if numbers.device.type != "cpu" or bool(most.isnan().any()):
        return formats.computed_scale(numbers, of, per, block_size)
    return (most / of.largest).to(torch.float32).clamp_(min=of.least_scale)


def _load_scaled(facts: Facts) -> Callable[..., Any]:
    of = _format(facts)
    wide = torch.float64 if facts["dtype"] is torch.float64 else torch.float32
    lowest, largest, narrow, is_whole = (-128.0 if of.is_whole else -of.largest), of.largest, of.dtype, of.is_whole

    def run(input: Tensor, *, scale: Tensor | None = None, per: str, block_size: int | None) -> tuple[Tensor, Tensor]:
        numbers = input.detach().to(wide)  # rounding lets no gradient through
        if scale is None:
            made = scales(numbers, of, per, block_size)
        else:
            made = scale.detach().clone(memory_format=torch.contiguous_format)
        quotients = formats.divided(numbers, made)
        if is_whole:
            quotients.round_()
        return quotients.clamp_(lowest, largest).to(narrow), made

    return run


def e2m1_by_bits(quotients: Tensor) -> Tensor:
    """Codes of the nearest e2m1 numbers of float32, of two as near the even one: its own bits, rounded to one of 23.

    Below 1 the numbers are halves, which float32 rounds to near 2^22. It takes 0.06 of the time of comparisons.
    """
    size = quotients.abs().clamp_(max=E2M1_LARGEST)
    bits = size.view(torch.int32)
    near = ((bits + 0x1FFFFF + (bits >> 22 & 1)) >> 22) - 252
    halves = (size + 4194304.0).view(torch.int32) & 3
    codes = torch.where(size < 1.0, halves, near).to(torch.uint8)
    return codes.add_((quotients < 0.0).to(torch.uint8), alpha=8)


def _load_blocks(divide: Callable[..., tuple[Tensor, Tensor]]) -> Callable[[Facts], Callable[..., Any]]:
    def load(facts: Facts) -> Callable[..., Any]:
        of, in_float32 = _format(facts), facts["dtype"] is not torch.float64

        def run(input: Tensor, **params: Any) -> tuple[Tensor, Tensor]:
            quotients, scale = divide(input, of, **params)
            if of.bits == 4 and in_float32:
                return packed(e2m1_by_bits(quotients)), scale
            return rounded(quotients, of), scale

        return run

    return load


_COMMON: dict[str, Any] = {"grad": True, "priority": 20}


def _of(formats: Iterable[Format]) -> tuple[str, ...]:
    return tuple(f"quantize.{each.name}" for each in formats)


def _add(residual: Tensor, input: Tensor) -> None:
    residual.add_(input)


def _load_scaled_add(facts: Facts) -> Callable[..., Any]:
    dtype: Any = facts["dtype"]
    wide = torch.promote_types(dtype, torch.float32)
    exact = wide is dtype or facts.device.platform != "cpu"

    def run(residual: Tensor, input: Tensor, *, scale_by_row: Tensor | None = None, scale: float | None = None) -> None:
        if scale_by_row is not None:
            residual.addcmul_(input, scale_by_row.unsqueeze(-1))
        elif scale is not None and exact:
            residual.add_(input, alpha=scale)
        elif scale is not None:
            residual.add_(input.to(wide) * scale)

    return run


def _load_softmax(facts: Facts) -> Callable[..., Any]:
    dtype: Any = facts["dtype"]
    wide = torch.promote_types(dtype, torch.float32)

    def run(input: Tensor, *, temperature: float | None = None) -> Tensor:
        if temperature is None:
            return torch.softmax(input, -1)
        return torch.softmax(input.to(wide) / temperature, -1).to(dtype)

    return run


_LOADS = {"add_bias": always(torch.add), "add": always(_add), "scaled_add": _load_scaled_add, "softmax": _load_softmax}


Rows = Callable[[Tensor, Tensor, int | None], Tensor]
"""Of ids, a table and the row that gets no gradient."""


def _embedding(facts: Facts) -> Rows:
    embedding = torch.embedding

    def run(ids: Tensor, weight: Tensor, padding: int | None) -> Tensor:
        return embedding(weight, ids, -1 if padding is None else padding)

    return run


def _selection(facts: Facts) -> Rows:
    recording = bool(facts["requires_grad"])

    def run(ids: Tensor, weight: Tensor, padding: int | None) -> Tensor:
        rows = weight.index_select(0, ids.reshape(-1)).view(*ids.shape, weight.shape[1])
        if padding is None or not recording:
            return rows
        return torch.where((ids == padding).unsqueeze(-1), rows.detach(), rows)

    return run


def _load(rows_of: Callable[[Facts], Rows]) -> Callable[[Facts], Callable[..., Any]]:
    def load(facts: Facts) -> Callable[..., Any]:
        rows = rows_of(facts)

        def whole(ids: Tensor, weight: Tensor, *, scale: float | None, padding_idx: int | None) -> Tensor:
            found = rows(ids, weight, padding_idx)
            return found if scale is None else found * scale

        def shard(
            ids: Tensor, weight: Tensor, *, scale: float | None, padding_idx: int | None, vocab_start: int
        ) -> Tensor:
            vocab = weight.shape[0]
            beyond = (ids < vocab_start) | (ids >= vocab_start + vocab)
            padding = None if padding_idx is None else padding_idx - vocab_start
            own = padding if padding is not None and 0 <= padding < vocab else None
            found = rows((ids - vocab_start).masked_fill(beyond, 0), weight, own).masked_fill(beyond.unsqueeze(-1), 0.0)
            return found if scale is None else found * scale

        return shard if facts["operation"] == "embedding.lookup.shard" else whole

    return load


def _load_relu2(facts: Facts) -> Callable[..., Any]:
    if facts["requires_grad"]:
        return relu2
    relu = torch.relu

    def run(input: Tensor) -> Tensor:
        return relu(input).square_()

    return run


def _times(facts: Facts, activation: Callable[..., Tensor]) -> Callable[..., Any]:
    in_place = not facts["requires_grad"]

    def apart(gate: Tensor, up: Tensor, **params: Any) -> Tensor:
        output = activation(gate, **params)
        return output.mul_(up) if in_place else output * up

    def together(input: Tensor, **params: Any) -> Tensor:
        gate, up = halves(input)
        return apart(gate, up, **params)

    return apart if "up" in facts.tensors else together


def _load_swiglu_oai(facts: Facts) -> Callable[..., Any]:
    dtype: Any = facts["dtype"]
    wide = torch.promote_types(dtype, torch.float32)

    def apart(gate: Tensor, up: Tensor, *, alpha: float, limit: float) -> Tensor:
        return swiglu_oai(gate.to(wide), up.to(wide), alpha, limit).to(dtype)

    def by_turns(input: Tensor, *, alpha: float, limit: float) -> Tensor:
        gate, up = turns(input)
        return apart(gate, up, alpha=alpha, limit=limit)

    return apart if "up" in facts.tensors else by_turns


_ACTIVATIONS = {
    "gelu": always(torch._C._nn.gelu),
    "silu": always(torch._C._nn.silu),
    "relu2": _load_relu2,
    "silu_mul": functools.partial(_times, activation=torch._C._nn.silu),
    "gelu_mul": functools.partial(_times, activation=torch._C._nn.gelu),
    "swiglu_oai": _load_swiglu_oai,
}
"""What is better than the expression; others are loaded as that."""


def _alike(facts: Facts) -> bool:
    """A GPU computes each element alike; a CPU computes what no vector fills by another exponential."""
    return facts.device.platform != "cpu"


KERNELS = (
    *(
        Kernel.of_expression(
            operation,
            id=f"torch.{name}",
            backend=TORCH,
            limits=(FLOATS,),
            load=_LOADS.get(name),
            **BY_ITSELF,
            handles_negated=True,
            priority=40,
            stock=True,
        )
        for operation in OPERATIONS
        for name in (operation.name.partition(".")[2],)
    ),
    *(
        Kernel.of_expression(*operations, id=f"torch.{name}", backend=TORCH, limits=(FLOATS,), priority=40, stock=True)
        for name, operations in (
            ("transpose_copy", (TRANSPOSE_HEAD_TOKEN, TRANSPOSE_TOKEN_HEAD)),
            ("split_qkv", (SPLIT_QKV,)),
            ("copy_slice", (COPY_SLICE,)),
        )
    ),
    *(
        kernel(
            f"{name}{ending}",
            operation,
            _load(rows_of),
            FLOATS,
            accepts=("scale", "padding_idx", *accepts),
            grad=True,
            **BY_ITSELF,
            handles_negated=True,
            priority=priority,
            stock=name == "torch.embedding" and not ending,  # a shard takes several functions
        )
        for name, rows_of, priority in (("torch.embedding", _embedding, 50), ("torch.index_select", _selection, 40))
        for ending, operation, accepts in (
            ("", "embedding.lookup", ()),
            (".shard", "embedding.lookup.shard", ("vocab_start",)),
        )
    ),
    *(
        Kernel.of_expression(
            *operations,
            id=f"torch.{name}",
            backend=TORCH,
            limits=(FLOATS,),
            load=_ACTIVATIONS.get(name),
            handles_empty=True,
            batch_invariant=_alike,
            handles_negated=True,
            priority=45,
            stock=name in ("gelu", "silu"),  # the others are several functions of torch
        )
        for operations in (*((each,) for each in ALONE), *GATED)
        for name in (operations[0].name.partition(".")[2],)
    ),
    kernel("torch.quantize", _of(SCALED), _load_scaled, FLOATS, accepts=("scale", "per", "block_size"), **_COMMON),
    kernel("torch.quantize_mx", _of(MX), _load_blocks(formats.mx_quotients), FLOATS, **_COMMON),
    kernel(
        "torch.quantize_nvfp4",
        _of(NV),
        _load_blocks(formats.nv_quotients),
        FLOATS,
        accepts=("tensor_scale",),
        **_COMMON,
    ),
    Kernel.of_expression(
        *DEQUANTIZE.values(),
        id="torch.dequantize",
        backend=TORCH,
        accepts=("tensor_scale", "out_dtype"),
        limits=(limit.dtype("int8", "uint8", "float8_e4m3", "float8_e5m2"),),
        **_COMMON,
    ),
)
