"""A joined product taken apart, normed, rotated, and written into a cache: what lies between product and attention.

kv.split_qkv_norm_rope_append         into a contiguous cache
kv.split_qkv_norm_rope_append.paged   into the slots of pages

The cache says how many heads of which width keys and values have; what is left of the product are queries.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from layerzero.core.arguments import Axis, TensorSchema
from layerzero.core.errors import refuse
from layerzero.core.judge import Elementwise
from layerzero.core.operation import Case, Function, Random, Routed, Work
from layerzero.ops.attention.declare import HEAD_DIM
from layerzero.ops.declaration import check_dense, eps_problems, operation, tensor
from layerzero.ops.paged import layout_record
from layerzero.ops.paged.declare import CACHE_LAYOUTS
from layerzero.ops.paged.route import CACHES, check_written, memory_problems
from layerzero.ops.rope import normed
from layerzero.ops.rope.declare import COS_SIN, INTERLEAVED
from layerzero.ops.rope.split import split_qkv_norm_rope_reference
from layerzero.ops.rope.stock import parts
from layerzero.ops.rope_append import declare, packed_steps, route
from layerzero.ops.rope_append.declare import EXACT, PAGED_PLACES, write
from layerzero.ops.rope_append.route import rank_problems, size_problems, varying

_WEIGHTS = ("q_weight", "k_weight")


def heads_of(qkv: Tensor, key_cache: Tensor) -> int:
    """Query heads: what is left of a joined product without the keys and values, which the cache knows. In NHD."""
    kv_heads, head_dim = key_cache.shape[-2:]
    return int(qkv.shape[-1]) // int(head_dim) - 2 * int(kv_heads)


def split_qkv_norm_rope_append_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    slot_mapping: Tensor | None = None,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    plus_one: bool = False,
    interleaved: bool = False,
    layout: str = "NHD",
) -> Tensor:
    """Take a joined product apart, norm and rotate queries and keys, write keys and values into a cache in place.

    ``lz.split_qkv_norm_rope`` and an append as one call: all that lies between ``lz.linear`` with joined weights and
    the attention over a cache.

    Shapes: paged: qkv (T, (H + 2 K) * D), a token's queries first, then its keys, then its values, positions and
        slot_mapping (T,), caches (P, N, K, D) in NHD → (T, H, D); contiguous: qkv (B, S, (H + 2 K) * D), positions
        (B, S), (1, S) or (S,), caches (B, L, K, D) in NHD → (B, S, H, D). Axes 1 and 2 of caches are swapped in HND.
        cos and sin (P, R/2), R at most D; q_weight and k_weight (D,). K and D are the cache's, H is what is left.
    Dtype: qkv, weights and caches the same floating dtype; cos, sin and positions as of ``lz.rope``; slot_mapping
        int64.
    Units: eps in x^2.
    Args:
        positions, slot_mapping, layout: as of ``lz.rope_append_``.
        q_weight, k_weight, eps, plus_one, interleaved: as of ``lz.split_qkv_norm_rope``.
    Returns: the queries. Keys and values are in the cache alone.
    Raises: InvalidCallError for shapes, devices or dtypes that do not fit, for a width that leaves no queries, for one
        weight without the other, for caches that share elements with what is read or with each other, before anything
        is written; on a CPU and in debug mode for positions and slots that lead nowhere or are
        named twice, too.
    Source: Qwen3, arXiv:2505.09388; RoFormer, arXiv:2104.09864; reshape_and_cache of vLLM, arXiv:2309.06180.
    """
    heads, kv_heads = heads_of(qkv, key_cache), key_cache.shape[-2]
    norm: dict[str, Any] = {"q_weight": q_weight, "k_weight": k_weight, "eps": eps, "plus_one": plus_one}
    query, key, value = split_qkv_norm_rope_reference(
        qkv, cos, sin, heads=heads, kv_heads=kv_heads, positions=positions, interleaved=interleaved, **norm
    )
    write(key, value, key_cache, value_cache, positions, slot_mapping)
    return query


def _lengths(result: str, arguments: Mapping[str, Any]) -> Tensor:
    """How long the pair of each entry is, of what was rotated: a kernel may round before it rotates."""
    given = {
        name: value.clone() if name in ("key_cache", "value_cache") else value
        for name, value in arguments.items()
        if value is not None
    }
    query = split_qkv_norm_rope_append_(**given)
    of = query if result == "query" else given["key_cache"]
    return normed.lengths_of_pairs(of, arguments["cos"].shape[-1], interleaved=arguments.get("interleaved", False))


def _derive(arguments: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, object]:
    return {
        "heads": values["features"] // max(values["head_dim"], 1) - 2 * values["kv_heads"],
        **declare.of_table(arguments, values),
    }


def _work(tokens: Sequence[str], facts: Mapping[str, Any]) -> Work:
    """The product read and its parts written; six operations a rotated pair, four an element that is normalised."""
    count, turned = math.prod(facts[name] for name in tokens), facts["heads"] + facts["kv_heads"]
    norm = 0.0 if facts["q_weight"] == "none" else 4.0 * facts["head_dim"]
    moved = 2.0 * count * facts["features"] * facts["dtype"].itemsize + 4.0 * count * facts["rotary_dim"]
    return Work(count * turned * (6.0 * facts["rotary_half"] + norm), moved)


def _joined(case: Case, *, norm: bool, **params: object) -> Case:
    """The case of a rotation with an append whose parts are one product."""
    sizes = {name: size for name, size in case.sizes.items() if name not in ("heads", "value_dim")}
    sizes["features"] = (case.sizes["heads"] + 2 * case.sizes["kv_heads"]) * case.sizes["head_dim"]
    name = case.name.replace("llama3", "qwen3") if norm else case.name
    return Case(name, sizes, {**case.params, **params}, _WEIGHTS if norm else ())


def _cases(of: Sequence[Case]) -> tuple[Case, ...]:
    """Each with norms, as Qwen3 has them, and some without."""
    small, interleaved, partial, *models = of
    plain = Case(f"{small.name}_plain", small.sizes, small.params)
    return (
        _joined(small, norm=True),
        _joined(plain, norm=False),
        _joined(interleaved, norm=True),
        _joined(partial, norm=True, plus_one=True),
        *(_joined(each, norm=True) for each in models),
        _joined(models[0], norm=False),
    )


def _sweep(of: Callable[..., Any], device: str, narrow: Mapping[str, Sequence[int]]) -> Any:
    return (_joined(each, norm=True) for each in of(device, narrow))


def _examples(
    of: Callable[..., dict[str, Tensor]], case: Case, dtype: torch.dtype, device: torch.device, generator: Random
) -> dict[str, Tensor]:
    made = of(case, dtype, device, generator)
    if not case.given:
        return made
    return made | normed.norm_examples(case, dtype, device, generator, case.sizes["head_dim"])


def _inputs(token: str, cache: str, *places: TensorSchema) -> tuple[TensorSchema | str, ...]:
    kept: dict[str, Any] = {"mutated": True, "has_layout": True, "resident": True}
    return (
        f"qkv: {token} features",
        *COS_SIN,
        *(tensor(f"{name}: {cache} kv_heads head_dim", **kept) for name in CACHES),
        *places,
        *(tensor(f"{name}: head_dim", required=False) for name in _WEIGHTS),
    )


_AXES = (
    Axis("kv_heads", scales=True, beside=True, apart=True),
    Axis("features", scales=True, implied=True),
    Axis("table", live=True, works=False),
    Axis("head_dim", codes=HEAD_DIM),
)
_COMMON: dict[str, Any] = {
    "reference": split_qkv_norm_rope_append_,
    "params": (INTERLEAVED, normed.EPS, normed.PLUS_ONE),
    "layouts": CACHE_LAYOUTS,
    "tolerance": normed.TOLERANCE,
    "tolerance_reason": normed.TOLERANCE_REASON,
    "judge": {
        **{
            each: Elementwise(normed.TOLERANCE, normed.TOLERANCE_REASON, functools.partial(_lengths, each))
            for each in ("query", "key_cache")
        },
        "value_cache": EXACT,
    },
    "derive": _derive,
    "derived_from": {"heads": ("features", "kv_heads", "head_dim"), **declare.OF_TABLE},
    "check_values": layout_record.checks,
    "guard": layout_record.guard,
    "note": layout_record.note,
    "stock": packed_steps.split_qkv_norm_rope_append,
}

SPLIT_APPEND = operation(
    "kv.split_qkv_norm_rope_append",
    "A joined product taken apart, normed and rotated, keys and values written into a contiguous cache",
    inputs=_inputs("batch seq", "batch length", declare.PLACES_IN_ROWS),
    outputs=("query: batch seq heads head_dim",),
    axes=(
        Axis("batch", scales=True, live=True, beside=True, apart=True),
        Axis("seq", scales=True, live=True),
        Axis("length", works=False),
        *_AXES,
    ),
    cases=_cases(declare.CONTIGUOUS),
    examples=functools.partial(_examples, declare.contiguous_examples),
    work=functools.partial(_work, ("batch", "seq")),
    sweep=functools.partial(_sweep, declare.contiguous_sweep),
    **_COMMON,
)
SPLIT_APPEND_PAGED = operation(
    "kv.split_qkv_norm_rope_append.paged",
    "A joined product taken apart, normed and rotated, keys and values written into the slots of a paged cache",
    inputs=_inputs("tokens", "pages page_size", *PAGED_PLACES),
    outputs=("query: tokens heads head_dim",),
    axes=(Axis("tokens", scales=True, live=True, apart=True), Axis("pages", live=True, works=False), *_AXES),
    cases=_cases(declare.PAGED),
    examples=functools.partial(_examples, declare.paged_examples),
    work=functools.partial(_work, ("tokens",)),
    sweep=functools.partial(_sweep, declare.paged_sweep),
    **_COMMON,
)
OPERATIONS = (SPLIT_APPEND, SPLIT_APPEND_PAGED)


_NAME = "split_qkv_norm_rope_append_"
_READ = ("qkv", "cos", "sin", "positions", "slot_mapping", "q_weight", "k_weight")


def _route(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    check_dense(_NAME, arguments)
    paged, layout = arguments["slot_mapping"] is not None, arguments["layout"]
    operation = SPLIT_APPEND_PAGED if paged else SPLIT_APPEND
    wanted = "(tokens, features)" if paged else "(batch, sequence, features) without slot_mapping"
    problems = rank_problems(arguments, ("qkv",), 2 if paged else 3, wanted)
    problems = problems or _part_problems(arguments, layout)
    refuse(_NAME, problems)
    check_written(_NAME, arguments)
    canonical = {
        name: value for name, value in arguments.items() if name != "layout" and (paged or name != "slot_mapping")
    }
    problems = operation.schema.validate(layout=layout, **canonical)
    refuse(_NAME, problems)
    kv_heads = arguments["key_cache"].shape[1 + layout.index("H")]
    heads = arguments["qkv"].shape[-1] // arguments["key_cache"].shape[-1] - 2 * kv_heads
    views = dict(zip(("query", "key", "value"), parts(arguments["qkv"], heads, kv_heads), strict=True))
    problems = size_problems(arguments | views, layout) + eps_problems(arguments)
    problems = problems or memory_problems(arguments, _READ)
    refuse(_NAME, problems)
    return Routed(operation, canonical, layout, varies=varying(arguments | views, layout))


def _part_problems(arguments: dict[str, Any], layout: str) -> list[str]:
    """What is wrong with the parts of the product, whose width and number the cache tells."""
    width, cache = arguments["qkv"].shape[-1], arguments["key_cache"].shape
    head_dim, kv_heads = cache[-1], cache[1 + layout.index("H")]
    problems = []
    if not head_dim or not kv_heads:
        problems.append(f"key_cache: wanted heads and widths above 0, got {tuple(cache)} in {layout}")
    elif width % head_dim or width // head_dim <= 2 * kv_heads:
        wanted = f"a multiple of the cache's head_dim {head_dim}, of more than 2 * {kv_heads} heads"
        problems.append(f"qkv: wanted {wanted} in the last axis, got {width}")
    problems += normed.both_weights(arguments)
    return problems


SPLIT_FUNCTION = Function(
    name=_NAME,
    signature=split_qkv_norm_rope_append_,
    route=_route,
    operations=(SPLIT_APPEND, SPLIT_APPEND_PAGED),
    draw=route.random_split_call,
    renamed={"split_qkv_norm_rope_append": _NAME},
    may_share_storage=frozenset({frozenset(CACHES)}),
)
