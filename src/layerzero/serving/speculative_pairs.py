"""Kernels of a target and of its draft that fit together, for each size of batch.

The target comes first: its fastest kernel for the verification. Then comes the draft's fastest kernel that reads a
layout and a dtype which the target's kernel reads as well, so that keys and values may go from one to the other; else
the target's kernel serves both. Pairs are kept by policy, by bucket of the batch and by context, and dropped once a
process-wide setting, a measurement or a kernel's health changes what would be chosen.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from layerzero.core.arguments import told
from layerzero.core.dtypes import dtype_name
from layerzero.core.errors import NoCompatibleKernelPairError, refuse
from layerzero.core.plan import Report
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.engine.config import current_policy
from layerzero.engine.dispatch import ENGINE
from layerzero.inspection.answers import explain
from layerzero.ops.kv import KVCache
from layerzero.ops.kv.layer import attention_over
from layerzero.serving.speculation import SpeculativeConfig

BUCKETS = (1, 4, 8, 16, 32)
"""Sizes of a batch that have a pair of their own; a larger one has the last."""

_LAYOUTS = ("NHD", "HND")
_ALIKE = ("layout", "dtype", "page_size", "head_sizes", "device")
"""What two caches have in common whose pages are the same memory."""

_MOST = 1024
"""Pairs that are kept, of batches and of scopes with other settings."""

_OFF = "a full batch leaves no room for drafts"


class _Reads(NamedTuple):
    """What a kernel reads a cache in."""

    kernel: str
    operation: str
    layouts: frozenset[str]
    dtypes: frozenset[torch.dtype]

    def meets(self, other: _Reads) -> bool:
        return bool(self.layouts & other.layouts and self.dtypes & other.dtypes)


@dataclass(frozen=True, slots=True)
class SpeculativePair:
    """What a step of a batch runs.

    Attributes:
        tokens: tokens that each sequence drafts; 0 where nothing is drafted.
        nodes: nodes of each draft, as many as tokens where it does not branch.
        target, draft: ids of the kernels; None for a draft without a cache, and both where nothing is drafted.
        locks: operations and their kernels, for ``lz.scope(locks=...)``; none where both kernels serve one operation.
        because: why the draft has this kernel.
    """

    tokens: int
    nodes: int
    target: str | None
    draft: str | None
    locks: dict[str, str]
    because: str


class SpeculativePairs:
    """The pairs of two caches; :func:`speculative_pair` makes it."""

    def __init__(
        self, draft: KVCache | None, target: KVCache, config: SpeculativeConfig, heads: int, draft_heads: int
    ) -> None:
        self.config = config
        self._draft, self._target, self._heads, self._draft_heads = draft, target, heads, draft_heads
        self._pairs: dict[Hashable, SpeculativePair] = {}
        self._epoch = -1

    def __len__(self) -> int:
        return len(self._pairs)

    def __repr__(self) -> str:
        return f"SpeculativePairs({self.config.told()}, {len(self)} kept)"

    def at(self, batch: int) -> SpeculativePair:
        """The pair for a step of so many sequences, and how many tokens each of them drafts.

        Raises: InvalidCallError for a batch that is none; NoCompatibleKernelPairError where no kernels fit together.
        """
        if type(batch) is not int or batch < 1:
            refuse("SpeculativePairs.at", [f"batch: wanted a number of at least 1, got {told(batch)}"])
        if self._epoch != ENGINE.epoch or len(self._pairs) >= _MOST:
            self._pairs, self._epoch = {}, ENGINE.epoch
        bucket = BUCKETS[min(bisect_left(BUCKETS, batch), len(BUCKETS) - 1)]
        tokens = self.config.tokens_for(batch)
        key = current_policy(), bucket, tokens, self._context()  # scopes take turns, and each has its own
        pair = self._pairs.get(key)
        if pair is None:
            pair = self._matched(bucket, tokens)
            if self.config.cache_kernel_pairs:
                self._pairs[key] = pair
        return pair

    def _context(self) -> Hashable:
        """What a pair depends on beside the batch: models, ranks, and how both caches lie."""
        caches = [(each.strategy, *(getattr(each, name) for name in _ALIKE)) for each in self._caches()]
        return self.config, self._heads, self._draft_heads, *caches

    def _caches(self) -> tuple[KVCache, ...]:
        return (self._target,) if self._draft is None else (self._target, self._draft)

    def _matched(self, batch: int, tokens: int) -> SpeculativePair:
        config = self.config
        if not tokens:
            because = "speculation is off" if not config.enabled else _OFF
            return SpeculativePair(0, 0, None, None, {}, because)
        nodes = config.nodes_for(tokens)
        verifying = self._reads_of(self._target, self._heads, batch, nodes + 1, tree=config.branches)
        if not verifying:
            raise self._refused(tree=config.branches)
        target = verifying[0]
        if not config.drafts_with_cache:
            locks = {target.operation: target.kernel}
            return SpeculativePair(tokens, nodes, target.kernel, None, locks, f"{config.algorithm} drafts without keys")
        cache = self._target if self._draft is None else self._draft
        drafting = self._reads_of(cache, self._draft_heads, batch, 1, tree=False)
        found = next((each for each in drafting if each.meets(target)), None)
        because = "the fastest that reads what the target's kernel reads"
        if found is None:
            found = next((each for each in drafting if each.kernel == target.kernel), None)
            because = "the target's own kernel, since no other reads what that one reads"
        if found is None:
            raise NoCompatibleKernelPairError([_incompatible(target, drafting)])
        locks = {target.operation: target.kernel, found.operation: found.kernel}
        if target.operation == found.operation and target.kernel != found.kernel:
            locks = {}  # a lock would take one of them from its own call, as of latent attention
        return SpeculativePair(tokens, nodes, target.kernel, found.kernel, locks, because)

    def _reads_of(self, cache: KVCache, heads: int, batch: int, tokens: int, *, tree: bool) -> list[_Reads]:
        """The legal kernels of a call over a cache, the fastest first, and what each of them reads."""
        layouts = (cache.layout,) if cache.layout not in _LAYOUTS else _LAYOUTS
        dtypes = dict.fromkeys([cache.dtype, *(each.dtype for each in self._caches())])
        legal: dict[tuple[str, torch.dtype], Report] = {}
        for layout in layouts:
            for dtype in dtypes:
                call = attention_over(cache, heads, batch, tokens, layout=layout, dtype=dtype, tree=tree)
                if call is not None:
                    legal[layout, dtype] = explain(call[0], **call[1])
        own = legal.get((cache.layout, cache.dtype))
        if own is None:
            return []
        taken = {key: {each.kernel.id for each in report.candidates if each.legal} for key, report in legal.items()}
        found = []
        for each in own.candidates:
            if each.legal:
                pairs = [key for key, kernels in taken.items() if each.kernel.id in kernels]
                reads = frozenset(key[0] for key in pairs), frozenset(key[1] for key in pairs)
                found.append(_Reads(each.kernel.id, own.operation, *reads))
        return found

    def _refused(self, *, tree: bool) -> NoCompatibleKernelPairError:
        cache, config = self._target, self.config
        name = f"{cache.layout} of {dtype_name(cache.dtype)}"
        if tree and attention_over(cache, self._heads, 1, 2) is not None:
            code, wanted = ReasonCode.SPEC_DECODE_ALGORITHM_UNSUPPORTED, "an algorithm whose drafts are chains"
            return NoCompatibleKernelPairError(
                [Reason(code, f"algorithm over a cache in {name}", wanted, config.told())]
            )
        code, wanted = ReasonCode.SPEC_DECODE_KV_INCOMPATIBLE, "one that a kernel attends over"
        return NoCompatibleKernelPairError([Reason(code, "the target's cache", wanted, name)])


def _incompatible(target: _Reads, drafting: list[_Reads]) -> Reason:
    def said(reads: _Reads) -> str:
        return (
            f"{reads.kernel} ({', '.join(sorted(reads.layouts))}; {', '.join(sorted(map(dtype_name, reads.dtypes)))})"
        )

    got = "; ".join(map(said, drafting[:4])) or "no kernel at all"
    hint = "Make both caches of one layout and dtype"
    return Reason(ReasonCode.SPEC_DECODE_KV_INCOMPATIBLE, "the draft's kernel", f"what {said(target)} reads", got, hint)


def speculative_pair(
    draft: KVCache | None,
    target: KVCache,
    *,
    heads: int,
    draft_heads: int | None = None,
    config: SpeculativeConfig | None = None,
) -> SpeculativePairs:
    """Match the attention kernels of a target and of its draft, over two caches or one.

        pairs = lz.speculative_pair(draft_cache, cache, heads=32, draft_heads=8, config=lz.EagleConfig())
        pair = pairs.at(len(requests))
        if pair.tokens: ...  # draft so many, verify by lz.verify_speculative

    Args:
        draft: the draft's cache; None where it shares the target's, and for Medusa and n-grams, which have none.
        target: the target's.
        heads, draft_heads: query heads of each, on this rank; the draft has the target's if None.
        config: the algorithm, one of ``lz.SpeculativeConfig``, ``lz.EagleConfig``, ``lz.Eagle3Config``,
            ``lz.MedusaConfig`` and ``lz.NGramConfig``.
    Raises: InvalidCallError for arguments that mean nothing together. NoCompatibleKernelPairError, with every rule
        that is broken: SPEC_DECODE_PP_INCOMPATIBLE for several pipeline stages, SPEC_DECODE_DRAFT_TP_CONSTRAINT for
        more ranks of the draft than ``max_draft_tp_size``, SPEC_DECODE_KV_INCOMPATIBLE for caches that have nothing in
        common, and SPEC_DECODE_ALGORITHM_UNSUPPORTED for trees that no kernel of the cache verifies.
    Source: arXiv:2211.17192.
    """
    config = SpeculativeConfig() if config is None else config
    kinds: tuple[tuple[str, object, type], ...] = (
        ("config", config, SpeculativeConfig),
        ("target", target, KVCache),
        ("draft", target if draft is None else draft, KVCache),
    )
    problems = [
        f"{name}: wanted a {kind.__name__}{' or None' if name == 'draft' else ''}, got {told(given)}"
        for name, given, kind in kinds
        if not isinstance(given, kind)
    ]
    of_draft = heads if draft_heads is None else draft_heads
    for name, size in (("heads", heads), ("draft_heads", of_draft)):
        if type(size) is not int or size < 1:
            problems.append(f"{name}: wanted a number of at least 1, got {told(size)}")
    refuse("speculative_pair", problems)
    for name, size, cache in (("heads", heads, target), ("draft_heads", of_draft, draft)):
        if cache is not None and cache.layout != "MLA" and size % cache.head_sizes[0]:
            problems.append(f"{name}: wanted a multiple of the {cache.head_sizes[0]} key heads, got {size}")
    if not config.drafts_with_cache and draft is not None:
        problems.append(f"draft: wanted None with {config.algorithm}, which drafts without a cache, got one")
    if config.drafts_with_cache and draft is None and not config.share_kv_cache:
        problems.append("draft: wanted the draft's cache, or share_kv_cache=True, got None")
    refuse("speculative_pair", problems)
    broken = _broken(draft, target, config)
    if broken:
        raise NoCompatibleKernelPairError(broken)
    pairs = SpeculativePairs(draft, target, config, heads, of_draft)
    pairs.at(1)  # says now what no batch could run
    return pairs


def _broken(draft: KVCache | None, target: KVCache, config: SpeculativeConfig) -> list[Reason]:
    """The rules of ranks and of a shared cache that are broken."""
    found, stages = [], config.pipeline_parallel_size
    if stages > 1:
        hint = "Split the target by tensor parallelism, or turn speculation off"
        code = ReasonCode.SPEC_DECODE_PP_INCOMPATIBLE
        found.append(Reason(code, "pipeline_parallel_size", 1, stages, hint))
    if config.draft_tp_size > config.max_draft_tp_size:
        wanted = f"<= max_draft_tp_size {config.max_draft_tp_size}"
        code = ReasonCode.SPEC_DECODE_DRAFT_TP_CONSTRAINT
        found.append(Reason(code, "draft_tp_size", wanted, config.draft_tp_size, "Raise max_draft_tp_size"))
    if draft is not None and draft is not target and config.share_kv_cache:
        hint = "Pass one cache, or share_kv_cache=False"
        for name in _ALIKE:
            one, other = _said(getattr(target, name)), _said(getattr(draft, name))
            if one != other:
                code = ReasonCode.SPEC_DECODE_KV_INCOMPATIBLE
                found.append(Reason(code, f"{name} of a draft that shares the cache", one, other, hint))
    return found


def _said(value: Any) -> str:
    return dtype_name(value) if isinstance(value, torch.dtype) else str(value)
