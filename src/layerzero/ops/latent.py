"""Multi-head latent attention with absorbed projections: all heads read one latent vector a token, as key and as value.

    attention.mla.decode.paged   the newest tokens of each sequence over a paged latent cache

A key is the latent vector and the rotated part side by side, a value the latent vector alone. The cache is two planes
without a head axis: (pages, page_size, latent) and (pages, page_size, rope). Planes that are columns of one tensor
(pages, page_size, latent + rope) serve every kernel; planes apart serve those that read two pointers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from layerzero.core import limits as limit
from layerzero.core.arguments import REQUIRED, Axis, Param, TensorSchema
from layerzero.core.dtypes import FLOATING
from layerzero.core.errors import InvalidCallError, refuse
from layerzero.core.facts import Facts
from layerzero.core.operation import Case, Function, Random, Routed, Work
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.core.values import Check
from layerzero.ops.attention import declare as attn
from layerzero.ops.attention.reference import attention_reference
from layerzero.ops.attention.route import score_problems
from layerzero.ops.attention.sweep import extent_of
from layerzero.ops.declaration import check_dense, shape_problems
from layerzero.ops.draw import Draw
from layerzero.ops.paged import declare as paged
from layerzero.ops.paged.draw import fill, tables
from layerzero.ops.paged.pages import gathered
from layerzero.ops.paged.step import StepMetadata, step_problems, table_problems
from layerzero.ops.ragged.declare import INT32

NAME, _FUNCTION = "attention.mla.decode.paged", "mla_attention"
_PLANES = "ckv_cache", "kpe_cache"
LATENT_DIM, ROPE_DIM, PAGE_SIZE = 512, 64, 64


def _case(
    name: str,
    batch: int,
    seq_q: int,
    context: int,
    *,
    heads: int = 128,
    latent_dim: int = LATENT_DIM,
    page_size: int = PAGE_SIZE,
) -> Case:
    """A case: as many tokens of each sequence, over so much context; units are tokens."""
    blocks = -(-context // page_size)
    sizes = {"batch": batch, "seq_q": seq_q, "heads": heads, "latent_dim": latent_dim, "rope_dim": ROPE_DIM}
    return Case(name, sizes | {"page_size": page_size, "max_blocks": blocks, "pages": batch * blocks})


def _sweep(device: str, narrow: Mapping[str, Sequence[int]]) -> Iterator[Case]:
    """Batches and contexts of decoding, with all heads of DeepSeek-V3 and with those of one rank of eight."""
    extent = extent_of(device, {name: sizes for name, sizes in narrow.items() if name != "head_dim"})
    page_size = PAGE_SIZE if device == "cuda" else 16  # vLLM's kernel for CPUs knows no other
    for heads in (128, 16) if "head_dim" not in narrow else ():
        for batch in extent.decode_batches:
            for context in extent.contexts:
                if batch * context <= extent.max_context:
                    name = f"B{batch} KV{context} ({heads} heads) page {page_size}"
                    yield _case(name, batch, 1, context, heads=heads, page_size=page_size)


def mla_attention(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    *,
    return_lse: bool = False,
    max_context_len: int | None = None,
    step: StepMetadata | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend from the newest tokens of each sequence to a paged latent cache, with absorbed projections.

    Shapes: q_nope (B, S, H, C), q_pe (B, S, H, R), ckv_cache (P, N, C), kpe_cache (P, N, R), block_tables
        (B, max_blocks), context_lens (B,) → (B, S, H, C). DeepSeek has C = 512 and R = 64.
    Dtype: queries and cache the same floating dtype; tables and lengths int32, on the same device.
    Args:
        q_nope: queries times the keys' up-projection of their head, so that they meet latent vectors.
        q_pe: the rotated part of the queries.
        ckv_cache: latent vectors, keys and values at once.
        kpe_cache: the rotated part of the keys, shared by all heads. Planes that are columns of one tensor
            (P, N, C + R) have more kernels.
        block_tables: the pages of each sequence in order; what lies beyond its last one is not read.
        context_lens: tokens of each sequence, these included: query i of S sees the keys below ``length - S + 1 + i``.
        scale: factor on the scores. It has no default: the width of a key before its projection was absorbed decides
            it (192 in DeepSeek-V3), which no tensor here has.
        return_lse: also return the log-sum-exp of the scores, float32 (B, H, S), natural logarithm.
        max_context_len: upper bound of ``context_lens`` that the caller knows.
        step: the :class:`layerzero.StepMetadata` of these tables and lengths, so that kernels plan once for all layers.
    Returns: the output, still latent, or (output, lse). A query that sees no key gives 0 and -inf.
    Raises: InvalidCallError for shapes, devices, dtypes or combinations that mean nothing, with wanted and got.
    Source: DeepSeek-V2, arXiv:2405.04434. Prefill with projected keys and values is ``lz.ragged_attention``.
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


def _check_values(
    ckv_cache: Tensor, block_tables: Tensor, context_lens: Tensor, step: StepMetadata | None = None, **_: object
) -> list[Check]:
    """Values on the device, besides places and counts: lengths within the step's bound, pages that have memory."""
    return paged.check_pages(ckv_cache, block_tables, context_lens, step)


def _work(facts: Mapping[str, Any]) -> Work:
    """Two products over the pages of full sequences; every latent vector is read once for all heads."""
    batch, queries, heads, keys = facts["batch"], facts["seq_q"], facts["heads"], facts["context_bound"]
    latent, rope = facts["latent_dim"], facts["rope_dim"]
    pairs = batch * attn.visible_pairs(queries, keys, True, None)
    elements = batch * queries * heads * (2 * latent + rope) + batch * keys * (latent + rope)
    return Work(2.0 * heads * pairs * (2 * latent + rope), float(elements * facts["dtype"].itemsize))


def _examples(case: Case, dtype: torch.dtype, device: torch.device, generator: Random) -> dict[str, Any]:
    """Tables as for decoding, and planes that are columns of one tensor, which every kernel reads."""
    size = case.sizes
    made = paged.table_examples(case, dtype, device, generator)
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

MLA_DECODE_PAGED = attn.operation(
    NAME,
    "Multi-head latent attention with absorbed projections over a paged latent cache",
    mla_attention,
    inputs=(
        TensorSchema("q_nope", ("batch", "seq_q", "heads", "latent_dim"), FLOATING),
        TensorSchema("q_pe", ("batch", "seq_q", "heads", "rope_dim"), FLOATING),
        TensorSchema("ckv_cache", ("pages", "page_size", "latent_dim"), FLOATING, resident=True),
        TensorSchema("kpe_cache", ("pages", "page_size", "rope_dim"), FLOATING, resident=True),
        TensorSchema("block_tables", ("batch", "max_blocks"), INT32, same_dtype=False, indexes=("pages",)),
        TensorSchema("context_lens", ("batch",), INT32, same_dtype=False, counts=("max_blocks", "page_size")),
    ),
    outputs=attn.results("batch", "seq_q", width="latent_dim"),
    params=(
        Param("scale", float, REQUIRED, example=_USUAL_SCALE, works=False),
        attn.RETURN_LSE,
        paged.MAX_CONTEXT_LEN,
        paged.STEP,
    ),
    axes=(
        Axis("batch", scales=True, live=True, beside=True, apart=True),
        Axis("heads", scales=True, beside=True),
        Axis("seq_q", scales=True, live=True, codes=attn.LENGTH),
        Axis("context_bound", scales=True),
        *paged.PAGES,
        Axis("latent_dim", codes=attn.HEAD_DIM),
        Axis("rope_dim", codes=attn.HEAD_DIM),
    ),
    cases=(
        _case("small", 3, 1, 64, heads=4, latent_dim=128, page_size=16),
        _case("drafts", 2, 3, 128, heads=16, page_size=64),
        _case("deepseek_v3_b64_kv4k", 64, 1, 4096),
    ),
    tolerance_reason="the attention contract; scores sum up more products, in float32",
    aliases={each: fact for each, fact in attn.ALIASES.items() if fact in ("batch", "seq_q", "heads")},
    derive=paged.bound_of,
    derived_from=paged.BOUND,
    work=_work,
    check_values=_check_values,
    examples=_examples,
    scratch=_scratch,
    parts=paged.parts,
    sweep=_sweep,
)
OPERATIONS = (MLA_DECODE_PAGED,)


_QUERIES = "a 4D tensor (one query of each sequence: [:, None])"


def _route(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    check_dense(_FUNCTION, arguments)
    tables = arguments["block_tables"], arguments["context_lens"]
    problems = table_problems(*tables)
    problems += shape_problems(arguments, ("q_nope", "q_pe"), 4, _QUERIES) + shape_problems(arguments, _PLANES, 3)
    refuse(_FUNCTION, problems)
    q_nope, planes = arguments["q_nope"], [arguments[name] for name in _PLANES]
    if not q_nope.shape[2] or not planes[0].shape[1] or not all(each.shape[2] for each in planes):
        shapes = f"q_nope {tuple(q_nope.shape)}, caches {tuple(planes[0].shape)} and {tuple(planes[1].shape)}"
        raise InvalidCallError(_FUNCTION, [f"wanted heads, widths and page size above 0, got {shapes}"])
    problems = score_problems(arguments) + step_problems(arguments["step"], *tables)
    problems += MLA_DECODE_PAGED.schema.validate(**arguments)
    refuse(_FUNCTION, problems)
    return Routed(MLA_DECODE_PAGED, arguments, varies=("batch", "max_blocks", "pages"))


_WIDTHS = ((512, 64), (128, 64), (256, 64), (16, 8), (7, 3))
"""Latent and rotated; kernels know the first, the third is what few models have."""


def _draw(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call: planes apart or in one tensor, NaN wherever nothing may be read."""
    batch, seq_q = draw.of((0, 1, 2, 3, 5), (1, 8, 12, 8, 3)), draw.of((1, 2, 4), (4, 1, 1))
    heads, (latent, rope) = draw.of((1, 3, 8, 16, 128), (2, 1, 4, 4, 1)), draw.of(_WIDTHS, (8, 2, 1, 2, 1))
    page_size, blocks = draw.of((16, 64, 3, 32), (5, 5, 1, 2)), draw.of((1, 2, 3, 7), (2, 3, 3, 1))
    capacity, least = blocks * page_size, 0 if draw.chance(0.15) else 1
    bound = draw.of((None, capacity, draw.stream.randint(1, capacity)), (7, 1, 1))
    longest = capacity if bound is None else bound
    lens = draw.integers((batch,), longest - least, torch.int32) + least
    table, pages = tables(draw, lens, blocks, page_size)
    widths, nan = (latent, rope), float("nan")
    form = draw.of(("joined", "apart", "padded"), (3, 2, 1))
    if form == "apart":
        planes = [torch.full((pages, page_size, width), nan, dtype=dtype, device=draw.device) for width in widths]
    else:
        extra = 8 if form == "padded" else 0
        both = torch.full((pages, page_size, latent + rope + extra), nan, dtype=dtype, device=draw.device)
        planes = [both[..., :latent], both[..., latent : latent + rope]]
    fill(draw, planes, table, lens, dtype)
    q_nope, q_pe = (draw.normal((batch, seq_q, heads, width), dtype) for width in widths)
    if draw.chance(0.3):
        q_nope, q_pe = torch.split(torch.cat((q_nope, q_pe), -1), [latent, rope], -1)
    else:
        q_nope, q_pe = draw.laid_out(q_nope), draw.laid_out(q_pe)
    arguments: dict[str, Any] = {
        "q_nope": q_nope,
        "q_pe": q_pe,
        "ckv_cache": planes[0],
        "kpe_cache": planes[1],
        "block_tables": table,
        "context_lens": lens,
        "scale": draw.of((1.0, 0.5, 1.7)) * (latent + rope) ** -0.5,
    }
    arguments |= draw.maybe(0.3, return_lse=lambda: True)
    if bound is not None:
        arguments["max_context_len"] = bound
    if draw.chance(0.5):
        arguments["step"] = StepMetadata(table, lens, max_context_len=bound, capturable=draw.chance(0.5))
    return arguments


MLA_ATTENTION = Function(_FUNCTION, mla_attention, _route, OPERATIONS, _draw, state=frozenset({"sdpa"}))
FUNCTIONS = (MLA_ATTENTION,)
ALIASES: dict[str, tuple[tuple[str, ...], dict[str, object]]] = {
    "attention.mla.decode": ((MLA_DECODE_PAGED.name,), {}),
    "attention.mla.prefill": ((MLA_DECODE_PAGED.name,), {}),
}
"""The specification's names: absorbed matrices are one operation, for one or more of the newest tokens."""


def joined(latent: Tensor, rotated: Tensor) -> Tensor:
    """Both side by side: where they lie so in memory as they are, in a copy otherwise.

    Shapes: latent (..., C), rotated (..., R) → (..., C + R)
    """
    width = latent.shape[-1] + rotated.shape[-1]
    beside = latent.data_ptr() + latent.shape[-1] * latent.element_size() == rotated.data_ptr()
    if beside and latent.stride() == rotated.stride() and latent.stride(-1) == 1:
        whole = latent.untyped_storage()
        if whole.data_ptr() == rotated.untyped_storage().data_ptr():
            return latent.as_strided((*latent.shape[:-1], width), latent.stride())
    return torch.cat((latent, rotated), -1)


def _columns_of_one(facts: Facts) -> Reason | None:
    """Planes whose tokens step by the width of both; the addresses are looked at in the call."""
    latent, rotated = facts.tensors["ckv_cache"], facts.tensors["kpe_cache"]
    _, page_size, width = latent.shape
    both = width + rotated.shape[2]
    wanted = (page_size * both, both, 1)
    if latent.strides == wanted == rotated.strides:
        return None
    return Reason(
        ReasonCode.NOT_CONTIGUOUS,
        "ckv_cache",
        f"strides {wanted}, as kpe_cache: columns of one dense tensor",
        f"{latent.strides} and {rotated.strides}",
        "Make both planes as views of one tensor (pages, page_size, latent + rope)",
    )


COLUMNS_OF_ONE = limit.Custom("ckv_cache and kpe_cache: columns of one dense tensor", _columns_of_one)
WIDTHS = (limit.dim("latent_dim", one_of=(512,)), limit.dim("rope_dim", one_of=(64,)))
"""DeepSeek's, which kernels are built for."""
