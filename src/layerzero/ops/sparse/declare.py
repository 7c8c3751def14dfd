"""Block-sparse attention: queries and keys in blocks of fixed sizes, each block of queries sees some blocks of keys.

    attention.sparse.block   one sequence; the pattern is compressed sparse rows of blocks (BSR)

Within a block every query sees every key. A window with the first blocks always visible is such a pattern, and so are
the pages that a selection leaves of a long context.

``block_indptr`` (R + 1,) says where each row's blocks begin in ``block_indices`` (Z,), which names columns of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from layerzero.core import values
from layerzero.core.arguments import REQUIRED, Axis, Param, Role, TensorSchema, told
from layerzero.core.errors import refuse
from layerzero.core.handle import Handle
from layerzero.core.operation import Case, Function, Random, Routed, Work
from layerzero.core.values import Check
from layerzero.ops.attention import declare as attn
from layerzero.ops.attention.reference import attention_reference
from layerzero.ops.attention.route import check_heads, score_problems, without_defaults
from layerzero.ops.attention.sweep import extent_of
from layerzero.ops.declaration import check_dense, number_problems, shape_problems
from layerzero.ops.draw import Draw
from layerzero.ops.ragged.declare import INT32, starts_of
from layerzero.ops.ragged.starts import checks as start_checks
from layerzero.ops.ragged.starts import sequences_of, spread
from layerzero.ops.ragged.starts import shape_problems as start_problems


def owners(block_indptr: Tensor, block_indices: Tensor) -> Tensor:
    """The row of each block, (Z,) int64; nothing is read on the host."""
    numbers = torch.arange(len(block_indices), device=block_indptr.device, dtype=torch.int32)
    return sequences_of(block_indptr, numbers)


def in_blocks(tensor: Tensor, size: int) -> Tensor:
    """Tokens in blocks of a size: (N, ...) as (N / size, size, ...), without a copy."""
    return torch.unflatten(tensor, 0, (len(tensor) // size, size))


def block_mask(block_indptr: Tensor, block_indices: Tensor, columns: int) -> Tensor:
    """Whether each row sees each column of blocks: (R, columns) of bool."""
    mask = torch.zeros((len(block_indptr) - 1, columns), dtype=torch.bool, device=block_indptr.device)
    mask[owners(block_indptr, block_indices), block_indices.long()] = True
    return mask


def block_table(block_indptr: Tensor, block_indices: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """The same as a table of pages, (R, columns) int32, and how many of them each row has, (R,) int32."""
    rows, counts = len(block_indptr) - 1, block_indptr[1:] - block_indptr[:-1]
    table = torch.zeros((rows, max(columns, 1)), dtype=torch.int32, device=block_indptr.device)
    owner = owners(block_indptr, block_indices)
    place = torch.arange(len(block_indices), device=block_indptr.device) - block_indptr[owner]
    table[owner, place.long()] = block_indices
    return table, counts


def pattern_problems(block_indptr: object, block_indices: object) -> list[str]:
    """What is wrong with them as tensors; their values are not read."""
    return start_problems("block_indptr", block_indptr) + number_problems("block_indices", block_indices, 1, "(Z,)")


def entry_problems(block_indptr: Tensor, block_indices: Tensor, columns: int | None) -> list[str]:
    """What is wrong with the values: rows that do not follow each other, blocks beyond the keys or named twice."""
    return values.problems_on_host(checks(block_indptr, block_indices, columns))


def checks(block_indptr: Tensor, block_indices: Tensor, columns: int | None) -> list[Check]:
    """The same where they lie; nothing is read on the host."""
    beyond = block_indices < 0 if columns is None else (block_indices < 0) | (block_indices >= columns)
    bounds = "" if columns is None else f" from 0 to {columns - 1}"

    def outside(place: tuple[int, ...], got: tuple[int, ...]) -> str:
        return f"block_indices[{place[0]}]: wanted a column of blocks{bounds}, got {got[0]}"

    def again(_: tuple[int, ...], got: tuple[int, ...]) -> str:
        return f"block_indices: wanted each column once in a row, got {got[0]} named again"

    named = (owners(block_indptr, block_indices) * 2**32 + block_indices).sort().values
    twice = (named[1:] == named[:-1]).sum().unsqueeze(0)
    return [
        *start_checks("block_indptr", block_indptr, len(block_indices), of="blocks"),
        Check(beyond, block_indices.unsqueeze(1), outside),
        Check(twice[0] > 0, twice, again, alone=True),
    ]


def guard(function: str, _: str | None) -> Callable[..., None]:
    """What every call is looked at for: rows and columns of blocks that exist, as far as a CPU can tell."""

    def look(block_indptr: Tensor, block_indices: Tensor, **__: Tensor) -> None:
        if block_indptr.is_cpu:
            refuse(function, entry_problems(block_indptr, block_indices, None))

    return look


class BlockPattern(Handle):
    """A pattern that many calls share, and one slot for each kernel that plans on it.

        pattern = lz.BlockPattern(block_indptr, block_indices)
        for layer in layers:
            output = lz.sparse_attention(q, k, v, block_indptr, block_indices, 64, 64, block_pattern=pattern)

    Args:
        block_indptr: (R + 1,) int32, where each row's blocks begin.
        block_indices: (Z,) int32, the columns of blocks that rows see.
    Raises: InvalidCallError for tensors that are no pattern.
    """

    def __init__(self, block_indptr: Tensor, block_indices: Tensor) -> None:
        refuse("BlockPattern", pattern_problems(block_indptr, block_indices))
        super().__init__((block_indptr, block_indices), "eager")

    def __repr__(self) -> str:
        rows, blocks = (len(each) for each in self._tensors)
        return f"BlockPattern({max(rows - 1, 0)} rows, {blocks} blocks)"

    @cached_property
    def host(self) -> tuple[Tensor, Tensor]:
        """Both on the CPU: one copy, which waits for the device."""
        block_indptr, block_indices = (each.cpu() for each in self._tensors)
        return block_indptr, block_indices

    def advance(self) -> None:
        """Tell that the values changed; every slot reads them again, outside of any capture."""
        self.refresh()


NAME = "attention.sparse.block"


def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_indptr: Tensor,
    block_indices: Tensor,
    block_rows: int,
    block_cols: int,
    scale: float | None = None,
    *,
    return_lse: bool = False,
    block_pattern: BlockPattern | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend from blocks of queries to some blocks of keys, all of a block or nothing of it.

    Shapes: query (M, H, D), key (N, K, D), value (N, K, D_v), H a multiple of K, M a multiple of ``block_rows`` and N
        of ``block_cols``; block_indptr (M / block_rows + 1,), block_indices (Z,) → (M, H, D_v).
    Dtype: query, key and value the same floating dtype; the pattern int32, on the same device.
    Args:
        block_indptr: where each row's blocks begin: 0, then the end of each row. Rows may be empty.
        block_indices: the columns of blocks that rows see, each once in a row, in any order.
        block_rows, block_cols: queries and keys of a block.
        scale: factor on the scores, 1/sqrt(D) by default.
        return_lse: also return the log-sum-exp of the scores, float32 (H, M), natural logarithm.
        block_pattern: the :class:`layerzero.BlockPattern` of these two, so that kernels which plan do so once.
    Returns: the output, or (output, lse). A query that sees no key gives 0 and -inf.
    Raises: InvalidCallError for shapes, devices, dtypes or combinations that mean nothing, with wanted and got; on a
        CPU and in debug mode for a pattern that leads beyond the keys, decreases, or names a block twice.
    Source: BlockSparseAttentionWrapper of FlashInfer, arXiv:2501.01005.
    """
    mask = block_mask(block_indptr, block_indices, len(key) // block_cols)
    mask = mask.repeat_interleave(block_rows, 0).repeat_interleave(block_cols, 1)
    dense = (each.unsqueeze(0) for each in (query, key, value))
    result = attention_reference(*dense, attn_mask=mask, scale=scale, return_lse=return_lse)
    return (result[0][0], result[1][0]) if isinstance(result, tuple) else result[0]


def _check_values(
    key: Tensor, block_indptr: Tensor, block_indices: Tensor, block_cols: int, **_: object
) -> list[Check]:
    """Values on the device: rows that follow each other, columns of blocks that exist, each once in a row."""
    return checks(block_indptr, block_indices, len(key) // block_cols)


def _work(facts: Mapping[str, Any]) -> Work:
    """Two products over the blocks that are seen; every tensor once."""
    pairs = facts["nonzero_blocks"] * facts["block_rows"] * facts["block_cols"]
    return attn.work_of(facts, pairs, facts["tokens"], facts["kv_tokens"])


def make_pattern(
    rows: int, columns: int, nonzero: int, device: torch.device | str, generator: torch.Generator | None
) -> dict[str, Tensor]:
    """A random pattern with so many blocks, about as many in each row; as far as they have room."""
    rows = max(rows, 0)
    starts = spread(min(nonzero, rows * columns), rows, columns)
    where = torch.device("cpu") if generator is None else generator.device
    order = torch.rand((rows, columns), generator=generator, device=where).cpu().argsort(1)
    taken = [order[row, : int(starts[row + 1] - starts[row])].sort().values for row in range(rows)]
    indices = torch.cat(taken) if taken else order.flatten()
    return {"block_indptr": starts.to(device), "block_indices": indices.to(device, torch.int32)}


def _examples(case: Case, _: torch.dtype, device: torch.device, generator: Random) -> dict[str, Any]:
    size, blocks = case.sizes, {name: int(str(case.params[name])) for name in ("block_rows", "block_cols")}
    rows, columns = size["block_starts"] - 1, size["kv_tokens"] // blocks["block_cols"]
    return make_pattern(rows, columns, size["nonzero_blocks"], device, generator)


def _case(
    name: str, tokens: int, kv_tokens: int, blocks: tuple[int, int], nonzero: int, heads: tuple[int, int, int]
) -> Case:
    sizes = {"tokens": tokens, "kv_tokens": kv_tokens, "block_starts": tokens // blocks[0] + 1}
    sizes |= {"nonzero_blocks": nonzero, "heads": heads[0], "kv_heads": heads[1]}
    sizes |= {"head_dim": heads[2], "value_dim": heads[2]}
    return Case(name, sizes, {"block_rows": blocks[0], "block_cols": blocks[1]})


def _sweep(device: str, narrow: Mapping[str, Sequence[int]]) -> Iterator[Case]:
    """Prefills of one sequence whose blocks see a quarter of the keys."""
    extent, block = extent_of(device, narrow), 64 if device == "cuda" else 32
    for heads in extent.heads[:2]:
        for length in extent.lengths:
            tokens = length // block * block
            if tokens and length <= 16384:
                count = max(tokens // block * (tokens // block) // 4, 1)
                shape = (heads.heads, heads.kv_heads, heads.head_dim)
                yield _case(f"S{tokens} blocks of {block} ({heads})", tokens, tokens, (block, block), count, shape)


def _block(name: str) -> Param:
    return Param(name, int, REQUIRED, example=16)


BLOCK_SPARSE = attn.operation(
    NAME,
    "Attention of blocks of queries to some blocks of keys",
    sparse_attention,
    inputs=(
        *attn.PACKED,
        TensorSchema("block_indptr", ("block_starts",), INT32, same_dtype=False, counts=("nonzero_blocks",)),
        TensorSchema("block_indices", ("nonzero_blocks",), INT32, same_dtype=False, indexes=("kv_tokens",)),
    ),
    outputs=attn.results("tokens"),
    params=(
        _block("block_rows"),
        _block("block_cols"),
        attn.SCALE,
        attn.RETURN_LSE,
        Param(
            "block_pattern",
            BlockPattern,
            None,
            Role.HANDLE,
            made_of=("block_indptr", "block_indices"),
            make=lambda given, _: BlockPattern(given["block_indptr"], given["block_indices"]),
        ),
    ),
    axes=(
        Axis("tokens", scales=True, live=True, codes=attn.LENGTH),
        Axis("kv_tokens", scales=True, live=True, codes=attn.LENGTH),
        Axis("block_starts", live=True, implied=True),
        Axis("nonzero_blocks", scales=True, live=True),
        *attn.HEADS,
        *attn.HEAD_DIMS,
    ),
    cases=(
        _case("small", 64, 96, (16, 16), 9, (4, 2, 64)),
        _case("llama3_8b_t8192_quarter", 8192, 8192, (64, 64), 4096, (32, 8, 128)),
    ),
    aliases={each: fact for each, fact in attn.ALIASES.items() if fact in ("heads", "kv_heads")},
    derive=attn.group_of,
    derived_from=attn.GROUP,
    work=_work,
    check_values=_check_values,
    guard=guard,
    examples=_examples,
    scratch=lambda sizes: sizes["heads"] * sizes["kv_tokens"] * max(sizes["tokens"], sizes["head_dim"]),
    sweep=_sweep,
)
OPERATIONS = (BLOCK_SPARSE,)


def _route(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    name, sizes = "sparse_attention", (arguments["block_rows"], arguments["block_cols"])
    check_dense(name, arguments)
    indptr, indices, pattern = (arguments[each] for each in ("block_indptr", "block_indices", "block_pattern"))
    problems = shape_problems(arguments, ("query", "key", "value"), 3) + pattern_problems(indptr, indices)
    problems += [
        f"{each}: wanted a number of at least 1, got {told(size)}"
        for each, size in zip(("block_rows", "block_cols"), sizes, strict=True)
        if type(size) is not int or not 1 <= size < 2**31
    ]
    refuse(name, problems)
    query, key = arguments["query"], arguments["key"]
    check_heads(name, query.shape, key.shape)
    rows = len(indptr) - 1
    if len(query) != rows * sizes[0]:
        problems.append(f"query: wanted {rows} rows of {sizes[0]} queries as block_indptr says, got {len(query)}")
    if len(key) % sizes[1]:
        problems.append(f"key: wanted whole blocks of {sizes[1]} keys, got {len(key)}")
    if indptr.is_cpu and indices.is_cpu and type(indptr) is Tensor and not problems:
        problems += entry_problems(indptr, indices, len(key) // sizes[1])
    problems += score_problems(arguments)
    belongs = pattern.kind_for(indptr, indices) if isinstance(pattern, BlockPattern) else ""
    if belongs in ("foreign", "stale"):
        wanted = "the BlockPattern of these two" if belongs == "foreign" else "advance() after they changed"
        problems.append(f"block_pattern: wanted {wanted}, got a {belongs} one")
    canonical = without_defaults(BLOCK_SPARSE, arguments, query.shape[2])
    problems += BLOCK_SPARSE.schema.validate(**canonical)
    refuse(name, problems)
    return Routed(BLOCK_SPARSE, canonical, varies=("nonzero_blocks",))


def _draw(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call: rows without a block, blocks of one token, every block."""
    block_rows, block_cols = draw.of((1, 2, 16, 64), (1, 1, 5, 2)), draw.of((1, 3, 16, 64), (1, 1, 5, 2))
    rows, columns = draw.of((0, 1, 3, 5), (1, 6, 8, 4)), draw.of((1, 2, 4, 7))
    kv_heads = draw.of((1, 2, 3))
    heads, dim = kv_heads * draw.of((1, 2, 4), (6, 2, 2)), draw.of((7, 16, 32, 64, 128), (1, 2, 2, 4, 3))
    value_dim = draw.of((8, 64)) if draw.chance(0.1) else dim
    counts = [draw.stream.randint(0, columns) for _ in range(rows)]
    chosen = [sorted(draw.stream.sample(range(columns), count)) for count in counts]
    arguments: dict[str, Any] = {
        "query": draw.laid_out(draw.normal((rows * block_rows, heads, dim), dtype)),
        "key": draw.laid_out(draw.normal((columns * block_cols, kv_heads, dim), dtype)),
        "value": draw.laid_out(draw.normal((columns * block_cols, kv_heads, value_dim), dtype)),
        "block_indptr": starts_of(draw, counts),
        "block_indices": torch.tensor([*chain(*chosen)], dtype=torch.int32, device=draw.device),
        "block_rows": block_rows,
        "block_cols": block_cols,
    }
    arguments |= draw.maybe(0.15, scale=lambda: draw.of((0.25, 3.0)) * dim**-0.5)
    arguments |= draw.maybe(0.2, return_lse=lambda: True)
    if draw.chance(0.4):
        arguments["block_pattern"] = BlockPattern(arguments["block_indptr"], arguments["block_indices"])
    return arguments


SPARSE_ATTENTION = Function(
    "sparse_attention", sparse_attention, _route, OPERATIONS, _draw, 1, state=frozenset({"sdpa"})
)
FUNCTIONS = (SPARSE_ATTENTION,)
