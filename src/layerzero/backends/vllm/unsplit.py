"""vLLM's builds of FlashAttention 2 and 3 with all keys in one part: no bit of a sequence depends on the others.

Left to themselves both share out keys among more blocks where few sequences fill the device, and add up what they give.
With one split none does: vLLM's own batch-invariant mode calls them so, without a schedule made before
(``supports_batch_invariance`` and ``num_splits`` in vllm/v1/attention/backends/flash_attn.py of vllm 0.20.0).

That mode says nothing of a prompt that is cut, or computed token by token. Of one query both take another kernel, of
other blocks of keys: version 2 lays the heads of a group in place of queries, version 3 leaves out the causal mask, by
which its blocks are picked (``is_causal`` in hopper/flash_api.cpp, hopper/tile_size.h of vllm-project/flash-attention,
6bf4ce25). So calls say two queries and a causal mask. Windows are refused: version 3 drops one that is wider than the
keys, and picks other blocks then. So are pages of 128 tokens and more, which it reads by TMA for long prompts alone.
Library: vllm 0.20, Apache-2.0; FlashAttention, BSD-3-Clause, arXiv:2307.08691 and arXiv:2407.08608.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from layerzero.backends.torch.tiled_attention import starts_of_one_length
from layerzero.backends.vllm import varlen
from layerzero.backends.vllm.flash_attn import OF_LENGTHS, lengths
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel, Trust
from layerzero.core.limit_kinds import Limit
from layerzero.ops.attention import declare as attention
from layerzero.ops.paged import mixed
from layerzero.ops.ragged import declare as ragged

Library = Callable[[], varlen.Forward]


def _of_two(library: Callable[[int], varlen.Forward]) -> Library:
    """A version's call with one split, which hears of two queries at least."""

    def load() -> varlen.Forward:
        forward = library(1)

        def run(
            query: Tensor, starts: Tensor, longest: int, keys: varlen.Keys, scores: varlen.Scores, out: Tensor | None
        ) -> tuple[Tensor, Tensor]:
            return forward(query, starts, max(longest, 2), keys, scores, out)

        return run

    return load


def _load_dense(facts: Facts, library: Library, strided: bool) -> Callable[..., Any]:
    """Keys as they lie with their lengths where ``strided``, for version 3; one after the other for version 2."""
    starts, decodes, forward = starts_of_one_length(facts), facts["operation"] in attention.DECODE, library()
    scored = varlen.acting(facts)
    where, capturing = f"cuda:{facts.device.index}", bool(facts["capturing"])

    def run(query: Tensor, key: Tensor, value: Tensor, *, causal: bool = False, **given: Any) -> Tensor:
        batch, queries, length = len(query), query.shape[1], key.shape[1]
        of_queries, of_keys = starts(batch, queries, 0 if strided else length)
        if strided:
            keys = varlen.Keys(key, value, None, lengths(where, batch, length, capturing=capturing), None, length)
        else:
            keys = varlen.Keys(key.flatten(0, 1), value.flatten(0, 1), of_keys, None, None, length)
        scores = scored(causal=causal or decodes, **given)
        output, _ = forward(query.flatten(0, 1), of_queries, queries, keys, scores, None)
        return output.view(batch, queries, *output.shape[1:])

    return run


class _Kind(NamedTuple):
    name: str
    operations: tuple[str, ...]
    load: Callable[..., Callable[..., Any]]
    layout: str | None
    accepts: tuple[str, ...]
    limits: tuple[Limit, ...]


_DENSE = ("query", "key", "value")
_SCORES = ("causal", "scale", "softcap")


def _dense(*limits: Limit, strided: bool) -> _Kind:
    load = functools.partial(_load_dense, strided=strided)
    return _Kind("", attention.ALL, load, "BSHD", _SCORES, (*varlen.shapes(*_DENSE), *limits))


_OTHERS = (
    _Kind(
        ".ragged",
        ragged.RAGGED,
        varlen.load_ragged,
        None,
        (*_SCORES, "max_seqlen_q", "max_seqlen_k"),
        (*varlen.shapes(*_DENSE), limit.contiguous("cu_seqlens_q", "cu_seqlens_k")),
    ),
    _Kind(
        ".paged_tokens",
        mixed.ALL,
        functools.partial(varlen.load_paged, split=False),
        "NHD",
        (*_SCORES, "max_seqlen_q", "max_context_len"),
        (*varlen.PAGED, limit.dim("page_size", multiple=16, max=64)),
    ),
)


def _kernels(own: varlen.Own, version: str, priority: int, dense: _Kind, *limits: Limit) -> Iterator[Kernel]:
    """What version 2 or 3 has: of dense keys, one sequence after the other, and over pages."""
    for kind in (dense, *_OTHERS):
        yield own.backend.kernel(
            f"vllm.flash_attn.{version}.unsplit{kind.name}",
            kind.operations,
            functools.partial(kind.load, library=_of_two(own.forward)),
            layout=kind.layout,
            accepts=kind.accepts,
            limits=(*limits, *(own.limits if kind.operations is mixed.ALL else ()), *kind.limits),
            batch_invariant=True,
            asked_for=True,
            jit=False,
            priority=priority,
            # Of version 3 passed 853 checks, and 18 of its bits; 2 had no memory for the reference (H200, vllm 0.20.0,
            # 2026-11-27). Version 2 never ran.
            trust=Trust.DECLARED if version == "v3" else Trust.UNTRIED,
        )


_COMPILED = limit.arch(min=(8, 0), max=(8, 9))
"""What version 2 came compiled for: elsewhere a build in the background would end with other bits than before it."""

KERNELS = (
    *_kernels(varlen.OF_V3, "v3", 8, _dense(OF_LENGTHS, strided=True), *varlen.HOPPER),
    *_kernels(varlen.OF_V2, "v2", 6, _dense(limit.contiguous("key", "value"), strided=False), _COMPILED, varlen.AMPERE),
)
