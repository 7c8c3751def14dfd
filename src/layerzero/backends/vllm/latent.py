"""vLLM's FlashMLA over a paged latent cache.

FlashMLA reads one tensor of 64 tokens a page, latent and rotated parts in one, for equally many queries a sequence; how
it splits them it computes on the device in the first call of a step, and the other layers take that over. A capturable
step shares nothing: what a graph replays follows the lengths that are there then. FlashAttention 3, which takes the
latent query with the rotated one (``q_v``), is left out: rows of a page beyond a sequence's length count 0 times their
value there, so a NaN in unwritten memory becomes the result (seen with vllm 0.20.0 on an H200, 2026-11-23: 72 of 96
calls whose pages held NaN there). Argument orders are those of flash_mla_interface.py in vllm 0.20.0.
Library: vllm 0.20, Apache-2.0; FlashMLA, MIT.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from layerzero.backends.shape_cache import give_context
from layerzero.backends.vllm.library import VLLM_FLASH_MLA, operators
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.ops.attention.reference import with_lse
from layerzero.ops.latent import COLUMNS_OF_ONE, NAME, WIDTHS, joined
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
        q_nope: Tensor, *rest: Tensor, scale: float, return_lse: bool = False, step: StepMetadata | None = None
    ) -> Any:
        q_pe, ckv_cache, kpe_cache, block_tables, context_lens = rest
        known = step.slot(owner, lambda _: _Schedule()) if shared and step is not None else _Schedule()
        cache = joined(ckv_cache, kpe_cache).unsqueeze(2)
        give_context(cache)  # with a step's split its first call makes a TMA descriptor
        output, lse, *split = operator(
            *(joined(q_nope, q_pe), cache, latent, context_lens, block_tables, scale, queries > 1, *known.split, None)
        )
        known.split = (split[0], split[1])
        return with_lse(output, lse) if return_lse else output

    return run


_LATENT_TENSORS = ("q_nope", "q_pe", "ckv_cache", "kpe_cache")
_SHARED = (
    limit.arch(min=(9, 0), max=(9, 9)),
    limit.instruction("wgmma"),
    limit.dtype("float16", "bfloat16"),
    *WIDTHS,
    limit.positive("scale"),
    limit.last_stride_one(*_LATENT_TENSORS, "block_tables"),
    limit.contiguous("context_lens"),
    limit.aligned(16, *_LATENT_TENSORS),
)

KERNELS = (
    VLLM_FLASH_MLA.kernel(
        "vllm.flashmla",
        NAME,
        _load_flash_mla,
        accepts=("scale", "return_lse", "step"),
        limits=(*_SHARED, limit.dim("page_size", one_of=(64,)), COLUMNS_OF_ONE),
        priority=90,
    ),
)
