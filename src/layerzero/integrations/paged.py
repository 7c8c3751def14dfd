"""One step of a serving engine as its attention layers see it: tables, lengths, starts, and the call they amount to."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import layerzero as lz

_OF_TOKENS = {"sinks", "alibi_slopes", "tree_mask"}
"""What calls of one token a sequence know only by their starts."""


class PagedStep(NamedTuple):
    """What all layers of one step share.

    Attributes:
        tables: (B, max_blocks) int32, the pages of each sequence.
        lens: (B,) int32, tokens of each sequence, this step's included.
        starts: (B + 1,) int32, where each sequence's queries begin.
        decodes: how many sequences, from the first on, have one query; None where nothing is promised.
        longest_q, longest_k: the most queries and keys that any sequence has; None where nothing is promised.
        metadata: what kernels plan on.
    """

    tables: Tensor
    lens: Tensor
    starts: Tensor
    decodes: int | None
    longest_q: int | None
    longest_k: int | None
    metadata: lz.StepMetadata

    @staticmethod
    def of(
        tables: Tensor,
        lens: Tensor,
        starts: Tensor,
        starts_on_host: Tensor,
        longest_k: int,
        lens_on_host: Tensor | None = None,
    ) -> PagedStep:
        """Make it of an engine's tensors; nothing waits for the device.

        Args:
            tables, lens, starts: as the engine keeps them; anything but int32 is copied.
            starts_on_host: the same starts on the CPU.
            longest_k: an upper bound of ``lens``.
            lens_on_host: the same lengths on the CPU, where the engine has them: kernels that plan wait for none then.
        """
        tables, lens, starts = (each.to(torch.int32) for each in (tables, lens, starts))
        counts = starts_on_host[1:] - starts_on_host[:-1]
        several = (counts != 1).nonzero()
        decodes = int(several[0]) if len(several) else len(counts)
        known = lens if lens.is_cpu else lens_on_host
        host = None if known is None else (known.to(torch.int32), starts_on_host.to(torch.int32))
        metadata = lz.StepMetadata(tables, lens, cu_seqlens_q=starts, host=host, max_context_len=max(longest_k, 1))
        longest_q = int(counts.max()) if len(counts) else 1
        return PagedStep(tables, lens, starts, decodes, max(longest_q, 1), max(longest_k, 1), metadata)

    @staticmethod
    def without_promises(tables: Tensor, lens: Tensor, starts: Tensor) -> PagedStep:
        """Make it for kernels of a CPU, which read lengths where they lie, over a cache that began with zeros.

        Decodes, prefills and mixed steps are calls of one class then: a changing batch seldom misses.
        """
        tables, lens, starts = (each.to(torch.int32) for each in (tables, lens, starts))
        metadata = lz.StepMetadata(tables, lens, cu_seqlens_q=starts, finite_pages=True)
        return PagedStep(tables, lens, starts, None, None, None, metadata)

    @staticmethod
    def captured(tables: Tensor, lens: Tensor, starts: Tensor, longest_k: int, each: int = 1) -> PagedStep:
        """Make it for a CUDA graph of as many tokens ``each`` sequence, over tensors that stay where they are.

        Before each replay ``metadata.advance()`` brings up to date what kernels planned. ``longest_k`` bounds the
        lengths of every replay.
        """
        begins = None if each == 1 else starts
        metadata = lz.StepMetadata(tables, lens, cu_seqlens_q=begins, capturable=True, max_context_len=longest_k)
        return PagedStep(tables, lens, starts, len(lens) if each == 1 else 0, each, longest_k, metadata)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, *, causal: bool = True, **scores: Any) -> Tensor:
        """Attention of this step's queries, (T, H, D), over pages of a layout, (P, N, K, D) in NHD: (T, H, D_v).

        ``scores`` are ``scale``, ``window``, ``softcap``, ``sinks``, ``alibi_slopes``, ``tree_mask``, ``key_scale``,
        ``value_scale`` and ``layout`` as in ``lz.paged_attention``.
        """
        caches, batch = (keys, values, self.tables, self.lens), len(self.lens)
        found: Any
        if self.decodes is None:
            return lz.paged_attention(  # type: ignore[no-any-return]
                query, *caches, step=self.metadata, cu_seqlens_q=self.starts, causal=causal, **scores
            )
        shared = {"step": self.metadata, "max_context_len": self.longest_k, **scores}
        if self.decodes == batch and len(query) == batch and not scores.keys() & _OF_TOKENS:
            found = lz.paged_attention(query.unsqueeze(1), *caches, **shared)  # it sees every key, causal or not
            return found.squeeze(1)  # type: ignore[no-any-return]
        shared |= {"cu_seqlens_q": self.starts, "max_seqlen_q": self.longest_q, "decodes": self.decodes or None}
        found = lz.paged_attention(query, *caches, causal=causal, **shared)
        return found  # type: ignore[no-any-return]

    def multiplies(self, query: Tensor, keys: Tensor, values: Tensor, *, causal: bool, **scores: Any) -> bool:
        """Whether a library has a kernel for this step over pages in tiles; torch's, as the reference, copies them."""
        call: dict[str, Any] = {"step": self.metadata, "cu_seqlens_q": self.starts, "causal": causal, **scores}
        report = lz.explain("paged_attention", query, keys, values, self.tables, self.lens, **call)
        return not str(report.kernel_id).startswith(("torch.", "reference."))
