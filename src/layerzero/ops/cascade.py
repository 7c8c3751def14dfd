"""Attention in parts: states of two parts of the keys made one, and a prefix that sequences share read once for all.

    attention.merge_states
    attention.cascade.decode.paged

With ``w = exp(lse_a) / (exp(lse_a) + exp(lse_b))`` the merged output is ``w a + (1 - w) b`` and its log-sum-exp
``log(exp(lse_a) + exp(lse_b))``: what one softmax over all keys would have given.

The result of a cascade is that of a plain decode: that the first ``shared_blocks`` pages of every table are the same is
a promise that flat kernels may leave be. Attention over the prefix takes all queries as those of one sequence;
attention over the rest is a decode of its own; both are merged by their log-sum-exps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from layerzero.core import values
from layerzero.core.arguments import REQUIRED, Axis, Param, Role, TensorSchema, told
from layerzero.core.errors import refuse
from layerzero.core.operation import Case, Function, Random, Routed, Work
from layerzero.core.values import Check
from layerzero.ops.attention import declare as attn
from layerzero.ops.attention.declare import HEAD_DIM, TOLERANCE
from layerzero.ops.attention.route import score_problems, without_defaults
from layerzero.ops.attention.sweep import extent_of
from layerzero.ops.declaration import check_dense, function, operation, shape_problems
from layerzero.ops.draw import Draw
from layerzero.ops.paged import declare as paged
from layerzero.ops.paged.draw import fill, tables
from layerzero.ops.paged.pages import nhd
from layerzero.ops.paged.route import cache_problems, check_queries
from layerzero.ops.paged.step import StepMetadata, step_problems, table_problems

_FLOAT32 = frozenset({torch.float32})


def merge_attention_states(output_a: Tensor, lse_a: Tensor, output_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Make attention over two parts of the keys attention over both.

    Shapes: output_a, output_b (T, H, D_v), lse_a, lse_b (H, T) → (T, H, D_v), (H, T), as ``lz.ragged_attention`` and
        ``lz.paged_attention`` with ``cu_seqlens_q`` return them; each part has keys of its own.
    Dtype: both outputs the same floating dtype, which the result has; log-sum-exps float32, natural logarithm.
    Returns: the output and its log-sum-exp. A part that saw no key (0 and -inf, as attention gives it) has no share;
        neither saw one: 0 and -inf. Other numbers than 0 may be merged there; debug mode refuses them.
    Raises: InvalidCallError for shapes, devices or dtypes that do not fit.
    Source: online softmax, arXiv:1805.02867.
    """
    compute = torch.promote_types(output_a.dtype, torch.float32)
    first, second = lse_a.to(compute), lse_b.to(compute)
    lse = torch.logaddexp(first, second)
    outputs = torch.zeros((), dtype=compute, device=output_a.device)
    for output, part in ((output_a, first), (output_b, second)):
        weight = (part - lse).exp().masked_fill(part == -torch.inf, 0.0).t().unsqueeze(-1)
        outputs = outputs + (weight * output.to(compute)).masked_fill(weight == 0, 0.0)
    return outputs.to(output_a.dtype), lse.float()


def _check_states(
    *, output_a: Tensor, lse_a: Tensor, output_b: Tensor, lse_b: Tensor, **_: object
) -> Sequence[str | Check]:
    """A part that saw no key is 0: kernels multiply it by 0, or by a half where neither saw one."""

    def text(part: str) -> Callable[[object, object], str]:
        return lambda _, __: f"output_{part}: wanted 0 wherever lse_{part} is -inf, got another number there"

    parts = (("a", output_a, lse_a), ("b", output_b, lse_b))
    return [
        Check(((lse.t() == -torch.inf) & (output != 0).any(-1)).any(), None, text(part)) for part, output, lse in parts
    ]


def _merge_work(facts: Mapping[str, Any]) -> Work:
    """Two outputs read, one written, and three numbers a head and token."""
    rows = facts["tokens"] * facts["heads"]
    return Work(3.0 * rows * facts["value_dim"], float(rows * (3 * facts["value_dim"] * facts["dtype"].itemsize + 12)))


def _case(name: str, tokens: int, heads: int, value_dim: int) -> Case:
    return Case(name, {"tokens": tokens, "heads": heads, "value_dim": value_dim})


def _merge_sweep(device: str, narrow: Mapping[str, Any]) -> list[Case]:
    heads = [each for each in extent_of(device, narrow).heads[:2] if "seq_lens" not in narrow]
    return [
        _case(f"{tokens} tokens ({each})", tokens, each.heads, each.head_dim)
        for each in heads
        for tokens in (1, 64, 2048)
    ]


MERGE_STATES = operation(
    "attention.merge_states",
    "Make attention over two parts of the keys attention over both",
    merge_attention_states,
    inputs=(
        "output_a: tokens heads value_dim",
        TensorSchema("lse_a", ("heads", "tokens"), _FLOAT32, same_dtype=False),
        "output_b: tokens heads value_dim",
        TensorSchema("lse_b", ("heads", "tokens"), _FLOAT32, same_dtype=False),
    ),
    outputs=(
        TensorSchema("output", ("tokens", "heads", "value_dim")),
        TensorSchema("lse", ("heads", "tokens"), _FLOAT32),
    ),
    axes=(
        Axis("tokens", scales=True, live=True, apart=True),
        Axis("heads", scales=True, apart=True),
        Axis("value_dim", codes=HEAD_DIM),
    ),
    cases=(_case("small", 5, 4, 64), _case("llama3_8b_b64", 64, 32, 128), _case("llama3_8b_t2048", 2048, 32, 128)),
    tolerance=TOLERANCE,
    tolerance_reason="two products and a sum in float32, one rounding",
    check_values=_check_states,
    work=_merge_work,
    sweep=_merge_sweep,
    stock=None,
)


def _merge_draw(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call of ``lz.merge_attention_states``: parts that saw no key among them, and parts that weigh nothing."""
    tokens, heads, dim = draw.of((0, 1, 2, 5, 33)), draw.of((1, 2, 3, 8)), draw.of((1, 7, 16, 32, 64, 128, 256))
    arguments: dict[str, Any] = {}
    for part in "ab":
        output = draw.normal((tokens, heads, dim), dtype)
        lse = draw.normal((heads, tokens), torch.float32) * draw.of((1.0, 20.0))
        if draw.chance(0.4):
            blind = draw.uniform((heads, tokens), torch.float32) < 0.4
            lse, output = lse.masked_fill(blind, -torch.inf), output.masked_fill(blind.t().unsqueeze(-1), 0.0)
        arguments |= {
            f"output_{part}": draw.laid_out(output, expand=False),
            f"lse_{part}": draw.laid_out(lse, expand=False),
        }
    return arguments


MERGE_ATTENTION_STATES = function(
    "merge_attention_states", MERGE_STATES, varies=("tokens",), draw=_merge_draw, weight=1
)


NAME = "attention.cascade.decode.paged"


def cascade_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    shared_blocks: int,
    scale: float | None = None,
    *,
    layout: str = "NHD",
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    max_context_len: int | None = None,
    step: StepMetadata | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend from the newest token of each sequence, where all sequences begin with the same pages.

    The result is that of ``lz.paged_attention``. Kernels that read the shared pages once for all sequences are
    candidates; so are the others, where they are faster.

    Shapes: query (B, 1, H, D); caches, block_tables and context_lens as in ``lz.paged_attention`` → (B, 1, H, D_v).
    Dtype: query and caches the same floating dtype; tables and lengths int32, on the same device.
    Args:
        shared_blocks: a promise that the first so many pages of every table are the same, and full. Found broken on a
            CPU by kernels that rely on it, and in debug mode.
        scale, layout, window, softcap, max_context_len, step: as in ``lz.paged_attention``.
        return_lse: also return the log-sum-exp of the scores, float32 (B, H, 1), natural logarithm.
    Returns: the output, or (output, lse).
    Raises: InvalidCallError for shapes, devices, dtypes or combinations that mean nothing, with wanted and got.
    Source: cascade inference of FlashInfer, arXiv:2501.01005.
    """
    key_cache, value_cache = nhd(layout, key_cache, value_cache)
    return paged.paged_attention_reference(
        query,
        key_cache,
        value_cache,
        block_tables,
        context_lens,
        scale=scale,
        window=window,
        softcap=softcap,
        return_lse=return_lse,
        max_context_len=max_context_len,
    )


def shared_problems(block_tables: Tensor, context_lens: Tensor, shared_blocks: int, page_size: int) -> list[str]:
    """What is wrong with the promise: tables that begin otherwise, sequences that end in the prefix."""
    return values.problems_on_host(_shared_checks(block_tables, context_lens, shared_blocks, page_size))


def _shared_checks(block_tables: Tensor, context_lens: Tensor, shared_blocks: int, page_size: int) -> list[Check]:
    prefix, tokens = block_tables[:, :shared_blocks], shared_blocks * page_size

    def other_pages(place: tuple[int, ...], got: tuple[int, ...]) -> str:
        wanted = f"the first {shared_blocks} pages as in row 0"
        return f"block_tables[{place[0]}]: wanted {wanted}, got {list(got)}"

    def too_short(place: tuple[int, ...], got: tuple[int, ...]) -> str:
        wanted = f"at least the {tokens} tokens of {shared_blocks} shared pages"
        return f"context_lens[{place[0]}]: wanted {wanted}, got {got[0]}"

    return [
        Check((prefix != prefix[:1]).any(1), prefix[:, :8], other_pages),
        Check(context_lens < tokens, context_lens.unsqueeze(1), too_short),
    ]


def _check_values(
    key_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    shared_blocks: int,
    step: StepMetadata | None = None,
    layout: str = "NHD",
    **_: object,
) -> list[Check]:
    """Values on the device, besides places and counts: what was promised of tables and lengths."""
    page_size = key_cache.shape[layout.index("N") + 1]
    found = paged.check_pages(key_cache, block_tables, context_lens, step)
    return found + _shared_checks(block_tables, context_lens, shared_blocks, page_size)


def _derive(arguments: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, object]:
    shared = min(values["shared_blocks"] or 0, values["max_blocks"])
    prefix = {"prefix_tokens": shared * values["page_size"]}
    return attn.group_of(arguments, values) | paged.bound_of(arguments, values) | prefix


def _work(facts: Mapping[str, Any]) -> Work:
    """Two products over all keys of each sequence; those that are shared are read once."""
    batch, keys = facts["batch"], facts["context_bound"]
    shared = min(facts["prefix_tokens"], keys)
    return attn.work_of(facts, batch * keys, batch, shared + batch * (keys - shared))


def _examples(case: Case, dtype: torch.dtype, device: torch.device, generator: Random) -> dict[str, Any]:
    """Tables whose first seven pages of eight are the same, or as many as the case promises."""
    size = case.sizes
    made = paged.table_examples(case, dtype, torch.device("cpu"), generator)
    tables, lens = made["block_tables"], made["context_lens"]
    page_size = max(size["page_size"], 1)
    full = int(lens.min()) // page_size if len(lens) else size["max_blocks"]
    promised: Any = case.params.get("shared_blocks", size["max_blocks"] * 7 // 8)
    shared = max(min(promised, full), 1)
    if len(lens):
        tables[:, :shared] = tables[:1, :shared]
    return {"block_tables": tables.to(device), "context_lens": lens.to(device), "shared_blocks": shared}


SHARED_BLOCKS = Param("shared_blocks", int, REQUIRED, Role.BOUND)
_OF_DECODE = paged.GQA_DECODE_PAGED.schema


def _sweep(device: str, narrow: Mapping[str, Sequence[int]]) -> Iterator[Case]:
    """Contexts of decoding, of which seven pages of eight are shared, for more than one sequence."""
    extent = extent_of(device, narrow)
    for heads in extent.heads[:2]:
        for batch in extent.decode_batches:
            for context in extent.contexts:
                if batch > 1 and context >= 256 and batch * context <= extent.max_context:
                    yield paged.paged_case(heads, batch, context)[1]


CASCADE = attn.operation(
    NAME,
    "Attention of one query per sequence over pages, the first of which all sequences share",
    cascade_attention,
    inputs=_OF_DECODE.inputs,
    outputs=_OF_DECODE.outputs,
    params=(*_OF_DECODE.params, SHARED_BLOCKS),
    axes=(*_OF_DECODE.axes, Axis("prefix_tokens", scales=True)),
    layouts=_OF_DECODE.layouts,
    fake=paged.GQA_DECODE_PAGED.fake,
    cases=(paged.decode_case("small", 3, 64, 8, 2, 64), paged.decode_case("llama3_8b_b64_kv9k", 64, 9216, 32, 8, 128)),
    tolerance_reason="the attention contract; parts are merged in float32, after one rounding more",
    derive=_derive,
    derived_from=attn.GROUP | paged.BOUND | {"prefix_tokens": ("max_blocks", "page_size")},
    work=_work,
    check_values=_check_values,
    guard=paged.GQA_DECODE_PAGED.guard,
    examples=_examples,
    scratch=paged.scratch,
    parts=paged.parts,
    sweep=_sweep,
)
OPERATIONS = (MERGE_STATES, CASCADE)
FLAT = (*paged.DECODE_PAGED, NAME)
"""What a kernel serves that follows each table on its own: a shared prefix is a promise that it leaves be."""


def _route(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    name = "cascade_attention"
    check_dense(name, arguments)
    tables = arguments["block_tables"], arguments["context_lens"]
    layout, shared = arguments["layout"], arguments["shared_blocks"]
    problems = table_problems(*tables) + shape_problems(arguments, ("query",), 4) + cache_problems(arguments)
    refuse(name, problems)
    check_queries(name, arguments, one_token="")
    problems, most = score_problems(arguments), tables[0].shape[1]
    if type(shared) is not int or not 1 <= shared <= most:
        problems.append(f"shared_blocks: wanted 1 to {most}, the pages of a table, got {told(shared)}")
    problems += step_problems(arguments["step"], *tables)
    canonical = without_defaults(CASCADE, arguments, arguments["query"].shape[3], newest=True)
    problems += CASCADE.schema.validate(layout=layout, **canonical)
    refuse(name, problems)
    return Routed(CASCADE, canonical, layout, varies=("batch", "pages"))


def _draw(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call of ``lz.cascade_attention``: whatever lies beyond a sequence is NaN."""
    batch, kv_heads, page_size = draw.of((1, 2, 3, 5)), draw.of((1, 2, 3)), draw.of((1, 3, 8, 16, 32))
    heads, dim = kv_heads * draw.of((1, 2, 4), (6, 2, 2)), draw.of((1, 7, 16, 32, 64, 128), (1, 1, 2, 2, 4, 3))
    blocks = draw.of((1, 2, 3, 7))
    shared = draw.stream.randint(1, blocks)
    capacity, least = blocks * page_size, shared * page_size
    lens = draw.integers((batch,), capacity - least, torch.int32) + least
    table, pages = tables(draw, lens, blocks, page_size, shared)
    shape = (pages, page_size, kv_heads, dim)
    keys, values = (torch.full(shape, float("nan"), dtype=dtype, device=draw.device) for _ in range(2))
    fill(draw, (keys, values), table, lens, dtype)
    layout = draw.of(paged.CACHE_LAYOUTS)
    caches = [cache if layout == paged.CACHE_LAYOUTS[0] else cache.transpose(1, 2) for cache in (keys, values)]
    arguments: dict[str, Any] = {
        "query": draw.laid_out(draw.normal((batch, 1, heads, dim), dtype)),
        "key_cache": caches[0],
        "value_cache": caches[1],
        "block_tables": table,
        "context_lens": lens,
        "shared_blocks": shared,
        "layout": layout,
    }
    arguments |= draw.maybe(0.15, scale=lambda: draw.of((0.25, 3.0)) * dim**-0.5)
    arguments |= draw.maybe(0.1, window=lambda: (draw.of((0, 1, 4, 40)), 0))
    arguments |= draw.maybe(0.1, softcap=lambda: draw.of((0.5, 5.0, 30.0)))
    arguments |= draw.maybe(0.2, return_lse=lambda: True)
    arguments |= draw.maybe(0.4, step=lambda: StepMetadata(table, lens, capturable=draw.chance(0.5)))
    return arguments


CASCADE_ATTENTION = Function(
    "cascade_attention", cascade_attention, _route, (CASCADE,), _draw, 1, state=frozenset({"sdpa"})
)
FUNCTIONS = (MERGE_ATTENTION_STATES, CASCADE_ATTENTION)
