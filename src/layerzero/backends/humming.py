"""Humming's products with codes by group, float8, MX and NVFP4, compiled with NVRTC for the shape of one weight.

A layer's configuration is a text; ``HummingKernel.prepare_kernels`` (humming/kernel/humming.py) makes a table of
kernels by the number of rows, and one operator launches them. Here the table is made once and the operator is called
directly: ``humming_gemm`` looks the table up by three texts in each call. Codes and zero points are streams of bits,
the lowest first (include/humming/kernel/pack_weight.cuh); without zero points the code of 0 is in the middle
(``dequantize_weight`` of utils/weight.py). Groups have 16 numbers at least (schema/humming.py), of inputs and
outputs steps of 128 alone are offered, which its tables of tiles take whole. Of a format with
zero points both tables are compiled, because a weight whose zero points are all in the middle takes none. Scales of
128 x 128 numbers are repeated for each row (schema/fp8.py); those of nvfp4 are multiples of a second one. Its import
starts a process that loads its launcher, which is turned off here.

Its batch-invariant mode (``use_batch_invariant`` in humming/config/config.py) shares out no sum, and keeps "the same
reduction tile for every batch size" (tune/sm90_policies.py); its own tests compare the bits of all numbers of rows
(testing/runner.py). Kernels in that mode never ran here.
Library: humming-kernels 0.1.19, Apache-2.0; no function that is called is documented, hence one version only.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.grouped_weights import (
    Locks,
    Product,
    as_powers,
    by_rows,
    bytes_of,
    grouped,
    refuse_nan,
    second_factor,
)
from layerzero.backends.shape_cache import named_folder
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Backend, Kernel, Trust
from layerzero.ops.linear.packed import Pack
from layerzero.ops.quantize.weight import QuantizedWeight
from layerzero.ops.quantize.weight_format import Codes, packed

HUMMING = Backend(
    name="humming",
    summary="Humming's products with quantised weights, compiled on first use",
    import_name="humming",
    distribution="humming-kernels",
    versions="==0.1.19",
    tested=("0.1.19",),
    requires=("torch>=2.11",),
    platforms=("cuda",),
    least_sm=(8, 0),
    install="pip install humming-kernels==0.1.19",
    homepage="https://github.com/vllm-project/humming",
    flags=("graph_safe", "jit"),
)

_LOCKS = 2048
"""As ``HummingLayer`` has them (humming/layer.py)."""

_QUIET = "HUMMING_DISABLE_PARALLEL_BUILD"


def _library() -> Any:
    """The package, whose import starts no process."""
    told = os.environ.get(_QUIET)
    os.environ[_QUIET] = "1"
    try:
        import humming.kernel.humming
        import humming.schema
        import humming.transform
    finally:
        if told is None:
            del os.environ[_QUIET]
    return humming


_cache_folder = functools.partial(named_folder, "HUMMING_CACHE_DIR", ".humming", "cache")
"""Where it keeps what it compiled (humming/utils/jit.py)."""


def _build_key(facts: Facts) -> Hashable:
    return facts.device.sm, *(facts[name] for name in ("out_features", "in_features", "weight_format", "dtype"))


def _schema(facts: Facts) -> dict[str, Any]:
    """What ``HummingWeightSchema`` takes: the numbers, their scales, and how many share one."""
    scheme, group = str(facts["weight_scheme"]), facts.size("weight_group")
    if scheme in _MICRO:
        return dict(zip(_FIELDS, _MICRO[scheme], strict=False))
    numbers = "float8e4m3" if scheme == "fp8" else f"uint{max(facts.size('weight_bits'), 4)}"
    scale = str(facts.tensors["input"].dtype).removeprefix("torch.")
    return dict(zip(_FIELDS, (numbers, scale, 0 if group == facts.size("in_features") else group), strict=False))


_FIELDS = ("b_dtype", "bs_dtype", "weight_scale_group_size", "weight_scale_2_type")
_MICRO: dict[str, tuple[object, ...]] = {
    "mxfp4": ("float4e2m1", "float8e8m0", 32),
    "mxfp8": ("float8e4m3", "float8e8m0", 32),
    "nvfp4": ("float4e2m1", "float8e4m3", 16, "tensor"),
}
"""As humming/schema/compressed_tensors.py and mxfp4.py have them."""


def _of_codes(codes: Codes, dtype: torch.dtype) -> dict[str, Tensor]:
    made = {"weight": packed(codes.numbers, codes.bits), "weight_scale": codes.scale.to(dtype).contiguous()}
    if (zero := codes.zero_points) is not None:
        made["zero_point"] = packed(zero.t(), codes.bits).t().contiguous()
    return made


def _of_weight(weight: QuantizedWeight, dtype: torch.dtype) -> dict[str, Tensor]:
    refuse_nan(weight, "Humming")
    scale = weight.fields.scale
    assert scale is not None
    words = weight.fields.data.contiguous().view(torch.int32)
    if weight.format.scheme == "fp8":
        return {"weight": words, "weight_scale": by_rows(weight).to(dtype).contiguous()}
    made = {"weight": words, "weight_scale": as_powers(scale).contiguous()}
    return made if weight.fields.second_scale is None else made | {"weight_scale_2": second_factor(weight)}


_INVARIANT = '{"use_batch_invariant": true}'
"""A text, as ``HummingKernel.prepare_kernels`` takes its configurations."""


def _parts(facts: Facts, compute: str | None = None) -> tuple[Pack, Product]:
    library, device = _library(), torch.device("cuda", facts.device.index or 0)
    dtype, given = facts.tensors["input"].dtype, _schema(facts)
    outputs, inputs = facts.size("out_features"), facts.size("in_features")

    def configured(*, zeros: bool) -> tuple[Any, Tensor]:
        """What a layer is, and its table of kernels, compiled."""
        schema = library.schema.HummingWeightSchema(**given, has_zero_point=zeros)
        layer = library.transform.prepare_layer_config(outputs, inputs, schema, torch_dtype=dtype, device=device)
        return layer, library.kernel.humming.HummingKernel.prepare_kernels(layer.to_str(), compute, None, device)

    may_have = {False, facts["weight_zeros"] != "none"} if facts.size("weight_bits") not in (2, 3) else {True}
    known = {zeros: configured(zeros=zeros) for zeros in may_have}
    launch = torch.ops.humming.launch_kernel.default

    def pack(weight: Codes | QuantizedWeight) -> tuple[tuple[Any, ...], int]:
        tensors = _of_codes(weight, dtype) if isinstance(weight, Codes) else _of_weight(weight, dtype)
        layer, table = known["zero_point" in tensors]
        made = library.transform.transform_humming_tensors(layer, tensors)
        parts = [made.get(name) for name in ("weight", "weight_scale", "weight_scale_2", "zero_point")]
        return (table, *parts, Locks(_LOCKS, parts[0].device)), bytes_of(*parts)

    def product(rows: Tensor, form: tuple[Any, ...]) -> Tensor:
        table, words, scale, second, zero, locks = form
        of_rows, behind, of_experts = (None, None), (None, None), (None,) * 4  # scales; a bias, the result
        given = (table, rows, words, scale, second, *of_rows, zero, *behind, *of_experts)
        output: Tensor = launch(*given, locks.now(), 1, 0)
        return output

    return pack, product


_LIMITS = (
    limit.dtype("float16", "bfloat16"),
    limit.dim("in_features", multiple=128),
    limit.dim("out_features", multiple=128),  # its tables for Hopper begin there (tune/sm90_policies.py)
    limit.aligned(16, "input"),
)


def _fits_tiles(facts: Facts) -> bool:
    """Whether no group crosses a tile, whose inputs are a power of two. 0.1.20 splits other groups (transform.py)."""
    group = facts.size("weight_group")
    return group & (group - 1) == 0 or group == facts.size("in_features")


def _kernels(name: str, operation: str, *limits: limit.Limit) -> tuple[Kernel, Kernel]:
    """A kernel, of which two runs gave other bits (H200, 2026-11-26), and the same in the batch-invariant mode."""
    make = functools.partial(
        grouped, platform="cuda", operation=operation, build_key=_build_key, cache_folder=_cache_folder
    )
    every = *_LIMITS, *limits
    invariant: dict[str, Any] = {
        "deterministic": True,
        "batch_invariant": True,
        "asked_for": True,
        "trust": Trust.UNTRIED,
    }
    return (
        make(name, HUMMING, _parts, 35, *every, deterministic=False),
        make(f"{name}_invariant", HUMMING, functools.partial(_parts, compute=_INVARIANT), 5, *every, **invariant),
    )


KERNELS = (
    *_kernels(
        "humming.linear",
        "group",
        limit.one_of("weight_bits", 2, 3, 4, 5, 6, 7, 8),
        limit.dim("weight_group", multiple=16),
        limit.rule("weight_group: a power of two, or in_features", _fits_tiles),
    ),
    *_kernels(
        "humming.linear_fp8",
        "block",
        limit.one_of("weight_dtype", "float8_e4m3"),
        limit.dim("weight_group", one_of=(0, 128)),
    ),
    *_kernels("humming.linear_nvfp4", "mx", limit.one_of("weight_scheme", "nvfp4")),
    *_kernels(
        "humming.linear_mx",
        "mx",
        limit.dtype("bfloat16"),  # of float16 it shifts powers of two into its range, and takes off what lies below
        limit.one_of("weight_scheme", "mxfp4", "mxfp8"),
        limit.one_of("weight_dtype", "uint8", "float8_e4m3"),
    ),
)
