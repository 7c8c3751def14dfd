"""Kernels with one mistake each, registered by importing this module; conformance finds them all."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import time

import torch
from torch.nn.functional import rms_norm

import layerzero as lz
from layerzero.engine.registry import REGISTRY
from layerzero.ops.paged.declare import paged_attention_reference

limit = lz.limits


def right(input, weight, eps):
    return rms_norm(input, weight.shape, weight, eps)


def narrow(kernel_id, **declared):
    """A plugin of rms_norm in float32."""
    return lz.register_kernel("norm.rms", f"planted.{kernel_id}", supported_dtypes=["float32"], **declared)


@narrow("sound", deterministic=True, grad=True)
def sound(input, weight, *, eps):
    return right(input, weight, eps)


@narrow("large")
def large(input, weight, *, eps):
    output = right(input, weight, eps)
    output[..., 2048:] = 0  # as a kernel that has 2048 places for a row
    return output


@narrow("long")
def long(input, weight, *, eps):
    output = right(input, weight, eps)
    output.view(-1, output.shape[-1])[2048:] = 0
    return output


@narrow("mutates")
def mutates(input, weight, *, eps):
    output = right(input, weight, eps)
    input.mul_(2)
    return output


@narrow("strides")
def strides(input, weight, *, eps):
    dense = input.as_strided(input.shape, torch.empty(input.shape, device="meta").stride())
    return right(dense, weight, eps)


@narrow("crashes")
def crashes(input, weight, *, eps):
    if input.dim() == 3:
        ctypes.string_at(0)
    return right(input, weight, eps)


@narrow("dead")
def dead(input, weight, *, eps):
    return ctypes.string_at(0)


@narrow("hangs")
def hangs(input, weight, *, eps):
    if input.shape[-1] == 2304:
        time.sleep(3600)
    return right(input, weight, eps)


@lz.register_kernel("norm.rms", "planted.nan", supported_dtypes=["float32", "float16"])
def nan(input, weight, *, eps):
    output = right(input, weight, eps)
    return output * torch.nan if input.dtype is torch.float16 else output


@narrow("unsteady", deterministic=True)
def unsteady(input, weight, *, eps):
    # Never the same factor twice in a row; a random one gave the same bits three times in one run of sixty.
    return right(input, weight, eps) * (1 + 2**-20 * (next(CALLS) % 7))


CALLS = itertools.count()


@narrow("gradient", grad=True)
def gradient(input, weight, *, eps):
    return right(input, weight.detach(), eps)


@narrow("racy")
def racy(input, weight, *, eps):
    SHARED["row"] = input
    time.sleep(0.002)
    return right(SHARED["row"], weight, eps) if SHARED["row"].shape == input.shape else right(input, weight, eps)


SHARED = {}


@narrow("grows")
def grows(input, weight, *, eps):
    """As a kernel whose scratch memory is one for all threads, and moves as it grows."""
    moved = SCRATCH["moved"] = SCRATCH["moved"] + (input.numel() > SCRATCH["size"])
    SCRATCH["size"] = max(SCRATCH["size"], input.numel())
    time.sleep(0.002)
    return right(input, weight, eps) * (moved == SCRATCH["moved"])


SCRATCH = {"size": 0, "moved": 0}


@narrow("too_strict", limits=[limit.dim("hidden", max=64)])
def too_strict(input, weight, *, eps):
    return right(input, weight, eps)


@narrow("needed", limits=[limit.dim("hidden", multiple=8)])
def needed(input, weight, *, eps):
    if input.shape[-1] % 8:
        raise RuntimeError("rows must be a multiple of 8")
    return right(input, weight, eps)


@narrow("dies_beyond", limits=[limit.dim("hidden", max=4096)])
def dies_beyond(input, weight, *, eps):
    if input.shape[-1] > 4096:
        ctypes.string_at(0)
    return right(input, weight, eps)


@narrow("coarse", tolerance={"float32": lz.Tolerance(1e-2, 1e-2)}, tolerance_reason="it adds up in bfloat16")
def coarse(input, weight, *, eps):
    return right(input, weight, eps) * 1.004


@lz.register_kernel(
    "attention.standard.prefill",
    "planted.too_wide",
    supported_dtypes=["float32"],
    limits=[limit.dim("head_dim", max=96)],
)
def too_wide(query, key, value, *, causal=False, scale=None):
    tensors = [tensor.transpose(1, 2) for tensor in (query, key, value)]
    if query.shape[-1] > 64:
        tensors[0] = tensors[0].clone()
        tensors[0][..., 64:] = 0  # as a kernel that reads 64 of them
    mask = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool).tril(key.shape[1] - query.shape[1])
    mask = mask if causal else torch.ones_like(mask)
    output = torch.nn.functional.scaled_dot_product_attention(*tensors, attn_mask=mask, scale=scale)
    hidden = ~mask.any(-1)
    return output.masked_fill(hidden[None, None, :, None], 0.0).transpose(1, 2)


_BUFFERS = {}


@narrow("one_buffer")
def one_buffer(input, weight, *, eps):
    output = _BUFFERS.setdefault((input.shape, input.dtype), torch.empty_like(input.contiguous()))
    return output.copy_(right(input, weight, eps))


_WEIGHTS = {}


@narrow("prepacked")
def prepacked(input, weight, *, eps):
    kept = _WEIGHTS.setdefault(weight.data_ptr(), weight.clone())  # as a library that packs a weight at first sight
    return right(input, kept if kept.shape == weight.shape else weight, eps)


def _sized_once(facts):
    """As a library that plans on the first call that it gets."""
    rows = []

    def run(input, weight, *, eps):
        output = right(input, weight, eps)
        rows.append(output.numel() // output.shape[-1])
        output.view(-1, output.shape[-1])[rows[0] :] = 0
        return output

    return run


lz.register_backend([
    dataclasses.replace(REGISTRY.kernel("planted.sound"), id="planted.sized_once", load=_sized_once, grad=False)
])  # fmt: skip


class _Lengths:
    def __init__(self, step):
        self.lens = step.context_lens.clone()

    def update(self, step):
        pass


@lz.register_kernel("attention.gqa.decode.paged", "planted.forgets", supported_dtypes=["float32"])
def forgets(query, key_cache, value_cache, block_tables, context_lens, *, step=None):
    lens = context_lens if step is None else step.slot("planted.forgets", _Lengths).lens
    return paged_attention_reference(query, key_cache, value_cache, block_tables, lens)


@lz.register_kernel("norm.add_rms", "planted.spills", supported_dtypes=["float32"])
def spills(input, residual, weight, *, eps):
    residual.add_(input)
    last = residual.storage_offset() + sum(
        (n - 1) * step for n, step in zip(residual.shape, residual.stride(), strict=True)
    )
    if residual.numel() and (last + 2) * residual.itemsize <= residual.untyped_storage().nbytes():
        residual.as_strided((1,), (1,), last + 1).fill_(0)  # as a kernel whose last store is one too wide
    return right(residual, weight, eps)


class _Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / 2


@narrow("strided_gradient", grad=True)
def strided_gradient(input, weight, *, eps):
    return right(input if input.is_contiguous() else _Halved.apply(input), weight, eps)


@narrow("odd_gradient", grad=True)
def odd_gradient(input, weight, *, eps):
    return right(_Halved.apply(input) if input.shape[-1] % 2 else input, weight, eps)


_COMPILED = set()


@narrow("stale_key", jit=True, build_key=lambda facts: "one artefact for all")
def stale_key(input, weight, *, eps):
    if input.shape[-1] not in _COMPILED and len(_COMPILED) < 3:  # it compiles for each length of a row
        _COMPILED.add(input.shape[-1])
        time.sleep(0.6)
    return right(input, weight, eps)


@narrow("right_key", jit=True, build_key=lambda facts: facts.size("hidden"))
def right_key(input, weight, *, eps):
    return right(input, weight, eps)
