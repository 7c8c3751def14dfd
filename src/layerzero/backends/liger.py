"""Liger's Triton kernels for norms and rotary positions, on NVIDIA's and AMD's GPUs.

The forward functions are called without their autograd functions: those cost 60 us a call on an H200 host (2026-11-21).
Their backward passes have not been compared with the reference, and rms_norm's writes the gradient over the one it was
given by default, so ``grad`` stays False. Casting mode ``gemma`` multiplies with the weight in float32, as norm.rms
does; ``llama`` rounds before it. The fused addition's kernel is launched from here, with the residual as its second
output: the function around it would make a new one. A kernel compiles in about a second for each power of two of the
row length, and again for what Triton specialises on: dtype, lengths that are multiples of 16, or 1. H200, bfloat16,
through the autograd functions: rms_norm 25 us at 1 x 4096 and 136 at 16384 x 8192 (torch 11 and 202), layer_norm 15 at
64 x 4096 and 181 at 16384 x 8192 (torch 12 and 225). The rotation writes over what it is given once that is contiguous,
keeps no copy, and is half-split only; it conforms on an H200 (docs/measurements/h200_layer.md).

Liger's Triton gates, on NVIDIA's and AMD's GPUs: a block a row, whole rows in registers, float32 inside.

The forward functions are called without their autograd functions, whose backward passes write gradients over what was
saved. Those that read two tensors take one stride for all of them. A kernel compiles in about a second for each length
of rows, and again for what Triton specialises on.
Library: liger-kernel 0.8.5, BSD-2-Clause, arXiv:2410.10989; read line by line, hence one version only.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from layerzero.backends.norm_limits import specialised
from layerzero.backends.shape_cache import triton_cache
from layerzero.backends.torch.collectives import ONE_SHOT, one_shot
from layerzero.core import limits as limit
from layerzero.core.facts import MAX_ALIGNMENT_BYTES, Facts
from layerzero.core.kernel import Backend
from layerzero.ops.rope.split import rope

LIGER = Backend(
    name="liger",
    summary="Liger's Triton kernels",
    import_name="liger_kernel",
    distribution="liger-kernel",
    versions="==0.8.5",
    tested=("0.8.5",),
    platforms=("cuda", "rocm"),
    install="pip install liger-kernel==0.8.5",
    homepage="https://github.com/linkedin/Liger-Kernel",
    flags=("deterministic", "graph_safe", "jit"),
)


def _load_rms_norm(facts: Facts) -> Callable[..., Any]:
    from liger_kernel.ops.rms_norm import rms_norm_forward

    def run(input: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        # float: Triton makes a constant of an integer, which cannot be cast as its kernel does
        output: Tensor = rms_norm_forward(input, weight, float(eps), 0.0, "gemma", None)[0]
        return output

    return run


def _norm_specialised(facts: Facts) -> Hashable:
    """The same as of other norms; many short rows have a kernel of their own (``rms_norm_forward``)."""
    return specialised(facts), facts.size("hidden") <= 256 and facts.size("rows") >= 2**15


def _load_add_rms_norm(facts: Facts) -> Callable[..., Any]:
    from liger_kernel.ops.fused_add_rms_norm import _CASTING_MODE_GEMMA, _fused_add_rms_norm_forward_kernel
    from liger_kernel.ops.utils import calculate_settings

    rows, hidden = facts.size("rows"), facts.size("hidden")
    block, warps = calculate_settings(hidden)
    launch = _fused_add_rms_norm_forward_kernel[(rows,)]
    mode = _CASTING_MODE_GEMMA.value

    def run(input: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        output = torch.empty_like(input)
        scales = torch.empty(rows, dtype=torch.float32, device=input.device)
        # output, sum, input, residual, weight, scales: each with its stride; then eps, offset, casting mode
        launch(
            *(output, hidden, residual, hidden, input, hidden, residual, hidden, weight, 1, scales, 1),
            *(hidden, float(eps), 0.0, mode),
            BLOCK_SIZE=block,
            num_warps=warps,
            num_stages=2,
        )
        increment_version(residual)  # Triton writes behind autograd's back
        return output

    return run


def _load_all_reduce_add_rms_norm(facts: Facts) -> Callable[..., Any]:
    add_norm = _load_add_rms_norm(facts)

    def run(input: Tensor, residual: Tensor, weight: Tensor, *, eps: float, group: Any = None) -> tuple[Tensor, Tensor]:
        total = one_shot(input, group=group)
        return add_norm(residual, total, weight, eps=eps), total

    return run


def _load_layer_norm(facts: Facts) -> Callable[..., Any]:
    from liger_kernel.ops.layer_norm import layer_norm_forward

    hidden = facts.size("hidden")

    def run(input: Tensor, *, normalized_shape: tuple[int, ...], weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        rows = input.view(-1, hidden)
        output: Tensor = layer_norm_forward(rows, weight.view(hidden), bias.view(hidden), float(eps))[0]
        return output.view(input.shape)

    return run


def _rotating(facts: Facts) -> Callable[..., None]:
    """One program for each token. The batch is a constant of the kernel, so all tokens are given as one sequence."""
    from liger_kernel.ops.rope import rope_forward

    heads, kv_heads, head_dim = (facts.size(name) for name in ("heads", "kv_heads", "head_dim"))
    width = facts.size("rotary_dim")

    def run(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool) -> None:
        seq = query.shape[-3]
        batch = query.shape[0] if query.ndim == 4 else 1
        if positions is None:
            rows = [each[:seq] for each in (cos, sin)]
            rows = [each.repeat(batch, 1) for each in rows] if batch > 1 else rows
        else:
            places = positions if positions.numel() == batch * seq else positions.expand(batch, seq)
            rows = [each.index_select(0, places.reshape(-1)) for each in (cos, sin)]
        rows = [each.float() for each in rows]  # it computes in their dtype
        flat = query.view(1, batch * seq, heads, head_dim), key.view(1, batch * seq, kv_heads, head_dim)
        rope_forward(*(each.transpose(1, 2) for each in flat), *rows, rotary_dim=width)

    return run


def _load_rope_inplace(facts: Facts) -> Callable[..., Any]:
    return rope(_rotating(facts), in_place=True)


def _rope_specialised(facts: Facts) -> Hashable:
    """What Triton makes a variant of the rotation for."""
    tokens = facts.size("batch") * facts.size("seq")
    sizes = tuple(facts.size(name) for name in ("heads", "kv_heads", "head_dim", "rotary_half"))
    aligned = tuple(facts.tensors[name].alignment_bytes == MAX_ALIGNMENT_BYTES for name in ("query", "key"))
    return facts.device.sm, facts["dtype"], sizes, tokens == 1, tokens % 16 == 0, aligned


_AMPERE = (limit.arch(min=(8, 0)), limit.dtype("float32", "float16", "bfloat16"))
"""On NVIDIA's GPUs from Ampere on: Triton has no bfloat16 on older ones."""

_LIMITS = (*_AMPERE, limit.contiguous("input", "residual", "weight", "bias"))
_WIDEST = 65536
# Rows shorter than a block of threads are read by several of them, and some could read what one has written already.
_IN_PLACE = limit.dim("hidden", min=512, max=_WIDEST)


def _load_silu_mul(facts: Facts) -> Callable[..., Any]:
    if "up" not in facts.tensors:
        from liger_kernel.ops.swiglu import swiglu_fused_gate_up_forward

        def together(input: Tensor) -> Tensor:
            output: Tensor = swiglu_fused_gate_up_forward(input)[1]
            return output

        return together
    from liger_kernel.ops.swiglu import swiglu_forward

    def apart(gate: Tensor, up: Tensor) -> Tensor:
        output: Tensor = swiglu_forward(gate, up)[2]
        return output

    return apart


def _load_gelu_mul(facts: Facts) -> Callable[..., Any]:
    from liger_kernel.ops.geglu import geglu_forward

    def run(gate: Tensor, up: Tensor, *, approximate: str) -> Tensor:
        output: Tensor = geglu_forward(gate, up)[2]
        return output

    return run


def _specialised(facts: Facts) -> Hashable:
    """The length of a row is a constant to Triton, the alignment of data what it specialises on."""
    aligned = tuple(tensor.alignment_bytes == MAX_ALIGNMENT_BYTES for tensor in facts.tensors.values())
    return facts.device.sm, facts["operation"], facts["dtype"], facts.size("features"), aligned


KERNELS = (
    LIGER.kernel(
        "liger.rms_norm",
        "norm.rms",
        _load_rms_norm,
        accepts=("eps",),
        limits=(*_LIMITS, limit.dim("hidden", max=_WIDEST)),
        cache_folder=triton_cache,
        build_key=_norm_specialised,
        priority=60,
    ),
    LIGER.kernel(
        "liger.add_rms_norm",
        "norm.add_rms",
        _load_add_rms_norm,
        accepts=("eps",),
        limits=(*_LIMITS, _IN_PLACE),
        cache_folder=triton_cache,
        build_key=specialised,
        priority=65,
    ),
    LIGER.kernel(
        "liger.symm_all_reduce_add_rms_norm",  # torch's one shot, then one launch where torch has two
        "comm.all_reduce_add_rms_norm",
        _load_all_reduce_add_rms_norm,
        accepts=("eps", "group"),
        limits=(*_LIMITS, _IN_PLACE, *ONE_SHOT),
        cache_folder=triton_cache,
        build_key=specialised,
        priority=65,
    ),
    LIGER.kernel(
        "liger.layer_norm",
        "norm.layer",
        _load_layer_norm,
        *_LIMITS,
        limit.dim("hidden", max=_WIDEST),
        limit.one_of("weight", "float"),
        limit.one_of("bias", "float"),
        accepts=("normalized_shape", "weight", "bias", "eps"),
        cache_folder=triton_cache,
        build_key=specialised,
        priority=45,
    ),
    *(
        LIGER.kernel(
            name,
            operation,
            load,
            *_AMPERE,
            limit.one_of("table_dtype", "float32", "float16", "bfloat16"),
            *((limit.contiguous("query", "key"),) if load is _load_rope_inplace else ()),  # a copy is lost
            layout="BSHD",
            accepts=("positions",),
            cache_folder=triton_cache,
            build_key=_rope_specialised,
            priority=60,
        )
        for name, operation, load in (
            ("liger.rope", "posenc.rope", lambda facts: rope(_rotating(facts), in_place=False)),
            ("liger.rope_inplace", "posenc.rope.inplace", _load_rope_inplace),
        )
    ),
    *(
        LIGER.kernel(
            f"liger.{name}",
            operations,
            load,
            *_AMPERE,
            limit.contiguous("input", "up"),
            limit.dim("features", max=_WIDEST),
            *limits,
            accepts=accepts,
            cache_folder=triton_cache,
            build_key=_specialised,
            priority=50,
        )
        for name, operations, load, accepts, limits in (
            ("silu_mul", ("mlp.silu_mul", "mlp.silu_mul.joined"), _load_silu_mul, (), ()),
            ("gelu_mul", ("mlp.gelu_mul",), _load_gelu_mul, ("approximate",), (limit.one_of("approximate", "tanh"),)),
        )
    ),
)
