"""vLLM's rotation of copies, then its write into the slots of a paged cache; see ``rope.py`` and ``paged.py`` here.

Its rotation works in place and its append reads dense tokens, so queries and keys are copied first: four launches.
FlashInfer's ``rope_quantize_fp8_append_paged_kv_cache`` writes float8 alone, and its fused append of Q | K | V wants
page tables in place of slots, for two pairs of head counts: neither is this operation.
Conforms on an H200 (torch 2.11, 2026-11-22).
Library: vllm 0.20, Apache-2.0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from layerzero.backends.flashinfer.paged import same_strides
from layerzero.backends.rotary import HEADS_DIVIDE, TABLE_IN_FLOAT32
from layerzero.backends.vllm.library import VLLM
from layerzero.backends.vllm.normed_rope import LIMITS, rotating
from layerzero.backends.vllm.paged import SCALES, load_append
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.ops.rope_append.composed import rotate_then_append


def _load(facts: Facts) -> Callable[..., Any]:
    return rotate_then_append(rotating(facts), load_append(facts))


KERNELS = (
    Kernel(
        id="vllm.rope_append",
        operations=("kv.rope_append.paged",),
        backend=VLLM,
        load=_load,
        layout="NHD",
        accepts=("interleaved",),
        limits=(
            *LIMITS,
            limit.dtype("float32", "float16", "bfloat16"),
            TABLE_IN_FLOAT32,
            HEADS_DIVIDE,
            limit.equal("value_dim", "head_dim"),
            limit.contiguous("value", "slot_mapping"),  # strides of a token's own axes are ignored in silence
            limit.last_stride_one("key_cache", "value_cache"),
            limit.Custom("key_cache and value_cache: the same strides", same_strides),
            SCALES.before_capture("its scales", lambda facts: (facts.device.index,)),
            limit.aligned(16, "value", "key_cache", "value_cache"),  # a misaligned address otherwise
        ),
        deterministic=True,
        graph_safe=True,
        priority=80,
    ),
)
