"""FlashInfer's draws, called as the module that it compiles with nvcc on first use: one for all of them.

Read: flashinfer-python 0.7.2.post1, sampling.py, csrc/sampling.cu, csrc/renorm.cu, include/flashinfer/sampling.cuh and
topk.cuh. Its kernels sort nothing: they draw, and draw again among likelier places where what they drew is not kept
("count of those above < k", "sum of those above < p", as our operations say it, so ties are kept together, too).
They take float32 that adds up to 1, as dense rows, and load vectors as wide as divide a row; where a row begins is
computed in 32 bits. Ids may be int64, in which case counts of rows are read as int64 as well, but for the radix kernel
of top-k before top-p, which reads int32. Logits become probabilities by torch's softmax.

A draw is named by seed and offset of a Philox stream, of which each row has its own. They are two numbers of the call,
read from the generator, which moves on; a captured graph would draw the same on each replay, so that none is captured.
The radix kernel wants zeros to count in: one buffer a call, where FlashInfer shares one between streams. Not run here
yet.

FlashInfer's verification of a drafted chain, from the module that holds its draws.

Read: ``chain_speculative_sampling`` of csrc/flashinfer_sampling_binding.cu and include/flashinfer/sampling.cuh, at
fb28d7242. Its last arguments are those of the draws in ``sampling``. A block a row; float32 rows, dense, which it loads
as wide as divides them; int32 tokens. A token stands where u * q < p, what falls is drawn of max(p - q, 0), as here;
it adds the chain's lengths to what their tensors hold. Where a row begins is computed in 32 bits. It wants what each
token was drawn from: a draft that was certain gets 1 at its token, 0 elsewhere. Seed and offset are numbers of the
call, so that none is captured. Conforms on an H200 (torch 2.11, 2026-11-22).
Library: flashinfer-python 0.7.2, Apache-2.0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.flashinfer.attention import kernel
from layerzero.backends.flashinfer.modules import of_modules
from layerzero.backends.norm_limits import ElementsBelow
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.ops.sampling.declare import LEAST
from layerzero.ops.sampling.formulas import probabilities

_ROUNDS = 32
"""Random numbers a row that FlashInfer moves a generator on by, where it may have to draw again."""

_RADIX_BYTES = 2**20
_DETERMINISTIC = True

Draw = Callable[..., None]
"""Calls one of the module's functions on probabilities, ids, a flag for each row, and where to draw from."""


@functools.cache
def built() -> Any:
    """The module, compiled or found."""
    from flashinfer.jit.sampling import gen_sampling_module

    return gen_sampling_module().build_and_load()


def _shares(share: float | None, of_rows: Tensor | None) -> tuple[Tensor | None, float]:
    """A share for each row and one for all, of which FlashInfer takes the first that is there."""
    if of_rows is None:
        return None, 1.0 if share is None else share
    return of_rows.reshape(-1).clamp(LEAST, 1.0), 1.0


def _counts(count: int | None, of_rows: Tensor | None, vocab: int, dtype: torch.dtype) -> tuple[Tensor | None, int]:
    """The same of counts, which are read in the dtype that its kernels are compiled for."""
    if of_rows is None:
        return None, vocab if count is None else min(count, vocab)
    return of_rows.reshape(-1).clamp(1, vocab).to(dtype), 0


def random_of(seed: int, offset: int) -> tuple[Any, ...]:
    """How draws are to be deterministic, and their seed and offset: as a tensor, and as a number."""
    return _DETERMINISTIC, None, seed, None, offset


def _of(function: str, parameter: str = "") -> Draw:
    """A function of the module that takes a count or a share, or neither, between the rows and where to draw from."""

    def draw(module: Any, probs: Tensor, ids: Tensor, valid: Tensor, random: tuple[Any, ...], **given: Any) -> None:
        asked: tuple[Any, ...] = ()
        one, of_rows = given.get(parameter), given.get(f"{parameter}_by_row")
        if parameter == "top_k":
            asked = _counts(one, of_rows, probs.shape[1], ids.dtype)
        elif parameter:
            asked = _shares(one, of_rows)
        getattr(module, function)(probs, ids, valid, None, *asked, *random)

    return draw


_top_p = _of("top_p_sampling_from_probs", "top_p")


def _top_k_top_p(
    module: Any,
    probs: Tensor,
    ids: Tensor,
    valid: Tensor,
    random: tuple[Any, ...],
    top_k: int | None = None,
    top_k_by_row: Tensor | None = None,
    top_p: float | None = None,
    top_p_by_row: Tensor | None = None,
) -> None:
    kept = torch.empty_like(probs)
    counting = torch.zeros(_RADIX_BYTES, dtype=torch.uint8, device=probs.device)
    module.top_k_renorm_probs(
        probs, kept, *_counts(top_k, top_k_by_row, probs.shape[1], torch.int32), _DETERMINISTIC, counting
    )
    _top_p(module, kept, ids, valid, random, top_p=top_p, top_p_by_row=top_p_by_row)


def _loader(draw: Draw, numbers: int, *, logits: bool) -> Callable[[Facts], Callable[..., Any]]:
    def load(facts: Facts) -> Callable[..., Any]:
        from flashinfer.sampling import get_seed_and_offset

        module = built()

        def run(
            tensor: Tensor,
            *,
            temperature: float | None = None,
            temperature_by_row: Tensor | None = None,
            seed: int | None = None,
            generator: torch.Generator | None = None,
            **given: Any,
        ) -> Tensor:
            probs = probabilities(tensor.detach(), temperature, temperature_by_row, logits=logits)
            probs = probs.view(-1, probs.shape[-1])
            rows = len(probs)
            ids = torch.empty(rows, dtype=torch.int64, device=probs.device)
            valid = torch.empty(rows, dtype=torch.bool, device=probs.device)
            start = get_seed_and_offset(rows * numbers, generator, probs.device) if seed is None else (seed, 0)
            draw(module, probs, ids, valid, random_of(*start), **given)
            return ids.view(tensor.shape[:-1])

        return run

    return load


def _kernel(kind: str, source: str, draw: Draw, accepts: tuple[str, ...], numbers: int, priority: int) -> Kernel:
    logits = source == "logits"
    ending = "" if kind == "categorical" else f"_{kind}"
    dense = (limit.dtype("float32", "float16", "bfloat16"), limit.contiguous(source))
    given = (limit.dtype("float32"), limit.contiguous(source), limit.aligned(16, source))
    return kernel(
        f"flashinfer.sample{ending}" if logits else f"flashinfer.sample{ending}_probs",
        f"sampling.{kind}" if logits else f"sampling.{kind}.probs",
        _loader(draw, numbers, logits=logits),
        accepts=(*accepts, *(("temperature", "temperature_by_row") if logits else ()), "seed", "generator"),
        limits=(*(dense if logits else given), ElementsBelow(2**32, ("rows", "vocab"))),
        grad=True,
        deterministic=True,
        graph_safe=False,
        **of_modules("sampling"),
        priority=priority,
    )


def _load(facts: Facts) -> Callable[..., Any]:
    from flashinfer.sampling import get_seed_and_offset

    module = built()

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
        numbers = batch * (count + 2)  # one for each token, one more for that which falls, one to draw in its place
        start = get_seed_and_offset(numbers, generator, target.device) if seed is None else (seed, 0)
        module.chain_speculative_sampling(
            draft_probs.detach(), tokens.contiguous(), target, ids, standing, stood, *random_of(*start)
        )
        places = torch.arange(count, device=target.device)
        return ids.long(), torch.where(places < stood.unsqueeze(-1), places, -1)

    return run


KERNELS = (
    *(
        _kernel(kind, source, draw, accepts, numbers, priority)
        for kind, draw, accepts, numbers, priority in (
            ("categorical", _of("sampling_from_probs"), (), 1, 80),
            ("topk", _of("top_k_sampling_from_probs", "top_k"), ("top_k", "top_k_by_row"), _ROUNDS, 80),
            ("topp", _top_p, ("top_p", "top_p_by_row"), _ROUNDS, 80),
            ("minp", _of("min_p_sampling_from_probs", "min_p"), ("min_p", "min_p_by_row"), 1, 80),
            ("topk_topp", _top_k_top_p, ("top_k", "top_k_by_row", "top_p", "top_p_by_row"), _ROUNDS, 80),
        )
        for source in ("logits", "probs")
    ),
    kernel(
        "flashinfer.verify",
        "sampling.verify",
        _load,
        limit.dtype("float32"),
        limit.contiguous("target_probs", "draft_probs"),
        limit.aligned(16, "target_probs", "draft_probs"),
        ElementsBelow(2**32, ("batch", "verified", "vocab")),
        accepts=("draft_probs", "seed", "generator"),
        grad=True,
        deterministic=True,
        **of_modules("sampling"),
        graph_safe=False,
        priority=80,
    ),
)
