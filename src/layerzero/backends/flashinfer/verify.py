"""FlashInfer's verification of a drafted chain, from the module that holds its draws.

Read: ``chain_speculative_sampling`` of csrc/flashinfer_sampling_binding.cu and include/flashinfer/sampling.cuh, at
fb28d7242. Its last arguments are those of the draws in ``sampling``. A block a row; float32 rows, dense, which it loads
as wide as divides them; int32 tokens. A token stands where u * q < p, what falls is drawn of max(p - q, 0), as here;
it adds the chain's lengths to what their tensors hold. Where a row begins is computed in 32 bits. It wants what each
token was drawn from: a draft that was certain gets 1 at its token, 0 elsewhere. Seed and offset are numbers of the
call, so that none is captured. Conforms on an H200 (torch 2.11, 2026-11-22).
Library: flashinfer-python 0.7.2, Apache-2.0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.flashinfer import sampling
from layerzero.backends.flashinfer.attention import FLASHINFER
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.reasons import Reason, ReasonCode


def _load(facts: Facts) -> Callable[..., Any]:
    from flashinfer.sampling import get_seed_and_offset

    module = sampling.built()

    def run(
        target_probs: Tensor,
        draft_ids: Tensor,
        *,
        draft_probs: Tensor | None = None,
        seed: int | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor]:
        target, tokens = target_probs.detach(), draft_ids.int()
        batch, count = tokens.shape
        if draft_probs is None:
            certain = torch.zeros_like(target[:, :-1])
            draft_probs = certain.scatter_(-1, draft_ids.long().unsqueeze(-1), 1.0)
        ids = torch.empty((batch, count + 1), dtype=torch.int32, device=target.device)
        standing, stood = (torch.zeros(batch, dtype=torch.int32, device=target.device) for _ in range(2))
        numbers = batch * (count + 1)
        start = get_seed_and_offset(numbers, generator, target.device) if seed is None else (seed, 0)
        module.chain_speculative_sampling(
            draft_probs.detach(), tokens.contiguous(), target, ids, standing, stood, *sampling.random_of(*start)
        )
        places = torch.arange(count, device=target.device)
        return ids.long(), torch.where(places < stood.unsqueeze(-1), places, -1)

    return run


def _elements(facts: Facts) -> Reason | None:
    got = facts.size("batch") * facts.size("verified") * facts.size("vocab")
    if got < 2**32:
        return None
    return Reason(ReasonCode.CONSTRAINT_FAILED, "batch * verified * vocab", "below 2^32", got)


KERNELS = (
    Kernel(
        id="flashinfer.verify",
        operations=("sampling.verify",),
        backend=FLASHINFER,
        load=_load,
        accepts=("draft_probs", "seed", "generator"),
        limits=(
            limit.platform("cuda"),
            limit.arch(min=(8, 0)),
            limit.dtype("float32"),
            limit.contiguous("target_probs", "draft_probs"),
            limit.aligned(16, "target_probs", "draft_probs"),
            limit.Custom("batch * verified * vocab < 2^32", _elements),
        ),
        grad=True,
        deterministic=True,
        build_key=sampling.module_of,
        prebuilt=sampling.prebuilt,
        graph_safe=False,
        priority=80,
    ),
)
