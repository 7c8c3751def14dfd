"""vLLM's FlashMLA, and its FlashAttention 3 whose values are wider than its keys, over a paged latent cache.

FlashMLA reads one tensor of 64 tokens a page, latent and rotated parts in one, for equally many queries a sequence; how
it splits them it computes on the device in the first call of a step, and the other layers take that over. A capturable
step shares nothing: what a graph replays follows the lengths that are there then. FlashAttention 3 takes the rotated
part as key and query, the latent vector as value, and the latent query beside them (``q_v``).
Argument orders are those of flash_mla_interface.py and flash_attn_interface.py in vllm 0.20.0.
Library: vllm 0.20, Apache-2.0; FlashMLA, MIT; FlashAttention, BSD-3-Clause.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.latent import COLUMNS_OF_ONE, WIDTHS, joined
from layerzero.backends.torch.varlen import longest_or
from layerzero.backends.vllm.library import VLLM_FLASH_ATTN_3, VLLM_FLASH_MLA, operators
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.ops.latent.declare import NAME
from layerzero.ops.paged.step import StepMetadata


class _Schedule:
    """How the first call of a step split the work, for the calls that follow; nothing before it."""

    __slots__ = ("split",)

    def __init__(self) -> None:
        self.split: tuple[Tensor | None, Tensor | None] = (None, None)

    def update(self, _: StepMetadata) -> None:
        self.split = (None, None)


def _load_flash_mla(facts: Facts) -> Callable[..., Any]:
    operator = operators("_flashmla_C.abi3.so", "_flashmla_C").dense_decode_fwd.default
    latent, queries, heads = (facts.size(name) for name in ("latent_dim", "seq_q", "heads"))
    shared = facts["step"] == "eager" and not facts["capturing"]
    owner = ("vllm.flashmla", queries, heads)

    def run(
        q_nope: Tensor,
        q_pe: Tensor,
        ckv_cache: Tensor,
        kpe_cache: Tensor,
        block_tables: Tensor,
        context_lens: Tensor,
        *,
        scale: float,
        return_lse: bool = False,
        step: StepMetadata | None = None,
    ) -> Any:
        known = step.slot(owner, lambda _: _Schedule()) if shared and step is not None else _Schedule()
        cache = joined(ckv_cache, kpe_cache).unsqueeze(2)
        output, lse, *split = operator(
            *(joined(q_nope, q_pe), cache, latent, context_lens, block_tables, scale, queries > 1, *known.split, None)
        )
        known.split = (split[0], split[1])
        return (output, lse.masked_fill(lse == torch.inf, -torch.inf)) if return_lse else output

    return run


def _load_flash_attn(facts: Facts) -> Callable[..., Any]:
    operator = operators("vllm_flash_attn/_vllm_fa3_C.abi3.so", "_vllm_fa3_C").fwd.default
    queries, page_size = facts.size("seq_q"), facts.size("page_size")

    def run(
        q_nope: Tensor,
        q_pe: Tensor,
        ckv_cache: Tensor,
        kpe_cache: Tensor,
        block_tables: Tensor,
        context_lens: Tensor,
        *,
        scale: float,
        return_lse: bool = False,
        max_context_len: int | None = None,
    ) -> Any:
        batch = len(context_lens)
        starts = torch.arange(0, (batch + 1) * queries, queries, dtype=torch.int32, device=q_nope.device)
        longest = longest_or(max_context_len, block_tables.shape[1] * page_size)
        tokens, rotated = q_nope.flatten(0, 1), q_pe.flatten(0, 1)
        output, lse, *_ = operator(
            *(rotated, kpe_cache.unsqueeze(2), ckv_cache.unsqueeze(2), None, None, tokens, None, starts),
            *(None, None, None, context_lens, queries, longest, block_tables, None, None),
            *(None, None, None, None, None, None, scale, True, -1, -1, 0.0),
            *(True, None, 0, None, 0, None, 1, 0, None),
        )
        output = output.view(q_nope.shape)
        if not return_lse:
            return output
        lse = lse.masked_fill(lse == torch.inf, -torch.inf)
        return output, lse.view(-1, batch, queries).transpose(0, 1).contiguous()

    return run


_TENSORS = ("q_nope", "q_pe", "ckv_cache", "kpe_cache")
_SHARED = (
    limit.platform("cuda"),
    limit.arch(min=(9, 0), max=(9, 9)),
    limit.instruction("wgmma"),
    limit.dtype("float16", "bfloat16"),
    *WIDTHS,
    limit.positive("scale"),
    limit.last_stride_one(*_TENSORS, "block_tables"),
    limit.contiguous("context_lens"),
    limit.aligned(16, *_TENSORS),
)

KERNELS = (
    Kernel(
        id="vllm.flashmla",
        operations=(NAME,),
        backend=VLLM_FLASH_MLA,
        load=_load_flash_mla,
        accepts=("scale", "return_lse", "step"),
        limits=(*_SHARED, limit.dim("page_size", one_of=(64,)), COLUMNS_OF_ONE),
        graph_safe=True,
        device_guard=True,
        priority=90,
    ),
    Kernel(
        id="vllm.flash_attn.v3.mla",
        operations=(NAME,),
        backend=VLLM_FLASH_ATTN_3,
        load=_load_flash_attn,
        accepts=("scale", "return_lse", "max_context_len"),
        limits=_SHARED,
        graph_safe=True,
        device_guard=True,
        priority=75,
    ),
)
