"""vLLM's builds of FlashAttention 2 and 3 over a paged cache, and its append, loaded without importing vllm.

Both follow the block table in the kernel and read lengths on the device, so nothing is planned on the host; what
FlashAttention 3 schedules from the lengths lives on the step, once for all layers. The longest length only sizes the
work: the promised bound, or what the table holds. 159 and 146 us for 64 sequences of 2048 tokens, 26 and 20 for one of
4096 (32 heads on 8, bfloat16, pages of 16, H200, 2026-11-21; reading the cache takes 125).

*Behind a shared prefix*: one call for the prefix, one for the rest, then a merge. To the prefix all queries are those
of one sequence, so that a tile of queries reads each page once. Both calls are merged by torch's expression; as an
operation of its own there is vLLM's, which takes one launch.

*Over patterns of blocks*: a row of blocks is a sequence, blocks of keys are its pages. Keys of one sequence, cut into
blocks, are a paged cache as they lie, and the pattern becomes a block table on the device. Nothing is gathered.
Library: vllm 0.20, Apache-2.0; FlashAttention, BSD-3-Clause, arXiv:2307.08691 and arXiv:2407.08608.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.flashinfer.paged import SAME_STRIDES
from layerzero.backends.norm_limits import ElementsBelow
from layerzero.backends.shape_cache import Prepared, driver_cache, give_context, launch_lock
from layerzero.backends.torch.latent_cascade import merge, weighted
from layerzero.backends.vllm.flash_attn import FITTING_VALUES
from layerzero.backends.vllm.library import (
    VLLM,
    VLLM_FLASH_ATTN_2,
    VLLM_FLASH_ATTN_3,
    driver_version,
    has_machine_code_of_v2,
    operators,
    variant_of_v2,
)
from layerzero.backends.vllm.varlen import HEADS, OF_V2, OF_V3, Forward, Keys, Own, acting
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.ops.attention.limits import DenseTokens
from layerzero.ops.attention.reference import with_lse
from layerzero.ops.cascade import CASCADE, FLAT, MERGE_STATES
from layerzero.ops.paged.step import StepMetadata
from layerzero.ops.sparse.declare import NAME, block_table, in_blocks


def _starts(device_index: int, batch: int) -> Tensor:
    """One query a sequence: the starts are the numbers of the sequences."""
    return torch.arange(batch + 1, dtype=torch.int32, device=f"cuda:{device_index}")


def starts_key(facts: Facts) -> tuple[int, int]:
    """What the starts of one query a sequence depend on."""
    return facts.device.index, facts.size("batch")


def _scales(device_index: int) -> Tensor:
    """What a float8 cache would be scaled by."""
    return torch.ones((), dtype=torch.float32, device=f"cuda:{device_index}")


STARTS, SCALES = Prepared(_starts, 1024), Prepared(_scales, 64)


def _with_lse(output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """From (B, H, D) and (H, B) to (B, 1, H, D) and (B, H, 1)."""
    return with_lse(output.unsqueeze(1), lse.t().unsqueeze(-1))


def _load_v2(facts: Facts) -> Callable[..., Any]:
    operator = operators("vllm_flash_attn/_vllm_fa2_C.abi3.so", "_vllm_fa2_C").varlen_fwd.default
    starts = STARTS.get(*starts_key(facts), capturing=bool(facts["capturing"]))
    longest, default = facts.size("max_blocks") * facts.size("page_size"), _scale(facts)

    def v2(
        query: Tensor,
        *pages: Tensor,
        scale: float | None = None,
        window: tuple[int, int] | None = None,
        softcap: float | None = None,
        return_lse: bool = False,
        max_context_len: int | None = None,
    ) -> Any:
        key_cache, value_cache, block_tables, context_lens = pages
        left, right = window or (-1, -1)
        output, lse, *_ = operator(
            *(query.squeeze(1), key_cache, value_cache, None, starts, starts, context_lens, None, block_tables, None),
            *(1, longest if max_context_len is None else min(max_context_len, longest), 0.0),
            *(default if scale is None else scale, False, False, left, right, softcap or 0.0, False, 0, None),
        )
        return _with_lse(output, lse) if return_lse else output.unsqueeze(1)

    return v2


def _scale(facts: Facts) -> float:
    return float(facts.size("head_dim") ** -0.5)


class _Schedule:
    """How FlashAttention 3 splits the lengths that a step has now; the same tensor after each update."""

    def __init__(self, step: StepMetadata, compute: Callable[[StepMetadata], Tensor]) -> None:
        self._compute = compute
        self.tensor = compute(step)

    def update(self, step: StepMetadata) -> None:
        self.tensor.copy_(self._compute(step))


def _load_v3(facts: Facts) -> Callable[..., Any]:
    library = operators("vllm_flash_attn/_vllm_fa3_C.abi3.so", "_vllm_fa3_C")
    operator, schedule = library.fwd.default, library.get_scheduler_metadata.default
    captured = bool(facts["capturing"])
    starts = STARTS.get(*starts_key(facts), capturing=captured)
    longest, default = facts.size("max_blocks") * facts.size("page_size"), _scale(facts)
    sizes = (facts.size("heads"), facts.size("kv_heads"), facts.size("head_dim"), facts.size("value_dim"))
    dtype, window_of_plan = facts.tensors["query"].dtype, facts["window"]
    left, right = window_of_plan if isinstance(window_of_plan, tuple) else (-1, -1)
    page_size, capped = facts.size("page_size"), facts["softcap"] is not None
    owner = ("vllm.flash_attn.v3.paged", *sizes, page_size, dtype, left, capped)
    # by a step's schedule a call counts tiles from 0, and puts the 0 back with its last launch: another thread's call
    # between the two would leave tiles out (mha_fwd in hopper/flash_api.cpp, f5bc33cf)
    alone, as_it_is = launch_lock("vllm.flash_attn.v3", facts.device.index), nullcontext()

    def scheduled(step: StepMetadata) -> Tensor:
        bound = step.max_context_len
        result: Tensor = schedule(
            *(len(step.context_lens), 1, longest if bound is None else min(bound, longest), *sizes, dtype),
            *(step.context_lens, starts, None, None, None, None, page_size, 0, False, left, right, capped, 0, None, 0),
        )
        return result

    def v3(
        query: Tensor,
        *pages: Tensor,
        scale: float | None = None,
        window: tuple[int, int] | None = None,
        softcap: float | None = None,
        return_lse: bool = False,
        max_context_len: int | None = None,
        step: StepMetadata | None = None,
    ) -> Any:
        key_cache, value_cache, block_tables, context_lens = pages
        metadata = None
        if step is not None:
            # the bound that its schedule was made for; a plan that a capture was the first to need serves eager calls
            max_context_len = step.bound_of_launch(captured=captured and torch.cuda.is_current_stream_capturing())
            metadata = step.slot(owner, lambda each: _Schedule(each, scheduled)).tensor
            give_context(query)  # with a step's schedule its first call makes a TMA descriptor
        given = (
            *(query.squeeze(1), key_cache, value_cache, None, None, None, None, starts, None, None, None, context_lens),
            *(1, longest if max_context_len is None else min(max_context_len, longest), block_tables, None, None),
            *(None, None, None, None, None, None, default if scale is None else scale, False, left, right),
            *(softcap or 0.0, True, metadata, 0, None, 0, None, 1, 0, None),
        )
        with as_it_is if metadata is None else alone:
            output, lse, *_ = operator(*given)
        return _with_lse(output, lse) if return_lse else output.unsqueeze(1)

    return v3


def load_append(facts: Facts) -> Callable[..., Any]:
    """What writes new tokens into the slots of a cache."""
    operator = operators("_C.abi3.so", "_C_cache_ops", "_C").reshape_and_cache_flash.default
    one = SCALES.get(facts.device.index, capturing=bool(facts["capturing"]))

    def append(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
        operator(key, value, key_cache, value_cache, slot_mapping, "auto", one, one)

    return append


_SHAPES = (
    *HEADS,
    limit.last_stride_one("query", "key_cache", "value_cache"),
    limit.last_stride_one("block_tables"),
    limit.contiguous("context_lens"),
    limit.aligned(16, "query", "key_cache", "value_cache"),
    STARTS.before_capture("its tensor of starts", starts_key),
)
_ACCEPTS = ("scale", "window", "softcap", "return_lse", "max_context_len")


HEADS_FOR_WARPS = limit.rule(
    "key_cache: dense heads, or at least 32 numbers a token",
    lambda facts: (
        facts.size("kv_heads") * facts.size("head_dim") >= 32
        or facts.tensors["key_cache"].strides[2] == facts["head_dim"]
    ),
    "NOT_CONTIGUOUS",
    got=lambda facts: f"strides {facts.tensors['key_cache'].strides}",
)
"""Heads that lie apart go to a warp each; fewer numbers make no warp, and its loop never ends (vllm 0.20.0, H200,
2026-11-28)."""
WRITES = (
    limit.equal("value_dim", "head_dim"),
    HEADS_FOR_WARPS,
    DenseTokens(("key", "value")),  # strides of a token's own axes are ignored in silence
    limit.contiguous("slot_mapping"),
    limit.last_stride_one("key_cache", "value_cache"),
    SAME_STRIDES,
)
"""What its operators that write tokens into pages take."""


def _load_cascade(facts: Facts, library: Callable[[], Forward]) -> Callable[..., Any]:
    forward, scored = library(), acting(facts)
    page_size = facts.size("page_size")

    def run(
        query: Tensor,
        *pages: Tensor,
        shared_blocks: int,
        return_lse: bool = False,
        max_context_len: int | None = None,
        **given: Any,
    ) -> Any:
        key_cache, value_cache, block_tables, context_lens = pages
        batch, blocks = block_tables.shape
        tokens, shared = query.squeeze(1), shared_blocks * page_size
        scores = scored(**given)
        numbers = functools.partial(torch.arange, dtype=torch.int32, device=query.device)
        lens = torch.full((1,), shared, dtype=torch.int32, device=query.device)
        prefix = Keys(key_cache, value_cache, None, lens, block_tables[:1, :shared_blocks], shared)
        first = forward(tokens, numbers(0, 2 * batch, batch), batch, prefix, scores, None)
        if shared_blocks < blocks:
            longest = blocks * page_size if max_context_len is None else min(max_context_len, blocks * page_size)
            table = block_tables[:, shared_blocks:]
            rest = Keys(key_cache, value_cache, None, context_lens - shared, table, max(longest - shared, 1))
            second, lse_of_rest = forward(tokens, numbers(batch + 1), 1, rest, scores, None)
            lse_of_rest = lse_of_rest.masked_fill(lse_of_rest == torch.inf, -torch.inf)  # of a sequence without a rest
            if not return_lse:
                return weighted(*first, second, lse_of_rest).unsqueeze(1)
            first = merge(*first, second, lse_of_rest)
        return _with_lse(*first) if return_lse else first[0].unsqueeze(1)

    return run


def _load_merge(facts: Facts) -> Callable[..., Any]:
    operator = operators("_C.abi3.so", "_C").merge_attn_states.default

    def run(output_a: Tensor, lse_a: Tensor, output_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
        # it steps over tokens by heads times the head's stride, which may be any for one head; a view has the dense one
        output_a = output_a.view(output_a.shape)
        output, lse = torch.empty_like(output_a), torch.empty_like(lse_a)
        # next to -inf it takes NaN for it, and the first part for both (merge_attn_states.cu): NaN goes into both
        lse_a, lse_b = lse_a.clamp(lse_b, lse_a), lse_b.clamp(lse_a, lse_b)
        operator(output, lse, output_a, lse_a, output_b, lse_b, None, None)
        return output, lse

    return run


_STATES = ("output_a", "lse_a", "output_b", "lse_b")
_PAGED = (
    *HEADS,
    limit.last_stride_one("query", "key_cache", "value_cache", "block_tables"),
    limit.contiguous("context_lens"),
    limit.aligned(16, "query", "key_cache", "value_cache"),
)


def _cascade(own: Own, version: int, priority: int) -> Kernel:
    return own.backend.kernel(
        f"vllm.flash_attn.v{version}.cascade",
        CASCADE.name,
        functools.partial(_load_cascade, library=own.forward),
        layout="NHD",
        accepts=("scale", "softcap", "return_lse", "max_context_len", "shared_blocks"),
        limits=(*own.limits, *_PAGED),
        **own.fields,
        priority=priority,
    )


def _load_blocks(facts: Facts, library: Callable[[], Forward]) -> Callable[..., Any]:
    forward, scored = library(), acting(facts)

    def run(
        query: Tensor, *rest: Tensor, block_rows: int, block_cols: int, return_lse: bool = False, **given: Any
    ) -> Any:
        key, value, block_indptr, block_indices = rest
        pages = in_blocks(key, block_cols), in_blocks(value, block_cols)
        table, counts = block_table(block_indptr, block_indices, len(pages[0]))
        starts = torch.arange(0, len(query) + 1, block_rows, dtype=torch.int32, device=query.device)
        keys = Keys(*pages, None, counts * block_cols, table, max(len(key), 1))
        output, lse = forward(query, starts, block_rows, keys, scored(**given), None)
        if not return_lse:
            return output
        # version 2 leaves what lay there for rows without a block (2.4e-38 on an H200, 2026-11-23)
        nothing = (counts == 0).repeat_interleave(block_rows)[: len(query)]
        return output, with_lse(output, lse)[1].masked_fill(nothing, -torch.inf)

    return run


def _of_blocks(own: Own, version: int, priority: int) -> Kernel:
    variant = functools.partial(variant_of_blocks, version=version)
    return own.backend.kernel(
        f"vllm.flash_attn.v{version}.block_sparse",
        NAME,
        functools.partial(_load_blocks, library=own.forward),
        *(each for each in own.limits if "page_size" not in each.facts_named()),
        *HEADS,
        # pages of version 2, and tiles of version 3 worth their launch
        limit.rule("block_cols: a multiple of 16", lambda facts: facts["block_cols"] % 16 == 0),
        limit.last_stride_one("query", "key", "value"),
        limit.aligned(16, "query", "key", "value"),
        limit.contiguous("block_indptr"),
        accepts=("block_rows", "block_cols", "scale", "return_lse"),
        **{**own.fields, **({"build_key": variant} if own.fields else {})},
        priority=priority,
    )


def variant_of_blocks(facts: Facts, version: int) -> tuple[object, ...]:
    """Which instantiation a call takes: one for each dtype and width, and whose compiler makes it of PTX."""
    return version, facts.device.sm, driver_version(), facts["dtype"], -(-facts.size("head_dim") // 32)


KERNELS = (
    VLLM_FLASH_ATTN_3.kernel(
        "vllm.flash_attn.v3.paged",
        FLAT,
        _load_v3,
        limit.arch(min=(9, 0), max=(9, 9)),
        limit.instruction("wgmma"),
        *_SHAPES,
        limit.dim(
            "head_dim", min=64
        ),  # its narrowest tile: of heads of 8 and 16 it left half of a page unread (H200, 2026-11-21)
        limit.dim("value_dim", max=256, multiple=8),
        FITTING_VALUES,
        layout="NHD",
        accepts=(*_ACCEPTS, "step"),
        device_guard=False,
        priority=85,
    ),
    VLLM_FLASH_ATTN_2.kernel(
        "vllm.flash_attn.v2.paged",
        FLAT,
        _load_v2,
        layout="NHD",
        accepts=_ACCEPTS,
        limits=(limit.dim("page_size", multiple=16), limit.equal("value_dim", "head_dim"), *_SHAPES),
        build_key=variant_of_v2,
        prebuilt=has_machine_code_of_v2,
        cache_folder=driver_cache,
        device_guard=False,
        priority=70,
    ),
    VLLM.kernel(
        "vllm.append_paged",
        "kv.append.paged",
        load_append,
        limit.dtype("float32", "float16", "bfloat16"),
        *WRITES,
        SCALES.before_capture("its scales", lambda facts: (facts.device.index,)),
        limit.aligned(16, "key", "value", "key_cache", "value_cache"),  # a misaligned address otherwise
        layout="NHD",
        device_guard=False,
        priority=80,
    ),
    _cascade(OF_V3, 3, 60),  # below those that follow each table: eager, its launches cost more than it saves
    _cascade(OF_V2, 2, 50),
    VLLM.kernel(
        "vllm.merge_states",
        MERGE_STATES.name,
        _load_merge,
        limit.dtype("float32", "float16", "bfloat16"),
        limit.dim("value_dim", multiple=8),
        limit.contiguous(*_STATES),
        limit.aligned(16, "output_a", "output_b"),
        ElementsBelow(2**32, ("tokens", "heads", "value_dim")),  # of 32 bits is where a head starts
        priority=80,
    ),
    _of_blocks(OF_V3, 3, 80),
    _of_blocks(OF_V2, 2, 55),
)
