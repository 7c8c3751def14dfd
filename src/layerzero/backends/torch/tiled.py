"""Products and activations whose bits do not depend on the batch: torch's own functions on tiles of one shape.

A library picks its blocks by the number of rows: of torch's float32 products on a CPU 18 of 32 parts of a batch, of 1
to 256 rows, had other bits than in the whole, of tiles of 32 rows none (AMD EPYC, torch 2.13, 2026-11-26). So 32 rows
are multiplied at a time, on a GPU 128, the last tile filled up: every call has the same shape.

torch's loops over elements compute the end of a range, which no vector fills, by another exponential: of 65,536 numbers
silu gave 2,552 other bits there, gelu by tanh 10,380. So rows are filled up to whole vectors, and given to torch in
pieces that one thread takes as a whole. On a GPU each element is computed alike.

One product of all rows is none of these. cuBLASLt that may not share out sums (split-K), as vLLM's batch-invariant mode
has it on Hopper, gave a row of a block of 1,024 and 2,816 features other bits alone than among 256, and took 322 us for
8 x 14,336 by 4,096 where cuBLAS took 33 (H200, torch 2.11, CUDA 13, 2026-11-27).

For ranks that share a product, its sum is a tree, too: blocks of a fixed length are multiplied, halves of the sum are
added up, and so are halves of these. A rank that has half of the inputs has a branch, whatever the number of ranks.

Queries, keys and values are three products, or one whose parts are the results. Joining three weights copies them,
which only many rows repay; three products with parts of a joined weight give dense results, and cost two launches more.
On the CPU the same of oneDNN with packed weights.
Library: torch >= 2.10, BSD-3-Clause; oneDNN 3, Apache-2.0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from layerzero.backends.torch.attention import BY_ITSELF, FLOATS, TORCH, kernel
from layerzero.backends.torch.cpu_half import linear_for, many, widened
from layerzero.backends.torch.linear import load_block, load_then, own
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.ops.activation.declare import ALONE, GATED, halves, turns
from layerzero.ops.activation.formulas import FUNCTIONS
from layerzero.ops.comm import tree_sum
from layerzero.ops.linear import packed_blocks
from layerzero.ops.linear.qkv import BIASES, Three, pieces


def load_three(facts: Facts, product: Callable[..., Tensor] | None = None) -> Callable[..., Any]:
    """Three products, of three weights or of parts of a joined one."""
    linear = product or linear_for(facts)

    def apart(
        *tensors: Tensor, q_bias: Tensor | None = None, k_bias: Tensor | None = None, v_bias: Tensor | None = None
    ) -> Three:
        input, q_weight, k_weight, v_weight = tensors
        return linear(input, q_weight, q_bias), linear(input, k_weight, k_bias), linear(input, v_weight, v_bias)

    def joined(input: Tensor, q_weight: Tensor, *, kv_features: int, q_bias: Tensor | None = None) -> Three:
        sizes = [q_weight.shape[0] - 2 * kv_features, kv_features, kv_features]
        biases = (None, None, None) if q_bias is None else torch.split(q_bias, sizes)
        query, key, value = map(linear, (input,) * 3, torch.split(q_weight, sizes), biases)
        return query, key, value

    return joined if facts["operation"] == "mlp.qkv.joined" else apart


def _load_one(facts: Facts, product: Callable[..., Tensor] | None = None) -> Callable[..., Any]:
    linear = product or linear_for(facts)

    def joined(input: Tensor, q_weight: Tensor, *, kv_features: int, q_bias: Tensor | None = None) -> Three:
        return pieces(linear(input, q_weight, q_bias), kv_features)

    return joined


def _load_joining(facts: Facts) -> Callable[..., Any]:
    linear, cat = linear_for(facts), torch.cat

    def run(
        input: Tensor,
        *weights: Tensor,
        q_bias: Tensor | None = None,
        k_bias: Tensor | None = None,
        v_bias: Tensor | None = None,
    ) -> Three:
        sizes = [each.shape[0] for each in weights]
        given = q_bias, k_bias, v_bias
        bias = None
        if any(each is not None for each in given):
            zeros = (input.new_zeros(size) if each is None else each for each, size in zip(given, sizes, strict=True))
            bias = cat(tuple(zeros))
        product = linear(input, cat(weights), bias)
        query, key, value = (
            product.narrow(-1, first, size)
            for first, size in zip((0, sizes[0], sizes[0] + sizes[1]), sizes, strict=True)
        )
        return query, key, value

    return run


_QKV = (
    ("torch.qkv_linear", ("mlp.qkv",), load_three, BIASES, 50),
    ("torch.qkv_linear.joined", ("mlp.qkv.joined",), _load_one, ("kv_features", "q_bias"), 50),
    ("torch.qkv_linear_apart.joined", ("mlp.qkv.joined",), load_three, ("kv_features", "q_bias"), 30),
    ("torch.qkv_linear_joining", ("mlp.qkv",), _load_joining, BIASES, 15),
)

_QKV_KERNELS = [
    kernel(
        name, operations, load, FLOATS, accepts=accepts, grad=True, handles_negated=True, priority=priority, stock=own
    )
    for name, operations, load, accepts, priority in _QKV
]


Product = Callable[..., Tensor]

ROWS = {"cpu": 32}
ROWS_ELSEWHERE = 128
"""Rows of a tile. A GPU reads the weight once for each: 128 take it as long as one."""

LEAF, OUTPUTS = 256, 256
"""Inputs that are summed up by the library itself where a sum is a tree, and outputs that are computed at once."""

_LINE = 64
"""Bytes at which torch's own memory begins: libraries take another way for rows that begin elsewhere."""

_STEP = 16
"""Inputs that a row is filled up to, so that rows of a tile begin alike: of float64 and 101 inputs the second row of
a tile had other bits than the first (AMD EPYC, MKL of torch 2.13, 2026-11-26)."""

_VECTORS, _PIECE = 64, 2**14
"""Elements that no vector of a CPU divides otherwise, and of a piece: torch shares out 32,768 and more."""


def tiled(facts: Facts) -> Product:
    """The product of rows that fill whole tiles, a tile at a time."""
    size, product = ROWS.get(facts.device.platform, ROWS_ELSEWHERE), linear_for(facts)

    def run(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        outputs, uneven = len(weight), -input.shape[-1] % _STEP
        if uneven:
            input, weight = functional.pad(input, (0, uneven)), functional.pad(weight, (0, uneven))
        rows = input.reshape(-1, input.shape[-1])
        if not rows.is_contiguous() or rows.data_ptr() % _LINE:
            rows = rows.clone(memory_format=torch.contiguous_format)
        found = [product(tile, weight, bias) for tile in torch.split(rows, size)]
        output = found[0] if len(found) == 1 else torch.cat(found)
        return output.view(*input.shape[:-1], outputs)

    return run


def filling(facts: Facts, run: Callable[..., Any]) -> Callable[..., Any]:
    """A call of products whose rows are filled up to whole tiles, once for all of them."""
    size = ROWS.get(facts.device.platform, ROWS_ELSEWHERE)
    zeros = facts.device.platform == "cpu" or bool(facts["requires_grad"])  # else nothing reads rows of no input

    def filled(input: Tensor, *weights: Tensor, **named: Any) -> Any:
        rows = input.reshape(-1, input.shape[-1])
        count, beyond = len(rows), -len(rows) % size
        if not beyond:
            return run(input, *weights, **named)
        if zeros:
            more = functional.pad(rows, (0, 0, 0, beyond))
        else:
            more = rows.new_empty((count + beyond, rows.shape[1]))  # a launch less, in a step that waits for its host
            more[:count].copy_(rows)
        found = run(more, *weights, **named)
        parts = [each[:count].view(*input.shape[:-1], -1) for each in (found if isinstance(found, tuple) else (found,))]
        return tuple(parts) if isinstance(found, tuple) else parts[0]

    return filled


def tree(facts: Facts) -> Product:
    """The same by blocks of outputs, each the tree of the sums of its leaves, in float32 or wider."""
    multiply, dtype = tiled(facts), facts["dtype"]
    assert isinstance(dtype, torch.dtype)
    wide = torch.promote_types(dtype, torch.float32)

    def branch(input: Tensor, weight: Tensor) -> Tensor:
        length = weight.shape[1]
        if length <= LEAF or length % 2:
            return multiply(input.contiguous(), weight.contiguous())
        half = length // 2
        parts = ((input[..., :half], weight[:, :half]), (input[..., half:], weight[:, half:]))
        return tree_sum([branch(*part) for part in parts])

    def run(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        found = []
        for block in torch.split(weight, OUTPUTS):
            count = len(block)
            filled = block if count == OUTPUTS else functional.pad(block, (0, 0, 0, OUTPUTS - count))
            found.append(branch(input.to(wide), filled.to(wide))[..., :count])
        output = torch.cat(found, -1)
        return (output if bias is None else output + bias).to(input.dtype)

    return run


def by_vectors(formula: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """An activation of rows in whole vectors, by pieces that torch does not share out among threads."""
    shape, features = tensors[0].shape, tensors[0].shape[-1]
    filled = [functional.pad(each, (0, -features % _VECTORS)) for each in tensors]
    flat = [torch.split(each.contiguous().view(-1), _PIECE) for each in filled]
    found = torch.cat([formula(*pieces) for pieces in zip(*flat, strict=True)])
    output = found.view(*shape[:-1], -1)[..., :features]
    return output if output.is_contiguous() else output.contiguous()


def _formulas(facts: Facts) -> Mapping[str, Callable[..., Tensor]]:
    """Activations by name, as products are followed by them."""
    if facts.device.platform != "cpu":
        return FUNCTIONS
    return {name: functools.partial(by_vectors, each) for name, each in FUNCTIONS.items()}


def _load(facts: Facts, load: Callable[..., Any], make: Callable[[Facts], Product]) -> Callable[..., Any]:
    formulas = () if load is load_three else (_formulas(facts),)  # nothing follows three products
    return filling(facts, load(facts, make(facts), *formulas))


def _load_activation(facts: Facts, formula: Callable[..., Tensor], gated: bool) -> Callable[..., Any]:
    split = turns if str(facts["operation"]).endswith("interleaved") else halves
    on_cpu = facts.device.platform == "cpu"

    def run(input: Tensor, up: Tensor | None = None, **params: Any) -> Tensor:
        tensors = (input,) if not gated else split(input) if up is None else (input, up)
        wide = torch.promote_types(input.dtype, torch.float32) if gated else input.dtype  # rounded once
        told, given = functools.partial(formula, **params), [each.to(wide) for each in tensors]
        return (by_vectors(told, *given) if on_cpu else told(*given)).to(input.dtype)

    return run


_KINDS: tuple[tuple[str, tuple[str, ...], Callable[..., Any], tuple[str, ...]], ...] = (
    ("linear", ("mlp.linear",), load_then, ("bias", "activation", "out_dtype")),
    ("mlp", packed_blocks.PLAIN, load_block, ("activation", *packed_blocks.BIASES[:2])),
    ("mlp.gated", packed_blocks.GATED, load_block, ("activation", *packed_blocks.BIASES)),
    ("qkv", ("mlp.qkv",), load_three, BIASES),
    ("qkv.joined", ("mlp.qkv.joined",), load_three, ("kv_features", "q_bias")),
)

KERNELS = (
    *(
        kernel(
            f"torch.{name.partition('.')[0]}_{ending}{''.join(name.partition('.')[1:])}",
            operations,
            functools.partial(_load, load=load, make=make),
            FLOATS,
            accepts=accepts,
            grad=True,
            batch_invariant=True,
            asked_for=True,
            tp_invariant=make is tree,
            handles_negated=True,
            priority=priority,
        )
        for ending, make, priority in (("tiled", tiled, 3), ("tree", tree, 2))
        for name, operations, load, accepts in _KINDS
        if make is tiled or name in ("linear", "qkv")  # what a block sums up of ranks it would have rounded before
    ),
    *(
        Kernel.of_expression(
            *operations,
            id=f"torch.{operations[0].name.partition('.')[2]}_tiled",
            backend=TORCH,
            limits=(FLOATS,),
            load=functools.partial(
                _load_activation, formula=operations[0].expression or operations[0].reference, gated=len(operations) > 1
            ),
            **BY_ITSELF,
            asked_for=True,
            handles_negated=True,
            priority=3,
        )
        for operations in (*((each,) for each in ALONE), *GATED)
    ),
    *_QKV_KERNELS,
    *(widened(each, many("rows"), each.load) for each in _QKV_KERNELS[:2]),
)
