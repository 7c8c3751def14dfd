"""Kernels of repositories of huggingface/kernels-community, a function for each adapter, named in ``ADAPTERS``.

Read at commit 40d4194f (2026-08); no build for an accelerator ran here.

activation: gates and activations with vLLM's signatures, which write into a tensor that is given. On a CPU it has
``silu_and_mul`` alone (activation_cpu), with AVX512-BF16 for bfloat16 and torch's own operators else. A build that has
no shared library may run anywhere; its limits are those of the strictest build.

fp8-fbgemm (quantizer.py) and finegrained-fp8 (utils.py) have no adapter. Scales of small rows and blocks are their own:
``lz.quantize`` has vLLM's bound of 1 / (448 * 512), they have smaller ones, or 0. ``quantize_fp8_per_row`` makes a
number of NaN, too (``tl.clamp``).

flash-attn2 and flash-attn3: ``flash_attn_func`` has the arguments of flash-attn 2.8 and flash-attn-3 3.0, gives the
same results, and has the packages' limits.

quantization-gptq and quantization-bitsandbytes: products with weights of four bits on CPUs, the same code but for what
a code stands for, with AVX512-BF16 or torch's operators. Blocks of 32 outputs hold 64 codes, two of each output, in 32
bytes, the first 32 in the low bits. Rows, scales and the numbers that codes stand for are bfloat16. More than four rows
are multiplied by blocks of 128 inputs, which groups must divide or be multiples of. quantization-eetq has no adapter:
``preprocess_weights`` is registered for CUDA and takes tensors of a CPU alone, so nothing there lays out codes that
exist already.

rmsnorm, for CPUs and Intel GPUs: ``apply_rms_norm`` reads whole vectors of a dense row with a weight of the same dtype.
layer-norm (ln_api.cpp), for NVIDIA's: ``dropout_add_ln_fwd`` is FlashAttention's dropout_layer_norm: two axes, rows of
multiples of 8 up to 8192 elements.

rotary (rotary-cpu, rotary_cuda.cu): FlashAttention's rotation of two halves, written over what it is given. Queries and
tables have one dtype there, so that half precision needs tables in half precision. Its CPU code for bfloat16 takes axes
(batch, heads, seq, half) and reads tables by their strides, so that they are expanded here.

vllm-moe (fused_moe.py): vLLM's Triton products of experts with a gate between them. ``fused_experts`` takes weights
(E, 2 I, H) and (E, H, I), gate first, as ``moe.experts`` does. Experts that are elsewhere get a number more, which
``expert_map`` sends nowhere.
Library: activation and vllm-moe are vLLM's, Apache-2.0; rmsnorm Apache-2.0; the products of four bits MIT; the others
BSD-3-Clause, arXiv:2307.08691 and arXiv:2407.08608.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.flash_attn import attention as dense
from layerzero.backends.grouped_weights import IN_FOUR_BITS, Product, bytes_of, grouped, regrouped
from layerzero.backends.hub.build import Build
from layerzero.backends.shape_cache import triton_cache
from layerzero.core import limits as limit
from layerzero.core.dtypes import dtype_name
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.ops.linear.packed import Pack
from layerzero.ops.quantize.weight import QuantizedWeight
from layerzero.ops.quantize.weight_format import Codes
from layerzero.ops.rope.split import rope

_DTYPES = limit.dtype("float32", "float16", "bfloat16")


def activation(build: Build) -> Sequence[Kernel]:
    """Declare what the repository serves on the build's platform."""

    def load(name: str, *, halves: bool) -> Callable[[Facts], Callable[..., Any]]:
        def loaded(facts: Facts) -> Callable[..., Any]:
            function = name
            if name.startswith("gelu") and facts["approximate"] == "tanh":
                function = name.replace("gelu", "gelu_tanh")
            compute = getattr(build.module(), function)

            def run(input: Tensor, **_: object) -> Tensor:
                width = input.shape[-1] // 2 if halves else input.shape[-1]
                output = input.new_empty((*input.shape[:-1], width))
                compute(output, input)
                return output

            return run

        return loaded

    dense = (_DTYPES, limit.contiguous("input"), limit.aligned(16, "input"))
    halves = (*dense, limit.dim("joined", multiple=8))
    rows = (*dense, limit.dim("features", multiple=8))
    found = [build.kernel("silu_mul", "mlp.silu_mul.joined", load=load("silu_and_mul", halves=True), limits=halves)]
    if build.platform == "cpu" and build.compiled:
        return found
    given = {"accepts": ("approximate",)}
    return [
        *found,
        build.kernel("gelu_mul", "mlp.gelu_mul.joined", load=load("gelu_and_mul", halves=True), limits=halves, **given),
        build.kernel("gelu", "activation.gelu", load=load("gelu", halves=False), limits=rows, **given),
        build.kernel("silu", "activation.silu", load=load("silu", halves=False), limits=rows),
    ]


_OF = {"flash-attn2": ("flash_attn.v2", dense.run_v2), "flash-attn3": ("flash_attn.v3", dense.run_v3)}


def attention(build: Build) -> Sequence[Kernel]:
    """Declare the package's kernel as one of this build."""
    name, run = _OF[build.name]
    declared = next(each for each in dense.KERNELS if each.id == name)

    def load(facts: Facts) -> Callable[..., Any]:
        return run(build.module().flash_attn_func, facts)

    fields = build.fields("attention")
    return (dataclasses.replace(declared, **fields, load=load, aliases=(), priority_since={}, graph_safe=False),)


def norms(build: Build) -> Sequence[Kernel]:
    """Declare what the repository serves."""
    return _rmsnorm(build) if build.name == "rmsnorm" else _layer_norm(build)


def _rmsnorm(build: Build) -> Sequence[Kernel]:
    def load(facts: Facts) -> Callable[..., Any]:
        compute, hidden = build.module().apply_rms_norm, facts.size("hidden")

        def run(input: Tensor, weight: Tensor, *, eps: float) -> Tensor:
            output: Tensor = compute(input.view(-1, hidden), weight, eps)
            return output.view(input.shape)

        return run

    limits = (
        limit.dtype("float32", "bfloat16") if build.compiled else _DTYPES,
        limit.contiguous("input", "weight"),
        limit.dim("hidden", multiple=32),
    )
    return (build.kernel("rms_norm", "norm.rms", load=load, accepts=("eps",), limits=limits),)


def _layer_norm(build: Build) -> Sequence[Kernel]:
    def load(facts: Facts) -> Callable[..., Any]:
        """The norm alone: no dropout, no residual, no scales of rows and columns, no subsets."""
        compute, hidden, rms = build.module().dropout_add_ln_fwd, facts.size("hidden"), facts["operation"] == "norm.rms"
        middle = None, None, None, None, 0.0

        def run(input: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float, **_: object) -> Tensor:
            if bias is not None:
                weight, bias = weight.view(hidden), bias.view(hidden)
            rows = input.view(-1, hidden)
            output: Tensor = compute(rows, weight, bias, *middle, eps, 1.0, 0, None, False, rms)[0]
            return output.view(input.shape)

        return run

    def limits(*tensors: str) -> tuple[limit.Limit, ...]:
        shared = _DTYPES, limit.dim("hidden", max=8192, multiple=8)
        return (*shared, limit.contiguous(*tensors), limit.aligned(16, *tensors))

    both = limit.one_of("weight", "float"), limit.one_of("bias", "float")
    return (
        build.kernel("rms_norm", "norm.rms", load=load, accepts=("eps",), limits=limits("input", "weight")),
        build.kernel(
            "layer_norm",
            "norm.layer",
            load=load,
            accepts=("normalized_shape", "weight", "bias", "eps"),
            limits=(*limits("input", "weight", "bias"), *both),
        ),
    )


def rotary(build: Build) -> Sequence[Kernel]:
    """Declare the rotation, into new memory and in place."""

    def load(*, in_place: bool) -> Callable[[Facts], Callable[..., Any]]:
        return lambda facts: rope(_rotating(build, facts), in_place=in_place)

    shared: dict[str, Any] = {"layout": "BSHD", "accepts": ("positions",), "limits": (_DTYPES, _ONE_DTYPE)}
    return (
        build.kernel("rope", "posenc.rope", load=load(in_place=False), **shared),
        build.kernel("rope_inplace", "posenc.rope.inplace", load=load(in_place=True), **shared),
    )


def _rotating(build: Build, facts: Facts) -> Callable[..., None]:
    compute, half = build.module().apply_rotary, facts.size("rotary_half")

    def run(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool) -> None:
        seq = query.shape[-3]
        batch = query.shape[0] if query.ndim == 4 else 1
        if positions is None:
            tables = [each[:seq].expand(batch, 1, seq, half) for each in (cos, sin)]
        else:
            places = positions.expand(batch, seq)
            tables = [each[places].unsqueeze(1) for each in (cos, sin)]
        for each in (query, key):
            rows = each.view(batch, seq, *each.shape[-2:]).transpose(1, 2)
            first, second = rows[..., :half], rows[..., half : 2 * half]
            compute(first, second, *tables, first, second, False)

    return run


_ONE_DTYPE = limit.rule(
    "table_dtype: that of query",
    lambda facts: facts["table_dtype"] == dtype_name(facts.tensors["query"].dtype),
    "DTYPE_UNSUPPORTED",
)


def moe(build: Build) -> Sequence[Kernel]:
    """Declare the experts without biases."""

    def load(facts: Facts) -> Callable[..., Any]:
        compute, experts = build.module().fused_experts, facts.size("experts")
        where = torch.arange(experts + 1, dtype=torch.int32, device=torch.device(facts.device.torch_type))
        where[-1] = -1

        def run(*tensors: Tensor, activation: str) -> Tensor:
            input, gate_up_weight, down_weight, expert_ids, expert_weights = tensors
            output: Tensor = compute(
                input,
                gate_up_weight,
                down_weight,
                expert_weights.to(torch.float32),
                expert_ids.to(torch.int32).remainder(experts + 1),
                activation=activation,
                global_num_experts=experts + 1,
                expert_map=where,
            )
            return output

        return run

    return (
        build.kernel(
            "experts",
            "moe.experts",
            load=load,
            accepts=("activation",),
            limits=(
                limit.arch(min=(8, 0)),
                limit.dtype("float16", "bfloat16"),
                limit.one_of("activation", "silu", "gelu"),
                limit.contiguous("input", "gate_up_weight", "down_weight"),
            ),
            jit=True,
            cache_folder=triton_cache,
        ),
    )


_POWERS = tuple(1 << power for power in range(5, 13))
"""Sizes of blocks."""

_WHOLE_BLOCKS = limit.rule(
    "in_features: a multiple of weight_group", lambda facts: facts["in_features"] % facts["weight_group"] == 0
)


def four_bits(build: Build) -> Sequence[Kernel]:
    """Declare the product with weights by group, or with those of nf4 and fp4."""
    of_groups = build.name == "quantization-gptq"
    groups = (limit.dim("in_features", multiple=32), limit.dim("weight_group", multiple=32), IN_FOUR_BITS)
    blocks = (limit.one_of("weight_group", *_POWERS), _WHOLE_BLOCKS)
    return (
        grouped(
            f"hub.{build.name}.linear",
            build.backend,
            functools.partial(_by_group if of_groups else _by_block, build),
            20,
            limit.dtype("bfloat16"),
            limit.dim("out_features", multiple=32),
            *(groups if of_groups else blocks),
            operation="group" if of_groups else "codebook",
            trust=build.fields("linear")["trust"],
        ),
    )


def _in_blocks(codes: Tensor) -> Tensor:
    """Codes as blocks of 32 outputs. Shapes: uint8 (N, K) → uint8 (N, K / 2)."""
    outputs, inputs = codes.shape
    pairs = codes.view(-1, 32, inputs // 2, 2).transpose(1, 2).reshape(-1, 2, 32)
    return (pairs[:, 0] | pairs[:, 1] << 4).view(outputs, -1)


def _by_group(build: Build, facts: Facts) -> tuple[Pack, Product]:
    compute = build.module().gemm_int4_forward

    def pack(codes: Codes) -> tuple[tuple[Any, ...], int]:
        codes = regrouped(codes, (128, 64, 32))
        zero = torch.full_like(codes.scale, codes.middle, dtype=torch.uint8) if codes.zero is None else codes.zero
        form = (_in_blocks(codes.numbers), zero.t().contiguous(), codes.scale.to(torch.bfloat16).t().contiguous())
        return (*form, codes.group), bytes_of(*form)

    return pack, lambda rows, form: compute(rows, *form)


def _by_block(build: Build, facts: Facts) -> tuple[Pack, Product]:
    compute, kind = build.module().gemm_4bit_forward, int(facts["weight_scheme"] == "fp4")

    def pack(weight: QuantizedWeight) -> tuple[tuple[Any, ...], int]:
        data, scale = weight.fields.data, weight.fields.scale
        assert scale is not None
        codes = torch.cat([data >> 4, data & 15], 1).view(weight.shape)
        form = _in_blocks(codes), scale.to(torch.bfloat16).view(len(codes), -1).t().contiguous()
        return (*form, weight.format.group, kind), bytes_of(*form)

    return pack, lambda rows, form: compute(rows, *form)


ADAPTERS: dict[str, Callable[[Build], Sequence[Kernel]]] = {
    "activation": activation,
    "flash-attn2": attention,
    "flash-attn3": attention,
    "layer-norm": norms,
    "quantization-bitsandbytes": four_bits,
    "quantization-gptq": four_bits,
    "rmsnorm": norms,
    "rotary": rotary,
    "vllm-moe": moe,
}
"""Repository, without its owner, to what declares the kernels of a build of it."""
