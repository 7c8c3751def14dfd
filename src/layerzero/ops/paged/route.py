"""``lz.paged_attention``: its signature, the checks of a call, and the route to one of its operations."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from layerzero.core.arguments import told
from layerzero.core.dtypes import dtype_name
from layerzero.core.errors import InvalidCallError, refuse
from layerzero.core.handle import FOREIGN
from layerzero.core.operation import Function, Operation, Routed
from layerzero.core.reasons import ReasonCode
from layerzero.ops.attention.route import score_problems, slope_problems, without_defaults
from layerzero.ops.declaration import check_dense, overlaps, shape_problems, write_problems
from layerzero.ops.paged import declare, draw, layout_record, mixed, quantized, tiles, tree
from layerzero.ops.paged.mixed import OF_TOKENS
from layerzero.ops.paged.pages import CacheList
from layerzero.ops.paged.step import StepMetadata, step_problems, table_problems
from layerzero.ops.ragged.starts import shape_problems as start_problems
from layerzero.ops.ragged.starts import value_problems
from layerzero.ops.rope.route import apart

NAME = "paged_attention"


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float | None = None,
    *,
    layout: str = "NHD",
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    max_context_len: int | None = None,
    step: StepMetadata | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    decodes: int | None = None,
    causal: bool = True,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    tree_mask: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    narrow_query: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend from the newest tokens of each sequence to all its tokens in a paged cache.

    One token a sequence is a decode step. Several, by ``cu_seqlens_q``, are prefills, chunks of prefills behind a
    cached prefix, and decodes, all in one call.

    Shapes: query (B, 1, H, D), or (T, H, D) with cu_seqlens_q (B + 1,); key_cache (P, N, K, D) and value_cache
        (P, N, K, D_v) in NHD, axes 1 and 2 swapped in HND; H a multiple of K; block_tables (B, max_blocks);
        context_lens (B,) → (B, 1, H, D_v), or (T, H, D_v). With cu_seqlens_q also caches in tiles of AMX, as vLLM
        keeps them: keys (P, K, N / 16, D / 2, 16, 2), values (P, K, D / 16, N / 2, 16, 2).
    Dtype: floating; caches the queries' dtype, or another, which is converted as it is read: then it computes in one
        that holds both, float32 or wider. Or caches of float8_e4m3fn, float8_e5m2 or int8 with scales. Tables, lengths
        and starts int32, on the same device. The output has the queries' dtype.
    Args:
        block_tables: the pages of each sequence, in order; entries beyond its last page may hold anything.
        context_lens: tokens of each sequence that are in the cache, the queries' own included. 0 gives 0 and -inf (with
            sinks, the sink).
        scale: factor on the scores, 1/sqrt(D) by default.
        layout: ``"NHD"`` or ``"HND"``.
        window: (left, right) as in ``lz.attention``; of one causal query only left counts: nothing is to its right.
        softcap: ``c * tanh(score / c)`` on the scores.
        return_lse: also return the log-sum-exp of the scores, float32 (B, H, 1) or (H, T), natural logarithm.
        cu_seqlens_q: where each sequence's queries begin: 0, then the end of each; they are its newest tokens. A
            sequence may have none.
        max_seqlen_q: an upper bound of the queries of one sequence; all tokens together if None.
        decodes: a promise that the first so many sequences have one query each, so that kernels may treat them apart;
            None where there are none.
        causal: hide keys in the future, aligned at the end of each sequence; without it every query sees all keys.
        sinks: (H,), one extra logit a head; with cu_seqlens_q alone, as the next two. All three have a CPU kernel. On
            GPUs the reference computes slopes, and sinks that Triton's kernel does not take, until ``layerzero vet``
            proved vLLM's (sinks: sm 9.x, bfloat16). Over caches of float8 or int8 it computes all three there.
        alibi_slopes: (H,) or (B, H).
        tree_mask: (T, columns) bool, for drafts that branch: which of its sequence's new tokens each query sees, by
            their places there. Row i of a chain of 3 is True up to column i. Each token sees itself, its parent and
            what that one sees. Sequences with more new tokens than columns are chains. ``window`` and slopes count
            depths: a token is as far behind what was cached as it has ancestors in its row. Trees with either run
            slower kernels: on a GPU ``torch.paged_each`` with a window, and the reference with slopes or in a capture.
        max_context_len: an upper bound of context_lens that the caller knows; what the tables hold if None. Kernels
            size their work by it. A length above it is the caller's mistake: found on a CPU and in debug mode.
        step: the :class:`layerzero.StepMetadata` of these tables and lengths, so that kernels that plan on the host
            do so once for all layers.
        key_scale, value_scale: of a cache of float8 or int8, what its numbers are multiples of, in float32. Shapes are
            (), (K,) or (P, N, K), whatever the layout. The last may be float16, too.
        narrow_query: over a cache of float8, whether kernels may round queries and probabilities to it as well, by 6 %
            of each at most. FlashAttention 3 does, and multiplies at twice the rate then.
    Returns: the output, or (output, lse).
    Raises: InvalidCallError for shapes, devices, dtypes or combinations that mean nothing, with wanted and got; in
        debug mode and on a CPU for pages, lengths and starts out of range and a tree mask that is none, too.
        NoKernelFoundError if policy leaves no
        kernel.
    Source: PagedAttention, arXiv:2309.06180.
    """
    raise AssertionError("the signature only; the engine makes the callable")


CACHES = ("key_cache", "value_cache")


def cache_problems(arguments: dict[str, Any]) -> list[str]:
    """What is wrong with both caches as tensors, and with their layout."""
    layout = arguments["layout"]
    problems = shape_problems(arguments, CACHES, 4)
    if not isinstance(layout, str) or layout not in declare.CACHE_LAYOUTS:
        problems.append(f"layout: wanted {' or '.join(declare.CACHE_LAYOUTS)}, got {told(layout)}")
    return problems


def check_written(function: str, arguments: dict[str, Any]) -> None:
    """Refuse caches whose memory is written in another layout. Raises: InvalidCallError."""
    layout_record.check(function, {name: arguments[name] for name in CACHES}, arguments["layout"])


def memory_problems(arguments: dict[str, Any], read: tuple[str, ...]) -> list[str]:
    """What forbids writing into the caches."""
    problems = write_problems(arguments, CACHES, read)
    keys, values = (arguments[name] for name in CACHES)
    if keys is values or (not keys.is_meta and overlaps(keys, values) and not apart(keys, values)):
        problems.append("value_cache: wanted elements of its own, got memory that it shares with key_cache")
    return problems


def check_queries(function: str, arguments: dict[str, Any], one_token: str | None = None) -> None:
    """Refuse queries that do not fit their cache: other than one token a sequence, heads that mean nothing.

    ``one_token`` says without what each sequence has one; None where it may have several. Raises: InvalidCallError.
    """
    query, key_cache, layout = arguments["query"], arguments["key_cache"], arguments["layout"]
    if one_token is not None and query.shape[1] != 1:
        wanted = f"wanted one token a sequence (B, 1, H, D){one_token}"
        raise InvalidCallError(function, [f"query: {wanted}, got {tuple(query.shape)}"])
    check_written(function, arguments)
    _check_heads(function, query, key_cache, layout)


def _check_heads(function: str, query: Tensor, key_cache: Tensor, layout: str) -> None:
    heads, kv_heads = query.shape[-2], key_cache.shape[1 + layout.index("H")]
    if not heads or not kv_heads or not query.shape[-1] or not key_cache.shape[1 + layout.index("N")]:
        shapes = f"query {tuple(query.shape)} and key_cache {tuple(key_cache.shape)} in {layout}"
        raise InvalidCallError(function, [f"wanted heads, head dim and page size above 0, got {shapes}"])
    if heads % kv_heads:
        problem = (
            f"query heads must be a multiple of kv heads: got {heads} query heads and {kv_heads} kv heads in {layout} "
            f"(key_cache {tuple(key_cache.shape)}); pass layout= if the axes are the other way round"
        )
        raise InvalidCallError(function, [problem], ReasonCode.GQA_HEADS_MISMATCH)


def _problems_of_one(arguments: dict[str, Any]) -> list[str]:
    """Arguments that mean nothing without ``cu_seqlens_q``."""
    problems = [
        f"{name}: wanted None without cu_seqlens_q, got {told(arguments[name])}"
        for name in ("max_seqlen_q", "decodes")
        if arguments[name] is not None
    ]
    problems += [
        f"{name}: wanted cu_seqlens_q with it (0 to B for one token each), got None"
        for name in OF_TOKENS
        if arguments[name] is not None
    ]
    if not isinstance(arguments["causal"], bool):
        problems.append(f"causal: wanted bool, got {told(arguments['causal'])}")
    return problems


def _of_codes_alone(arguments: dict[str, Any]) -> list[str]:
    """What was given as for a cache of codes, with one of floating numbers."""
    dtype = arguments["key_cache"].dtype
    if dtype in quantized.QUANTIZED or not dtype.is_floating_point:
        return []
    return [
        f"{name}: wanted {none} over a cache of {dtype_name(dtype)}, whose numbers have no scales, got {told(given)}"
        for name, none in (("key_scale", None), ("value_scale", None), ("narrow_query", False))
        if (given := arguments[name]) is not none
    ]


def _bias_problems(arguments: dict[str, Any]) -> list[str]:
    """What is wrong with slopes and with a tree mask, whose shapes the schema leaves open.

    Whether the mask is that of a tree, each call is looked at for, this one too.
    """
    tokens, heads = arguments["query"].shape[:2]
    problems = tree.shape_problems(arguments["tree_mask"], tokens, causal=arguments["causal"])
    return problems + slope_problems(arguments["alibi_slopes"], heads, len(arguments["context_lens"]))


def _problems_of_several(arguments: dict[str, Any]) -> list[str]:
    """What is wrong with starts, the step and promises of several tokens a sequence."""
    starts, step = arguments["cu_seqlens_q"], arguments["step"]
    problems = []
    decodes, longest = arguments["decodes"], arguments["max_seqlen_q"]
    if starts.is_cpu and type(starts) is Tensor:
        longest = longest if type(longest) is int else None
        problems = value_problems("cu_seqlens_q", starts, len(arguments["query"]), longest)
        problems += mixed.decodes_problems(starts, decodes) if type(decodes) is int else []
    if type(decodes) is int and decodes > len(starts) - 1:
        problems.append(f"decodes: wanted at most {len(starts) - 1}, as many as there are sequences, got {decodes}")
    problems += step_problems(step, arguments["block_tables"], arguments["context_lens"])
    if isinstance(step, StepMetadata) and not problems and step.cu_seqlens_q is not starts:
        got = "that of one token a sequence" if step.cu_seqlens_q is None else "that of others"
        problems.append(f"step: wanted the StepMetadata of this cu_seqlens_q, got {got}")
    return problems


def _operation(arguments: dict[str, Any], *, coded: bool) -> Operation:
    """By what the cache holds, by how many tokens a sequence has, by head counts, and by whether decodes are given."""
    one = arguments["cu_seqlens_q"] is None
    if coded:
        return quantized.DECODE if one else quantized.PREFILL
    if quantized.converts(arguments):
        return quantized.CONVERTED_DECODE if one else quantized.CONVERTED_PREFILL
    equal = arguments["query"].shape[-2] == arguments["key_cache"].shape[1 + arguments["layout"].index("H")]
    if one:
        return declare.STANDARD_DECODE_PAGED if equal else declare.GQA_DECODE_PAGED
    if arguments["decodes"] is None:
        return mixed.STANDARD_PREFILL_PAGED if equal else mixed.GQA_PREFILL_PAGED
    return mixed.STANDARD_MIXED_PAGED if equal else mixed.GQA_MIXED_PAGED


def _varies(arguments: dict[str, Any], *, coded: bool) -> tuple[str, ...]:
    """Axes whose size may differ without another route."""
    own = {"pages"} if coded else set[str]()  # rows of these belong to pages, to sequences, or to tokens
    if arguments["cu_seqlens_q"] is None:
        return tuple(each for each in ("batch", "max_blocks", "pages") if each not in own)
    slopes = arguments["alibi_slopes"]
    own |= {"batch", "starts"} if slopes is not None and slopes.ndim == 2 else set()
    own |= {"tokens"} if arguments["tree_mask"] is not None else set()
    return tuple(each for each in ("tokens", "batch", "starts", "max_blocks", "pages") if each not in own)


def _query_problems(arguments: dict[str, Any]) -> list[str]:
    """Queries of another rank than starts want, and starts that do not fit them and the tables."""
    query, starts = arguments["query"], arguments["cu_seqlens_q"]
    problems = table_problems(arguments["block_tables"], arguments["context_lens"])
    found = shape_problems(arguments, ("query",), 4 if starts is None else 3)
    if found and isinstance(query, Tensor) and query.ndim in (3, 4):
        several = "queries of (B, H, D), one a sequence, go as query[:, None], those of (T, H, D) with cu_seqlens_q="
        hint = several if starts is None else "with cu_seqlens_q, given or of the step, queries are (T, H, D)"
        found = [f"{found[0]}; {hint}"]
    problems += found
    if not problems and starts is not None:
        problems += start_problems("cu_seqlens_q", starts, len(arguments["context_lens"]) + 1, len(query))
    return problems


def _route_tiles(arguments: dict[str, Any]) -> Routed:
    """Over a cache in tiles: queries by their starts, and what its one operation knows."""
    query, operation = arguments["query"], tiles.ATTENTION
    problems = _of_codes_alone(arguments)
    if arguments["tree_mask"] is not None:
        problems.append("tree_mask: wanted None over a cache in tiles, got a tensor; take one in NHD or HND")
    if arguments["cu_seqlens_q"] is None:
        problems.append("cu_seqlens_q: wanted starts over a cache in tiles (0 to B for one token each), got None")
    refuse(NAME, problems or _query_problems(arguments))
    refuse(NAME, tiles.tile_problems(arguments, query.shape[-1]))
    layout_record.check(NAME, {name: arguments[name] for name in CACHES}, tiles.NAME)
    _check_heads(NAME, query, arguments["key_cache"], "HND")
    problems = score_problems(arguments) + _problems_of_several(arguments) + _bias_problems(arguments)
    canonical = without_defaults(operation, arguments, query.shape[-1])
    refuse(NAME, problems + operation.schema.validate(**canonical))
    return Routed(operation, canonical, None, varies=_varies(arguments, coded=False))


def _route(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    check_dense(NAME, arguments)
    if tiles.is_tiled(arguments["key_cache"]):
        return _route_tiles(arguments)
    layout, one = arguments["layout"], arguments["cu_seqlens_q"] is None
    coded = quantized.has_codes(arguments) or arguments["narrow_query"] is not False
    problems = _problems_of_one(arguments) if one else []
    problems += _query_problems(arguments) + cache_problems(arguments)
    if coded:
        problems = problems or _of_codes_alone(arguments) or quantized.scale_problems(arguments, layout)
    elif not problems and quantized.converts(arguments):
        problems = quantized.dtype_problems(arguments)
    refuse(NAME, problems)
    check_queries(NAME, arguments, " without cu_seqlens_q" if one else None)
    problems = score_problems(arguments)
    if one:
        problems += step_problems(arguments["step"], arguments["block_tables"], arguments["context_lens"])
    else:
        problems += _problems_of_several(arguments) + _bias_problems(arguments)
    operation = _operation(arguments, coded=coded)
    canonical = without_defaults(operation, arguments, arguments["query"].shape[-1], newest=one)
    problems += operation.schema.validate(layout=layout, **canonical)
    refuse(NAME, problems)
    return Routed(operation, canonical, layout, varies=_varies(arguments, coded=coded))


def list_problems(arguments: dict[str, Any]) -> list[str]:
    """What is wrong with a list of caches, and not with the tensors that stand for it."""
    given = arguments["cache_list"]
    if given is None:
        return []
    if not isinstance(given, CacheList):
        return [f"cache_list: wanted a CacheList or None, got {type(given).__name__}"]
    if given.kind_for(*(arguments[name] for name in CACHES)) == FOREIGN or given.layout != arguments["layout"]:
        return ["cache_list: wanted the list that key_cache stands for, got another; pass it as key_cache alone"]
    return []


def _route_batched(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    name, operation, layout = "batched_attention", declare.GQA_DECODE_BATCHED, arguments["layout"]
    check_dense(name, arguments)
    problems = shape_problems(arguments, ("query",), 4) + cache_problems(arguments)
    if any(isinstance(arguments[each], (list, tuple)) for each in CACHES):
        problems.append("key_cache: a list goes as lz.CacheList(keys, values), which stands for both")
    refuse(name, problems or list_problems(arguments))
    check_queries(name, arguments, "")
    problems = score_problems(arguments) + quantized.dtype_problems(arguments)
    canonical = without_defaults(operation, arguments, arguments["query"].shape[-1], newest=True)
    refuse(name, problems + operation.schema.validate(layout=layout, **canonical))
    return Routed(operation, canonical, layout, varies=("batch", "length"))


BATCHED_ATTENTION = Function(
    name="batched_attention",
    signature=declare.batched_attention,
    route=_route_batched,
    operations=(declare.GQA_DECODE_BATCHED,),
    draw=draw.batched_attention,
    state=frozenset({"sdpa"}),
)
PAGED_ATTENTION = Function(
    name=NAME,
    signature=paged_attention,
    route=_route,
    operations=(
        declare.STANDARD_DECODE_PAGED,
        declare.GQA_DECODE_PAGED,
        *mixed.OPERATIONS,
        *quantized.OPERATIONS,
        tiles.ATTENTION,
    ),
    draw=draw.paged_attention,
    weight=4,
    state=frozenset({"sdpa"}),
)
FUNCTIONS = (PAGED_ATTENTION, BATCHED_ATTENTION)
