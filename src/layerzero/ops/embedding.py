"""Rows of a table: embedding.lookup, and embedding.lookup.shard, where ids of other shards give zeros.

A shard holds the rows ``vocab_start`` and up of a vocabulary; what all shards give adds up to what the table does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from layerzero.core.arguments import Axis, Param, Role, told
from layerzero.core.dtypes import INDEX
from layerzero.core.operation import Case, Operation, Random, Tolerance, Work
from layerzero.ops.declaration import NDIM, cases, function, operation, tensor, wide
from layerzero.ops.draw import Draw

TOLERANCE = {
    torch.float64: Tolerance(1e-6, 0.0),
    torch.float32: Tolerance(1e-6, 0.0),
    torch.float16: Tolerance(1e-3, 1e-7),
    torch.bfloat16: Tolerance(8e-3, 0.0),
}


def embedding(
    ids: Tensor,
    weight: Tensor,
    *,
    scale: float | None = None,
    padding_idx: int | None = None,
    vocab_start: int | None = None,
) -> Tensor:
    """Look up rows of a table by ids: ``weight[ids] * scale``.

    Shapes: ids (*), weight (V, D) → (*, D)
    Dtype: ids int32 or int64; weight floating, returned; a scale multiplies in float32 or wider and is rounded once.
    Args:
        scale: factor on every row, as Gemma's models have it.
        padding_idx: the row of this id gets no gradient, as in ``torch.nn.functional.embedding``; from the end where
            it is negative. The result is what the row holds.
        vocab_start: declares the table a shard, with rows ``vocab_start`` to ``vocab_start + V - 1`` of a vocabulary.
            Ids of other rows give zeros, so that the results of all shards add up to the whole table's. padding_idx is
            an id of the vocabulary, of 0 and above, then. None for a whole table.
    Raises: InvalidCallError for shapes, devices or dtypes that do not fit, and for a padding_idx that no row has.
        Without a shard ids that no row has are the caller's mistake: an error on a CPU, and in debug mode elsewhere.
    Source: shards as in Megatron-LM, arXiv:1909.08053.
    """
    if vocab_start is None:
        rows = _untrained(weight[ids.long()], ids, padding_idx)
    elif weight.shape[0] == 0:
        return weight.new_zeros((*ids.shape, weight.shape[1]))
    else:
        places = ids.long() - vocab_start
        beyond = (places < 0) | (places >= weight.shape[0])
        rows = _untrained(weight[places.masked_fill(beyond, 0)], ids, padding_idx)
        rows = rows.masked_fill(beyond.unsqueeze(-1), 0.0)
    return rows if scale is None else (rows.to(wide(rows.dtype)) * scale).to(rows.dtype)


def _fake(ids: Tensor, weight: Tensor, **_: object) -> Tensor:
    """The reference reads a single id of a tensor without axes, which a tensor without memory does not have."""
    return weight.new_empty((*ids.shape, weight.shape[1]))


def _untrained(rows: Tensor, ids: Tensor, padding_idx: int | None) -> Tensor:
    """The rows of padding pass no gradient on."""
    if padding_idx is None or not rows.requires_grad:
        return rows
    return torch.where((ids == padding_idx).unsqueeze(-1), rows.detach(), rows)


def _stock(
    ids: Tensor,
    weight: Tensor,
    *,
    scale: float | None = None,
    padding_idx: int | None = None,
    vocab_start: int | None = None,
) -> Callable[[], Tensor]:
    """``torch.nn.functional.embedding``, with the masks of parallel vocabularies around it."""
    own = None if padding_idx is None else padding_idx - (vocab_start or 0)
    own = own if own is not None and -weight.shape[0] <= own < weight.shape[0] else None

    def run() -> Tensor:
        if vocab_start is None:
            rows = functional.embedding(ids, weight, own)
        else:
            beyond = (ids < vocab_start) | (ids >= vocab_start + weight.shape[0])
            rows = functional.embedding((ids - vocab_start).masked_fill(beyond, 0), weight, own)
            rows = rows.masked_fill(beyond.unsqueeze(-1), 0.0)
        return rows if scale is None else rows * scale

    return run


def _work(facts: Mapping[str, Any]) -> Work:
    elements = facts["rows"] * facts["features"]
    flops = 0.0 if facts["scale"] is None else float(elements)
    return Work(flops, 2.0 * elements * facts["dtype"].itemsize + 8.0 * facts["rows"])


_ROWS = {"cuda": (1, 16, 64, 512, 4096, 16384), "cpu": (1, 16, 128, 512)}
_TABLES = {"cuda": ((128256, 4096), (152064, 3584), (256000, 3584)), "cpu": ((30522, 384), (32000, 2048))}
"""(rows of the vocabulary, features)"""


def _operation(name: str, summary: str, *, shard: bool) -> Operation:
    def case(label: str, rows: int, vocab: int, features: int, **params: object) -> Case:
        start = {"vocab_start": vocab} if shard else {}
        return cases("rows vocab features", {label: (rows, vocab, features)}, {**start, **params})[0]

    def examples(case: Case, dtype: torch.dtype, device: torch.device, generator: Random) -> dict[str, Tensor]:
        """Ids of every shard of three, of which the case's is the middle one."""
        if not shard:
            return {}
        if device.type == "meta":
            return {"ids": torch.empty(case.sizes["rows"], dtype=torch.int64, device=device)}
        most = max(3 * case.sizes["vocab"], 1)
        where = device if generator is None else generator.device
        ids = torch.randint(0, most, (case.sizes["rows"],), generator=generator, device=where)
        return {"ids": ids.to(device)}

    def sweep(device: str, narrow: Mapping[str, Sequence[int]]) -> Iterator[Case]:
        kind = device if device in _ROWS else "cpu"
        for vocab, features in _TABLES[kind] if narrow.keys() <= {"rows"} else ():
            for rows in narrow.get("rows", _ROWS[kind]):
                yield case(f"{rows} of {vocab}x{features}", rows, vocab, features)

    return operation(
        name,
        summary,
        embedding,
        fake=_fake,
        inputs=(
            tensor("ids: ...", INDEX, same_dtype=False, indexes=() if shard else ("vocab",)),
            tensor("weight: vocab features", resident=True),
        ),
        outputs=("output: ... features",),
        params=(
            Param("scale", float, None, example=2.5, works=False),
            Param("padding_idx", int, None, example=0, works=False),
            *((Param("vocab_start", int, role=Role.PASSED, least=0, example=8),) if shard else ()),
        ),
        axes=(
            Axis("rows", scales=True, live=True, apart=True, leading=True),
            Axis("vocab", scales=True, works=False),
            Axis("features", scales=True),
            NDIM,
        ),
        dtype_of="weight",
        cases=(
            case("small", 33, 100, 64),
            case("small_scaled", 33, 100, 64, scale=8.0, padding_idx=3),
            case("minilm", 1024, 30522, 384),
            case("decode_b16", 16, 32000, 2048),
        ),
        tolerance=TOLERANCE,
        tolerance_reason="twice the rounding of one product; without a scale it only moves numbers",
        examples=examples,
        work=_work,
        sweep=sweep,
        stock=_stock,
    )


LOOKUP = _operation("embedding.lookup", "Rows of a table by ids", shard=False)
LOOKUP_SHARD = _operation("embedding.lookup.shard", "Rows of a shard of a vocabulary, zeros for other ids", shard=True)


def _problems(arguments: dict[str, Any]) -> list[str]:
    problems, shard = [], "vocab_start" in arguments
    weight, scale, padding = (arguments[name] for name in ("weight", "scale", "padding_idx"))
    if scale is not None and not math.isfinite(scale):
        problems.append(f"scale: wanted a finite number, got {told(scale)}")
    if weight.shape[1] == 0:
        problems.append(f"weight: wanted rows of a width above 0, got shape {tuple(weight.shape)}")
    vocab = weight.shape[0]
    if not shard and not vocab and arguments["ids"].numel():
        problems.append(f"weight: wanted a row for each id, got shape {tuple(weight.shape)}")
    if padding is not None and shard and padding < 0:
        problems.append(
            f"padding_idx: wanted an id of the vocabulary, 0 and above with vocab_start, got {told(padding)}"
        )
    if padding is not None and not shard and not -vocab <= padding < vocab:
        problems.append(f"padding_idx: wanted {-vocab} to {vocab - 1}, a row of weight, got {told(padding)}")
    return problems


def _count_from_the_start(arguments: dict[str, Any]) -> None:
    if "vocab_start" not in arguments and arguments["padding_idx"] is not None:
        arguments["padding_idx"] %= arguments["weight"].shape[0]


def _draw(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call: ids of any shape, a whole table or a shard that has some of them."""
    vocab = draw.of((1, 2, 7, 64, 300))
    features = draw.of((1, 3, 8, 32, 64, 257))
    shape = draw.leading((0, 1, 2, 3), (1, 5, 4, 1), (1, 2, 5, 17))
    arguments: dict[str, Any] = {"weight": draw.laid_out(draw.normal((vocab, features), dtype))}
    most = vocab - 1
    if draw.chance(0.45):
        arguments["vocab_start"] = draw.of((0, vocab, 2 * vocab, 5))
        most = 3 * vocab
    ids = draw.integers(shape, most, draw.of((torch.int64, torch.int32), (3, 1)))
    arguments["ids"] = draw.laid_out(ids, expand=False)
    arguments |= draw.maybe(0.3, scale=lambda: draw.of((2.5, 0.125, 33.9411255)))
    arguments |= draw.maybe(0.3, padding_idx=lambda: draw.of((0, most)))
    return draw.poison(arguments, ("weight",))


OPERATIONS = (LOOKUP, LOOKUP_SHARD)
FUNCTIONS = (
    function(
        *("embedding", LOOKUP, LOOKUP_SHARD),
        choose=lambda arguments: LOOKUP if arguments["vocab_start"] is None else LOOKUP_SHARD,
        fits=_problems,
        canonical=_count_from_the_start,
        draw=_draw,
        weight=1,
    ),
)
