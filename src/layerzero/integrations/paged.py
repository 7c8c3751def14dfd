"""One step of a serving engine as its attention layers see it: tables, lengths, starts, and the call they amount to."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import layerzero as lz


class PagedStep(NamedTuple):
    """What all layers of one step share.

    Attributes:
        tables: (B, max_blocks) int32, the pages of each sequence.
        lens: (B,) int32, tokens of each sequence, this step's included.
        starts: (B + 1,) int32, where each sequence's queries begin.
        decodes: how many sequences, from the first on, have one query.
        longest_q, longest_k: the most queries and keys that any sequence has.
        metadata: what kernels plan on.
    """

    tables: Tensor
    lens: Tensor
    starts: Tensor
    decodes: int
    longest_q: int
    longest_k: int
    metadata: lz.StepMetadata

    @staticmethod
    def of(tables: Tensor, lens: Tensor, starts: Tensor, starts_on_host: Tensor, longest_k: int) -> PagedStep:
        """Make it of an engine's tensors; nothing waits for the device.

        Args:
            tables, lens, starts: as the engine keeps them; anything but int32 is copied.
            starts_on_host: the same starts on the CPU.
            longest_k: an upper bound of ``lens``.
        """
        tables, lens, starts = (each.to(torch.int32) for each in (tables, lens, starts))
        counts = starts_on_host[1:] - starts_on_host[:-1]
        several = (counts != 1).nonzero()
        decodes = int(several[0]) if len(several) else len(counts)
        host = (lens, starts_on_host.to(torch.int32)) if lens.is_cpu else None
        metadata = lz.StepMetadata(tables, lens, cu_seqlens_q=starts, host=host, max_context_len=max(longest_k, 1))
        longest_q = int(counts.max()) if len(counts) else 1
        return PagedStep(tables, lens, starts, decodes, max(longest_q, 1), max(longest_k, 1), metadata)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, *, causal: bool = True, **scores: Any) -> Tensor:
        """Attention of this step's queries, (T, H, D), over pages (P, N, K, D): (T, H, D_v).

        ``scores`` are ``scale``, ``window`` and ``softcap`` as in ``lz.paged_attention``.
        """
        shared = {"step": self.metadata, "max_context_len": self.longest_k, **scores}
        caches = (keys, values, self.tables, self.lens)
        batch = len(self.lens)
        if self.decodes == batch and len(query) == batch:  # the newest token sees every key, causal or not
            output: Any = lz.paged_attention(query.unsqueeze(1), *caches, **shared)
            return output.squeeze(1)  # type: ignore[no-any-return]
        decodes = self.decodes or None
        shared |= {"cu_seqlens_q": self.starts, "max_seqlen_q": self.longest_q, "decodes": decodes}
        found: Any = lz.paged_attention(query, *caches, causal=causal, **shared)
        return found  # type: ignore[no-any-return]
