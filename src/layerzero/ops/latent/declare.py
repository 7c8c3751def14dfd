"""Multi-head latent attention with absorbed projections: all heads read one latent vector a token, as key and as value.

    attention.mla.decode.paged   the newest tokens of each sequence over a paged latent cache

A key is the latent vector and the rotated part side by side, a value the latent vector alone. The cache is two planes
without a head axis: (pages, page_size, latent) and (pages, page_size, rope). Planes that are columns of one tensor
(pages, page_size, latent + rope) serve every kernel; planes apart serve those that read two pointers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from layerzero.core.arguments import REQUIRED, Axis, Param, TensorSchema
from layerzero.core.dtypes import FLOATING
from layerzero.core.operation import Case, Operation, Work
from layerzero.core.schema import OperationSchema
from layerzero.core.values import Check
from layerzero.ops.attention.declare import ALIASES, HEAD_DIM, LENGTH, RETURN_LSE, TOLERANCE, visible_pairs
from layerzero.ops.attention.reference import attention_reference
from layerzero.ops.latent.sweep import latent_case, sweep
from layerzero.ops.paged import parts
from layerzero.ops.paged.declare import MAX_CONTEXT_LEN, PAGES, STEP, check_pages, table_examples
from layerzero.ops.paged.gather import gathered
from layerzero.ops.paged.step import StepMetadata
from layerzero.ops.ragged.declare import INT32

NAME = "attention.mla.decode.paged"


def mla_reference(
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
) -> Tensor | tuple[Tensor, Tensor]:
    """Gather the pages of each sequence, put latent and rotated parts side by side, then attend by definition.

    Shapes: q_nope (B, S, H, C), q_pe (B, S, H, R), ckv_cache (P, N, C), kpe_cache (P, N, R), block_tables
    (B, max_blocks), context_lens (B,) → (B, S, H, C); log-sum-exp (B, H, S). Query i of S is the sequence's token
    ``length - S + i``; one that sees no key gives 0 and -inf.
    Dtype: computes in float32, or float64 for float64; returns q_nope.dtype; log-sum-exp float32, natural logarithm.
    Source: DeepSeek-V2, arXiv:2405.04434.
    """
    planes = ckv_cache.unsqueeze(2), kpe_cache.unsqueeze(2)
    latent, rotated = gathered(*planes, block_tables, context_lens, max_context_len)
    return attention_reference(
        torch.cat((q_nope, q_pe), -1),
        torch.cat((latent, rotated), -1),
        latent,
        causal=True,
        scale=scale,
        kv_lens=context_lens,
        return_lse=return_lse,
    )


def _fake(q_nope: Tensor, *_: object, return_lse: bool = False, **__: object) -> Tensor | tuple[Tensor, Tensor]:
    batch, seq_q, heads, _dim = q_nope.shape
    output = q_nope.new_empty(q_nope.shape)
    return (output, q_nope.new_empty((batch, heads, seq_q), dtype=torch.float32)) if return_lse else output


def _check_values(
    ckv_cache: Tensor, block_tables: Tensor, context_lens: Tensor, step: StepMetadata | None = None, **_: object
) -> list[Check]:
    """Values on the device, beside places and counts: lengths within the step's bound, pages that have memory."""
    return check_pages(ckv_cache, block_tables, context_lens, step)


def _derive(arguments: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, object]:
    capacity, bound = values["max_blocks"] * values["page_size"], values["max_context_len"]
    return {"context_bound": capacity if bound is None else min(bound, capacity)}


def _work(facts: Mapping[str, Any]) -> Work:
    """Two products over the pages of full sequences; every latent vector is read once for all heads."""
    batch, queries, heads, keys = facts["batch"], facts["seq_q"], facts["heads"], facts["context_bound"]
    latent, rope = facts["latent_dim"], facts["rope_dim"]
    pairs = batch * visible_pairs(queries, keys, True, None)
    elements = batch * queries * heads * (2 * latent + rope) + batch * keys * (latent + rope)
    return Work(2.0 * heads * pairs * (2 * latent + rope), float(elements * facts["dtype"].itemsize))


def _examples(
    case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None
) -> dict[str, Any]:
    """Tables as for decoding, and planes that are columns of one tensor, which every kernel reads."""
    size = case.sizes
    made = table_examples(case, dtype, device, generator)
    shape = (size["pages"], size["page_size"], size["latent_dim"] + size["rope_dim"])
    where = device if generator is None else generator.device
    both = torch.randn(shape, generator=generator, device=where).to(device, dtype)
    latent = size["latent_dim"]
    return made | {"ckv_cache": both[..., :latent], "kpe_cache": both[..., latent:], "scale": _USUAL_SCALE}


def _scratch(sizes: Mapping[str, int]) -> int:
    """The larger of the scores and of the keys for every head."""
    keys, width = sizes["max_blocks"] * sizes["page_size"], sizes["latent_dim"] + sizes["rope_dim"]
    return sizes["batch"] * sizes["heads"] * keys * max(sizes["seq_q"], width)


_USUAL_SCALE = 192**-0.5
"""That of DeepSeek-V3: of a key before its projection was absorbed, 128 plain and 64 rotated numbers."""

MLA_DECODE_PAGED = Operation(
    schema=OperationSchema(
        operation=NAME,
        inputs=(
            TensorSchema("q_nope", ("batch", "seq_q", "heads", "latent_dim"), FLOATING),
            TensorSchema("q_pe", ("batch", "seq_q", "heads", "rope_dim"), FLOATING),
            TensorSchema("ckv_cache", ("pages", "page_size", "latent_dim"), FLOATING, resident=True),
            TensorSchema("kpe_cache", ("pages", "page_size", "rope_dim"), FLOATING, resident=True),
            TensorSchema("block_tables", ("batch", "max_blocks"), INT32, same_dtype=False, indexes=("pages",)),
            TensorSchema("context_lens", ("batch",), INT32, same_dtype=False, counts=("max_blocks", "page_size")),
        ),
        outputs=(
            TensorSchema("output", ("batch", "seq_q", "heads", "latent_dim")),
            TensorSchema("lse", ("batch", "heads", "seq_q"), frozenset({torch.float32}), when="return_lse"),
        ),
        params=(
            Param("scale", float, REQUIRED, example=_USUAL_SCALE, works=False),
            RETURN_LSE,
            MAX_CONTEXT_LEN,
            STEP,
        ),
        axes=(
            Axis("batch", scales=True, live=True, beside=True, apart=True),
            Axis("heads", scales=True, beside=True),
            Axis("seq_q", scales=True, live=True, codes=LENGTH),
            Axis("context_bound", scales=True),
            *PAGES,
            Axis("latent_dim", codes=HEAD_DIM),
            Axis("rope_dim", codes=HEAD_DIM),
        ),
    ),
    summary="Multi-head latent attention with absorbed projections over a paged latent cache",
    reference=mla_reference,
    fake=_fake,
    cases=(
        latent_case("small", 3, 1, 64, heads=4, latent_dim=128, page_size=16),
        latent_case("drafts", 2, 3, 128, heads=16, page_size=64),
        latent_case("deepseek_v3_b64_kv4k", 64, 1, 4096),
    ),
    tolerance=TOLERANCE,
    tolerance_reason="the attention contract; scores sum up more products, in float32",
    aliases={each: fact for each, fact in ALIASES.items() if fact in ("batch", "seq_q", "heads")},
    derive=_derive,
    derived=("context_bound",),
    derived_from={"context_bound": ("max_blocks", "page_size")},
    work=_work,
    check_values=_check_values,
    examples=_examples,
    scratch=_scratch,
    parts=parts.parts,
    sweep=sweep,
)
OPERATIONS = (MLA_DECODE_PAGED,)
