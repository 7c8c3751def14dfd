"""Block-sparse attention whose blocks differ in size: a mask of blocks and their sizes, for each key head its own.

attention.sparse.variable   one sequence
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from layerzero.core.arguments import Axis, TensorSchema
from layerzero.core.errors import refuse
from layerzero.core.operation import Case, Function, Random, Routed, Work
from layerzero.core.values import Check
from layerzero.ops.attention import declare as attn
from layerzero.ops.attention.reference import attention_reference
from layerzero.ops.attention.route import check_heads, score_problems, without_defaults
from layerzero.ops.declaration import check_dense, shape_problems
from layerzero.ops.draw import Draw
from layerzero.ops.ragged.declare import INT32
from layerzero.ops.ragged.starts import spread

NAME = "attention.sparse.variable"
FUNCTION_NAME = "variable_sparse_attention"


def variable_mask(seen_blocks: Tensor, row_sizes: Tensor, col_sizes: Tensor, tokens: int, kv_tokens: int) -> Tensor:
    """Whether each query sees each key, by key head: (K, M, N) of bool; nothing is read on the host."""
    mask = seen_blocks
    for axis, sizes, count in ((1, row_sizes, tokens), (2, col_sizes, kv_tokens)):
        ends = sizes.cumsum(1, dtype=torch.int32)
        numbers = torch.arange(count, device=sizes.device, dtype=torch.int32).expand(len(sizes), count).contiguous()
        owner = torch.searchsorted(ends, numbers, right=True).clamp(max=max(sizes.shape[1] - 1, 0))
        index = owner.unsqueeze(3 - axis)
        shape = list(mask.shape)
        shape[axis] = count
        mask = mask.gather(axis, index.expand(shape))
    return mask


def variable_sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen_blocks: Tensor,
    row_sizes: Tensor,
    col_sizes: Tensor,
    scale: float | None = None,
    *,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend from blocks of queries to some blocks of keys, where blocks differ in size and key heads in their blocks.

    Shapes: query (M, H, D), key (N, K, D), value (N, K, D_v), H a multiple of K; seen_blocks (K, R, C), row_sizes
        (K, R), col_sizes (K, C) → (M, H, D_v).
    Dtype: query, key and value the same floating dtype; seen_blocks bool, sizes int32, all on the same device.
    Args:
        seen_blocks: whether a row of blocks sees a column of them, for the query heads of each key head.
        row_sizes, col_sizes: queries and keys of each block, in tokens; they sum up to M and N.
        scale: factor on the scores, 1/sqrt(D) by default.
        return_lse: also return the log-sum-exp of the scores, float32 (H, M), natural logarithm.
    Returns: the output, or (output, lse). A query that sees no key gives 0 and -inf.
    Raises: InvalidCallError for shapes, devices, dtypes or combinations that mean nothing, with wanted and got; on a
        CPU and in debug mode for sizes that do not sum up to the tokens.
    Source: VariableBlockSparseAttentionWrapper of FlashInfer, arXiv:2501.01005.
    """
    mask = variable_mask(seen_blocks, row_sizes, col_sizes, len(query), len(key))
    mask = mask.repeat_interleave(query.shape[1] // key.shape[1], 0).unsqueeze(0)
    dense = (each.unsqueeze(0) for each in (query, key, value))
    result = attention_reference(*dense, attn_mask=mask, scale=scale, return_lse=return_lse)
    return (result[0][0], result[1][0]) if isinstance(result, tuple) else result[0]


def size_problems(query: Tensor, key: Tensor, row_sizes: Tensor, col_sizes: Tensor) -> list[str]:
    """What is wrong with the sizes: below 0, or other sums than there are tokens; reads them on the host."""
    problems = []
    for name, sizes, count in (("row_sizes", row_sizes, len(query)), ("col_sizes", col_sizes, len(key))):
        for head, row in enumerate(sizes.tolist()):
            if min(row, default=0) < 0 or sum(row) != count:
                problems.append(f"{name}[{head}]: wanted sizes of at least 0 that sum up to {count}, got {row[:8]}")
    return problems


def _check_values(query: Tensor, key: Tensor, row_sizes: Tensor, col_sizes: Tensor, **_: object) -> list[Check]:
    return [*_checks("row_sizes", row_sizes, len(query)), *_checks("col_sizes", col_sizes, len(key))]


def _checks(name: str, sizes: Tensor, count: int) -> list[Check]:
    def say(place: tuple[int, ...], got: tuple[int, ...]) -> str:
        return f"{name}[{place[0]}]: wanted sizes of at least 0 that sum up to {count}, got {list(got)}"

    return [Check((sizes < 0).any(1) | (sizes.sum(1) != count), sizes[:, :8], say)]


def _guard(function: str, _: str | None) -> Callable[..., None]:
    def look(query: Tensor, key: Tensor, row_sizes: Tensor, col_sizes: Tensor, **__: Tensor) -> None:
        refuse(function, size_problems(query, key, row_sizes, col_sizes) if row_sizes.is_cpu else [])

    return look


def _examples(case: Case, _: torch.dtype, device: torch.device, generator: Random) -> dict[str, Any]:
    """Blocks of unlike sizes, a quarter of which each row sees, the first always among them."""
    size = case.sizes
    heads, rows, columns = size["kv_heads"], size["row_blocks"], size["col_blocks"]
    where = torch.device("cpu") if generator is None else generator.device
    seen = torch.rand((heads, rows, columns), generator=generator, device=where).cpu() < 0.25
    seen[..., :1] = True
    made = {"seen_blocks": seen.to(device)}
    for name, tokens, count in (("row_sizes", size["tokens"], rows), ("col_sizes", size["kv_tokens"], columns)):
        made[name] = spread(tokens, count).diff().expand(heads, count).contiguous().to(device)
    return made


def _work(facts: Mapping[str, Any]) -> Work:
    """Two products over all pairs, since how many are seen lies on the device; every tensor once."""
    return attn.work_of(facts, facts["tokens"] * facts["kv_tokens"], facts["tokens"], facts["kv_tokens"])


def _case(name: str, tokens: int, blocks: int, heads: tuple[int, int, int]) -> Case:
    sizes = {"tokens": tokens, "kv_tokens": tokens, "row_blocks": blocks, "col_blocks": blocks}
    sizes |= {"heads": heads[0], "kv_heads": heads[1], "head_dim": heads[2], "value_dim": heads[2]}
    return Case(name, sizes)


VARIABLE_SPARSE = attn.operation(
    NAME,
    "Attention of blocks of queries to some blocks of keys, blocks of any sizes",
    variable_sparse_attention,
    inputs=(
        *attn.PACKED,
        TensorSchema(
            "seen_blocks", ("kv_heads", "row_blocks", "col_blocks"), frozenset({torch.bool}), same_dtype=False
        ),
        TensorSchema("row_sizes", ("kv_heads", "row_blocks"), INT32, same_dtype=False, counts=("tokens",)),
        TensorSchema("col_sizes", ("kv_heads", "col_blocks"), INT32, same_dtype=False, counts=("kv_tokens",)),
    ),
    outputs=attn.results("tokens"),
    params=(attn.SCALE, attn.RETURN_LSE),
    axes=(
        Axis("tokens", scales=True, live=True, codes=attn.LENGTH),
        Axis("kv_tokens", scales=True, live=True, codes=attn.LENGTH),
        Axis("row_blocks", scales=True, live=True),
        Axis("col_blocks", scales=True, live=True),
        Axis("kv_heads", scales=True, beside=True),
        Axis("heads", scales=True, beside=True),
        Axis("group", implied=True),
        *attn.HEAD_DIMS,
    ),
    cases=(_case("small", 64, 5, (4, 2, 64)), _case("video_t8192", 8192, 64, (24, 24, 128))),
    aliases={each: fact for each, fact in attn.ALIASES.items() if fact in ("heads", "kv_heads")},
    derive=attn.group_of,
    derived_from=attn.GROUP,
    work=_work,
    check_values=_check_values,
    guard=_guard,
    examples=_examples,
    scratch=lambda sizes: sizes["heads"] * sizes["kv_tokens"] * max(sizes["tokens"], sizes["head_dim"]),
)


def _route(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    check_dense(FUNCTION_NAME, arguments)
    problems = shape_problems(arguments, ("query", "key", "value", "seen_blocks"), 3)
    problems += shape_problems(arguments, ("row_sizes", "col_sizes"), 2)
    refuse(FUNCTION_NAME, problems)
    query, key = arguments["query"], arguments["key"]
    check_heads(FUNCTION_NAME, query.shape, key.shape)
    problems = score_problems(arguments)
    canonical = without_defaults(VARIABLE_SPARSE, arguments, query.shape[2])
    problems += VARIABLE_SPARSE.schema.validate(**canonical)
    sizes = arguments["row_sizes"]
    if not problems and sizes.is_cpu and type(sizes) is Tensor:
        problems += size_problems(query, key, sizes, arguments["col_sizes"])
    refuse(FUNCTION_NAME, problems)
    return Routed(VARIABLE_SPARSE, canonical, varies=("tokens", "kv_tokens", "row_blocks", "col_blocks"))


def _draw(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call of ``lz.variable_sparse_attention``: blocks without a token, rows that see nothing."""
    kv_heads, rows, columns = draw.of((1, 2, 3)), draw.of((1, 2, 5)), draw.of((1, 3, 6))
    heads, dim = kv_heads * draw.of((1, 2, 4), (6, 2, 2)), draw.of((7, 16, 32, 64, 128), (1, 2, 2, 4, 3))
    tokens, kv_tokens = draw.of((1, 5, 33, 64)), draw.of((1, 7, 40, 96))
    sizes = []
    for count, total in ((rows, tokens), (columns, kv_tokens)):
        cuts = [sorted(draw.stream.randint(0, total) for _ in range(count - 1)) for _ in range(kv_heads)]
        lengths = [[b - a for a, b in zip([0, *each], [*each, total], strict=True)] for each in cuts]
        sizes.append(torch.tensor(lengths, dtype=torch.int32, device=draw.device))
    arguments: dict[str, Any] = {
        "query": draw.laid_out(draw.normal((tokens, heads, dim), dtype)),
        "key": draw.laid_out(draw.normal((kv_tokens, kv_heads, dim), dtype)),
        "value": draw.laid_out(draw.normal((kv_tokens, kv_heads, dim), dtype)),
        "seen_blocks": draw.uniform((kv_heads, rows, columns), torch.float32) < draw.of((0.3, 0.8)),
        "row_sizes": sizes[0],
        "col_sizes": sizes[1],
    }
    arguments |= draw.maybe(0.15, scale=lambda: draw.of((0.25, 3.0)) * dim**-0.5)
    arguments |= draw.maybe(0.2, return_lse=lambda: True)
    return arguments


VARIABLE_SPARSE_ATTENTION = Function(
    FUNCTION_NAME, variable_sparse_attention, _route, (VARIABLE_SPARSE,), _draw, 1, state=frozenset({"sdpa"})
)
