"""Experts with quantised weights, one after another: what a product with one weight makes of those of a mixture.

Kernels of a product, which make a form of a weight once, serve the experts that have tokens with a form of each; the
weights of others are not read. Sorting, the gate and the sum are those of torch's loop over experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from layerzero.backends.grouped_weights import Parts, Product, formed
from layerzero.backends.torch.moe import load_each
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Backend, Kernel
from layerzero.core.limit import Limit
from layerzero.ops.linear.packed import Pack, PackedWeight, belongs
from layerzero.ops.moe.experts import PACKED_OF
from layerzero.ops.moe.quantized import QUANTIZED
from layerzero.ops.quantize.weight import QuantizedWeight

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


def _load(facts: Facts, owner: str, parts: Parts, *, of_codes: bool) -> Callable[..., Any]:
    made_of = [
        parts(of_product(facts, *each)) for each in (("hidden", "joined_features"), ("inner_features", "hidden"))
    ]
    count, key = facts.size("experts"), (owner, facts["dtype"])

    def forms(packed: PackedWeight, pack: Pack, product: Product) -> Products:
        def made(weight: QuantizedWeight) -> tuple[list[Any], int]:
            found = [formed(pack, weight[number], of_codes=of_codes) for number in range(weight.shape[0])]
            return [each for each, _ in found], sum(size for _, size in found)

        all_forms = packed.form(key, made)

        def run(rows: Tensor, number: int) -> Tensor:
            form, order = all_forms[number]
            return product(rows.contiguous() if order is None else rows.index_select(1, order), form)

        return Products(count, run)

    return looped(facts, lambda given: [forms(given[name], *own) for name, own in zip(PACKED_OF, made_of, strict=True)])


ALIKE = limit.one_of("formats_alike", True)
"""What kernels demand that look at one of both formats alone."""


def experts_of(
    kernel_id: str,
    backend: Backend,
    parts: Parts,
    priority: int,
    *limits: Limit,
    of_codes: bool = True,
) -> Kernel:
    """A kernel for quantised experts on a CPU, made of a product's.

    See ``grouped`` of :mod:`layerzero.backends.grouped_weights`.
    """
    return Kernel(
        id=kernel_id,
        operations=(QUANTIZED.name,),
        backend=backend,
        load=lambda facts: _load(facts, kernel_id, parts, of_codes=of_codes),
        accepts=(*ACCEPTS, *TENSORS, *PACKED_OF),
        limits=(
            limit.platform("cpu"),
            ALIKE,
            *limits,
            *(belongs(packed, of) for packed, of in PACKED_OF.items()),
        ),
        graph_safe=False,
        priority=priority,
    )
