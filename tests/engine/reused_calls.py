"""Calls that may share a plan: memory and sizes that are changed, and what a plan that serves one violates."""

from __future__ import annotations

import math

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch.nn import Parameter

import layerzero as lz
from drawing import examples
from layerzero.core import indices
from layerzero.core.facts import TensorFacts
from layerzero.core.reuse_conditions import SizedCall
from layerzero.engine import legality, plan_source
from layerzero.engine.config import current_policy
from layerzero.engine.functions import CALLS
from layerzero.engine.reference import as_tuple
from layerzero.testing import random_call
from layerzero.testing.compare import copied
from layerzero.testing.generate import FUNCTIONS, RandomCall

SHARING = sorted(name for name, each in FUNCTIONS.items() if not any(of.is_collective for of in each.operations))
"""Functions whose plans serve other sizes, and calls with gradients: what ranks compute together does neither."""

EXAMPLES = settings(
    max_examples=examples(400),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def on_tensors(call, change):
    arguments = {n: change(t) if isinstance(t, torch.Tensor) else t for n, t in call.arguments.items()}
    return RandomCall(call.function, with_its_step(arguments), call.name)


STARTS = ("cu_seqlens_q", "cu_seqlens_k")


def with_its_step(arguments):
    """A step or pattern belongs to the tensors that it was made of; each call has its own."""
    step = arguments.get("step")
    if arguments.get("block_indptr") is not None:  # it ends with the blocks: what is beyond is left out
        both = arguments["block_indptr"].detach().clamp(max=len(arguments["block_indices"])), arguments["block_indices"]
        arguments |= {"block_indptr": both[0], "block_indices": both[1].detach()}
        if arguments.get("block_pattern") is not None:
            arguments["block_pattern"] = lz.BlockPattern(arguments["block_indptr"], arguments["block_indices"])
    for name, tokens in (("row_sizes", "query"), ("col_sizes", "key")):
        if arguments.get(name) is None or not arguments[name].shape[1]:
            continue
        count, ends = len(arguments[tokens]), arguments[name].cumsum(1)
        if not (ends[:, -1] == count).all():  # sizes of blocks sum up to the tokens
            ends = ends.clamp(max=count)
            ends[:, -1] = count
            arguments[name] = ends.diff(dim=1, prepend=torch.zeros_like(ends[:, :1])).to(arguments[name].dtype)
    if step is not None:
        names = ("block_tables", "context_lens", *STARTS)
        arguments |= {name: arguments[name].detach() for name in names if arguments.get(name) is not None}
        if isinstance(step, lz.RaggedMetadata):
            arguments["step"] = lz.RaggedMetadata(*(arguments[name] for name in STARTS), capturable=step.capturable)
        else:
            tables = arguments["block_tables"], arguments["context_lens"]
            starts = arguments.get("cu_seqlens_q")
            arguments["step"] = lz.StepMetadata(*tables, cu_seqlens_q=starts, capturable=step.capturable)
    return arguments


def with_its_starts(arguments):
    """Starts belong to as many sequences as there are tables, and end with the tokens: what is beyond is left out."""
    if arguments.get("cu_seqlens_q") is None:
        return arguments
    starts = [name for name in STARTS if arguments.get(name) is not None]
    count = min(len(arguments[name]) for name in starts)
    tables = [name for name in ("block_tables", "context_lens") if name in arguments]
    count = min([count, *(len(arguments[name]) + 1 for name in tables)])
    slopes = arguments.get("alibi_slopes")
    if slopes is not None and slopes.ndim == 2:
        arguments["alibi_slopes"] = slopes[: count - 1]
    arguments |= {name: arguments[name][: count - 1] for name in tables}
    for name, tokens in zip(STARTS, (("query",), ("key", "value")), strict=True):
        if name in starts:
            kept = arguments[name][:count]
            arguments |= {each: arguments[each][: int(kept[-1])] for each in tokens}
            least = min(len(arguments[each]) for each in tokens)
            arguments[name] = kept.clamp(max=least)
    if arguments.get("decodes") is not None:
        queries = arguments["cu_seqlens_q"].diff().tolist()
        alone = next((place for place, each in enumerate(queries) if each != 1), len(queries))
        arguments["decodes"] = min(arguments["decodes"], alone) or None
    return arguments


def moved(offset_bytes):
    """The same strides in a copy of the memory that starts at another address; one element further where None."""

    def change(tensor):
        step = offset_bytes or tensor.element_size()
        memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        room = torch.cat((memory.new_zeros(step), memory)).untyped_storage()
        start = tensor.storage_offset() + step // tensor.element_size()
        copy = torch.empty(0, dtype=tensor.dtype).set_(room, start, tensor.shape, tensor.stride())
        return torch._neg_view(copy) if tensor.is_neg() else copy

    return change


def loose(tensor):
    """Other strides where an axis has one element: other numbers, the same memory."""
    strides = [stride + 3 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.as_strided(tensor.shape, strides, tensor.storage_offset()) if not tensor.is_neg() else tensor


def resized(call, pick, dense):
    """The same call with one of the axes that may vary made shorter, within the class of its size where that can be."""
    dispatcher = CALLS[call.function].dispatcher
    report, _ = dispatcher.explain(dispatcher.function.bind((), call.arguments), current_policy())
    sized = SizedCall(report.facts, None, dispatcher.order, frozenset(report.varies))
    axes = {name: sized.axes(name) for name in report.facts.tensors}
    there = {axis for each in axes.values() for axis in each} & set(report.varies)
    written = call.function in ("append_paged_kv_", "copy_kv_blocks_")  # where a page that is named twice is an error
    tables = call.arguments.get("positions") is None  # which have a row for each token then
    there = sorted(there - ({"pages"} if written else set()) - ({"table"} if tables else set()))
    if not there:
        return call
    axis = there[pick % len(there)]
    arguments = dict(call.arguments)
    for name, names in axes.items():
        if axis in names and report.facts.tensors[name].shape[names.index(axis)] > 1:
            tensor, place = arguments[name], names.index(axis)
            size = tensor.shape[place]
            shorter = tensor.narrow(place, 0, max((1 << size.bit_length()) // 2, size - 1 - pick % 3))
            arguments[name] = shorter.contiguous() if dense else shorter
    for rule in indices.rules_of(report.facts.operation.schema, report.facts.layout, report.facts.tensors):
        name = rule.tensor.name  # nothing leads to what is not there any more
        most = math.prod(arguments[of].shape[place] for of, place in rule.sizes) - bool(rule.tensor.indexes)
        if rule.tensor.distinct and rule.tensor.holes:  # two at the last place would be an error
            arguments[name] = arguments[name].masked_fill(arguments[name] > most, -1)
        else:
            arguments[name] = arguments[name].clamp(max=most)
    arguments = with_its_step(with_its_starts(arguments))
    if isinstance(arguments.get("tree_mask"), torch.Tensor):  # a row for each query that is left
        arguments["tree_mask"] = arguments["tree_mask"][: len(arguments["query"])]
    return RandomCall(call.function, arguments, call.name)


def padded(elements):
    """Rows so many elements further apart: other strides of one class."""

    def change(tensor):
        if not tensor.dim():
            return tensor
        rows = tensor.new_empty((*tensor.shape[:-1], tensor.shape[-1] + elements))
        return rows[..., : tensor.shape[-1]].copy_(tensor.detach())

    return change


def asking_for_gradients(call):
    """Gradients of every tensor; of those that are written into, autograd wants a copy that it made itself."""
    asked = on_tensors(call, lambda tensor: tensor.detach().clone().requires_grad_(tensor.is_floating_point()))
    for name in CALLS[call.function].function.mutates:
        asked.arguments[name] = asked.arguments[name].clone()
    return asked


def as_parameter(tensor):
    return Parameter(tensor, requires_grad=False) if tensor.is_floating_point() and not tensor.is_neg() else tensor


CHANGES = {
    "nothing": lambda call: call,
    "moved by 16 bytes": lambda call: on_tensors(call, moved(16)),
    "moved by one element": lambda call: on_tensors(call, moved(None)),
    "loose strides": lambda call: on_tensors(call, loose),
    "contiguous": lambda call: on_tensors(call, lambda tensor: tensor.contiguous()),
    "gradients": asking_for_gradients,
    "parameters": lambda call: on_tensors(call, as_parameter),
    "defaults spelled out": lambda call: RandomCall(
        call.function,
        {k: v for k, v in CALLS[call.function].function.bind((), call.arguments).items() if k != "causal"}
        | ({"causal": call.arguments.get("causal", True)} if call.function == "attention" else {}),
    ),
}


@st.composite
def pairs(draw):
    """Two calls: the same one with other data and, mostly, one change; or two that are drawn apart."""
    function = draw(st.sampled_from(SHARING))
    number = draw(st.integers(0, 100_000))
    first = random_call(2, number, function=function)
    if draw(st.integers(0, 9)) == 0:
        return first, random_call(2, draw(st.integers(0, 100_000)), function=function)
    second = random_call(2, number, function=function, data=draw(st.integers(1, 3)))
    if draw(st.integers(0, 2)) == 0:
        return first, resized(second, draw(st.integers(0, 11)), draw(st.booleans()))
    return first, CHANGES[draw(st.sampled_from(sorted(CHANGES)))](second)


def table(call):
    return CALLS[call.function].dispatcher.cache.table(current_policy())


def arguments_of(call):
    """Arguments of which a call may write into those that it writes into, with handles of their own."""
    mutated = CALLS[call.function].function.mutates
    fresh = {
        name: _fresh(value) if name in mutated or isinstance(value, torch.Generator) else value
        for name, value in call.arguments.items()
    }
    return RandomCall(call.function, fresh).arguments


def _fresh(value):
    """A copy to write into, which asks for gradients where the tensor does and is no leaf then, either."""
    asks = isinstance(value, torch.Tensor) and value.requires_grad and value.dtype.itemsize > 1  # float8 has no product
    return value * 1 if asks else copied(value)


def run(call):
    """Results, and everything the call wrote into."""
    torch.manual_seed(0)  # what is drawn without a seed is drawn again
    mutated, arguments = CALLS[call.function].function.mutates, arguments_of(call)
    result = getattr(lz, call.function)(**arguments)
    return [*as_tuple(result), *(arguments[name] for name in mutated)]


def plan_that_served(call):
    """Run a call; the kept plan that it used, None if it was chosen anew."""
    for plan in table(call).values():
        plan.used = False
    before = set(table(call))
    results = run(call)
    used = [plan for key, plan in table(call).items() if plan.used and key in before]
    assert len(used) <= 1
    return results, used[0] if used else None


def violations(plan, call):
    """What the plan's kernel finds wrong with the tensors that the plan makes of this call's own."""
    dispatcher = CALLS[call.function].dispatcher
    arguments = dispatcher.function.bind((), call.arguments)
    report, _ = dispatcher.explain(arguments, current_policy())
    adapted = plan_source.adapted_tensors(plan, arguments)
    tensors = {name: TensorFacts.of(tensor) for name, tensor in adapted.items() if name in report.facts.tensors}
    facts = report.facts.seen_in(plan.kernel.layout).with_tensors(tensors)
    made_good = {each.argument for each in plan.adaptations if each.kind in ("expand", "fold")}
    found = legality.limit_findings(plan.kernel, facts)
    found = [each.reason for each in found if each.repair is None or each.repair.argument not in made_good]
    candidate = next(each for each in report.candidates if each.kernel is plan.kernel)
    return [*found, *candidate.reasons, *(["adaptations"] if candidate.adaptations != plan.adaptations else [])]
