"""vLLM's rotation of copies, then its write into the slots of a paged cache; see ``rope.py`` and ``paged.py`` here.

Its rotation works in place and its append reads dense tokens, so queries and keys are copied first: four launches.
FlashInfer's fused append of Q | K | V wants page tables in place of slots, for two pairs of head counts, and what it
has for float8 rounds queries, too (``ops/rope_append/quantized.py``): neither is one of these operations.
Into a cache of the queries' dtype it conforms on an H200 (torch 2.11, 2026-11-22); into one of float8 it was right in
the few random calls there that had one scale for all keys and one for all values (2026-11-23).
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
from layerzero.backends.vllm.quantized import OF_CODES, load_append_codes
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.limit import Limit
from layerzero.ops.rope_append.composed import rotate_then_append


def _load(facts: Facts) -> Callable[..., Any]:
    return rotate_then_append(rotating(facts), load_append(facts))


def _load_codes(facts: Facts) -> Callable[..., Any]:
    return rotate_then_append(rotating(facts), load_append_codes(facts))


_TOKENS: tuple[Limit, ...] = (
    *LIMITS,
    limit.dtype("float32", "float16", "bfloat16"),
    TABLE_IN_FLOAT32,
    HEADS_DIVIDE,
    limit.equal("value_dim", "head_dim"),
    limit.contiguous("value", "slot_mapping"),  # strides of a token's own axes are ignored in silence
    limit.last_stride_one("key_cache", "value_cache"),
    limit.Custom("key_cache and value_cache: the same strides", same_strides),
    limit.aligned(16, "value", "key_cache", "value_cache"),  # a misaligned address otherwise
)

KERNELS = (
    Kernel(
        id="vllm.rope_append",
        operations=("kv.rope_append.paged",),
        backend=VLLM,
        load=_load,
        layout="NHD",
        accepts=("interleaved",),
        limits=(*_TOKENS, SCALES.before_capture("its scales", lambda facts: (facts.device.index,))),
        device_guard=False,
        priority=80,
    ),
    Kernel(
        id="vllm.rope_append_codes",
        operations=("kv.rope_append.quantized",),
        backend=VLLM,
        load=_load_codes,
        layout="NHD",
        accepts=("interleaved",),
        limits=(*_TOKENS, *OF_CODES),
        device_guard=False,
        priority=80,
    ),
)
