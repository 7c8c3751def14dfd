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

from layerzero.core.arguments import Axis, Param, Role, TensorSchema
from layerzero.core.dtypes import FLOATING, INDEX
from layerzero.core.operation import Case, Operation, Tolerance, Work
from layerzero.core.schema import OperationSchema

TOLERANCE = {
    torch.float64: Tolerance(1e-6, 0.0),
    torch.float32: Tolerance(1e-6, 0.0),
    torch.float16: Tolerance(1e-3, 1e-7),
    torch.bfloat16: Tolerance(8e-3, 0.0),
}
TOLERANCE_REASON = "twice the rounding of one product; without a scale it only moves numbers"

SCALE = Param("scale", float, None, example=2.5, works=False)
PADDING = Param("padding_idx", int, None, example=0, works=False)


def _scaled(rows: Tensor, scale: float | None) -> Tensor:
    if scale is None:
        return rows
    return (rows.to(torch.promote_types(rows.dtype, torch.float32)) * scale).to(rows.dtype)


def _untrained(rows: Tensor, ids: Tensor, padding_idx: int | None) -> Tensor:
    """The rows of padding pass no gradient on."""
    if padding_idx is None or not rows.requires_grad:
        return rows
    return torch.where((ids == padding_idx).unsqueeze(-1), rows.detach(), rows)


def lookup_reference(
    ids: Tensor, weight: Tensor, *, scale: float | None = None, padding_idx: int | None = None
) -> Tensor:
    """``weight[ids] * scale``; the row of ``padding_idx`` gets no gradient.

    Shapes: ids (*), weight (V, D) → (*, D)
    Dtype: the product in float32 (float64 for float64), rounded once; returns weight.dtype.
    Raises: IndexError for ids that are no row.
    """
    rows = weight[ids.long()]
    return _scaled(_untrained(rows, ids, padding_idx), scale)


def shard_reference(
    ids: Tensor,
    weight: Tensor,
    *,
    vocab_start: int,
    scale: float | None = None,
    padding_idx: int | None = None,
) -> Tensor:
    """``weight[ids - vocab_start] * scale``; zeros for ids of other shards. padding_idx is an id of the vocabulary.

    Shapes and dtype: as of ``embedding.lookup``.
    Source: Megatron-LM, arXiv:1909.08053.
    """
    if weight.shape[0] == 0:
        return weight.new_zeros((*ids.shape, weight.shape[1]))
    places = ids.long() - vocab_start
    beyond = (places < 0) | (places >= weight.shape[0])
    rows = _untrained(weight[places.masked_fill(beyond, 0)], ids, padding_idx)
    return _scaled(rows.masked_fill(beyond.unsqueeze(-1), 0.0), scale)


def _fake(ids: Tensor, weight: Tensor, **_: object) -> Tensor:
    return weight.new_empty((*ids.shape, weight.shape[1]))


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


def _derive(arguments: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, object]:
    shape = arguments["ids"].shape
    return {"rows": math.prod(shape), "input_ndim": len(shape)}


def _work(facts: Mapping[str, Any]) -> Work:
    """Each row read and written."""
    elements = facts["rows"] * facts["features"]
    flops = 0.0 if facts["scale"] is None else float(elements)
    return Work(flops, 2.0 * elements * facts["dtype"].itemsize + 8.0 * facts["rows"])


def _case(name: str, rows: int, vocab: int, features: int, *, shard: bool, **params: object) -> Case:
    start = {"vocab_start": vocab} if shard else {}
    return Case(name, {"rows": rows, "vocab": vocab, "features": features}, {**start, **params})


_ROWS = {"cuda": (1, 16, 64, 512, 4096, 16384), "cpu": (1, 16, 128, 512)}
_TABLES = {"cuda": ((128256, 4096), (152064, 3584), (256000, 3584)), "cpu": ((30522, 384), (32000, 2048))}
"""(rows of the vocabulary, features)"""


def _operation(name: str, summary: str, *, shard: bool) -> Operation:
    places: dict[str, Any] = {} if shard else {"indexes": ("vocab",)}

    def examples(
        case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None
    ) -> dict[str, Tensor]:
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
                yield _case(f"{rows} of {vocab}x{features}", rows, vocab, features, shard=shard)

    return Operation(
        schema=OperationSchema(
            operation=name,
            inputs=(
                TensorSchema("ids", ("...",), INDEX, same_dtype=False, **places),
                TensorSchema("weight", ("vocab", "features"), FLOATING, resident=True),
            ),
            outputs=(TensorSchema("output", ("...", "features"), FLOATING),),
            params=(
                SCALE,
                PADDING,
                *((Param("vocab_start", int, role=Role.PASSED, least=0, example=8),) if shard else ()),
            ),
            axes=(
                Axis("rows", scales=True, live=True, apart=True, leading=True),
                Axis("vocab", scales=True, works=False),
                Axis("features", scales=True),
                Axis("input_ndim", works=False),
            ),
            dtype_of="weight",
        ),
        summary=summary,
        reference=shard_reference if shard else lookup_reference,
        fake=_fake,
        cases=(
            _case("small", 33, 100, 64, shard=shard),
            _case("small_scaled", 33, 100, 64, shard=shard, scale=8.0, padding_idx=3),
            _case("minilm", 1024, 30522, 384, shard=shard),
            _case("decode_b16", 16, 32000, 2048, shard=shard),
        ),
        tolerance=TOLERANCE,
        tolerance_reason=TOLERANCE_REASON,
        derive=_derive,
        derived=("rows", "input_ndim"),
        derived_from={"rows": ("...",), "input_ndim": ()},
        examples=examples,
        work=_work,
        sweep=sweep,
        stock=_stock,
    )


LOOKUP = _operation("embedding.lookup", "Rows of a table by ids", shard=False)
LOOKUP_SHARD = _operation("embedding.lookup.shard", "Rows of a shard of a vocabulary, zeros for other ids", shard=True)
OPERATIONS = (LOOKUP, LOOKUP_SHARD)
