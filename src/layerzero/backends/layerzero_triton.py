"""Kernels of our own in Triton, where no library has one for what Triton serves: NVIDIA's and AMD's GPUs.

    layerzero_triton.swiglu_oai     gpt-oss's gate in one launch; torch takes seven
    layerzero_triton.paged_tokens   queries over pages where drafts branch, with windows, softcaps and sinks; torch runs
                                    each sequence by itself, which waits for the device

On an H200 (Triton 3.6, 2026-11-27) conformance passed 562 checks of them, 0 wrong; windows, sinks, softcaps, trees and
log-sum-exps were not built there in every dtype. AMD's GPUs never ran them, and vet them first. Under Triton's
interpreter, on a CPU, their results in float32 and bfloat16 are the reference's
(``tests/kernels/test_layerzero_triton.py``). Triton 3.3, 3.6 and 3.9 compile them for sm_90, 3.6 and 3.9 for gfx942
(``tests/kernels/test_triton_compiles.py``).
A program computes one query token, so that a key is read once for each token of its sequence: right for drafts and
decodes, slow for long prompts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.shape_cache import triton_cache
from layerzero.core import limits as limit
from layerzero.core.facts import MAX_ALIGNMENT_BYTES, Facts, TensorFacts
from layerzero.core.kernel import Backend
from layerzero.core.reasons import ReasonCode
from layerzero.ops.paged import mixed
from layerzero.ops.ragged.starts import sequences_of

OURS = Backend(
    name="layerzero_triton",
    summary="LayerZero's own kernels in Triton, where no library has one",
    import_name="triton",
    distribution=("triton", "pytorch-triton-rocm"),
    versions=">=3.3",
    tested=("3.6.0",),
    platforms=("cuda", "rocm"),
    homepage="https://triton-lang.org",
    flags=("deterministic", "graph_safe", "jit"),
)

_BLOCK = 1024
_SIZES = ("heads", "kv_heads", "head_dim", "value_dim", "page_size")
"""Constants of a variant over pages."""

_LEAST = 16
"""Rows and columns of a product, at least: what Triton's ``dot`` takes."""

_KEYS_BYTES = 2**14
"""Of the keys of a step. With twice as many a program of float32 asks for 68 KiB of shared memory; MI300 has 64."""


def _load_swiglu_oai(facts: Facts) -> Callable[..., Any]:
    from layerzero.backends import triton_kernels

    launch, turns = triton_kernels.swiglu_oai, "up" not in facts.tensors

    def run(input: Tensor, up: Tensor | None = None, *, alpha: float, limit: float) -> Tensor:
        shape = (*input.shape[:-1], input.shape[-1] // 2) if turns else input.shape
        output = input.new_empty(shape)
        count = output.numel()
        given = input, input if up is None else up, output
        if count:
            launch[(-(-count // _BLOCK),)](*given, float(alpha), float(limit), count, by_turns=turns, block=_BLOCK)
        return output

    return run


def _power(number: int) -> int:
    return max(_LEAST, 1 << (number - 1).bit_length())


def _load_paged_tokens(facts: Facts) -> Callable[..., Any]:
    from layerzero.backends import triton_kernels

    launch = triton_kernels.paged_tokens
    heads, kv_heads, width, value_width, page = map(facts.size, _SIZES)
    group = heads // kv_heads
    blocks = {"group_block": _power(group), "head_block": _power(width), "value_block": _power(value_width)}
    row_bytes = max(blocks["head_block"], blocks["value_block"]) * facts.tensors["key_cache"].dtype.itemsize
    blocks["key_block"] = min(64, max(_LEAST, _KEYS_BYTES // row_bytes))
    usual = width**-0.5
    sizes = {"head_dim": width, "value_dim": value_width, "group": group, "page_size": page}

    def run(
        query: Tensor,
        *pages: Tensor,
        causal: bool = True,
        scale: float | None = None,
        window: tuple[int, int] | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        tree_mask: Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        key_cache, value_cache, block_tables, context_lens, cu_seqlens_q = pages
        tokens = query.shape[0]
        output = query.new_empty((tokens, heads, value_width))
        lse = torch.empty((heads, tokens), dtype=torch.float32, device=query.device) if return_lse else output
        left, right = (-1, -1) if window is None else window
        numbers = torch.arange(tokens, dtype=torch.int32, device=query.device)
        owners = sequences_of(cu_seqlens_q, numbers)
        tree = None if tree_mask is None else tree_mask.view(torch.uint8)
        said = {"causal": causal, "has_softcap": softcap is not None, "has_left": left >= 0, "has_right": right >= 0}
        said |= {"has_sinks": sinks is not None, "has_tree": _grown(tree), "has_lse": return_lse}
        if tokens:
            launch[(tokens, kv_heads)](
                *(query, key_cache, value_cache, block_tables, context_lens, cu_seqlens_q, owners),
                *(query if sinks is None else sinks, query if tree is None else tree, output, lse),
                *(usual if scale is None else float(scale), 1.0 if softcap is None else float(softcap), left, right),
                *(0 if tree is None else tree.shape[1], tokens, *query.stride()[:2]),
                *(*key_cache.stride()[:3], *value_cache.stride()[:3], block_tables.stride(0)),
                *(0 if tree is None else tree.stride(0), heads),
                **sizes,
                **blocks,
                **said,
            )
        return (output, lse) if return_lse else output

    return run


def _seen(number: int) -> tuple[bool, bool]:
    """What Triton sees of an integer."""
    return number == 1, number % 16 == 0


def _laid(facts: Facts) -> Hashable:
    """What Triton makes a variant for in every kernel: dtypes, and whether data lie at multiples of 16."""
    tensors = sorted(facts.tensors.items())
    laid = ((name, each.dtype, each.alignment_bytes == MAX_ALIGNMENT_BYTES) for name, each in tensors)
    return facts.device.sm, facts["operation"], tuple(laid)


def _gate_key(facts: Facts) -> Hashable:
    """The same, with the number of elements."""
    return _laid(facts), _seen(math.prod(facts.tensors["input"].shape) // (1 if "up" in facts.tensors else 2))


def _paged_key(facts: Facts) -> Hashable:
    """The same, with the strides that a launch passes and what is a constant there."""
    strides = [_seen(each) for name in ("query", "key_cache", "value_cache") for each in facts.tensors[name].strides]
    given: Any = facts["window"]
    window = given and tuple(each >= 0 for each in given)
    said = facts["causal"], facts["softcap"] is not None, facts["return_lse"], _grown(facts.tensors.get("tree_mask"))
    return _laid(facts), tuple(strides), tuple(map(facts.size, _SIZES)), window, said


def _grown(tree: Tensor | TensorFacts | None) -> bool:
    return tree is not None and tree.shape[1] > 0


def on_amd(facts: Facts) -> bool:
    """Whether it is one of AMD's GPUs: ``proved_first`` of kernels that ran on NVIDIA's alone."""
    return facts.device.platform == "rocm"


_LIMITS = (limit.arch(min=(8, 0)), limit.dtype("float32", "float16", "bfloat16"))  # Triton has no bfloat16 before

KERNELS = (
    OURS.kernel(
        "layerzero_triton.swiglu_oai",
        ("mlp.swiglu_oai", "mlp.swiglu_oai.interleaved"),
        _load_swiglu_oai,
        accepts=("alpha", "limit"),
        limits=(*_LIMITS, limit.contiguous("input", "up")),
        cache_folder=triton_cache,
        build_key=_gate_key,
        proved_first=on_amd,
        priority=50,
    ),
    OURS.kernel(
        "layerzero_triton.paged_tokens",
        mixed.ALL,
        _load_paged_tokens,
        *_LIMITS,
        *limit.dims("head_dim", "value_dim", max=256),
        limit.last_stride_one("query", "key_cache", "value_cache", "block_tables", "tree_mask"),
        limit.contiguous("context_lens", "cu_seqlens_q", "sinks"),
        limit.rule(  # it would count places, where a window counts depths
            "window: none with tree_mask",
            lambda facts: facts["window"] is None or "tree_mask" not in facts.tensors,
            code=ReasonCode.WINDOW_UNSUPPORTED,
        ),
        layout="NHD",
        accepts=("causal", "scale", "window", "softcap", "sinks", "tree_mask", "return_lse"),
        cache_folder=triton_cache,
        build_key=_paged_key,
        proved_first=on_amd,
        priority=16,
    ),
)
