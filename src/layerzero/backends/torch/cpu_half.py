"""Half precision on CPUs by torch: in float32 where instructions lack, by whole tiles where AMX has them.

Kernels are made wide: tensors are widened, torch's float32 kernel of the operation runs, and results are rounded to the
dtype of the input. Its distance from float64 is that of torch's own or less: what lies between the products of a block
stays in float32. Weights are widened at each call, a block of rows after another, so that they take :data:`BLOCK_BYTES`
and stay in the host's caches. In units of ``F.linear``'s time, 1024 / 2816, 8, 64 and 1024 rows: bfloat16 0.84, 0.48
and 0.42 with AVX-512, 0.65, 0.30 and 0.24 with AVX2; float16 0.62, 0.27 and 0.24 (AMD EPYC Zen 4 without its bfloat16
instructions, CPU time of one thread, torch 2.13.0, 2026-11-26). Blocks of 0.5 and 8 MB took up to 1.3 and 1.15 of that
of 2.6 MB; oneDNN's float32 product took 0.87 of MKL's there with AVX-512, and as long with AVX2.

Attention is widened by heads, in as many bytes a thread. In units of the time of torch's operator: float16 0.43 to 0.65
of 128 to 2048 queries, 0.16 to 0.6 of one; bfloat16 0.3 to 0.9 of one query a head, 0.9 to 1.1 of more, where the
operator itself adds up in float32 (the same CPU, AVX2 and AVX-512, head dims 8 to 128, 2026-11-26).

Calls that record gradients are refused: autograd would keep the wide weights until the backward pass.
On CPUs with AMX, oneDNN's tiles of 32 bfloat16 read over the end of a row whose length is no multiple of 32: what is no
number there makes this row none. A NaN in row 6 of 33 by 100 numbers made row 5 of ``F.linear`` NaN, and of oneDNN's
packed products (torch 2.11 and 2.13, Intel Xeon with AMX, 2026-11-22). One request's rows must not spoil another's, so
rows are filled up with zeros there, which costs a copy of the weight; kernels that cannot do so refuse such calls.
Up to 16 rows stay as they are: none of 5,000 such products read over an end (torch 2.13, 1 and 2 threads, 2026-11-29).
Library: torch >= 2.10, BSD-3-Clause.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.ops.attention import declare as attention

_TILE, _TILES, _ROWS = 32, "amx_bf16", 16
_PRODUCTS = "mlp.", "moe."
_FEATURES = ("in_features", "hidden", "inner_features", "features")


def has_tiles(facts: Facts) -> bool:
    """Whether oneDNN computes such a call with the tiles of AMX."""
    return (facts.get("out_dtype") or facts["dtype"]) is torch.bfloat16 and _TILES in facts.device.instruction_sets


def _first_uneven(facts: Facts) -> str | None:
    """The first length of a row that tiles do not fill; None where nothing reads over an end."""
    if not has_tiles(facts):
        return None
    uneven = (name for name in _FEATURES if facts.get(name) is not None and facts.size(name) % _TILE)
    return next(uneven, None)


def leaking_rows(facts: Facts) -> Reason | None:
    """Why a product's rows are not handed to oneDNN as they are; None where they may be, and of what is no product."""
    name = _first_uneven(facts) if facts.operation.name.startswith(_PRODUCTS) else None
    if name is None:
        return None
    return Reason(ReasonCode.CONSTRAINT_FAILED, name, f"a multiple of {_TILE}", facts.size(name))


ROWS_APART = limit.Custom("bfloat16 on a CPU with AMX: multiples of 32 features", leaking_rows)
"""For kernels that hand rows to oneDNN as they are."""


def fewer_rows(rows: int, numbers: int | None = None) -> limit.Limit:
    """For kernels that multiply by vectors, where tiles take less for so many rows, a power of two.

    ``numbers``: of weights below so many only.
    """

    def holds(facts: Facts) -> bool:
        few = _TILES not in facts.device.instruction_sets or facts.size_bits("rows") < rows.bit_length()
        return few or (numbers is not None and facts.size("in_features") * facts.size("out_features") >= numbers)

    of = "" if numbers is None else f" with a weight of fewer than {numbers} numbers"
    return limit.rule(f"rows: fewer than {rows} on a CPU with AMX{of}", holds, got="more")


def linear_for(facts: Facts, product: Callable[..., Tensor] | None = None) -> Callable[..., Tensor]:
    """``F.linear`` itself, or with rows filled up to whole tiles where they would be read over their ends.

    Rows of the result's gradient are rows of a product, too: whether they are even is seen when it runs.
    ``product`` is another one of rows (*, M, K), weights (*, N, K) and a bias.
    """
    if _first_uneven(facts) is None and not (has_tiles(facts) and facts["requires_grad"]):
        return product or functional.linear
    return _filled_up if product is None else functools.partial(_filled_up, product=product)


def _filled_up(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, product: Callable[..., Tensor] | None = None
) -> Tensor:
    if input.numel() <= _ROWS * input.shape[-1]:
        return (product or functional.linear)(input, weight, bias=bias)
    outputs = weight.shape[-2]
    if input.requires_grad:
        weight, bias = padded(weight.mT)[0].mT, None if bias is None else padded(bias)[0]
    input, weight = padded(input, weight)
    output = (product or functional.linear)(input, weight, bias=bias)
    return output if output.shape[-1] == outputs else output[..., :outputs].contiguous()


def padded(*rows: Tensor) -> tuple[Tensor, ...]:
    """Rows of one length, padded with zeros to a multiple of 32 where they are in bfloat16."""
    missing = -rows[0].shape[-1] % _TILE if rows[0].dtype is torch.bfloat16 else 0
    return tuple([functional.pad(each, (0, missing)) for each in rows]) if missing else rows


def padding_for(facts: Facts) -> Callable[..., tuple[Tensor, ...]]:
    """:func:`padded` where the CPU has AMX, else what leaves rows as they are."""
    return padded if _TILES in facts.device.instruction_sets else lambda *rows: rows


def bmm_for(facts: Facts) -> Callable[[Tensor, Tensor], Tensor]:
    """``torch.bmm`` itself, or with rows that are filled up at run time where the CPU has tiles."""
    return _bmm_filled_up if _TILES in facts.device.instruction_sets else torch.bmm


def _bmm_filled_up(left: Tensor, right: Tensor) -> Tensor:
    left, columns = padded(left, right.mT)
    return torch.bmm(left, columns.mT)


BLOCK_BYTES = 5 * 2**19
"""Of a weight in float32: what widens it writes into the cache from which the product reads it."""

HALVES = frozenset({torch.float16, torch.bfloat16})

FEW_BITS = 4
"""Bits of the least number of rows that pay, 8: there it took 0.62 to 0.84 of the emulated product's time, and 1.0 to
1.2 at 4 rows."""

CPU = (limit.platform("cpu"), limit.dtype("float16", "bfloat16"))
"""What each of these kernels demands."""


KEPT_BITS = 3
"""The same of a weight that is kept in float32, in oneDNN's order: 4 rows took 0.60 to 1.05 of the emulated time, 8
rows 0.47 to 0.69, 64 rows 0.20 to 0.39, where blocks took 0.22 to 0.64; 2 rows 0.83 to 2.4 (weights of 384 to 2816
features, each read from memory; bfloat16 with AVX-512 and AVX2, float16; AMD EPYC Zen 4, one thread, 2026-11-26)."""


def many(rows: str, *, of: str = "", over: str = "", least: int = FEW_BITS) -> Callable[[Facts], bool]:
    """Whether each weight gets enough rows: so many, ``of`` times as many, spread ``over`` so many weights."""

    def pays(facts: Facts) -> bool:
        bits = facts.size_bits(rows)
        bits += facts.size_bits(of) - 1 if of else 0
        bits -= facts.size_bits(over) - 1 if over else 0
        return bits >= least

    return pays


def wide(tensor: Tensor | None) -> Any:
    """A tensor in float32, where it is half precision."""
    return tensor.float() if tensor is not None and tensor.dtype in HALVES else tensor


def product(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` in float32 of rows that are wide, and of a weight and bias that are not."""
    blocks = -(-weight.numel() * 4 // BLOCK_BYTES)
    if blocks <= 1 or weight.dtype not in HALVES:
        return functional.linear(input, wide(weight), wide(bias))
    rows = -(-weight.shape[0] // blocks // 16) * 16 or 16
    parts = torch.split(weight, rows)
    biases = (None,) * len(parts) if bias is None else torch.split(bias, rows)
    return torch.cat(
        [functional.linear(input, each.float(), wide(one)) for each, one in zip(parts, biases, strict=True)], -1
    )


Attend = Callable[..., tuple[Tensor, Tensor]]
"""torch's operator of attention on a CPU: query, key, value (B, H, S, D), dropout, causal, ``attn_mask``, ``scale``."""


def attended(operator: Attend) -> Attend:
    """The operator in float32, for as many heads at a time as fit into :data:`BLOCK_BYTES` a thread."""

    def run(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout: float,
        causal: bool,
        *,
        attn_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        (batch, heads, rows, size), kv_heads = query.shape, key.shape[1]
        group = heads // max(kv_heads, 1)
        head_bytes = 8 * (key.shape[2] + group * rows) * size
        fitting = max(BLOCK_BYTES * torch.get_num_threads() // max(head_bytes, 1), 1)
        if fitting >= batch * kv_heads or query.dtype not in HALVES:
            mask = wide(attn_mask)
            output, lse = operator(wide(query), wide(key), wide(value), dropout, causal, attn_mask=mask, scale=scale)
            return output.to(query.dtype), lse
        output = query.new_empty(batch, rows, heads, size).transpose(1, 2)
        lse = query.new_empty(batch, rows, heads, dtype=torch.float32).transpose(1, 2)
        step, batches = min(fitting, kv_heads), max(fitting // kv_heads, 1)
        for first, head in itertools.product(range(0, batch, batches), range(0, kv_heads, step)):
            block = slice(first, first + batches), slice(head, head + step)
            place = block[0], slice(head * group, (head + step) * group)
            given = query[place].float(), key[block].float(), value[block].float(), dropout, causal
            output[place], lse[place] = operator(*given, attn_mask=_block(attn_mask, place), scale=scale)
        return output, lse

    return run


def _block(mask: Tensor | None, place: tuple[slice, slice]) -> Tensor | None:
    """A block's part of a mask: all of an axis that is the same for all."""
    if mask is None or mask.ndim < 4:
        return wide(mask)  # type: ignore[no-any-return]
    return wide(mask[tuple([slice(None) if mask.shape[axis] == 1 else part for axis, part in enumerate(place)])])  # type: ignore[no-any-return]


def attends(facts: Facts) -> bool:
    """Whether attention pays: always in float16, in bfloat16 for one query a head, where it widens least."""
    return facts["dtype"] is torch.float16 or facts["operation"] == attention.STANDARD_DECODE.name


def widened(
    kernel: Kernel, pays: Callable[[Facts], bool], load: Callable[..., Callable[..., Any]] | None = None, **changes: Any
) -> Kernel:
    """The kernel of torch that computes as this one does, in float32.

    Args:
        kernel: torch's own.
        pays: see :attr:`layerzero.core.kernel.Kernel.widens`.
        load: gets the facts and :func:`product`, which it takes for its products with weights: these are widened in
            blocks there. Without it all tensors are widened as a whole, and ``kernel.load`` gives what runs.
        changes: fields of the kernel that are others.
    """
    own = kernel.load if load is None else functools.partial(load, product=product)
    return in_float32(kernel, pays, functools.partial(_load, own, load is not None), **changes)


def in_float32(kernel: Kernel, pays: Callable[[Facts], bool], load: Callable[..., Any], **changes: Any) -> Kernel:
    """The same with a ``load`` that widens by itself."""
    library, name, *ending = kernel.id.split(".")
    rest = [each for each in kernel.limits if type(each) not in {type(one) for one in CPU}]
    told: dict[str, Any] = {
        "id": ".".join((library, f"{name}_widened", *ending)),
        "load": load,
        "limits": (*CPU, *rest),
        "grad": False,
        "graph_safe": False,
        "priority": 30,
        "stock": False,
        "widens": pays,
        "aliases": (),
    }
    return replace(kernel, **told | changes)


def _load(load: Callable[[Facts], Callable[..., Any]], blocks: bool, facts: Facts) -> Callable[..., Any]:
    run = load(facts)

    def computed(input: Tensor, *tensors: Any, out_dtype: torch.dtype | None = None, **named: Any) -> Any:
        """Of tensors by place, and others by name."""
        dtype = out_dtype or input.dtype
        if not blocks:
            tensors = tuple([wide(each) if isinstance(each, Tensor) else each for each in tensors])
            named = {name: wide(each) if isinstance(each, Tensor) else each for name, each in named.items()}
        found = run(input.float(), *tensors, **named)
        return found.to(dtype) if isinstance(found, Tensor) else tuple([each.to(dtype) for each in found])

    return computed
